"""Sample sheets through the stock pipelines: the same flowers for each model.

    python training/samples.py models/tokenmerge_models/tiny-* --sizes 256 --out docs/samples
    python training/samples.py models/tokenmerge_models/tiny-* --sizes 512 --count 8 --out docs/samples

writes `<model>-<size>.webp`, each image with its flower's name below.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image, ImageDraw

NAMES = (
    "sunflower", "rose", "water lily", "passion flower", "bird of paradise", "oxeye daisy", "foxglove",
    "moon orchid", "grape hyacinth", "corn poppy", "frangipani", "hibiscus", "tiger lily", "globe thistle",
    "sword lily", "magnolia",
)  # fmt: skip
COLUMNS = 4
CAPTION_HEIGHT = 18


def load_pipeline(folder: Path, device: str, dtype: torch.dtype, lora: Path | None = None) -> DiffusionPipeline:
    torch.set_float32_matmul_precision("high")  # TF32 where there is a GPU
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    return pipe


def generate(
    pipe: DiffusionPipeline,
    prompts: list[str],
    size: int,
    steps: int = 30,
    guidance: float = 2.5,
    seed: int = 0,
    batch: int = 32,
    text_length: int = 512,
) -> Iterator[Image.Image]:
    """One image per prompt. Image i has its own generator with seed `seed + i`, whatever the batch size."""
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        options = {"guidance_scale": guidance}
        if isinstance(pipe, FluxPipeline):
            # Without a negative prompt, FluxPipeline does not guide.
            options = {"true_cfg_scale": guidance, "negative_prompt": [""] * len(part)}
            options["max_sequence_length"] = text_length
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        result = pipe(part, height=size, width=size, num_inference_steps=steps, generator=generators, **options)
        yield from result.images


def sheet(images: list[Image.Image], captions: list[str]) -> Image.Image:
    """Images in rows of four, each with its caption below."""
    width, height = images[0].size
    rows = -(-len(images) // COLUMNS)
    page = Image.new("RGB", (COLUMNS * width, rows * (height + CAPTION_HEIGHT)), "white")
    draw = ImageDraw.Draw(page)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = i % COLUMNS * width, i // COLUMNS * (height + CAPTION_HEIGHT)
        page.paste(image, (left, top))
        draw.text((left + width // 2, top + height + 2), caption, fill="black", anchor="ma")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders from export.py")
    parser.add_argument("--sizes", type=int, nargs="+", default=(256, 512))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=2.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lora", type=Path, help="folder from distil.py, for --steps 4 --guidance 1")
    parser.add_argument("--count", type=int, help="flowers (default: all sixteen)")
    parser.add_argument("--text-length", type=int, default=512, help="tokens of Flux's T5")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/samples"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(NAMES[: args.count])
    prompts = [f"a photo of a {name}" for name in names]
    for folder in args.models:
        pipe = load_pipeline(folder, args.device, torch.float32, args.lora)
        for size in args.sizes:
            began = time.monotonic()
            images = list(
                generate(pipe, prompts, size, args.steps, args.guidance, args.seed, args.batch, args.text_length)
            )
            path = args.out / f"{folder.name}-{size}.webp"
            sheet(images, names).save(path, quality=75, method=6)
            print(f"{path}: {len(images)} images in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
