"""Denoisers from their configs alone: shapes without weights, on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import TokenMergeError
from . import families

_PARTS = ("unet", "transformer")


def empty_denoiser(model: str) -> tuple[nn.Module, int]:
    """The denoiser of a pipeline folder, denoiser folder or hub id, without weights, and pixels per latent."""
    index = _read_json(model, "model_index.json")
    part = next((name for name in _PARTS if index and name in index), None)
    if index and part is None:
        raise TokenMergeError(
            f"{model!r} is a {index.get('_class_name')} without a unet or transformer; give another model"
        )
    config = _read_json(model, f"{part}/config.json" if part else "config.json")
    if config is None:
        raise TokenMergeError(
            f"{model!r} has no {f'{part}/config.json' if part else 'model_index.json or config.json'}; "
            "give a diffusers folder or a hub id that has it"
        )
    vae = _read_json(model, "vae/config.json") if index else None
    scale = 2 ** (len(vae["block_out_channels"]) - 1) if vae and "block_out_channels" in vae else 8
    for family in families():
        if family.denoiser.__name__ == config.get("_class_name"):
            with torch.device("meta"):
                return family.denoiser.from_config(config), scale  # type: ignore[attr-defined]
    supported = ", ".join(family.denoiser.__name__ for family in families())
    raise TokenMergeError(f"{model!r} has a {config.get('_class_name')}; supported denoisers are {supported}")


def _read_json(model: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a folder or a hub repository; None if it is not there."""
    path = Path(model) / name if Path(model).is_dir() else _from_hub(model, name)
    if path is None or not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _from_hub(repository: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except LocalEntryNotFoundError as error:
        raise TokenMergeError(
            f"{repository!r} is not a folder here, and the hub cannot be reached for it; check the path or the network"
        ) from error
    except EntryNotFoundError:
        return None
    except (HFValidationError, HfHubHTTPError) as error:
        raise TokenMergeError(
            f"{repository!r} is neither a folder nor a readable repository of the hub; check its name, or log in"
        ) from error
