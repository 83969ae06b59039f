"""Puts load on `tokenmerge serve`: throughput and latency with batches and without, and with a replica killed midway.

    python benchmarks/serve.py --out benchmarks/results/serve.jsonl

Every server has two replicas and a tiny random SDXL pipeline. It is asked for 200 pictures of 4 steps, 16 at once; then
for as many again while one replica is killed when half of them are answered. Servers with batches and without take
turns, so that a busy machine slows both. Server and clients share the machine.
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

# The pipeline is that of the tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
COMMAND = "python benchmarks/serve.py"
BATCHES = (8, 1)
# In the title of a process that draws.
REPLICA = "ServeReplica:tokenmerge:Worker"
# An answer that takes longer is lost.
PATIENCE = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--speed", default="plain")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from saved import save_sdxl

    options.out.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        model = save_sdxl(Path(folder) / "tiny")
        for turn in range(options.turns):
            for max_batch in BATCHES:
                # At once: a run that is ended keeps what it has measured.
                for line in measured(model, max_batch, turn, options):
                    append_line(options.out, line)


def measured(model: Path, max_batch: int, turn: int, options: argparse.Namespace) -> Iterator[str]:
    """A line for the undisturbed server, and one for that which loses a replica."""
    asked = {name: getattr(options, name) for name in ("requests", "clients", "replicas", "steps", "side", "speed")}
    with served(model, max_batch, options) as (process, address):
        body = {"prompt": "a rose", "size": f"{options.side}x{options.side}", "steps": options.steps}
        body["speed"] = options.speed
        load(address, body, 2 * options.clients, options.clients)
        for kills in (False, True):
            before = batches(address)
            victim = process if kills else None
            found = load(address, body, options.requests, options.clients, victim)
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
def served(model: Path, max_batch: int, options: argparse.Namespace) -> Iterator[tuple[psutil.Process, str]]:
    """A server of its own, and its address; nothing of it is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenmerge", "serve", "--model", str(model), "--device", "cpu"]
    command += ["--port", str(port), "--replicas", str(options.replicas), "--max-batch", str(max_batch)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = process.stdout.readline() if process.stdout else ""
        if not told.startswith("serving"):
            raise SystemExit(f"the server did not start: {told}")
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        for each in psutil.wait_procs(family, 5)[1]:
            each.kill()


def load(
    address: str, body: dict[str, Any], requests: int, clients: int, victim: psutil.Process | None = None
) -> dict[str, Any]:
    """Ask for so many pictures. victim: the server that loses a replica when half of them are answered."""
    answered = threading.Semaphore(0)

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
            # No answer, or half of one.
            status = None
        answered.release()
        return status, time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
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
    """Pictures that were drawn so far, and batches."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE) as page:
        words = [line.split() for line in page.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in words}
    return values["tokenmerge_batch_size_sum"], values["tokenmerge_batch_size_count"]


def table(records: list[dict[str, Any]]) -> str:
    """The median of all turns; and of requests without an answer, all."""
    groups: dict[tuple[bool, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["killed"], record["max_batch"]), []).append(record)
    rows = []
    for (killed, max_batch), found in groups.items():
        median = {
            name: statistics.median(each[name] for each in found) for name in ("mean_batch", "throughput", "p50", "p95")
        }
        rows.append(
            [
                "one killed midway" if killed else "both alive",
                str(max_batch),
                str(len(found)),
                f"{median['mean_batch']:.1f}",
                f"{median['throughput']:.1f}",
                f"{median['p50']:.2f} s",
                f"{median['p95']:.2f} s",
                *(str(sum(each[name] for each in found)) for name in ("answered", "refused", "lost")),
            ]
        )
    header = [
        "replicas",
        "`--max-batch`",
        "turns",
        "mean batch",
        "pictures / s",
        "p50",
        "p95",
        "answered",
        "refused",
        "lost",
    ]
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
