"""`tokenmerge heal`: prepares pictures, trains, evaluates and reports, in one process or several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...config import Merge, Techniques
from ...errors import TokenMergeError
from ...families import denoiser_of, family_of
from ...merging.places import merge_places, shares_destinations
from ..drawing.studio import Setup, Studio
from ..evaluation.folder import Folder, interrupted, read_json, tell_new
from ..evaluation.pairs import list_pictures
from ..evaluation.plots import check_plots
from ..evaluation.run import Task, evaluate
from ..fields import check_seeds
from ..files import PARTIAL, check_folder, to_json, write_text
from ..loading import best_device
from ..measure import environment, free_memory
from ..quality.networks import Missing, Sources, find_network
from ..typed import Configuration, read_typed
from .adapter import Adapter
from .data import Item, check_number, digest_items, draw_items, read_items, split
from .memory import check_memory, explain_memory
from .noising import NoisedCall, Noising
from .report import Outcome, write_outcome
from .training import Lessons, Progress, Trainer, train

LORA = "lora.safetensors"
LORA_FOR_COMFYUI = "lora-comfyui.safetensors"
_CHECKPOINT, _RECORD = "checkpoint.pt", "run.json"
# Held-out pictures whose loss is measured, and noise levels of each.
_MEASURED, _LEVELS = 16, 4
# The first seed of the report's pictures, beyond all seeds of training.
_UNSEEN = 2**40


@dataclass(frozen=True, kw_only=True)
class Healing:
    """The settings of a run. `steps` counts training steps; `setup` has the steps of a picture."""

    setup: Setup
    merge: str | None = None  # as typed; None: the preset of the model's family
    data: Path | None = None  # a folder or a list; None: the plain model draws
    prompts: Sequence[str] = ()
    number: int = 64
    held_out: int = 8
    rank: int = 32
    steps: int = 1000
    batch: int = 4
    at_once: int | None = None  # pictures per call; None: the batch, or one where a batch shares destinations
    lr: float = 5e-4
    seed: int = 0
    every: int = 100
    reference: Path | None = None
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        check_seeds(self.seed, self.seed + self.number - 1, _UNSEEN + self.seed + self.held_out)
        if self.setup.dtype == "float16":
            raise TokenMergeError("--dtype is float16, in which gradients vanish; use bfloat16 or float32")


def heal(asked: Healing, out: Path, *, resume: bool = False) -> Outcome | None:
    """Do all that is not done yet in the folder `out`. Only the first process returns an outcome."""
    check_plots()
    check_folder(out)
    accelerator = _accelerator(asked)
    try:
        return _Run(asked, out, accelerator, resume).do()
    except KeyboardInterrupt as interrupt:
        raise interrupted(out) from interrupt


def _accelerator(asked: Healing) -> Any:
    """Splits training over processes."""
    try:
        import peft  # noqa: F401
        from accelerate import Accelerator
    except ImportError as error:
        raise TokenMergeError("heal needs peft and accelerate: pip install tokenmerge[heal]") from error
    return Accelerator(cpu=best_device(asked.setup.device).type == "cpu", mixed_precision="no")


class _Run:
    """The work of one process."""

    def __init__(self, asked: Healing, out: Path, accelerator: Any, resume: bool) -> None:
        self.asked = asked
        self.out = out
        self._checkpoint = out / _CHECKPOINT
        self._accelerator = accelerator
        self._is_first = accelerator.is_main_process
        device = best_device(asked.setup.device) if accelerator.num_processes == 1 else accelerator.device
        self._studio = studio = Studio(asked.setup, device)
        self.merge = _merge_of(asked.merge or studio.outline.family.merging)
        # Everything that can be refused is refused before pictures are drawn.
        studio.check(Configuration("merged", Techniques(self.merge)))
        if studio.outline.family.frames > 1:
            raise TokenMergeError(f"{asked.setup.model!r} makes videos, but heal trains on pictures; use another model")
        _check_reference(asked)
        self._items = [] if asked.data is None else read_items(asked.data)
        check_number(len(self._items) or asked.number, asked.held_out)
        self._settings = self._read_settings()
        if self._is_first:
            self._check_begun(resume)
        with explain_memory(device):
            self._trainer = self._prepared()
            self._progress = self._trainer.restore(self._checkpoint) if self._checkpoint.is_file() else Progress()
            if self._progress.step < asked.steps:
                check_memory(self._trainer, device)
        if self._is_first:
            for left_over in out.rglob(f"*{PARTIAL}"):
                left_over.unlink()
            write_text(out / _RECORD, to_json(self._settings, indent=2))
        accelerator.wait_for_everyone()

    def _check_begun(self, resume: bool) -> None:
        """Refuse a folder that holds a run, unless it is the same run and `resume` is set."""
        if not (self.out / _RECORD).is_file():
            if resume:
                tell_new(self.out)
            return
        if not resume:
            raise TokenMergeError(f"{self.out} holds a run of heal; add --resume to continue it, or give another --out")
        before = read_json(self.out / _RECORD, "give another --out")
        for name, now in json.loads(to_json(self._settings)).items():
            if before.get(name) != now:
                raise TokenMergeError(
                    f"{self.out} was begun with {name} {before.get(name)}, not {now}; ask for the same, or give "
                    "another --out"
                )

    def _read_settings(self) -> dict[str, Any]:
        """Everything that training depends on."""
        asked, request = self.asked, self._studio.request
        names = ("number", "held_out", "rank", "steps", "batch", "at_once", "lr", "seed")
        return {
            "model": asked.setup.model,
            **{name: getattr(asked, name) for name in names},
            "guidance": asked.setup.guidance,
            "merge": self.merge.to_dict(),
            "data": None if asked.data is None else str(asked.data),
            "pictures": None if asked.data is None else digest_items(self._items),
            "prompts": list(asked.prompts) if asked.data is None else [],
            "denoising_steps": request.steps,
            "size": [request.width, request.height],
            "dtype": self._studio.dtype,
            "processes": self._accelerator.num_processes,
        }

    def _prepared(self) -> Trainer:
        """The model with its adapter, ready to train."""
        denoiser = denoiser_of(self._studio.pipe)
        places = merge_places(denoiser, family_of(denoiser), self.merge)
        noising = Noising(self._studio.pipe, self._studio.request, self.merge)
        adapter = Adapter(denoiser, places, self.asked.rank, self.asked.seed)
        # Pictures are drawn one by one, each with its own destinations. Training on shared ones would differ.
        at_once = self.asked.at_once or (1 if shares_destinations(places) else self.asked.batch)
        at_once = min(at_once, self.asked.batch)
        return Trainer(adapter, noising, self.merge, self._studio.device, self._studio.dtype, at_once)

    def do(self) -> Outcome | None:
        if self.asked.data is None:
            self._items = self._drawn()
        items, held_out = split(self._items, self.asked.held_out, self.asked.seed)
        progress = self._train(items, held_out)
        # The evaluation needs their memory.
        device = self._studio.device
        del self._studio, self._trainer
        free_memory(device)
        evaluation = self.out / "evaluation"
        results = evaluate(self._task(held_out), evaluation, resume=Folder(evaluation).begun() is not None)
        if results is None:
            return None
        outcome = Outcome(self.out / LORA, self._settings, len(items), progress, results, environment(device))
        write_outcome(outcome, self.out)
        return outcome

    def _drawn(self) -> list[Item]:
        """Pictures by the plain model. The first process draws them."""
        asked, folder = self.asked, self.out / "pictures"
        if self._is_first:
            self._studio.pipe.set_progress_bar_config(disable=True)
            self._trainer.adapter.enable(False)
            draw_items(self._studio, asked.prompts, asked.number, asked.seed, folder)
            self._trainer.adapter.enable(True)
        self._accelerator.wait_for_everyone()
        return read_items(folder)

    def _train(self, items: Sequence[Item], held_out: Sequence[Item]) -> Progress:
        """Train, measure the loss of held-out pictures, and write the LoRA."""
        asked, trainer, progress = self.asked, self._trainer, self._progress
        model = denoiser = trainer.adapter.denoiser
        processes, process = self._accelerator.num_processes, self._accelerator.process_index
        if processes > 1:
            model = self._accelerator.prepare(denoiser)

        def keep(progress: Progress) -> None:
            if self._is_first:
                trainer.save(self._checkpoint, progress)

        lessons = Lessons(items, asked.steps, asked.batch, asked.lr, asked.seed)
        train(trainer, lessons, model, progress, keep, every=asked.every, process=process, processes=processes)
        if self._is_first:
            if not progress.held_out:
                progress.held_out = trainer.errors(held_out_calls(trainer.noising, held_out, asked.seed))
                keep(progress)
            part = next(name for name in ("unet", "transformer") if getattr(self._studio.pipe, name, None) is denoiser)
            dtype = getattr(torch, self._studio.dtype)
            trainer.adapter.write(self.out / LORA, part, self.merge, dtype)
            if part == "unet":
                trainer.adapter.write_for_comfyui(self.out / LORA_FOR_COMFYUI, self.merge, dtype)
        self._accelerator.wait_for_everyone()
        return progress

    def _task(self, held_out: Sequence[Item]) -> Task:
        """The evaluation: pictures of held-out captions, plain, merged and healed."""
        healed = self.merge.replace(lora=self.out / LORA)
        techniques = {"merged": Techniques(self.merge), "healed": Techniques(healed)}
        return Task(
            **vars(self.asked.setup),
            techniques=[Configuration(*each) for each in techniques.items()],
            prompts=tuple(item.caption for item in held_out),
            # Each has its own seed, since captions may be equal or empty.
            seeds=range(_UNSEEN + self.asked.seed, _UNSEEN + self.asked.seed + len(held_out)),
            paired=True,
            reference=self.asked.reference,
            sources=self.asked.sources,
            repeats=0,
        )


def _merge_of(typed: str) -> Merge:
    """Read the technique as typed; it must be a Merge alone."""
    configuration = read_typed(typed).configuration
    merge = configuration.techniques.merge
    if merge is None or merge.ratio == 0 or configuration.what != (Techniques(merge), None, None):
        raise TokenMergeError(f"--merge is {typed!r}; heal trains a Merge alone: give one, such as dit:ratio=0.5")
    if merge.lora is not None:
        raise TokenMergeError("--merge has a LoRA already; leave lora out")
    return merge


def _check_reference(asked: Healing) -> None:
    """Refuse photographs that cannot serve as a reference. Otherwise this would show only at the end."""
    if asked.reference is None:
        return
    list_pictures(asked.reference)
    network = find_network("inception", asked.sources)
    if isinstance(network, Missing):
        raise TokenMergeError(
            f"--reference is for FID and KID, whose network is missing: {network.reason}; or leave --reference out"
        )


def held_out_calls(noising: Noising, items: Sequence[Item], seed: int) -> Iterator[NoisedCall]:
    """Calls for some held-out pictures, at noise levels over the whole window; the same in every run."""
    steps = noising.steps
    chosen = [steps[(2 * place + 1) * len(steps) // (2 * _LEVELS)] for place in range(_LEVELS)]
    for number, item in enumerate(items[:_MEASURED]):
        for step in dict.fromkeys(chosen):
            yield noising.call([item], [item.caption], step, seed + number)
