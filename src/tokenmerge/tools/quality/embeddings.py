"""Networks that turn a picture, uint8 [H, W, 3], into a vector.

Pictures go through one by one: with others beside it a picture's vector would differ by rounding, and a figure would
depend on what else was measured.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...errors import TokenMergeError, first_line

_INCEPTION_SIDE = 299
_SSCD_SIDE = 288


@contextmanager
def exactly() -> Iterator[None]:
    """Without gradients, and with the same rounding whenever it is run: no tuning, no reduced precision."""
    with (
        torch.inference_mode(),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        yield


class Inception:
    """The network of the original FID, as TorchScript: [2048]."""

    def __init__(self, path: Path, device: torch.device) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._network = torch.jit.load(path, map_location=device).eval()
        self._device = device

    def __call__(self, picture: Tensor) -> Tensor:
        return self.of_many(picture.permute(2, 0, 1)[None])[0]

    def of_many(self, pictures: Tensor) -> Tensor:
        """uint8 [n, 3, H, W] to [n, 2048], at once: for thousands, where rounding does not matter."""
        pixels = pictures.to(self._device).float()
        # Without it the first calls run other code than those after them.
        with exactly(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            features = self._network((_resized_from_corner(pixels, _INCEPTION_SIDE) - 128) / 128)
        return features.float().cpu()


def _resized_from_corner(pixels: Tensor, side: int) -> Tensor:
    """[B, C, H, W] -> [B, C, side, side], bilinear with the first pixel of both in one place, as the original FID
    does; the usual way puts the corners in one place."""
    height, width = pixels.shape[-2:]
    rows, columns = (
        torch.arange(side, device=pixels.device) * (length / side) for length in (height, width)
    )  # in pixels of the original

    def along(values: Tensor, places: Tensor, axis: int) -> Tensor:
        lower = places.floor().long()
        upper = (lower + 1).clamp_max(values.shape[axis] - 1)
        share = (places - lower).to(values.dtype)
        share = share[:, None] if axis == -2 else share
        return torch.lerp(values.index_select(axis, lower), values.index_select(axis, upper), share)

    return along(along(pixels, rows, -2), columns, -1)


class Sscd:
    """The copy detector SSCD, as ONNX: [512], of unit length."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._name = self._session.get_inputs()[0].name

    def __call__(self, picture: Tensor) -> Tensor:
        pixels = picture.permute(2, 0, 1)[None].float()
        resized = F.interpolate(pixels, (_SSCD_SIDE, _SSCD_SIDE), mode="bilinear", antialias=True)
        whole = resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        vector = torch.from_numpy(self._session.run(None, {self._name: whole.numpy()})[0])
        return F.normalize(vector[0].float(), dim=0)


class Dino:
    """A DINO or DINOv2 network of transformers: its class token, of unit length."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoModel

        self._network = _loaded(AutoModel, folder).to(device)
        self._prepare = Preparation(folder)
        self._device = device

    def __call__(self, picture: Tensor) -> Tensor:
        with exactly():
            states = self._network(pixel_values=self._prepare(picture).to(self._device)).last_hidden_state
        return F.normalize(states[0, 0].float().cpu(), dim=0)


class Clip:
    """A CLIP network of transformers: vectors of unit length for pictures and for texts."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoTokenizer, CLIPModel

        self._network = _loaded(CLIPModel, folder).to(device)
        self._tokenizer = _loaded(AutoTokenizer, folder)
        self._prepare = Preparation(folder)
        self._device = device
        self.text = lru_cache(maxsize=None)(self._text)

    def __call__(self, picture: Tensor) -> Tensor:
        with exactly():
            pixels = self._prepare(picture).to(self._device)
            vector = self._network.visual_projection(self._network.vision_model(pixel_values=pixels).pooler_output)
        return F.normalize(vector[0].float().cpu(), dim=0)

    def _text(self, text: str) -> Tensor:
        """Of what fits: CLIP reads 77 tokens, about 50 words."""
        length = self._network.config.text_config.max_position_embeddings
        tokens = self._tokenizer(text, truncation=True, max_length=length, return_tensors="pt").to(self._device)
        with exactly():
            outputs = self._network.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
            vector = self._network.text_projection(outputs.pooler_output)
        return F.normalize(vector[0].float().cpu(), dim=0)


class Preparation:
    """A network's own way with pictures, from its `preprocessor_config.json`: resize, crop, normalise.

    transformers' own classes give other pixels with torchvision than without it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "preprocessor_config.json"
        if not path.is_file():
            raise TokenMergeError(f"{folder} has no preprocessor_config.json; give a complete model folder")
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        size, crop = values["size"], values.get("crop_size")
        self._shortest: int | None = size.get("shortest_edge") if isinstance(size, dict) else None
        self._size: tuple[int, int] | None = None if self._shortest else _sides(size)
        # Old files of CLIP give one number, which means the shortest side where there is a crop.
        if isinstance(size, int) and values.get("do_center_crop"):
            self._shortest, self._size = size, None
        self._crop = _sides(crop) if values.get("do_center_crop") else None
        self._resample = Image.Resampling(values.get("resample", Image.Resampling.BICUBIC))
        self._mean, self._deviation = (torch.tensor(values[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))

    def __call__(self, picture: Tensor) -> Tensor:
        """[1, 3, height, width]."""
        image = Image.fromarray(picture.numpy())
        width, height = self._size or _scaled(image.size, self._shortest or min(image.size))
        image = image.resize((width, height), self._resample)
        if self._crop:
            left, top = (image.width - self._crop[0]) // 2, (image.height - self._crop[1]) // 2
            image = image.crop((left, top, left + self._crop[0], top + self._crop[1]))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
        return ((pixels.permute(2, 0, 1).float() / 255 - self._mean) / self._deviation)[None]


def _sides(size: Any) -> tuple[int, int]:
    """Width and height from a number or a mapping."""
    return (size, size) if isinstance(size, int) else (size["width"], size["height"])


def _scaled(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """`size` with its shortest side as told."""
    low = min(size)
    return int(size[0] * shortest / low), int(size[1] * shortest / low)


def _loaded(kind: Any, folder: Path) -> Any:
    try:
        made = kind.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise TokenMergeError(
            f"{folder} cannot be loaded as {kind.__name__} ({first_line(error)}); give another folder"
        ) from error
    return made.eval() if isinstance(made, torch.nn.Module) else made
