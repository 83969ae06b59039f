"""Measures whether depth makes merging cheap: drift and FID of Merge and Hold on Flux models of several depths.

    python benchmarks/depth.py flux-6 flux-12 flux-24 --reference PHOTOGRAPHS --networks FOLDER --out OUT

Each folder is a model that training/flux.py trained with other `--layers` and training/export.py wrote;
training/README.md has the commands. It needs a GPU. The first quarter of the blocks runs whole, as in the preset `dit`.
Options of eval may follow, such as `--number 2 --steps 3 --size 64x64 --device cpu` for a trial. A killed run resumes.
OUT/depth.jsonl gets a line for each model and setting, and OUT/depth.png plots them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diffusers import FluxTransformer2DModel

from tokenmerge.planning.tables import markdown
from tokenmerge.tools.cli.main import main as tokenmerge
from tokenmerge.tools.evaluation.plots import new_plot, save_plot, series_style
from tokenmerge.tools.files import to_json, write_text

RATIOS = (0.25, 0.5, 0.75)
TECHNIQUES = (*(f"dit:ratio={ratio:g}" for ratio in RATIOS), "hold")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders of models")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--networks", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked, others = parser.parse_known_args()
    lines = []
    for model in asked.models:
        out = asked.out / model.name
        failed = tokenmerge(
            [
                *("eval", "--model", str(model), "--techniques", *TECHNIQUES, "--steps", "28", "--seeds", "0,1,2,3"),
                *("--metrics", "mse,psnr,lpips,fid", "--reference", asked.reference, "--networks", asked.networks),
                *("--reference-steps", "0", "--repeats", "0"),
                *(*others, "--out", str(out), "--resume"),
            ]
        )
        if failed:
            return failed
        results = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
        lines += [{"blocks": count_blocks(model), **json.loads(line)} for line in results]
    write_text(asked.out / "depth.jsonl", "".join(to_json(line) for line in lines))
    save_plot(plot(lines), asked.out / "depth.png")
    print(table(lines))
    return 0


def count_blocks(model: Path) -> int:
    config = FluxTransformer2DModel.load_config(model, subfolder="transformer")
    return int(config["num_layers"] + config["num_single_layers"])


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        metrics = line["metrics"]
        drift = f"{metrics['lpips']['mean']:.4f}" if "lpips" in metrics else ""
        fid = f"{metrics['fid']['mean']:.2f}"
        rows.append([str(line["blocks"]), f"`{line['label']}`", f"{line['work']:.0%}", drift, fid])
    return markdown(["blocks", "configuration", "work", "LPIPS ↓", "FID ↓"], rows)


def plot(lines: list[dict[str, Any]]) -> Any:
    """LPIPS to the plain picture over the number of blocks, with a line per technique."""
    figure, axes = new_plot()
    for place, technique in enumerate(TECHNIQUES):
        mine = [line for line in lines if line["label"] == technique]
        points = sorted((line["blocks"], line["metrics"]["lpips"]["mean"]) for line in mine)
        axes.plot(*zip(*points, strict=True), label=technique, **series_style(place))
    axes.set_xlabel("blocks")
    axes.set_ylabel("LPIPS to the plain picture")
    axes.legend()
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
