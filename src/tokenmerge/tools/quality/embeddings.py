"""Networks that turn a picture, uint8 [H, W, 3], into a vector.

Pictures go through one at a time. In a batch, rounding would make a vector depend on the other pictures.
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
    """Run without gradients and with reproducible rounding: no autotuning, no reduced precision."""
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
        """uint8 [n, 3, H, W] -> [n, 2048] as one batch: faster for thousands, where rounding does not matter."""
        pixels = pictures.to(self._device).float()
        # The optimiser of TorchScript would run different code in the first calls than in later ones.
        with exactly(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            features = self._network((_resized_from_corner(pixels, _INCEPTION_SIDE) - 128) / 128)
        return features.float().cpu()


def _resized_from_corner(pixels: Tensor, side: int) -> Tensor:
    """[B, C, H, W] -> [B, C, side, side], bilinear. As in the original FID, the centres of the first pixels coincide;
    usually the corners do."""
    height, width = pixels.shape[-2:]
    # Positions in the original picture.
    rows, columns = (torch.arange(side, device=pixels.device) * (length / side) for length in (height, width))

    def along(values: Tensor, places: Tensor, axis: int) -> Tensor:
        lower = places.floor().long()
        upper = (lower + 1).clamp_max(values.shape[axis] - 1)
        share = (places - lower).to(values.dtype)
        share = share[:, None] if axis == -2 else share
        return torch.lerp(values.index_select(axis, lower), values.index_select(axis, upper), share)

    return along(along(pixels, rows, -2), columns, -1)


class Sscd:
    """The copy detector SSCD, as ONNX: a unit vector [512]."""

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
        return _unit(vector[0])


class Dino:
    """A DINO or DINOv2 network of transformers: its class token as a unit vector."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoModel

        self._network = _loaded(AutoModel, folder).to(device)
        self._prepare = Preparation(folder)
        self._device = device

    def __call__(self, picture: Tensor) -> Tensor:
        with exactly():
            states = self._network(pixel_values=self._prepare(picture).to(self._device)).last_hidden_state
        return _unit(states[0, 0])


class Clip:
    """A CLIP network of transformers: unit vectors of pictures and of texts."""

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
        return _unit(vector[0])

    def _text(self, text: str) -> Tensor:
        """The unit vector of a text, cut to what CLIP reads: 77 tokens, about 50 words."""
        length = self._network.config.text_config.max_position_embeddings
        tokens = self._tokenizer(text, truncation=True, max_length=length, return_tensors="pt").to(self._device)
        with exactly():
            outputs = self._network.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
            vector = self._network.text_projection(outputs.pooler_output)
        return _unit(vector[0])


class Preparation:
    """Resizes, crops and normalises pictures for a network, as its `preprocessor_config.json` says.

    The classes in transformers are not used: their pixels depend on whether torchvision is installed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "preprocessor_config.json"
        if not path.is_file():
            raise TokenMergeError(f"{folder} has no preprocessor_config.json; give a complete model folder")
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        size, crops = values["size"], values.get("do_center_crop")
        if isinstance(size, int) and crops:
            # In old files of CLIP, one number beside a crop is the shortest side.
            size = {"shortest_edge": size}
        self._shortest: int | None = size.get("shortest_edge") if isinstance(size, dict) else None
        self._size = None if self._shortest else _sides(size)
        self._crop = _sides(values["crop_size"]) if crops else None
        self._resample = Image.Resampling(values.get("resample", Image.Resampling.BICUBIC))
        self._mean, self._deviation = (torch.tensor(values[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))

    def __call__(self, picture: Tensor) -> Tensor:
        """uint8 [H, W, 3] -> [1, 3, height, width]."""
        image = Image.fromarray(picture.numpy())
        width, height = self._size or _scaled(image.size, self._shortest or min(image.size))
        image = image.resize((width, height), self._resample)
        if self._crop:
            left, top = (image.width - self._crop[0]) // 2, (image.height - self._crop[1]) // 2
            image = image.crop((left, top, left + self._crop[0], top + self._crop[1]))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
        return ((pixels.permute(2, 0, 1).float() / 255 - self._mean) / self._deviation)[None]


def _sides(size: Any) -> tuple[int, int]:
    """Width and height, from a number or a mapping."""
    return (size, size) if isinstance(size, int) else (size["width"], size["height"])


def _scaled(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """`size`, scaled so that its shortest side is `shortest`."""
    low = min(size)
    return int(size[0] * shortest / low), int(size[1] * shortest / low)


def _unit(vector: Tensor) -> Tensor:
    return F.normalize(vector.float().cpu(), dim=0)


def _loaded(kind: Any, folder: Path) -> Any:
    try:
        made = kind.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise TokenMergeError(
            f"{folder} cannot be loaded as {kind.__name__} ({first_line(error)}); give another folder"
        ) from error
    return made.eval() if isinstance(made, torch.nn.Module) else made
