"""Runs `tokenmerge heal` on both bundled models at two ratios, and gathers the figures.

    python benchmarks/heal.py --data PHOTOGRAPHS --reference UNSEEN --networks FOLDER --out OUT

PHOTOGRAPHS have captions in text files beside them. UNSEEN are other photographs, for FID. It needs a GPU: 3000 steps
should take about 25 minutes for each model on an H200. Options of heal may follow. To try it on a CPU, add `--size
64x64 --steps 2 --batch 2 --held-out 3 --denoising-steps 3`. A killed run resumes. OUT/heal.jsonl gets a line for each
model and ratio, for benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenmerge.tools.cli.main import main as tokenmerge
from tokenmerge.tools.files import to_json, write_text

MODELS = {"tiny-flux": "dit", "tiny-sdxl": "unet"}
RATIOS = (0.5, 0.75)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "reference", "networks"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked, others = parser.parse_known_args()
    lines = []
    for model, preset in MODELS.items():
        for ratio in RATIOS:
            out = asked.out / f"{model}-{ratio}"
            failed = tokenmerge(
                [
                    *("heal", "--model", model, "--merge", f"{preset}:ratio={ratio}", "--size", "512x512"),
                    *("--data", asked.data, "--reference", asked.reference, "--networks", asked.networks),
                    *("--rank", "64", "--batch", "32", "--lr", "0.001", "--steps", "3000", "--held-out", "2000"),
                    *(*others, "--out", str(out), "--resume"),
                ]
            )
            if failed:
                return failed
            lines.append(to_json(json.loads((out / "results.json").read_text(encoding="utf-8"))))
    write_text(asked.out / "heal.jsonl", "".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
