"""Assemble the folders that stock diffusers loads.

    python training/export.py --text build/text --vae build/vae/vae.0.safetensors \
        --flux build/flux/flux.*.safetensors --sdxl build/sdxl/sdxl.*.safetensors

writes `tiny-flux` and `tiny-sdxl` (whichever denoiser is given) into the package, with fp16 weights and a SHA256SUMS in
each. Files that both share are stored once; the other folder has links.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from autoencoder import make_autoencoder
from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from flux import CONFIG as FLUX_CONFIG
from flux import SCHEDULER as FLUX_SCHEDULER
from optim import load_weights
from safetensors.torch import load_file, save_file
from sdxl import CONFIG as SDXL_CONFIG
from sdxl import SCHEDULER as SDXL_SCHEDULER
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5EncoderModel,
    T5Tokenizer,
)

# How to call each pipeline, for `tokenmerge generate`. All else is the pipeline's own default.
CALLS = {
    # Without a negative prompt FluxPipeline does not guide, and its 512 text tokens are mostly padding.
    "FluxPipeline": {
        "call": {"negative_prompt": "", "true_cfg_scale": 2.5, "max_sequence_length": 32},
        "guidance_argument": "true_cfg_scale",
    },
    "StableDiffusionXLPipeline": {"call": {"guidance_scale": 2.5}, "guidance_argument": "guidance_scale"},
}
PICTURES = {"steps": 28, "size": [256, 256]}
# Files of this many bytes or more are stored once if two models share them.
SHARED = 50_000


def common_parts(text: Path, vae: list[Path]) -> dict[str, Any]:
    return {
        "vae": make_autoencoder(vae),
        "text_encoder": CLIPTextModel.from_pretrained(text / "clip"),
        "tokenizer": CLIPTokenizer.from_pretrained(text / "tokenizer_clip"),
    }


def make_flux(text: Path, vae: list[Path], weights: list[Path]) -> FluxPipeline:
    state = load_weights(weights)
    joint, single = (_count(state, f"{name}transformer_blocks.") for name in ("", "single_"))
    transformer = FluxTransformer2DModel(**FLUX_CONFIG, num_layers=joint, num_single_layers=single)
    transformer.load_state_dict(state)
    return FluxPipeline(
        **common_parts(text, vae),
        scheduler=FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULER),
        text_encoder_2=T5EncoderModel.from_pretrained(text / "t5"),
        tokenizer_2=T5Tokenizer.from_pretrained(text / "tokenizer_t5"),
        transformer=transformer,
    )


def _count(state: Iterable[str], blocks: str) -> int:
    return len({key.removeprefix(blocks).split(".")[0] for key in state if key.startswith(blocks)})


def make_sdxl(text: Path, vae: list[Path], weights: list[Path]) -> StableDiffusionXLPipeline:
    unet = UNet2DConditionModel(**SDXL_CONFIG)
    unet.load_state_dict(load_weights(weights))
    return StableDiffusionXLPipeline(
        **common_parts(text, vae),
        scheduler=EulerDiscreteScheduler(**SDXL_SCHEDULER),
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(text / "clip"),
        tokenizer_2=CLIPTokenizer.from_pretrained(text / "tokenizer_clip"),
        unet=unet,
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def tidy_text_encoder(folder: Path) -> None:
    """Correct two things that `save_pretrained` leaves in a text encoder.

    The weights are fp16 only to be small. transformers would load them in the dtype that the config names,
    beside a denoiser that diffusers loads in fp32, so the config must say fp32. And CLIP's keys must begin
    with `text_model.`, as in published pipelines: every version of transformers reads those.
    """
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if config["model_type"] == "clip_text_model":
        path = folder / "model.safetensors"
        kept = ("text_model.", "text_projection.")
        state = {k if k.startswith(kept) else f"text_model.{k}": v for k, v in load_file(path).items()}
        save_file(state, path, metadata={"format": "pt"})
        if "text_projection.weight" in state:
            split_projection(folder)


def split_projection(folder: Path) -> None:
    """Split the weights into the encoder and its projection, so that models without a projection share the first."""
    whole = folder / "model.safetensors"
    state = load_file(whole)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shards: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for key, tensor in state.items():
        shards[names[key.startswith("text_projection.")]][key] = tensor
    for name, shard in shards.items():
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
        "weight_map": {key: name for name, shard in shards.items() for key in sorted(shard)},
    }
    (folder / f"{whole.name}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    whole.unlink()


def write_checksums(folder: Path) -> None:
    """SHA256SUMS over every file of the folder but the card; check with `sha256sum -c SHA256SUMS`."""
    sums = folder / "SHA256SUMS"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (sums.name, "README.md"))
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}" for path in files
    ]
    sums.write_text("\n".join(lines) + "\n")


def save(pipe: DiffusionPipeline, folder: Path) -> None:
    """Write the pipeline in fp16. It replaces everything in the folder but README.md, the model card."""
    card = (folder / "README.md").read_bytes() if (folder / "README.md").exists() else None
    if folder.exists():
        shutil.rmtree(folder)
    pipe.to(dtype=torch.float16).save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_bytes(card)
    for encoder in ("text_encoder", "text_encoder_2"):
        tidy_text_encoder(folder / encoder)
    (folder / "tokenmerge.json").write_text(json.dumps(CALLS[type(pipe).__name__] | PICTURES, indent=2) + "\n")
    write_checksums(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    print(f"{folder}: {size / 1e6:.1f} MB of weights")


def files_of_models(out: Path) -> Iterator[Path]:
    for index in sorted(out.glob("*/model_index.json")):
        yield from (path for path in sorted(index.parent.rglob("*")) if path.is_file())


def unshare(out: Path) -> None:
    """Replace links by copies, so that one model can be replaced without the other."""
    for path in files_of_models(out):
        if path.is_symlink():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)


def share(out: Path) -> None:
    """Store equal large files once, and link the others to the first.

    Files are linked and not folders: hatchling packs a folder with two names only once.
    """
    first: dict[str, Path] = {}
    for path in files_of_models(out):
        if path.stat().st_size < SHARED:
            continue
        held = first.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
        if held != path:
            path.unlink()
            path.symlink_to(os.path.relpath(held, path.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("build/text"), help="folder from text.py")
    parser.add_argument("--vae", type=Path, nargs="+", required=True, help="weights from autoencoder.py")
    parser.add_argument("--flux", type=Path, nargs="+", help="weights from flux.py")
    parser.add_argument("--flux-name", default="tiny-flux", help="of the folder")
    parser.add_argument("--sdxl", type=Path, nargs="+", help="weights from sdxl.py")
    parser.add_argument("--out", type=Path, default=Path("models/tokenmerge_models"))
    args = parser.parse_args()
    unshare(args.out)
    if args.flux:
        save(make_flux(args.text, args.vae, args.flux), args.out / args.flux_name)
    if args.sdxl:
        save(make_sdxl(args.text, args.vae, args.sdxl), args.out / "tiny-sdxl")
    share(args.out)


if __name__ == "__main__":
    main()
