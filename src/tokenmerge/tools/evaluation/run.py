"""`tokenmerge eval`: make the pictures, time, measure, report; alone or split over processes.

Every picture is made by itself, in a batch of one. Beside others a picture would differ: by rounding everywhere, and in
models whose batches share destinations by what is merged. So a picture depends on its prompt, seed and configuration
alone, and neither on how the work was split nor on what was left of it after an interruption. Time is measured apart,
in batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ... import api
from ...families import denoiser_of, family_of
from ..caches import TRIAL_STEPS, calibrate, disable_cache, enable_cache, try_cache
from ..loading import dtype_on, load_pipeline
from ...compiling.blocks import check_cacheable, compile_as, recordings, uncompile, warm_ups, way_on
from ...errors import TokenMergeError
from ..files import digest_of, write_text
from ..drawing.generate import Request, best_device, check_seeds, draw, picture_size, step_modes, token_counts
from ..measure import environment, forget_peak_memory, free_memory, peak_memory, timed_calls
from ..typed import check_counts
from ..drawing.pictures import save_picture
from ..quality.metrics import BY_NAME, Choice, Meter, Picture, choose_metrics
from ..quality.networks import Sources
from .configurations import BASELINE, Configuration, read_configurations
from .folder import Folder, Sample, interrupted, read_features, read_json, read_picture, save_features, to_json
from .pairs import list_pictures
from .plots import check_plots
from .processes import Processes
from .report import write_report
from .results import Results, gather

Item = TypeVar("Item")


@dataclass(frozen=True)
class Task:
    """What was asked for."""

    model: str
    configurations: Sequence[str | Configuration]
    prompts: Sequence[str]
    seeds: Sequence[int] = (0,)
    ratios: Sequence[float] | None = None
    steps: int | None = None
    guidance: float | None = None
    size: str | None = None
    metrics: Sequence[str] | None = None
    sources: Sources = field(default_factory=Sources)
    reference: Path | None = None
    batch: int = 1
    repeats: int = 5
    threads: int = 1
    device: str | None = None
    dtype: str | None = None
    compile: str | None = None
    # Whether a configuration that the model refuses is told of in the report, and not an error.
    tell_refused: bool = False

    def __post_init__(self) -> None:
        check_counts(batch=self.batch, threads=self.threads, steps=self.steps)
        check_counts(0, repeats=self.repeats)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise TokenMergeError(f"--seeds are {list(self.seeds)}; give different numbers, as in 0,1,2")
        check_seeds(self.seeds)


def evaluate(task: Task, out: Path, *, resume: bool = False) -> Results | None:
    """Do all that is not done yet in the folder `out`, and report. Results are the same for any number of processes
    and interruptions, but for seconds and memory. The first process returns them."""
    check_plots()
    processes = Processes()
    # Also where a GPU computes: sums on the CPU round by the number of threads.
    torch.set_num_threads(task.threads)
    try:
        evaluation = Evaluation(task, Folder(out), processes)
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
        # By one process while the others rest, or they would be timed too.
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
    """The work of one process."""

    def __init__(self, task: Task, folder: Folder, processes: Processes) -> None:
        self.task = task
        self.folder = folder
        self._processes = processes
        device = task.device
        if device is None and torch.cuda.is_available():
            device = f"cuda:{processes.local_index % torch.cuda.device_count()}"
        self._device = best_device(device)
        if self._device.type == "cuda":
            # Kernels run on the current device, wherever their tensors are.
            torch.cuda.set_device(self._device)
        self._way = way_on(self._device, task.compile)
        self._dtype = dtype_on(self._device, task.dtype)
        # The first process fetches what is not here yet, the others find it.
        with processes.first_alone():
            self.choice: Choice = choose_metrics(task.metrics, task.sources)
            self._pipe, self._defaults = load_pipeline(task.model, getattr(torch, self._dtype), self._device)
        self._pipe.set_progress_bar_config(disable=True)
        family = family_of(denoiser_of(self._pipe))
        configurations = read_configurations(
            task.configurations, task.ratios, family.defaults_under(self._pipe.scheduler)
        )
        width, height = picture_size(task.size, self._defaults, self._pipe)
        self._request = Request(
            "", task.steps or self._defaults.steps, width, height, (), task.guidance, self._defaults
        )
        # Everything that can be refused is refused before hours of work.
        self._request.arguments(self._pipe, (0,), 1)
        refusals = {item.label: reason for item in configurations if (reason := self._refusal(item)) is not None}
        if refusals and not task.tell_refused:
            label, reason = next(iter(refusals.items()))
            raise TokenMergeError(f"configuration {label!r} is refused: {reason}")
        self._refusals = refusals
        self.configurations = tuple(item for item in configurations if item.label not in refusals)
        self.samples = [Sample(place, prompt, seed) for place, prompt in enumerate(task.prompts) for seed in task.seeds]
        self._photographs = list_pictures(task.reference) if task.reference else []
        if len(self.samples) < 2 or len(self._photographs) == 1:
            self.choice = self.choice.without({"set": "a set needs two pictures or more; add prompts or seeds"})

    def settings(self) -> dict[str, Any]:
        """Everything that a figure of this evaluation depends on."""
        request = self._request
        return {
            "model": self.task.model,
            "configurations": {item.label: item.config.to_dict() for item in self.configurations},
            "caches": {item.label: item.cache.to_dict() for item in self.configurations if item.cache},
            "refused": self._refusals,
            "prompts": list(self.task.prompts),
            "seeds": list(self.task.seeds),
            "steps": request.steps,
            "guidance": request.guidance,
            "call": request.defaults.call,
            "size": [request.width, request.height],
            "dtype": self._dtype,
            "compile": self._way,
            "batch": self.task.batch,
            "repeats": self.task.repeats,
            "reference": {path.name: digest_of(path) for path in self._photographs},
            "networks": {name: network.identity for name, network in self.choice.networks.items()},
            "environment": environment(self._device),
        }

    def calibrate(self) -> None:
        """What some caches need to know of the unmerged model, from the first picture."""
        if self.folder.calibration.is_file() or not any(
            item.cache and item.cache.calibrated for item in self.configurations
        ):
            return
        ratios = calibrate(self._pipe, lambda: self._draw(self.samples[0]), self._request.steps)
        write_text(self.folder.calibration, to_json({"mag_ratios": ratios}))

    def make_pictures(self) -> None:
        """This process's share of the pictures, each in a batch of one."""
        for configuration in self.configurations:
            left = [
                sample for sample in self._processes.share_of(self.samples) if not self._made(configuration, sample)
            ]
            if not left:
                continue
            self._apply(configuration)
            if self._way:
                # Until every phase has been compiled and recorded, other code runs.
                for _ in range(warm_ups(self._way)):
                    self._draw(left[0])
            for sample in self._progress(left, configuration.label):
                picture, modes = self._draw(sample), self.folder.modes(configuration)
                # Before the picture, which says that nothing is left to do.
                if not modes.is_file():
                    write_text(modes, to_json(step_modes(self._pipe)))
                save_picture(picture, self.folder.image(configuration, sample))
        self._restore()

    def time(self) -> None:
        """Laps of all configurations in turn, so that a slow moment of the machine costs none of them its place."""
        laps = [(lap, item) for lap in range(self.task.repeats) for item in self.configurations]
        left = [(lap, item) for lap, item in laps if not self.folder.timing(item, lap).is_file()]
        for lap, configuration in self._progress(left, "time"):
            self._apply(configuration)
            # Of what ran before, which the peak would count.
            free_memory(self._device)
            write_text(self.folder.timing(configuration, lap), to_json(self._lap()))
        self._restore()

    def _lap(self) -> dict[str, Any]:
        """One timed batch, after those that do not count: seconds per picture of the whole call and of the denoiser in
        it, and the memory it took."""
        batch, request = self.task.batch, replace(self._request, prompt=self.task.prompts[0])

        def run() -> float:
            return draw(self._pipe, request, range(batch), request.steps, self._device)[1]

        for _ in range(warm_ups(self._way)):
            run()
        forget_peak_memory(self._device)
        with timed_calls(denoiser_of(self._pipe), self._device) as watch:
            seconds = run()
        return {
            "seconds": seconds / batch,
            "denoiser_seconds": sum(watch.milliseconds()) / 1e3 / batch,
            "batch": batch,
            "peak_memory": peak_memory(self._device),
            "graphs": recordings(denoiser_of(self._pipe)),
            "tokens": token_counts(self._pipe),
        }

    def measure(self) -> None:
        """Metrics of this process's pictures, and features for metrics of sets."""
        for sample in self._progress(self._processes.share_of(self.samples), "measure"):
            reference = self._picture(self.configurations[0], sample)
            for configuration in self.configurations:
                self._measure(configuration, sample, reference)
        if not self.choice.of_kind("set"):
            return
        for path in self._progress(self._processes.share_of(self._photographs), "reference"):
            kept = self.folder.reference(path)
            if not kept.is_file():
                save_features(kept, self._meter.features(Picture(read_picture(path))))

    def measure_sets(self) -> None:
        """Metrics of this process's share of the sets."""
        metrics = self.choice.of_kind("set")
        left = [item for item in self._processes.share_of(self.configurations) if self._lacking(item)]
        if not self._photographs:
            # The distance of the unmerged pictures to themselves says nothing.
            left = [configuration for configuration in left if configuration.label != BASELINE]
        if not left:
            return
        if self._photographs:
            reference = read_features([self.folder.reference(path) for path in self._photographs])
        else:
            reference = self._features(self.configurations[0])
        for configuration in self._progress(left, "sets"):
            features = self._features(configuration)
            values = {metric.name: self._meter.of_sets(metric, reference, features) for metric in metrics}
            known = self._known_of_set(configuration)
            write_text(self.folder.sets(configuration), to_json(_ordered({**known, **values})))

    def _lacking(self, configuration: Configuration) -> bool:
        """Whether metrics of its set are to be measured."""
        known = self._known_of_set(configuration)
        return any(metric.name not in known for metric in self.choice.of_kind("set"))

    def _known_of_set(self, configuration: Configuration) -> dict[str, Any]:
        path = self.folder.sets(configuration)
        known: dict[str, Any] = read_json(path) if path.is_file() else {}
        return known

    def close(self) -> None:
        """Give the model up, or a search would hold that of every rung."""
        del self._pipe
        free_memory(self._device)

    def results(self, settings: dict[str, Any]) -> Results:
        return gather(self.folder, settings, self.choice, self.configurations, self.samples)

    def _refusal(self, configuration: Configuration) -> str | None:
        """Why the model cannot be merged or cached so at this size."""
        try:
            if configuration.merges:
                api.plan(self._pipe, configuration.config, height=self._request.height, width=self._request.width)
                with api.applied(self._pipe, configuration.config):
                    self._try_cache(configuration)
            else:
                self._try_cache(configuration)
        except TokenMergeError as error:
            return str(error)
        return None

    def _try_cache(self, configuration: Configuration) -> None:
        if configuration.cache is None:
            return
        check_cacheable(self._way)
        steps = min(TRIAL_STEPS, self._request.steps)
        request = replace(self._request, prompt=self.task.prompts[0])
        make = partial(draw, self._pipe, request, self.task.seeds[:1], steps, self._device)
        try_cache(self._pipe, configuration.cache, make, steps)

    def _made(self, configuration: Configuration, sample: Sample) -> bool:
        return self.folder.image(configuration, sample).is_file()

    def _apply(self, configuration: Configuration) -> None:
        disable_cache(self._pipe)
        if configuration.merges:
            api.apply(self._pipe, configuration.config)
        else:
            api.remove(self._pipe)
        if self._way:
            # Code compiled for other token counts before, in this process, might serve these too and round differently.
            uncompile(self._pipe)
            torch.compiler.reset()
            compile_as(self._pipe, self._way)
        if configuration.cache:
            ratios = read_json(self.folder.calibration)["mag_ratios"] if configuration.cache.calibrated else None
            enable_cache(self._pipe, configuration.cache, self._request.steps, ratios)

    def _restore(self) -> None:
        """The model as it was loaded."""
        disable_cache(self._pipe)
        api.remove(self._pipe)
        uncompile(self._pipe)

    def _draw(self, sample: Sample) -> Any:
        request = replace(self._request, prompt=sample.prompt)
        (picture,), _ = draw(self._pipe, request, (sample.seed,), request.steps, self._device)
        return picture

    def _measure(self, configuration: Configuration, sample: Sample, reference: Picture) -> None:
        """What is not known yet about one picture. The baseline is not compared with itself."""
        path, features = self.folder.values(configuration, sample), self.folder.features(configuration, sample)
        known = read_json(path) if path.is_file() else {}
        pairs = self.choice.of_kind("pair") if configuration.label != BASELINE else ()
        wanted = [metric for metric in (*pairs, *self.choice.of_kind("text")) if metric.name not in known]
        lacks_features = bool(self.choice.of_kind("set")) and not features.is_file()
        if not wanted and not lacks_features:
            return
        test = reference if configuration.label == BASELINE else self._picture(configuration, sample)
        if lacks_features:
            save_features(features, self._meter.features(test))
        for metric in wanted:
            if metric.kind == "pair":
                known[metric.name] = self._meter.pair(metric, reference, test)
            else:
                known[metric.name] = self._meter.text(metric, sample.prompt, test)
        if wanted:
            write_text(path, to_json(_ordered(known)))

    def _picture(self, configuration: Configuration, sample: Sample) -> Picture:
        return Picture(read_picture(self.folder.image(configuration, sample)))

    def _features(self, configuration: Configuration) -> torch.Tensor:
        return read_features([self.folder.features(configuration, sample) for sample in self.samples])

    @cached_property
    def _meter(self) -> Meter:
        return Meter(self.choice, self._device, self.task.threads)

    def _progress(self, items: Sequence[Item], label: str) -> Iterator[Item]:
        """A bar, by the first process, for its own share."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        hidden = not self._processes.is_first or not items
        yield from tqdm(items, desc=f"{label[-40:]:>12}", disable=hidden, leave=False)


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """By the order of the metrics, whichever came first; also those that another run of this evaluation asked for."""
    return {name: values[name] for name in BY_NAME if name in values}
