"""Compares seven ways to train a LoRA that heals merging, on both bundled models, with the same number of steps.

    python benchmarks/targets.py --data PHOTOGRAPHS --networks FOLDER --out OUT

PHOTOGRAPHS have captions in text files beside them. It needs a GPU. OUT/targets.jsonl gets a line for each model and
way; a killed run resumes after its last line. To try it on a CPU, add `--size 64 --steps 2 --batch 2 --at-once 1
--held-out 2 --denoising-steps 3`.

Every way is judged alike: by the loss against the plain model's output on held-out pictures, and by the drift of
pictures of held-out captions.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmerge import api
from tokenmerge.config import Merge
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.families.base import Block
from tokenmerge.merging.places import merge_places
from tokenmerge.presets import preset
from tokenmerge.tools.drawing.pictures import to_tensor
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.files import to_json
from tokenmerge.tools.healing.adapter import Adapter
from tokenmerge.tools.healing.data import Item, draw_items, read_items, split
from tokenmerge.tools.healing.noising import NoisedCall, Noising, joined
from tokenmerge.tools.healing.run import held_out_calls
from tokenmerge.tools.healing.training import Lessons, Progress, Trainer, train
from tokenmerge.tools.loading import best_device
from tokenmerge.tools.measure import environment
from tokenmerge.tools.quality.metrics import Meter, Picture, choose_metrics
from tokenmerge.tools.quality.networks import Sources

MODELS = {"tiny-flux": "dit", "tiny-sdxl": "unet"}
METRICS = ("mse", "lpips")
# Guidance of both models.
GUIDANCE = 2.5
# Weight of the features' loss; the output's is 1.
FEATURES = 1.0
# First seeds of the judged pictures, and of pictures that the plain model draws to train with.
JUDGED, OWN = 2**40, 2**41


class FeatureTrainer(Trainer):
    """Teaches the output and the tokens that leave each block. Errors of tokens are relative to their mean square."""

    blocks: Sequence[Block]

    def _target(self, call: NoisedCall) -> Any:
        with self._features() as found:
            return super()._target(call), found

    def _error(self, call: NoisedCall, target: Any, model: nn.Module) -> Tensor:
        # The plain features have no gradient. On held-out pictures, `Trainer` computes the loss instead.
        wanted, plain = target
        with self._features() as found:
            loss = super()._error(call, wanted, model)
        errors = [
            (merged.float() - kept.float()).square().mean() / kept.float().square().mean()
            for merged, kept in zip(found, plain, strict=True)
        ]
        return loss + FEATURES * torch.stack(errors).mean()

    @contextmanager
    def _features(self) -> Iterator[list[Tensor]]:
        found: list[Tensor] = []
        with ExitStack() as undo:
            for block in self.blocks:
                ports = block.kind.ports

                def keep(_: nn.Module, __: Any, output: Any, ports: Any = ports) -> None:
                    found.extend(ports.outgoing(output))

                undo.callback(block.module.register_forward_hook(keep).remove)
            yield found


class GuidedCall(NamedTuple):
    """A call without the caption and one with it. Its output is the guided one."""

    empty: NoisedCall
    captioned: NoisedCall

    @property
    def rows(self) -> int:
        return self.captioned.rows

    def output(self, model: nn.Module) -> Tensor:
        empty, captioned = self.empty.output(model), self.captioned.output(model)
        return empty + GUIDANCE * (captioned - empty)


class GuidedTrainer(Trainer):
    """Teaches the guided output, which is what moves the picture."""

    def calls(self, items: Sequence[Item], rng: random.Random) -> list[Any]:
        made = []
        for first in range(0, len(items), self.at_once):
            parts = []
            for item in items[first : first + self.at_once]:
                step, seed = rng.choice(self.noising.steps), rng.randrange(2**31)
                parts.append(_halves(self.noising, item, step, seed))
            empty, captioned = zip(*parts, strict=True)
            made.append(GuidedCall(joined(empty), joined(captioned)))
        return made


def _halves(noising: Noising, item: Item, step: int, seed: int) -> tuple[NoisedCall, NoisedCall]:
    """The denoiser's rows without the caption and with it, as two calls."""
    call = noising.call([item], [item.caption], step, seed)
    if not noising.guided:
        return noising.call([item], [""], step, seed), call
    return _row(call, 0), _row(call, 1)


def _row(value: Any, row: int) -> Any:
    """One of the two rows of every tensor that has rows."""
    if isinstance(value, NoisedCall):
        return NoisedCall(_row(value.args, row), _row(value.kwargs, row))
    if isinstance(value, dict):
        return {name: _row(item, row) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_row(item, row) for item in value)
    return value[row : row + 1] if isinstance(value, Tensor) and value.ndim and value.shape[0] == 2 else value


class UnmergeWeights:
    """Learned weights for a block's residual, one per token: 1 + a linear function of the token that enters."""

    def __init__(self, adapter: Adapter, blocks: Sequence[Block], merge: Merge) -> None:
        device = next(adapter.denoiser.parameters()).device
        self._is_merged = False
        for number, block in enumerate(blocks):
            weight = nn.Parameter(torch.zeros(block.width + 1, device=device))
            adapter.weights[f"unmerge.{number}"] = weight
            block.module.register_forward_hook(self._weighing(block, weight), with_kwargs=True)
        enable = adapter.enable

        def switch(on: bool) -> None:
            self._is_merged = on
            enable(on)

        adapter.enable = switch  # type: ignore[method-assign]
        adapter.enable(True)

    def _weighing(self, block: Block, weight: nn.Parameter) -> Callable[..., Any]:
        ports = block.kind.ports

        def weigh(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not self._is_merged:
                return None
            entered = ports.tokens.read(args, kwargs)
            factor = 1 + (entered.float() @ weight[:-1] + weight[-1]).unsqueeze(-1)
            left = [entered + (each - entered) * factor.to(each.dtype) for each in ports.outgoing(output)[:1]]
            return ports.replaced(output, left)

        return weigh


@dataclass(frozen=True)
class Way:
    """One way to train. ends: as in `Adapter`."""

    name: str
    trainer: type[Trainer] = Trainer
    ends: str = ""
    unmerge: bool = False
    early: bool = False  # only the noisier half of the steps
    own: bool = False  # pictures that the plain model drew


WAYS = (
    Way("output"),
    Way("guided output", GuidedTrainer),
    Way("features of blocks", FeatureTrainer),
    Way("output, early noise", early=True),
    Way("output, values alone", ends="to_v"),
    Way("output, values and unmerge weights", ends="to_v", unmerge=True),
    Way("output, own pictures", own=True),
)


class Comparison:
    """One model, with the pictures and metrics that judge all ways."""

    def __init__(self, model: str, asked: argparse.Namespace, items: Sequence[Item]) -> None:
        self.asked, self.model = asked, model
        self.merge = preset(MODELS[model]).replace(ratio=asked.ratio)
        self.setup = Setup(
            model=model,
            size=(asked.size, asked.size),
            steps=asked.denoising_steps,
            guidance=GUIDANCE,
            device=asked.device,
            threads=asked.threads,
        )
        self.items, self.held_out = split(items, asked.held_out, asked.seed)
        self.meter = Meter(choose_metrics(METRICS, Sources(asked.networks)), best_device(asked.device))
        studio = Studio(self.setup)
        self.plain = self._pictures(studio)
        self.own: list[Item] = []

    def _pictures(self, studio: Studio) -> list[Picture]:
        """One picture per held-out caption."""
        studio.pipe.set_progress_bar_config(disable=True)
        drawn = [studio.draw(item.caption, (JUDGED + place,))[0][0] for place, item in enumerate(self.held_out)]
        return [Picture(to_tensor(picture)) for picture in drawn]

    def drift(self, pictures: Sequence[Picture]) -> dict[str, float]:
        metrics = choose_metrics(METRICS, Sources(self.asked.networks)).metrics
        pairs = list(zip(self.plain, pictures, strict=True))
        return {each.name: sum(self.meter.pair(each, *pair) for pair in pairs) / len(pairs) for each in metrics}

    def judge(self, way: Way) -> dict[str, Any]:
        """Train in one way from the beginning, and return its figures."""
        asked, studio = self.asked, Studio(self.setup)
        if way.own and not self.own:
            folder = asked.out / f"{self.model}-own"
            captions = [item.caption for item in self.items]
            studio.pipe.set_progress_bar_config(disable=True)
            draw_items(studio, captions, min(asked.own, len(captions)), OWN, folder)
            self.own = read_items(folder)
        denoiser = denoiser_of(studio.pipe)
        places = merge_places(denoiser, family_of(denoiser), self.merge)
        blocks = list({place.block.name: place.block for place in places if not place.skipped}.values())
        noising = Noising(studio.pipe, studio.request, self.merge)
        adapter = Adapter(denoiser, places, asked.rank, asked.seed, ends=way.ends)
        if way.unmerge:
            UnmergeWeights(adapter, blocks, self.merge)
        arguments = (adapter, noising, self.merge, studio.device, studio.dtype, min(asked.at_once, asked.batch))
        trainer, judge = way.trainer(*arguments), Trainer(*arguments)
        if isinstance(trainer, FeatureTrainer):
            trainer.blocks = blocks
        every = noising.steps
        if way.early:
            noising.steps = every[: (len(every) + 1) // 2]
        lessons = Lessons(self.own if way.own else self.items, asked.steps, asked.batch, asked.lr, asked.seed)
        progress, began = Progress(), time.perf_counter()
        train(trainer, lessons, denoiser, progress, lambda _: None, every=asked.steps, process=0, processes=1)
        seconds = time.perf_counter() - began
        noising.steps = every
        found: dict[str, Any] = {"loss": judge.errors(held_out_calls(noising, self.held_out, asked.seed))}
        for name in ("merged", "healed"):
            adapter.enable(name == "healed")
            with api.applied(studio.pipe, self.merge):
                found[name] = self.drift(self._pictures(studio))
        weights = sum(weight.numel() for weight in adapter.weights.values())
        return {**found, "seconds": seconds, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "networks", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    numbers = {"size": 512, "steps": 300, "batch": 32, "at-once": 8, "rank": 32, "held-out": 64, "own": 512, "seed": 0}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--denoising-steps", type=int, default=28)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    asked = parser.parse_args()
    # The backward pass of cuDNN's attention crashed in torch 2.11.
    torch.backends.cuda.enable_cudnn_sdp(False)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "targets.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    done = {(line["model"], line["way"]) for line in map(json.loads, lines)}
    items = read_items(asked.data)
    known = {"environment": environment(best_device(asked.device)), "ratio": asked.ratio, "size": asked.size}
    for model in asked.models:
        left = [way for way in WAYS if (model, way.name) not in done]
        comparison = Comparison(model, asked, items) if left else None
        for way in left:
            assert comparison is not None
            record = {"model": model, "way": way.name, "steps": asked.steps, "batch": asked.batch, "rank": asked.rank}
            record |= {**comparison.judge(way), **known}
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(record))
            print(f"{model}, {way.name}: LPIPS {record['merged']['lpips']:.3f} -> {record['healed']['lpips']:.3f}")


if __name__ == "__main__":
    main()
