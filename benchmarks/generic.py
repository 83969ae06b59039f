"""Tries Hold without a table on every denoiser class that diffusers has.

    PYTHONPATH=tests python benchmarks/generic.py --out benchmarks/results/generic.jsonl

Every class in diffusers' folders of transformers and UNets has a line, and so have denoisers of pipelines that can be
built tiny. Each is built with random weights (`tests/denoisers.py`; classes with a table as in the tests of families,
with the table set aside). It is called for 6 steps under `Hold(every=2, start=0)`, with falling times, or rising ones
if its pipelines have those. A line has

    outcome    "held", "refused" or "not tried"
    table      whether the class also has a table
    blocks     members of lists that could be held
    held       blocks that are held, and `runs`, the first and last block of each
    steps      steps of each kind
    checks     `plain`: every=1 and the first step equal the plain model. `again`: a second image equals the first.
               `removed`: after `remove`, outputs and attributes are as before. `table`: equal to Hold with the table,
               where the table holds the same blocks in one run; with a table, the last of several runs makes up for
               all of them
    reason     why the class was refused or not tried
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from bundled import parser_for, write_records
from diffusers.models import transformers, unets
from torch import Tensor, nn

import denoisers
import tiny
import tokenmerge
import zoo
from tokenmerge import Hold, TokenMergeError
from tokenmerge.families import families
from tokenmerge.families.base import Family
from tokenmerge.families.generic import RISING, candidates, unholdable
from tokenmerge.holding.sites import LearnedSite
from tokenmerge.runtime.state import APPLIED

STEPS = 6
HOLD = Hold(every=2, start=0.0)
# Classes with a table, but without a pipeline in the tests of families.
TINY = {"FluxTransformer2DModel": "flux", "SD3Transformer2DModel": "sd3", "UNet2DConditionModel": "sdxl"}


@dataclass(frozen=True)
class Tabled:
    """A denoiser that has a table, called as its table says."""

    family: Family
    name: str

    def build(self) -> nn.Module:
        if self.name in TINY:
            return tiny.denoiser_of(tiny.build(TINY[self.name]))
        model = next(each for each in zoo.MODELS.values() if _class_of(each) == self.name)
        return zoo.denoisers(model.build())[0]

    def call(self, module: nn.Module, step: int) -> list[Tensor]:
        given = self.family.example(module, 2, 16, 16, 3)
        time = "timestep" if "timestep" in given else "t"
        rises = self.name.startswith(RISING)
        with torch.no_grad():
            output = module(**{**given, time: given[time] * (0.4 + step / 16 if rises else 1.0 - step / 16)})
        return denoisers.tensors(output)


@cache
def _class_of(model: zoo.Model) -> str:
    return type(zoo.denoisers(model.build())[0]).__name__


def main() -> None:
    options = parser_for(__doc__).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    write_records(options.out, ({"class": name, **tried(name)} for name in listed()))


def listed() -> list[str]:
    """Every class in diffusers' folders of denoisers, and all denoisers that `tests/denoisers.py` builds."""
    found = set(denoisers.DENOISERS)
    for folder in (transformers, unets):
        for each in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{folder.__name__}.{each.name}")
            found |= {
                name
                for name, value in vars(module).items()
                if inspect.isclass(value)
                and issubclass(value, diffusers.ModelMixin)
                and value.__module__ == module.__name__
            }
    return sorted(found)


def tried(name: str) -> dict[str, Any]:
    table = next((family for family in families() if family.denoiser.__name__ == name), None)
    if name in denoisers.LEFT_OUT:
        return {"outcome": "not tried", "table": False, "reason": denoisers.LEFT_OUT[name]}
    case = denoisers.DENOISERS[name] if table is None else Tabled(table, name)
    module = case.build()
    record: dict[str, Any] = {"table": any(isinstance(module, family.denoiser) for family in families())}
    obstacle = unholdable(module)
    if obstacle:
        return {"outcome": "refused", **record, "reason": obstacle}
    record["blocks"] = len(candidates(module))
    plain, before = image(case, module), attributes(module)
    checks: dict[str, bool] = {}
    with patch("tokenmerge.families.families", lambda: ()):
        tokenmerge.apply(module, Hold(every=1, start=0.0))
        checks["plain"] = same(image(case, module), plain)
        tokenmerge.apply(module, HOLD)
        try:
            found = image(case, module)
        except TokenMergeError as error:
            reason = str(error).partition(" cannot be held: ")[2].removesuffix("; call remove first")
            tokenmerge.remove(module)
            assert same(image(case, module), plain)
            return {"outcome": "refused", **record, "reason": reason or str(error)}
        steps = tokenmerge.summary(module).steps
        runs = learned(module)
        checks["plain"] &= same(found[0], plain[0])
        checks["again"] = same(image(case, module), found)
        tokenmerge.remove(module)
        checks["removed"] = same(image(case, module), plain) and attributes(module) == before
    if table is not None and runs == [held_blocks(module, table)]:
        tokenmerge.apply(module, HOLD.replace(what="blocks"))
        checks["table"] = same(image(case, module), found)
        tokenmerge.remove(module)
    return {
        "outcome": "held",
        **record,
        "held": sum(map(len, runs)),
        "runs": [[run[0], run[-1]] for run in runs],
        "steps": steps,
        "checks": checks,
    }


def image(case: Any, module: nn.Module) -> list[list[Tensor]]:
    return [case.call(module, step) for step in range(STEPS)]


def attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(each)) for each in module.modules()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


def learned(module: nn.Module) -> list[list[str]]:
    """Names of the blocks of every run."""
    runs: list[list[str]] = []
    for site in vars(module)[APPLIED].installation.sites_on(module.modules()):
        if isinstance(site, LearnedSite):
            if site.first:
                runs.append([])
            runs[-1].append(site.name)
    return runs


def held_blocks(module: nn.Module, table: Family) -> list[str]:
    return [block.name for block in table.blocks(module)]


if __name__ == "__main__":
    main()
