"""Optimiser, averaged weights, the wall-clock schedule, and weight files: what all training scripts share."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# Odd quintic p(x) = a x + b x^3 + c x^5 whose iteration drives singular values in (0, 1] to about 1.
QUINTIC = (3.4445, -4.7750, 2.0315)
LARGEST_FILE = 15 * 2**20


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace the singular values of each matrix [k, rows, columns] by about 1 (Newton-Schulz iteration)."""
    a, b, c = QUINTIC
    wide = matrices.bfloat16()
    tall = wide.shape[-2] > wide.shape[-1]
    if tall:
        wide = wide.mT
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if tall else wide


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for weight matrices (a convolution counts as out x rest).

    Update: weight <- (1 - lr * decay) weight - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal. The factor
    gives the update the size of an AdamW step, so that learning rates mean the same in both. Matrices of one
    shape are orthogonalised together.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                buffers = [
                    self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    for parameter in parameters
                ]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                # Nesterov: look ahead by one more step of the average.
                ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
                update = orthogonalise(torch.stack(ahead).flatten(2))
                size = 0.2 * max(update.shape[-2:]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
                changes = list(update.to(parameters[0].dtype).view(-1, *shape).unbind())
                torch._foreach_add_(parameters, changes, alpha=-group["lr"] * size)


class Optimizers:
    """Muon for the inner matrices and AdamW for all else (vectors, and layers named in `adamw_names`)."""

    def __init__(
        self, model: nn.Module, lr: float, adamw_lr: float, adamw_names: tuple[str, ...], decay: float
    ) -> None:
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            inner = parameter.ndim >= 2 and not name.startswith(adamw_names)
            (matrices if inner else rest).append(parameter)
        fused = rest[0].is_cuda
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(matrices, lr, decay=decay), lr),
            (torch.optim.AdamW(rest, adamw_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused), adamw_lr),
        ]
        self.parameters = matrices + rest

    def step(self, factor: float, clip: float = 1.0) -> None:
        """One update with every learning rate times `factor`; then forget the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, clip)
        for optimizer, lr in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad()


class Average:
    """Exponential moving average of a model's weights: average <- decay * average + (1 - decay) * weights.

    The decay rises with the number of steps, so that a short run is not an average over its beginning.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.source = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.values = [parameter.detach().clone() for parameter in self.source]
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, self.source, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the model's weights; call twice to evaluate the average in between."""
        for value, parameter in zip(self.values, self.source, strict=True):
            kept = parameter.clone()
            parameter.copy_(value)
            value.copy_(kept)


class Clock:
    """A run measured by wall-clock time: it knows the learning-rate factor and when to save and stop."""

    def __init__(self, minutes: float, warmup_steps: int, decay_share: float, save_minutes: float) -> None:
        self.length, self.warmup_steps, self.decay_share = minutes * 60, warmup_steps, decay_share
        self.save_every = save_minutes * 60
        self.began = time.monotonic()
        self.next_save = self.save_every
        self.steps = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def running(self) -> bool:
        return self.elapsed < self.length

    def factor(self) -> float:
        """Linear warm-up over the first steps, level, then linear to 0 over the last `decay_share`."""
        self.steps += 1
        left = max(0.0, 1 - self.elapsed / self.length)
        return min(1.0, self.steps / self.warmup_steps, left / self.decay_share)

    def save_is_due(self) -> bool:
        if self.elapsed < self.next_save:
            return False
        self.next_save += self.save_every
        return True


def save_weights(state: dict[str, Tensor], folder: Path, name: str) -> None:
    """Write fp16 safetensors `name.0.safetensors`, `name.1...`, none larger than 15 MiB.

    Each file appears whole or not at all, so that a run may be stopped while it saves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in state.items():
        half = value.detach().half().cpu().contiguous()
        if size + half.nbytes > LARGEST_FILE - 2**16:
            parts.append({})
            size = 0
        parts[-1][key] = half
        size += half.nbytes
    for index, part in enumerate(parts):
        path = folder / f"{name}.{index}.safetensors"
        save_file(part, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)


def load_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """Read what `save_weights` wrote, in fp32."""
    state: dict[str, Tensor] = {}
    for path in files:
        state.update({key: value.float() for key, value in load_file(path).items()})
    return state
