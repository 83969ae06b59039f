"""`tokenmerge eval`: draw pictures, time and measure them, and report; in one process or several.

Every picture is drawn alone, in a batch of one. In a larger batch rounding differs, and some models share destinations
over the batch. So a picture depends on its prompt, seed and configuration only, not on how the work was split or
interrupted. Time is measured separately, in batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ... import api
from ...errors import TokenMergeError
from ...families import denoiser_of
from ..compiling import warm_ups
from ..drawing.pictures import save_picture
from ..drawing.request import token_counts
from ..drawing.studio import Setup, Studio, is_calibrated
from ..files import digest_of, to_json, write_text
from ..loading import best_device
from ..measure import counted_calls, environment, forget_peak_memory, free_memory, peak_memory, timed_calls
from ..quality.metrics import BY_NAME, Choice, Meter, Metric, Picture, choose_metrics
from ..quality.networks import Sources
from ..typed import Configuration, default_techniques, read_configurations
from .folder import Folder, Sample, interrupted, read_features, read_if_there, read_json, read_picture, save_features
from .pairs import list_pictures
from .plots import check_plots
from .processes import Processes
from .report import write_report
from .results import CALIBRATED, ESTIMATED, Results, gather
from .yardstick import FINER, fine_metrics, fine_name, fine_pictures, measured_by

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Task(Setup):
    """What to evaluate."""

    techniques: Sequence[str | Configuration] | None = None  # as typed; None: those of the model's family
    prompts: Sequence[str]
    seeds: Sequence[int] = (0,)
    paired: bool = False  # one seed per prompt, in order, instead of all seeds for each
    ratios: Sequence[float] | None = None
    metrics: Sequence[str] | None = None
    sources: Sources = field(default_factory=Sources)
    reference: Path | None = None
    reference_steps: int | None = 0  # steps of the second yardstick; None: four times the usual; 0: leave it out
    batch: int = 1
    repeats: int = 5
    threads: int = 1  # fixed, since rounding depends on it
    tell_refused: bool = False  # report configurations that the model refuses, instead of raising an error

    @property
    def samples(self) -> list[Sample]:
        seeds = [(seed,) for seed in self.seeds] if self.paired else [tuple(self.seeds)] * len(self.prompts)
        prompts = enumerate(zip(self.prompts, seeds, strict=True))
        return [Sample(place, prompt, seed) for place, (prompt, its) in prompts for seed in its]


def evaluate(task: Task, out: Path, *, resume: bool = False) -> Results | None:
    """Do what is not done yet in the folder `out`, and report. The first process returns the results.

    Apart from seconds and memory, results do not depend on the number of processes or on interruptions.
    """
    check_plots()
    folder = Folder(out)
    typed = None if task.techniques is None else read_configurations(task.techniques, task.ratios)
    processes = Processes()
    try:
        evaluation = Evaluation(task, typed, folder, processes)
        if processes.is_first:
            settings = evaluation.folder.begin(evaluation.settings(), resume)
            if processes.count > 1:
                print(f"tokenmerge: {processes.count} processes share the work", file=sys.stderr)
            for line in evaluation.choice.missing_lines():
                print(f"tokenmerge: {line}", file=sys.stderr)
            evaluation.calibrate()
        processes.wait()
        evaluation.make_pictures()
        processes.wait()
        # One process measures time while the others wait, as they would slow it down.
        if processes.is_first:
            evaluation.time()
        processes.wait()
        evaluation.measure()
        processes.wait()
        evaluation.measure_sets()
        processes.wait()
        results = evaluation.results(settings) if processes.is_first else None
        if results is not None:
            write_report(results, out)
        processes.wait()
        evaluation.close()
    except KeyboardInterrupt as interrupt:
        raise interrupted(out) from interrupt
    processes.end()
    return results


class Evaluation:
    """One process's part of an evaluation."""

    def __init__(self, task: Task, typed: Sequence[Configuration] | None, folder: Folder, processes: Processes) -> None:
        self.task = task
        self.folder = folder
        self._processes = processes
        device = task.device
        if device is None and torch.cuda.is_available():
            device = f"cuda:{processes.local_index % torch.cuda.device_count()}"
        place = best_device(device)
        if place.type == "cuda":
            # Triton launches kernels on the current device, not on that of their tensors.
            torch.cuda.set_device(place)
        self.samples = task.samples
        self._photographs = list_pictures(task.reference) if task.reference else []
        # The first process downloads missing files, and the others find them.
        with processes.first_alone():
            self.choice: Choice = choose_metrics(task.metrics, task.sources)
            if len(self.samples) < 2 or len(self._photographs) == 1:
                self.choice = self.choice.without({"set": "a set needs two pictures or more; add prompts or seeds"})
            self._studio = Studio(task, place)
            if typed is None:
                typed = read_configurations(default_techniques(self._studio.outline.family), task.ratios)
            # Refuse whatever can be refused before hours of work.
            self._refusals = self._refused(typed, self._studio.check)
            self._studio.pipe.set_progress_bar_config(disable=True)
        left = [item for item in typed if item.label not in self._refusals]
        self._refusals |= self._refused(left, lambda each: self._studio.attempt(each, task.prompts[0]))
        self.configurations = tuple(item for item in typed if item.label not in self._refusals)
        self._fine_steps = self._steps_of_yardstick()
        self._fine_metrics = fine_metrics(self.choice.metrics, self._fine_steps) if self._fine_steps else ()
        self._fine = fine_pictures(self._fine_steps) if self._fine_metrics else None

    def _steps_of_yardstick(self) -> int:
        """The number of steps of the second yardstick, or 0."""
        steps, given = self._studio.request.steps, self.task.reference_steps
        if given is not None and 0 < given <= steps:
            raise TokenMergeError(
                f"--reference-steps is {given}; it must be more than the {steps} steps of the other pictures, or 0"
            )
        return FINER * steps if given is None else given

    def _refused(
        self, configurations: Sequence[Configuration], check: Callable[[Configuration], None]
    ) -> dict[str, str]:
        """The labels of configurations that `check` refuses, with reasons."""
        refusals: dict[str, str] = {}
        for each in configurations:
            try:
                check(each)
            except TokenMergeError as error:
                if not self.task.tell_refused:
                    raise TokenMergeError(f"{each.label!r} is refused: {error}") from error
                refusals[each.label] = str(error)
        return refusals

    def settings(self) -> dict[str, Any]:
        """Everything that the figures of this evaluation depend on."""
        request = self._studio.request
        return {
            "model": self.task.model,
            "configurations": {item.label: item.techniques.to_list() for item in self.configurations},
            "caches": {item.label: item.cache.to_dict() for item in self.configurations if item.cache},
            "schedules": {item.label: item.schedule.to_dict() for item in self.configurations if item.schedule},
            "refused": self._refusals,
            "prompts": list(self.task.prompts),
            "seeds": list(self.task.seeds),
            "paired": self.task.paired,
            "steps": request.steps,
            "scheduler": self.task.scheduler,
            "reference_steps": self._fine_steps,
            "guidance": request.guidance,
            "call": request.defaults.call,
            "size": [request.width, request.height],
            "dtype": self._studio.dtype,
            "compile": self._studio.way,
            "batch": self.task.batch,
            "repeats": self.task.repeats,
            "reference": {path.name: digest_of(path) for path in self._photographs},
            "networks": {name: network.identity for name, network in self.choice.networks.items()},
            "environment": environment(self._studio.device),
        }

    def calibrate(self) -> None:
        """Measure what some caches need to know about the plain model, in the first picture."""
        if self.folder.calibration.is_file() or not is_calibrated(self.configurations):
            return
        self._studio.calibrate(self.samples[0].prompt, self.samples[0].seed)
        write_text(self.folder.calibration, to_json({"mag_ratios": self._studio.mag_ratios}))

    def make_pictures(self) -> None:
        """Draw this process's share of the pictures, each in a batch of one."""
        labels = {configuration.label for configuration in self.configurations}
        fine = [self._fine] if self._fine and self._fine.label not in labels else []
        for configuration in (*self.configurations, *fine):
            share = self._processes.share_of(self.samples)
            left = [sample for sample in share if not self.folder.image(configuration, sample).is_file()]
            if not left:
                continue
            self._configure(configuration)
            # Until all kinds of step are compiled and recorded, other code runs, which rounds differently.
            for _ in range(warm_ups(self._studio.way) if self._studio.way else 0):
                self._draw(left[0])
            for sample in self._progress(left, configuration.label):
                self._make(configuration, sample)
        self._studio.restore()

    def _make(self, configuration: Configuration, sample: Sample) -> None:
        work, kinds = self.folder.work(configuration, sample), self.folder.kinds(configuration)
        known: dict[str, float | bool] = {}
        if self._studio.way:
            # Operations in compiled blocks and replayed graphs cannot be counted.
            picture = self._draw(sample)
        else:
            with counted_calls(denoiser_of(self._studio.pipe)) as counter:
                picture = self._draw(sample)
            known["operations"] = counter.operations
        summary = api.summary(self._studio.pipe)
        if summary.drift is not None:
            known |= {ESTIMATED: summary.drift.psnr, CALIBRATED: summary.drift.calibrated}
        # The picture is written last: where it exists, nothing is left to do.
        if known and not work.is_file():
            write_text(work, to_json(known))
        if not kinds.is_file():
            write_text(kinds, to_json(summary.steps))
        save_picture(picture, self.folder.image(configuration, sample))

    def _configure(self, configuration: Configuration) -> None:
        if self._studio.mag_ratios is None and is_calibrated([configuration]):
            self._studio.mag_ratios = read_json(self.folder.calibration)["mag_ratios"]
        self._studio.configure(configuration)

    def _draw(self, sample: Sample) -> Any:
        (picture,), _ = self._studio.draw(sample.prompt, (sample.seed,))
        return picture

    def time(self) -> None:
        """Time the laps of all configurations in turn, so that a slow moment of the machine harms no single one."""
        laps = [(lap, item) for lap in range(self.task.repeats) for item in self.configurations]
        left = [(lap, item) for lap, item in laps if not self.folder.timing(item, lap).is_file()]
        for lap, configuration in self._progress(left, "time"):
            self._configure(configuration)
            if self._studio.device.type != "cpu":
                # The peak would include what ran before.
                free_memory(self._studio.device)
            write_text(self.folder.timing(configuration, lap), to_json(self._lap()))
        self._studio.restore()

    def _lap(self) -> dict[str, Any]:
        """A timed batch, after warm-up batches: seconds per picture, for the whole call and the denoiser alone, and
        peak memory."""
        batch, studio, prompt = self.task.batch, self._studio, self.task.prompts[0]
        for _ in range(warm_ups(studio.way)):
            studio.draw(prompt, range(batch))
        forget_peak_memory(studio.device)
        with timed_calls(denoiser_of(studio.pipe), studio.device) as watch:
            _, seconds = studio.draw(prompt, range(batch))
        return {
            "seconds": seconds / batch,
            "denoiser_seconds": sum(watch.milliseconds()) / 1e3 / batch,
            "batch": batch,
            "peak_memory": peak_memory(studio.device),
            "graphs": studio.graphs,
            "tokens": token_counts(studio.pipe),
        }

    def measure(self) -> None:
        """Measure this process's pictures, and their features for metrics of sets."""
        for sample in self._progress(self._processes.share_of(self.samples), "measure"):
            plain = self._picture(self.configurations[0], sample)
            fine = self._picture(self._fine, sample) if self._fine else None
            for configuration in self.configurations:
                self._measure(configuration, sample, plain, fine)
        if not self.choice.of_kind("set"):
            return
        for path in self._progress(self._processes.share_of(self._photographs), "reference"):
            kept = self.folder.reference(path)
            if not kept.is_file():
                save_features(kept, self._meter.features(Picture(read_picture(path))))

    def measure_sets(self) -> None:
        """Measure this process's share of the sets."""
        metrics = self.choice.of_kind("set")
        # Without photographs, the plain pictures are the reference.
        compared = [item for item in self.configurations if self._photographs or not item.is_plain]
        share = self._processes.share_of(compared)
        known = {item.label: read_if_there(self.folder.sets(item)) for item in share}
        left = [item for item in share if any(metric.name not in known[item.label] for metric in metrics)]
        if not left:
            return
        keys = [sample.place if len(self.task.prompts) > 1 else sample.seed for sample in self.samples]
        if self._photographs:
            reference = read_features([self.folder.reference(path) for path in self._photographs])
        else:
            reference = self._features(self.configurations[0])
        for configuration in self._progress(left, "sets"):
            features = self._features(configuration)
            values = {each.name: self._meter.of_parts(each, reference, features, keys) for each in metrics}
            write_text(self.folder.sets(configuration), to_json(_ordered({**known[configuration.label], **values})))

    def close(self) -> None:
        """Free the model. A search would otherwise keep one per rung in memory."""
        device = self._studio.device
        del self._studio
        free_memory(device)

    def results(self, settings: dict[str, Any]) -> Results:
        metrics = (*self.choice.metrics, *self._fine_metrics)
        return gather(self.folder, settings, self.choice, metrics, self.configurations, self.samples)

    def _measure(self, configuration: Configuration, sample: Sample, plain: Picture, fine: Picture | None) -> None:
        """Measure what is not known yet about a picture. The plain picture is not compared with itself."""
        path, features = self.folder.values(configuration, sample), self.folder.features(configuration, sample)
        known = read_if_there(path)
        pairs = self.choice.of_kind("pair") if not configuration.is_plain else ()
        asked = (*pairs, *self._fine_metrics, *self.choice.of_kind("text"))
        wanted = [metric for metric in asked if metric.name not in known]
        lacks_features = bool(self.choice.of_kind("set")) and not features.is_file()
        if not wanted and not lacks_features:
            return
        test = plain if configuration.is_plain else self._picture(configuration, sample)
        if lacks_features:
            save_features(features, self._meter.features(test))
        for metric in wanted:
            known[metric.name] = self._measured(metric, sample, test, plain, fine)
        if wanted:
            write_text(path, to_json(_ordered(known)))

    def _measured(self, metric: Metric, sample: Sample, test: Picture, plain: Picture, fine: Picture | None) -> float:
        if metric.kind == "text":
            return self._meter.text(metric, sample.prompt, test)
        reference = fine if metric in self._fine_metrics and fine is not None else plain
        return self._meter.pair(measured_by(metric), reference, test)

    def _picture(self, configuration: Configuration, sample: Sample) -> Picture:
        return Picture(read_picture(self.folder.image(configuration, sample)))

    def _features(self, configuration: Configuration) -> torch.Tensor:
        return read_features([self.folder.features(configuration, sample) for sample in self.samples])

    @cached_property
    def _meter(self) -> Meter:
        return Meter(self.choice, self._studio.device, self.task.threads)

    def _progress(self, items: Sequence[Item], label: str) -> Iterator[Item]:
        """The items, with a progress bar in the first process only."""
        hidden = not self._processes.is_first or not items
        yield from tqdm(items, desc=f"{label[-40:]:>12}", disable=hidden, leave=False)


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """Values in the order of all metrics, including those that an earlier run measured."""
    names = [each for name in BY_NAME for each in (name, fine_name(name))]
    return {name: values[name] for name in names if name in values}
