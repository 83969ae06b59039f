"""Models by name (bundled, folder or hub id): whole pipelines, or outlines from their config files alone."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from ..api import plan
from ..config import Techniques
from ..errors import TokenMergeError, did_you_mean, first_line
from ..families import Family, denoiser_of, families, family_of
from ..families.scales import latent_frames, latent_scales
from ..planning.plan import Plan
from .random_models import RANDOM_MODELS

_PARTS = ("unet", "transformer")
# Only paths begin like this, never hub ids.
_PATHS = ("./", "../", "~")
# The models in the package tokenmerge-models, whether it is installed or not.
BUNDLED = ("tiny-flux", "tiny-sdxl")
_BUNDLE = "tokenmerge_models"
# A file beside a model's weights: how to call its pipeline.
_CALL_FILE = "tokenmerge.json"
# The files that an outline needs.
_CONFIG_FILES = ("model_index.json", "config.json", "vae/config.json", *(f"{part}/config.json" for part in _PARTS))
# Latents along a side, where no config says. Flux's pipelines use the same.
_LATENTS = 128


@dataclass(frozen=True)
class CallDefaults:
    """How a model's pipeline is best called. The pipeline decides what is not known."""

    call: dict[str, Any] = field(default_factory=dict)
    guidance_argument: str = "guidance_scale"
    steps: int = 30
    size: tuple[int, int] | None = None  # width, height


@dataclass(frozen=True)
class Outline:
    """A model from its config files alone: enough to check a request before weights are loaded."""

    model: str
    denoiser: nn.Module  # on the meta device
    decoder_scale: int | None = None  # pixels along a side of a latent, if its decoder says so
    decoder_frames: int | None = None  # frames per latent, likewise
    defaults: CallDefaults = field(default_factory=CallDefaults)
    # Name of the pipeline class, as module.class if its code lies beside the model; None for a bare denoiser.
    pipeline: str | None = None

    @cached_property
    def family(self) -> Family:
        return family_of(self.denoiser)

    @property
    def scale(self) -> int:
        """Pixels along a side of a latent."""
        return self.decoder_scale or self.family.scales[0]

    @property
    def frame_scale(self) -> int:
        """Frames per latent."""
        return self.decoder_frames or self.family.scales[1]

    @property
    def own_size(self) -> tuple[int, int]:
        """Width and height in pixels that the model was made for."""
        if self.defaults.size:
            return self.defaults.size[0], self.defaults.size[1]
        side = int(self.denoiser.config.get("sample_size", _LATENTS)) * self.scale  # type: ignore[union-attr, operator]
        return side, side

    @property
    def pipeline_class(self) -> type | None:
        """The class of its pipeline, if diffusers has one."""
        _quieten_transformers()
        return getattr(diffusers, self.pipeline, None) if self.pipeline else None

    def drawing_class(self) -> type:
        """The class of its pipeline; an error if diffusers has none."""
        found = self.pipeline_class
        if found is None:
            raise TokenMergeError(
                f"{self.model!r} is a {self.pipeline or 'bare denoiser'}, which is not a diffusers pipeline, and code "
                "beside a model never runs here; give another model"
            )
        return found

    def example(
        self, denoiser: nn.Module, batch: int, width: int, height: int, frames: int | None = None
    ) -> dict[str, Any]:
        """Random arguments for a call of the loaded denoiser. Sizes are in pixels."""
        latents = latent_frames(self.family, frames, self.frame_scale)
        return self.family.example(denoiser, batch, height // self.scale, width // self.scale, latents)

    def plan(self, techniques: Techniques, width: int, height: int, *, steps: int, frames: int | None = None) -> Plan:
        """What techniques would do to the model at a size in pixels."""
        scales = {"vae_scale_factor": self.scale, "vae_scale_factor_temporal": self.frame_scale}
        return plan(self.denoiser, techniques, height=height, width=width, frames=frames, steps=steps, **scales)

    @property
    def unit(self) -> int:
        """Sides of its pictures must be multiples of this many pixels."""
        return self.family.calls.unit(self.denoiser, self.scale)

    @property
    def least_side(self) -> int:
        return max(4 * self.scale, self.unit)

    def check_size(self, width: int, height: int) -> None:
        """Refuse sizes that the pipeline would refuse or change, or that have too few tokens to merge."""
        unit, least = self.unit, self.least_side
        if min(width, height) < least or width % unit or height % unit:
            near = "x".join(str(max(least, round(side / unit) * unit)) for side in (width, height))
            raise TokenMergeError(
                f"{width}x{height} pixels cannot be drawn; both sides must be multiples of {unit}, from {least}: "
                f"try {near}"
            )


def best_device(name: str | None) -> torch.device:
    """The device with this name, or the best one available."""
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name or best)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TokenMergeError(f"device {name!r} cannot be used here ({first_line(error)}); try {best}") from error
    return device


def dtype_on(device: torch.device, asked: str | None) -> str:
    """The dtype to work in: the one asked for, or the usual one of the device."""
    return asked or ("float32" if device.type == "cpu" else "bfloat16")


def outline(model: str) -> Outline:
    """The outline of a model, or of one of `RANDOM_MODELS`."""
    if model in RANDOM_MODELS:
        known = RANDOM_MODELS[model]
        with torch.device("meta"):
            denoiser = _from_config(known.config, model)
        return Outline(model, denoiser, defaults=CallDefaults(steps=known.steps, size=known.size))
    place = Path(_place(model))
    folder = place if place.is_dir() else _from_hub(model, _CONFIG_FILES)
    index = _read_json(folder, "model_index.json")
    pipeline = _pipeline(index) if index else None
    part = next((name for name in _PARTS if index and name in index), None)
    if index and part is None:
        raise TokenMergeError(f"{model!r} is a {pipeline} without a unet or transformer; give another model")
    config = _read_json(folder, f"{part}/config.json" if part else "config.json")
    if config is None:
        raise TokenMergeError(
            f"{model!r} has no {f'{part}/config.json' if part else 'model_index.json or config.json'}; "
            "give a diffusers folder or a hub id that has it"
        )
    vae = _read_json(folder, "vae/config.json") if index else None
    with torch.device("meta"):
        denoiser = _from_config(config, model)
    return Outline(model, denoiser, *latent_scales(vae or {}), _defaults(folder), pipeline)


def _pipeline(index: dict[str, Any]) -> str | None:
    """The name of the pipeline class. If its code lies beside the model, the index holds a list: module, class."""
    name = index.get("_class_name")
    return ".".join(map(str, name)) if isinstance(name, list) else name


def load_pipeline(
    model: str, dtype: torch.dtype, device: torch.device, safetensors: bool = False
) -> tuple[Any, CallDefaults]:
    """A pipeline by bundled name, folder or hub id, and how to call it. Code beside a model never runs.

    safetensors: refuse weights in other formats, which may hold code.
    """
    _quieten_transformers()
    place = _place(model)
    if not Path(place).is_dir():
        # Ask first: diffusers' error for an unknown name is long.
        _from_hub(model, ("model_index.json",))
    try:
        with warnings.catch_warnings():
            # Newer versions prefer another name for torch_dtype, but older ones ignore that name.
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                place, torch_dtype=dtype, use_safetensors=safetensors or None
            )
    except (OSError, ValueError) as error:
        raise TokenMergeError(f"{model!r} cannot be loaded ({first_line(error)}); {_WAY_OUT}") from error
    return pipe.to(device), _defaults(Path(place))


def image_to_image(pipe: Any) -> Any:
    """The image-to-image pipeline with the same parts."""
    try:
        return diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError as error:
        raise TokenMergeError(
            f"{type(pipe).__name__} has no image-to-image pipeline, which we need to pass noised pictures to its "
            "denoiser; use a model that has one, such as SD, SDXL, SD3 or Flux"
        ) from error


def is_bundled(model: str) -> bool:
    """Whether a name stands for an installed bundled model."""
    return model in BUNDLED and find_spec(_BUNDLE) is not None


def name_of(model: str) -> str:
    """The name of a model for strangers. Of a folder they see the name, but not the path."""
    return Path(model).absolute().name if _is_folder(model) else model


def whole_path(model: str) -> str:
    """A folder as an absolute path, for programs that run elsewhere; a bundled name or hub id unchanged."""
    return str(Path(model).resolve()) if _is_folder(model) else model


def load_denoiser(model: str, dtype: str | None, device: torch.device) -> nn.Module:
    """The denoiser of a pipeline, or one of `RANDOM_MODELS` with random weights."""
    if model not in RANDOM_MODELS:
        pipe, _ = load_pipeline(model, getattr(torch, dtype_on(device, dtype)), device)
        return denoiser_of(pipe).eval()
    config, usual = RANDOM_MODELS[model].config, RANDOM_MODELS[model].dtype
    before = torch.get_default_dtype()
    # Create weights in their own dtype: in float32 they may not fit.
    torch.set_default_dtype(getattr(torch, dtype or usual))
    try:
        with device, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return _from_config(config, model).eval()
    finally:
        torch.set_default_dtype(before)


_WAY_OUT = f"give a bundled name ({', '.join(BUNDLED)}), a diffusers folder or a hub id"


def _place(model: str) -> str:
    """The folder of a bundled model; any other name unchanged."""
    if model not in BUNDLED or _is_folder(model):
        return model
    if not is_bundled(model):
        raise TokenMergeError(
            f"{model!r} comes with the package tokenmerge-models, which is not installed; in the repository run "
            "pip install ./models, elsewhere pip install tokenmerge-models, or give a diffusers folder or a hub id"
        )
    folder: Path = importlib.import_module(_BUNDLE).models()[model]
    return str(folder)


def _is_folder(model: str) -> bool:
    """Whether a name stands for a folder. An installed bundled model goes before a folder of its name."""
    return Path(model).is_dir() and not is_bundled(model)


def _quieten_transformers() -> None:
    """Silence transformers' advice on image packages, which these pipelines do not need."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise TokenMergeError("text encoders need transformers: pip install tokenmerge[generate]") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _defaults(folder: Path) -> CallDefaults:
    return CallDefaults(**(_read_json(folder, _CALL_FILE) or {}))


def _from_config(config: dict[str, Any], model: str) -> nn.Module:
    for family in families():
        if family.denoiser.__name__ == config.get("_class_name"):
            denoiser: nn.Module = family.denoiser.from_config(config)  # type: ignore[attr-defined]
            return denoiser
    name = str(config.get("_class_name"))
    near = did_you_mean(name, [family.denoiser.__name__ for family in families()])
    raise TokenMergeError(
        f"{model!r} has a {name}, which has no table{near}; tokenmerge.supported_models() lists those with one"
    )


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON file in a folder; None if it is missing."""
    path = folder / name
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _from_hub(model: str, files: Sequence[str]) -> Path:
    """The folder of a model in the hub's cache, with those of `files` that exist. Downloads what is missing."""
    if Path(model).is_absolute() or model.startswith(_PATHS):
        raise TokenMergeError(f"there is no folder {model}; {_WAY_OUT}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Unlike downloads of single files, this fails at once where the hub cannot be reached.
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except LocalEntryNotFoundError as error:
        raise _unknown(model, "the hub cannot be reached") from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise _unknown(model, "the hub has no model of that name that you may read") from error


def _unknown(model: str, why: str) -> TokenMergeError:
    near = did_you_mean(model, (*BUNDLED, *RANDOM_MODELS))
    return TokenMergeError(f"model {model!r} is unknown{near}: no folder here has that name, and {why}; {_WAY_OUT}")
