"""Models by name: bundled ones, folders and hub ids; whole pipelines, or denoisers from their configs alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..errors import TokenMergeError, first_line
from ..families import denoiser_of, families, family_of
from .sizes import RANDOM_MODELS

_PARTS = ("unet", "transformer")
# What only paths of folders begin with.
_PATHS = ("./", "../", "~")
_BUNDLED = Path(__file__).parent.parent / "models"
# Beside a model's weights: how its pipeline wants to be called.
_CALL_FILE = "tokenmerge.json"
# What a denoiser is made from without its weights.
_CONFIG_FILES = ("model_index.json", "config.json", "vae/config.json", *(f"{part}/config.json" for part in _PARTS))


@dataclass(frozen=True)
class CallDefaults:
    """How a model's pipeline is best called; what is not known is left to the pipeline."""

    call: dict[str, Any] = field(default_factory=dict)
    guidance_argument: str = "guidance_scale"
    steps: int = 30
    size: tuple[int, int] | None = None  # width, height


def bundled_models() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    return tuple(sorted(folder.name for folder in _BUNDLED.iterdir() if folder.is_dir())) if _BUNDLED.is_dir() else ()


def dtype_on(device: torch.device, asked: str | None) -> str:
    """The name of the dtype to work in: as asked, or the usual one of the device."""
    return asked or ("float32" if device.type == "cpu" else "bfloat16")


def load_pipeline(model: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, CallDefaults]:
    """A pipeline by bundled name, folder or hub id, and how to call it."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise TokenMergeError("text encoders need transformers: pip install .[generate]") from error
    # Its advice on packages for images is not about these pipelines.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = _place(model)
    if not Path(place).is_dir():
        # Asked first, since what diffusers tells of names that nobody has is long.
        _from_hub(model, ("model_index.json",))
    try:
        with warnings.catch_warnings():
            # Newer versions prefer another name for it, which older ones ignore.
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            pipe = DiffusionPipeline.from_pretrained(place, torch_dtype=dtype)
    except (OSError, ValueError) as error:
        names = ", ".join(bundled_models())
        raise TokenMergeError(
            f"{model!r} cannot be loaded ({first_line(error)}); give a bundled name ({names}), a diffusers folder or a "
            "hub id"
        ) from error
    values = _read_json(Path(place), _CALL_FILE)
    defaults = CallDefaults(**values) if values else CallDefaults()
    return pipe.to(device), defaults


def load_denoiser(model: str, dtype: str | None, device: torch.device) -> tuple[nn.Module, int]:
    """The denoiser of a pipeline, or one of `RANDOM_MODELS` with random weights, and pixels per latent."""
    if model not in RANDOM_MODELS:
        pipe, _ = load_pipeline(model, getattr(torch, dtype_on(device, dtype)), device)
        return denoiser_of(pipe).eval(), pipe.vae_scale_factor
    config, usual = RANDOM_MODELS[model]
    before = torch.get_default_dtype()
    # Weights in their own dtype from the start: twice the size would not fit everywhere.
    torch.set_default_dtype(getattr(torch, dtype or usual))
    try:
        with device, torch.random.fork_rng(_devices(device)):
            torch.manual_seed(0)
            return _from_config(config, model).eval(), 8
    finally:
        torch.set_default_dtype(before)


def check_size(denoiser: nn.Module, scale: int, width: int, height: int) -> None:
    """Refuse pictures whose sides, in pixels, a pipeline would refuse or change, or that have too few tokens for any to
    merge. scale: pixels to a latent."""
    unit = family_of(denoiser).unit(denoiser, scale)
    least = max(4 * scale, unit)
    if min(width, height) < least or width % unit or height % unit:
        near = "x".join(str(max(least, round(side / unit) * unit)) for side in (width, height))
        raise TokenMergeError(
            f"{width}x{height} pixels cannot be made; both sides must be multiples of {unit}, from {least}: try {near}"
        )


def _devices(device: torch.device) -> list[torch.device]:
    """Those whose generators a seed changes beside the CPU's."""
    return [device] if device.type == "cuda" else []


def _place(model: str) -> str:
    """The folder of a bundled model, or what was given."""
    return str(_BUNDLED / model) if model in bundled_models() else model


def empty_denoiser(model: str) -> tuple[nn.Module, int]:
    """The denoiser of a model, or one of `RANDOM_MODELS`, without weights, and pixels per latent."""
    if model in RANDOM_MODELS:
        with torch.device("meta"):
            return _from_config(RANDOM_MODELS[model][0], model), 8
    place = Path(_place(model))
    folder = place if place.is_dir() else _from_hub(model, _CONFIG_FILES)
    index = _read_json(folder, "model_index.json")
    part = next((name for name in _PARTS if index and name in index), None)
    if index and part is None:
        raise TokenMergeError(
            f"{model!r} is a {index.get('_class_name')} without a unet or transformer; give another model"
        )
    config = _read_json(folder, f"{part}/config.json" if part else "config.json")
    if config is None:
        raise TokenMergeError(
            f"{model!r} has no {f'{part}/config.json' if part else 'model_index.json or config.json'}; "
            "give a diffusers folder or a hub id that has it"
        )
    vae = _read_json(folder, "vae/config.json") if index else None
    scale = 2 ** (len(vae["block_out_channels"]) - 1) if vae and "block_out_channels" in vae else 8
    with torch.device("meta"):
        return _from_config(config, model), scale


def _from_config(config: dict[str, Any], model: str) -> nn.Module:
    for family in families():
        if family.denoiser.__name__ == config.get("_class_name"):
            denoiser: nn.Module = family.denoiser.from_config(config)  # type: ignore[attr-defined]
            return denoiser
    supported = ", ".join(family.denoiser.__name__ for family in families())
    raise TokenMergeError(f"{model!r} has a {config.get('_class_name')}; supported denoisers are {supported}")


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON file of a folder; None if it is not there."""
    path = folder / name
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _from_hub(model: str, files: Sequence[str]) -> Path:
    """The folder of a model in the hub's cache, with those of `files` that it has, fetched if need be."""
    if Path(model).is_absolute() or model.startswith(_PATHS):
        # No hub id is written so.
        raise TokenMergeError(
            f"there is no folder {model}; give a bundled name ({', '.join(bundled_models())}), a diffusers folder or a "
            "hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Unlike the download of single files it tries once: a hub that cannot be reached is told of at once.
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except LocalEntryNotFoundError as error:
        raise _unknown(model, "the hub cannot be reached for it") from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise _unknown(model, "the hub has no model of that name that you may read") from error


def _unknown(model: str, why: str) -> TokenMergeError:
    names = bundled_models()
    near = get_close_matches(model, names, n=1)
    way = f"did you mean {near[0]!r}?" if near else "give one of those, a diffusers folder or a hub id"
    return TokenMergeError(
        f"model {model!r} is not bundled ({', '.join(names)} are), it is no folder here, and {why}; {way}"
    )
