"""Shared by benchmarks that draw with the bundled models on a CPU: models, schedules, pictures, and record files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.loading import load_pipeline
from tokenmerge.tools.measure import environment

SIDE, STEPS = 128, 28
CPU = torch.device("cpu")
# Schedules of a model by name: a class with `from_config`, and changes to the config of the model's own scheduler.
Schedules = Mapping[str, tuple[Any, dict[str, Any]]]


def load(model: str, side: int = SIDE) -> tuple[Any, dict[str, Any]]:
    """A bundled pipeline, and the arguments to call it with."""
    pipe, defaults = load_pipeline(model, torch.float32, CPU)
    pipe.set_progress_bar_config(disable=True)
    return pipe, {**defaults.call, "height": side, "width": side}


def under_schedules(schedules: Mapping[str, Schedules]) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Every model under each of its schedules: both names, the pipeline, and the arguments to call it with."""
    for model, own_schedules in schedules.items():
        pipe, call = load(model)
        config = pipe.scheduler.config
        for name, (scheduler, changes) in own_schedules.items():
            pipe.scheduler = scheduler.from_config(config, **changes)
            yield model, name, pipe, call


def draw(pipe: Any, call: dict[str, Any], prompts: Sequence[str], steps: int = STEPS, seed: int = 0) -> np.ndarray:
    """Pictures [n, side, side, 3] in 0..255, with seeds that count up."""
    # Some schedulers draw from the global generator.
    torch.manual_seed(0)
    pictures = []
    for number, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed + number)
        pictures.append(
            pipe(prompt, num_inference_steps=steps, generator=generator, output_type="np", **call).images[0]
        )
    return 255 * np.stack(pictures)


def some_prompts(count: int) -> Sequence[str]:
    """Prompts at even distances in the list of flowers."""
    prompts = read_prompts()
    return prompts[:: max(1, len(prompts) // count)][:count]


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def write_records(out: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write every record as a line of JSON, with the environment. Everything runs in one thread.

    The file replaces an older one at the end. A run that breaks off leaves it, and its own records in a `.part` file.
    """
    torch.set_num_threads(1)
    known = environment(CPU)
    part = out.with_name(f"{out.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({**record, "environment": known}) + "\n")
            file.flush()
            print(*(value for value in record.values() if isinstance(value, str | int | float)), flush=True)
    part.replace(out)
