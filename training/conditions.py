"""The denoisers' text conditions: captions of every flower, encoded once by the frozen encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from captions import Captioner
from text import clip_outputs
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer


def make_captions(names: list[str], companions: list[str], each: int, seed: int = 2) -> list[str]:
    """`each` captions per flower, number `label * each + k`, and the empty prompt as the last."""
    captioner = Captioner(companions, seed)
    return [captioner.caption(name) for name in names for _ in range(each)] + [""]


@torch.inference_mode()
def encode_clip(folder: Path, texts: list[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`clip_outputs` of many texts: [n, d], [n, d] and [n, 77, d]."""
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer_clip")
    model = CLIPTextModelWithProjection.from_pretrained(folder / "clip").to(device).eval()
    parts = []
    for start in range(0, len(texts), 512):
        batch = tokenizer(texts[start : start + 512], padding="max_length", truncation=True, return_tensors="pt")
        parts.append(clip_outputs(model, batch.input_ids.to(device)))
    pooled, projected, states = (torch.cat(part) for part in zip(*parts, strict=True))
    return pooled, projected, states


@torch.inference_mode()
def encode_t5(folder: Path, texts: list[str], length: int, device: torch.device) -> Tensor:
    """T5 states [n, length, d] of padded texts; as in the pipeline, padding is attended to and handed on."""
    tokenizer = T5Tokenizer.from_pretrained(folder / "tokenizer_t5")
    model = T5EncoderModel.from_pretrained(folder / "t5").to(device).eval()
    states = []
    for start in range(0, len(texts), 256):
        batch = tokenizer(
            texts[start : start + 256],
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        states.append(model(batch.input_ids.to(device))[0])
    return torch.cat(states)


@dataclass(frozen=True)
class CaptionDraw:
    """Draws a caption for each label: one of `each`, or with probability `drop` the empty last one."""

    each: int
    classes: int
    drop: float = 0.1

    def __call__(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """labels: int64 [b], 0-based; returns caption numbers int64 [b]."""
        device = labels.device
        chosen = labels * self.each + torch.randint(self.each, labels.shape, generator=generator, device=device)
        dropped = torch.rand(labels.shape, generator=generator, device=device) < self.drop
        return torch.where(dropped, self.each * self.classes, chosen)
