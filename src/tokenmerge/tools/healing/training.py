"""The training loop: teach the merged model the plain model's output on noised pictures.

A step depends on the seed and its number alone, so a killed run resumes as if it had never stopped.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import api
from ...config import Merge
from ...errors import TokenMergeError
from ..files import write_file
from .adapter import Adapter
from .data import Item
from .noising import NoisedCall, Noising, joined

# Share of the steps over which the learning rate rises.
_WARM_UP = 0.05
_LONGEST_GRADIENT = 1.0
# Share of captions that are left out, where guidance makes its own calls without captions.
_EMPTY = 0.3
# Noise levels in a batch.
_LEVELS = 4
# Latest steps, whose mean loss the progress bar shows.
_RECENT = 50


@dataclass(frozen=True)
class Lessons:
    """The pictures and settings of training."""

    items: Sequence[Item]
    steps: int
    batch: int
    lr: float
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate: it rises, then falls as a cosine."""
        warm_up = max(1, round(_WARM_UP * self.steps))
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, self.steps - warm_up)))

    def batch_at(self, step: int, process: int, processes: int) -> list[Item]:
        """The pictures of a step. Every round goes through all of them in another order."""
        first = (step * processes + process) * self.batch
        return [self._at(place) for place in range(first, first + self.batch)]

    def _at(self, place: int) -> Item:
        lap, place = divmod(place, len(self.items))
        return self.items[_order(f"{self.seed} {lap}", len(self.items))[place]]


@lru_cache(maxsize=2)
def _order(seed: str, count: int) -> list[int]:
    """The order of pictures in a round. Two are cached, since a batch may span two rounds."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


@dataclass
class Progress:
    """How far training has come."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)  # losses of held-out pictures, after training


class Trainer:
    """A denoiser with an adapter, and the calls it learns from."""

    def __init__(
        self, adapter: Adapter, noising: Noising, merge: Merge, device: torch.device, dtype: str, at_once: int
    ) -> None:
        self.adapter = adapter
        self.at_once = at_once
        self.noising = noising
        # Calls come from steps in the window. They follow no schedule by which Merge could find its window itself.
        self._merge = merge.replace(start=0.0, stop=1.0)
        self._device = device
        self._half = None if dtype == "float32" else getattr(torch, dtype)
        self.optimizer = torch.optim.AdamW(adapter.weights.values(), weight_decay=0.0)
        adapter.denoiser.enable_gradient_checkpointing()

    def calls(self, items: Sequence[Item], rng: random.Random) -> list[NoisedCall]:
        """Calls for pictures, `at_once` in each, with the noise of steps that merge.

        The noise comes from equal parts of the window in turn: the loss depends far more on noise than on the picture.
        """
        steps, share = self.noising.steps, 0.0 if self.noising.guided else _EMPTY
        levels, calls = min(_LEVELS, len(steps), len(items)), []
        for first in range(0, len(items), self.at_once):
            together = range(first, min(first + self.at_once, len(items)))
            parts = []
            for level in dict.fromkeys(place % levels for place in together):
                some = [items[place] for place in together if place % levels == level]
                step = rng.choice(steps[level * len(steps) // levels : (level + 1) * len(steps) // levels])
                captions = ["" if rng.random() < share else item.caption for item in some]
                parts.append(self.noising.call(some, captions, step, rng.randrange(2**31)))
            calls.append(joined(parts))
        return calls

    def learn(self, calls: Sequence[NoisedCall], model: nn.Module, rate: float) -> float:
        """One step of the optimizer; returns the loss. model: the denoiser, or its wrapper for several processes."""
        loss = self.rehearse(calls, model)
        self.advance(rate)
        return loss

    def advance(self, rate: float) -> None:
        """Update the adapter's weights by their gradients."""
        torch.nn.utils.clip_grad_norm_(self.adapter.weights.values(), _LONGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def rehearse(self, calls: Sequence[NoisedCall], model: nn.Module | None = None) -> float:
        """Compute the mean loss of calls and the gradients of the adapter's weights, without updating them."""
        denoiser, rows = self.adapter.denoiser, sum(call.rows for call in calls)
        targets = [self._target(call) for call in calls]
        losses = []
        self.optimizer.zero_grad()
        denoiser.train()
        # Merging stays on for the backward pass, where checkpointed blocks run again.
        with api.applied(denoiser, self._merge):
            for call, target in zip(calls, targets, strict=True):
                loss = self._error(call, target, model or denoiser) * (call.rows / rows)
                loss.backward()
                losses.append(loss.detach())
        denoiser.eval()
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def errors(self, calls: Iterable[NoisedCall]) -> dict[str, float]:
        """The mean loss of calls, merged (without the adapter) and healed (with it)."""
        denoiser = self.adapter.denoiser
        found: dict[str, list[float]] = {"merged": [], "healed": []}
        for call in calls:
            target = self._target(call)
            for name, losses in found.items():
                self.adapter.enable(name == "healed")
                with api.applied(denoiser, self._merge):
                    losses.append(float(self._error(call, target, denoiser)))
        self.adapter.enable(True)
        return {name: sum(losses) / len(losses) for name, losses in found.items()}

    def _target(self, call: NoisedCall) -> Tensor:
        """The plain model's output."""
        self.adapter.enable(False)
        with torch.no_grad(), self._mixed():
            target = call.output(self.adapter.denoiser).float()
        self.adapter.enable(True)
        return target

    def _error(self, call: NoisedCall, target: Tensor, model: nn.Module) -> Tensor:
        with self._mixed():
            output = call.output(model)
        return (output.float() - target).square().mean()

    def _mixed(self) -> AbstractContextManager[Any]:
        """Let the fp32 adapter compute in the denoiser's dtype."""
        return nullcontext() if self._half is None else torch.autocast(self._device.type, self._half)

    def save(self, path: Path, progress: Progress) -> None:
        state = {"lora": self.adapter.state(), "optimizer": self.optimizer.state_dict(), **vars(progress)}
        write_file(path, lambda file: torch.save(state, file))

    def restore(self, path: Path) -> Progress:
        """Load a checkpoint; returns its progress."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.adapter.load(state["lora"])
            self.optimizer.load_state_dict(state["optimizer"])
            return Progress(**{item.name: state[item.name] for item in fields(Progress)})
        except (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
            raise TokenMergeError(f"{path} cannot be read ({error!r}); remove it to train anew") from error


def train(
    trainer: Trainer,
    lessons: Lessons,
    model: nn.Module,
    progress: Progress,
    keep: Callable[[Progress], None],
    *,
    every: int,
    process: int,
    processes: int,
) -> None:
    """Train to the end. keep: receives the progress after every `every` steps and at the end."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=lessons.steps, initial=progress.step, desc="heal", disable=process > 0, leave=False) as bar:
        while progress.step < lessons.steps:
            step = progress.step
            rng = random.Random(f"{lessons.seed} {step} {process}")
            calls = trainer.calls(lessons.batch_at(step, process, processes), rng)
            progress.losses.append(trainer.learn(calls, model, lessons.rate(step)))
            progress.step += 1
            recent = progress.losses[-_RECENT:]
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.4g}", refresh=False)
            bar.update()
            if progress.step % every == 0 or progress.step == lessons.steps:
                keep(progress)
