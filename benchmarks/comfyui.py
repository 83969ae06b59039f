"""Measures time and drift of the ComfyUI nodes and of ComfyUI's own step cache, in a real server.

    make .venv-comfyui/installed
    python benchmarks/comfyui.py --out benchmarks/results/comfyui.jsonl

A KSampler draws prompts on `tiny-flux` with every configuration in turn. Seconds are processor time of the sampler
alone, so that other programs do not count. Drift compares decoded pictures with the plain ones. Each configuration has
a line, with the figures of every picture.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenmerge.planning.tables import markdown

ROOT = Path(__file__).parent.parent
# Side in pixels, and steps.
SIDE, STEPS = 256, 28
PROMPTS = ("a photo of a sunflower", "a photo of a red rose", "a photo of a tulip", "a photo of a daisy")
HOLD, MERGE, CACHE = "TokenMergeHold", "TokenMergeMerge", "EasyCache"
# Each with a name, the nodes between loader and sampler with their changed widgets, and the share of the steps.
CONFIGURATIONS: tuple[tuple[str, list[tuple[str, dict[str, Any]]], float], ...] = (
    ("plain", [], 1.0),
    ("half of the steps", [], 0.5),
    ("Hold", [(HOLD, {})], 1.0),
    ("Hold, tolerance 0.4", [(HOLD, {"tolerance": 0.4})], 1.0),
    ("Hold, every 3", [(HOLD, {"every": 3})], 1.0),
    ("EasyCache, threshold 0.05", [(CACHE, {"reuse_threshold": 0.05})], 1.0),
    ("EasyCache, threshold 0.1", [(CACHE, {"reuse_threshold": 0.1})], 1.0),
    ("EasyCache", [(CACHE, {})], 1.0),
    ("Merge, ratio 0.5", [(MERGE, {})], 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-comfyui" / "bin" / "python")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests_comfyui"))
    from server import Server

    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.python, Path(folder), cache=True)
        try:
            records = measured(server, PROMPTS[: options.prompts])
        finally:
            server.close()
    command = f"python benchmarks/comfyui.py --prompts {options.prompts}"
    lines = [json.dumps({**record, "command": command}) for record in records]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measured(server: Any, prompts: tuple[str, ...]) -> list[dict[str, Any]]:
    import torch
    from safetensors.torch import load_file
    from server import sampled

    from tokenmerge.tools.measure import environment
    from tokenmerge.tools.quality import pixels

    decode = decoder()
    stats = server.get("/system_stats")["system"]
    known = {**environment(torch.device("cpu")), "comfyui": stats["comfyui_version"], "threads": "1"}
    pictures: dict[str, list[Any]] = {}
    records = []
    # The first run loads everything.
    server.run(sampled(("TestFlux", {"prompt": PROMPTS[0], "side": SIDE, "batch": 1}), steps=1))
    for name, nodes, share in CONFIGURATIONS:
        figures = []
        drawn = []
        for seed, prompt in enumerate(prompts):
            loader = ("TestFlux", {"prompt": prompt, "side": SIDE, "batch": 1})
            patches = [("TestClock", {"run": len(records)}), *(server.usual(node, **each) for node, each in nodes)]
            before = len(server.log())
            file = server.run(sampled(loader, *patches, steps=round(STEPS * share), seed=seed))["save"]
            log = server.log()[before:]
            (seconds,) = re.findall(r"sampled in [\d.]+ s, ([\d.]+) s of the processor", log)
            drawn.append(decode(load_file(file)["latent_tensor"]))
            figures.append({"seed": seed, "prompt": prompt, "seconds": float(seconds), **counted(log)})
        pictures.setdefault(name, drawn)
        if name != "plain":
            for figure, plain, mine in zip(figures, pictures["plain"], drawn, strict=True):
                figure["psnr"] = pixels.psnr(plain, mine)
        seconds = statistics.median(each["seconds"] for each in figures)
        record = {"name": name, "nodes": nodes, "side": SIDE, "steps": round(STEPS * share)}
        records.append({**record, "seconds": seconds, "pictures": figures, "environment": known})
        print(f"{name}: {seconds:.2f} s, PSNR {[each.get('psnr') for each in figures]}", flush=True)
    return records


def counted(log: str) -> dict[str, int]:
    """Steps that did not run, as the node logs them."""
    held = re.findall(r"(\d+) held", log)
    skipped = re.findall(r"skipped (\d+)/\d+ steps", log)
    return {"left_out": int((held or skipped or ["0"])[-1])}


def decoder() -> Any:
    """A function from the model's latents to pictures, uint8 [H, W, 3]."""
    import torch
    from diffusers import AutoencoderKL

    from tokenmerge_models import models

    vae = AutoencoderKL.from_pretrained(models()["tiny-flux"], subfolder="vae", torch_dtype=torch.float32)

    @torch.inference_mode()
    def decode(latent: Any) -> Any:
        (picture,) = vae.decode(latent / vae.config.scaling_factor + vae.config.shift_factor).sample
        return (picture.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8).permute(1, 2, 0)

    return decode


def table(records: list[dict[str, Any]]) -> str:
    plain = next(record for record in records if record["name"] == "plain")
    rows = []
    for record in records:
        figures = record["pictures"]
        left_out = statistics.mean(each["left_out"] for each in figures)
        psnr = [each["psnr"] for each in figures if "psnr" in each]
        cells = [f"{record['seconds']:.1f}", f"{plain['seconds'] / record['seconds']:.2f}x", f"{left_out:.1f}"]
        drift = [f"{statistics.mean(psnr):.1f}", f"{min(psnr):.1f}"] if psnr else ["", ""]
        rows.append([record["name"], str(record["steps"]), *cells, *drift])
    header = ["nodes", "steps", "seconds", "speed-up", "steps left out", "PSNR to plain, dB", "least"]
    version = plain["environment"]["comfyui"]
    count = len(plain["pictures"])
    conditions = (
        f"`tiny-flux` in ComfyUI {version}, {plain['side']}x{plain['side']}, KSampler `euler`, guidance 4, "
        f"{count} prompts with a seed each. Seconds of the processor in the sampler, median, one thread of a CPU, fp32."
    )
    command = f"{plain['command']} --out benchmarks/results/comfyui.jsonl"
    return f"```\n{command}\n```\n\n{markdown(header, rows)}\n\n{conditions}"


if __name__ == "__main__":
    main()
