"""Measures `tokenmerge serve` under load: throughput and latency with and without batches, and with a replica killed.

    python benchmarks/serve.py --out benchmarks/results/serve.jsonl

Every server has two replicas and a tiny random SDXL pipeline. It draws 200 pictures of 4 steps for 16 clients. Then it
draws 200 more, and one replica is killed when half of them are answered. Servers with and without batches take turns,
so that a busy machine slows both. Server and clients share the machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from tokenmerge.planning.tables import markdown
from tokenmerge.tools.files import append_line
from tokenmerge.tools.measure import environment

# The tests build the pipeline.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
COMMAND = "python benchmarks/serve.py"
REQUESTS, CLIENTS, REPLICAS, STEPS, SIDE, SPEED = 200, 16, 2, 4, 64, "plain"
TURNS, BATCHES = 2, (8, 1)
# Part of the title of a process that draws.
REPLICA = "ServeReplica:tokenmerge:Worker"
# Seconds after which an answer counts as lost.
PATIENCE = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from saved import save_sdxl

    options.out.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        model = save_sdxl(Path(folder) / "tiny")
        for turn in range(TURNS):
            for max_batch in BATCHES:
                # Written one by one, so that an interrupted run keeps its lines.
                for line in measured(model, max_batch, turn):
                    append_line(options.out, line)


def measured(model: Path, max_batch: int, turn: int) -> Iterator[str]:
    """A line for the undisturbed server, and one for the server that loses a replica."""
    asked = {"requests": REQUESTS, "clients": CLIENTS, "replicas": REPLICAS}
    asked |= {"steps": STEPS, "side": SIDE, "speed": SPEED}
    with served(model, max_batch) as (process, address):
        load(address, 2 * CLIENTS)
        for kills in (False, True):
            before = batches(address)
            found = load(address, REQUESTS, victim=process if kills else None)
            drawn, count = (after - was for after, was in zip(batches(address), before, strict=True))
            record = {**asked, "max_batch": max_batch, "turn": turn, "killed": kills, **found}
            record |= {"mean_batch": round(drawn / count, 2), "command": COMMAND, "environment": where()}
            line = json.dumps(record)
            print(line, flush=True)
            yield line


def where() -> dict[str, str]:
    return {
        **environment(torch.device("cpu")),
        "ray": importlib.metadata.version("ray"),
        "cores": str(psutil.cpu_count()),
    }


@contextmanager
def served(model: Path, max_batch: int) -> Iterator[tuple[psutil.Process, str]]:
    """A new server's process and address. No process of it is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenmerge", "serve", "--model", str(model), "--device", "cpu"]
    command += ["--port", str(port), "--replicas", str(REPLICAS), "--max-batch", str(max_batch)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("serving"):
            raise SystemExit(f"the server did not start: {line}")
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        for each in psutil.wait_procs(family, 5)[1]:
            each.kill()


def load(address: str, requests: int, victim: psutil.Process | None = None) -> dict[str, Any]:
    """Request pictures. victim: a server that loses a replica when half of them are answered."""
    answered = threading.Semaphore(0)
    body = {"prompt": "a rose", "size": f"{SIDE}x{SIDE}", "steps": STEPS, "speed": SPEED}

    def ask(seed: int) -> tuple[int | None, float]:
        begun = time.perf_counter()
        request = urllib.request.Request(
            f"{address}/v1/images/generations",
            json.dumps({**body, "seed": seed}).encode(),
            {"Content-Type": "application/json"},
        )
        status: int | None = None
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                status = answer.status if len(json.loads(answer.read())["data"]) == 1 else None
        except urllib.error.HTTPError as error:
            status = error.code
        except (OSError, ValueError):
            # No answer, or a broken one.
            status = None
        answered.release()
        return status, time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, seed) for seed in range(requests)]
        if victim is not None:
            for _ in range(requests // 2):
                answered.acquire()
            family = victim.children(recursive=True)
            next(each for each in family if REPLICA in " ".join(each.cmdline())).kill()
        results = [each.result() for each in asked]
    seconds = time.perf_counter() - begun
    taken = sorted(took for _, took in results)
    good = sum(status == 200 for status, _ in results)
    lost = sum(status is None for status, _ in results)
    return {
        "answered": good,
        "refused": requests - good - lost,
        "lost": lost,
        "throughput": round(good / seconds, 2),
        "p50": round(statistics.median(taken), 3),
        "p95": round(taken[int(0.95 * (len(taken) - 1))], 3),
    }


def batches(address: str) -> tuple[float, float]:
    """The number of pictures drawn so far, and of batches."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE) as page:
        words = [line.split() for line in page.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in words}
    return values["tokenmerge_batch_size_sum"], values["tokenmerge_batch_size_count"]


def table(records: list[dict[str, Any]]) -> str:
    """Medians over all turns, and the requests of all turns by their answers."""
    groups: dict[tuple[bool, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["killed"], record["max_batch"]), []).append(record)
    formats = {"mean_batch": "{:.1f}", "throughput": "{:.1f}", "p50": "{:.2f} s", "p95": "{:.2f} s"}
    rows = []
    for (killed, max_batch), found in groups.items():
        medians = [form.format(statistics.median(each[name] for each in found)) for name, form in formats.items()]
        counts = [str(sum(each[name] for each in found)) for name in ("answered", "refused", "lost")]
        where = ["one killed midway" if killed else "both alive", str(max_batch), str(len(found))]
        rows.append([*where, *medians, *counts])
    header = ["replicas", "`--max-batch`", "turns", "mean batch", "pictures / s", "p50", "p95"]
    header += ["answered", "refused", "lost"]
    first = records[0]
    size = f"{first['side']}x{first['side']}"
    conditions = (
        f"{first['requests']} requests of {first['steps']} steps at {size}, {first['clients']} at once, "
        f"{first['replicas']} replicas on {first['environment']['cores']} cores, speed `{first['speed']}`. "
        "Medians of all turns; the last three columns count the requests of all turns."
    )
    return (
        f"```\n{first['command']} --out benchmarks/results/serve.jsonl\n```\n\n{markdown(header, rows)}\n\n{conditions}"
    )


if __name__ == "__main__":
    main()
