"""One of two processes that draw pictures together, over gloo on CPUs.

`main` runs all of `CASES` and writes their results into FOLDER/RANK.json. Each process starts only once, since starting
takes longer than most cases.
"""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FlowMatchEulerDiscreteScheduler
from torch import Tensor

import tiny
import tokenmerge
import traces
import zoo
from denoisers import DENOISERS
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.applying import token_maps
from tokenmerge.runtime.state import APPLIED

STEPS = 8
TECHNIQUES: dict[str, list[Merge | Hold]] = {
    "plain": [Hold(every=1)],
    "hold": [Hold(tolerance=0.8)],
    "merge": [Merge(regions="tile:2x2")],
    "stripes": [Merge(regions="stripe:10")],
    "wide stripes": [Merge(regions="stripe:3")],
    "both": [Merge(regions="tile:2x2"), Hold(every=2, start=0.0)],
}
CONFIGS: dict[str, Callable[[], ContextParallelConfig]] = {
    "ulysses": lambda: ContextParallelConfig(ulysses_degree=2),
    "ring": lambda: ContextParallelConfig(ring_degree=2),
    "uneven": lambda: ContextParallelConfig(ulysses_degree=2, ulysses_anything=True),
}
# Techniques that need all tokens in one process.
TOGETHER: dict[str, Any] = {
    "whole": Merge(regions="whole"),
    "merged in the whole": Merge(merge_regions="whole"),
    "random": Merge(method="random"),
    "stochastic": Merge(selection="stochastic"),
    "tomesd": "tomesd",
    "lower-bound": "lower-bound",
}


def build(name: str) -> Any:
    pipe = tiny.build(name) if name in tiny.KINDS else zoo.MODELS[name].build()
    if name == "flux2-dev":
        # Random weights magnify this model's fp32 rounding twenty times.
        pipe.transformer.double()
    return pipe


def draw(pipe: Any, name: str, size: tuple[int, int] | None = None, text: int = 6, **options: Any) -> Tensor:
    if size is not None:
        options["size"] = size
    if name in tiny.KINDS:
        prompt = tiny.noise(1, text, tiny.TEXT_WIDTH, seed=1)
        return tiny.draw(pipe, steps=STEPS, prompt_embeds=prompt, **options)
    return zoo.draw(pipe, zoo.MODELS[name], steps=STEPS, text=text, negative_text=text, **options)


def off(picture: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return ((picture - expected).abs().max() / expected.abs().max()).item()


def share(pipe: Any, config: str) -> None:
    """Split the tokens of its pictures between both processes."""
    if config == "ring":
        # Ring attention needs a backend that also returns the softmax normalizer.
        pipe.transformer.set_attention_backend("_native_flash")
    pipe.transformer.enable_parallelism(config=CONFIGS[config]())


def told(pipe: Any) -> dict[str, Any]:
    """What Hold decided in the last picture, and the errors it measured."""
    state = vars(pipe.transformer)[APPLIED].state
    measured = state.holding.errors.measured if state.holding is not None else []
    return {
        "steps": dict(state.steps),
        "errors": [each.error for each in measured],
        "drift": (state.holding.drift if state.holding is not None else None) or 0.0,
        "bytes": tokenmerge.summary(pipe).residual_bytes,
    }


@cache
def alone(name: str, technique: str, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """A picture drawn by one process alone, and what Hold decided."""
    pipe = tokenmerge.apply(build(name), TECHNIQUES[technique])
    return draw(pipe, name, **options), told(pipe)


def picture(name: str, technique: str, config: str, order: str, **options: Any) -> dict[str, Any]:
    """How far a picture that both processes draw is from one that a single process draws."""
    expected, known = alone(name, technique, **options)
    pipe = build(name)
    if order == "before":
        share(pipe, config)
    tokenmerge.apply(pipe, TECHNIQUES[technique])
    if order == "after":
        share(pipe, config)
    return {"off": off(draw(pipe, name, **options), expected), "alone": known, **told(pipe)}


def without_a_table(name: str, order: str) -> dict[str, Any]:
    def held(share_at: str) -> tuple[Tensor, str]:
        denoiser, scheduler = DENOISERS[name].build(), FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(STEPS)
        if share_at == "before":
            denoiser.enable_parallelism(config=CONFIGS["ulysses"]())
        tokenmerge.apply(denoiser, Hold(every=2, start=0.0), scheduler=scheduler)
        if share_at == "after":
            denoiser.enable_parallelism(config=CONFIGS["ulysses"]())
        outputs = []
        for step, time in enumerate(scheduler.timesteps):
            outputs += DENOISERS[name].call(denoiser, step, batch=1)
            scheduler.step(torch.zeros(1), time, torch.zeros(1))
        return torch.stack(outputs), str(tokenmerge.summary(denoiser))

    (expected, before), (drawn, after) = held("never"), held(order)
    return {"off": off(drawn, expected), "alone": before, "told": after}


def nonsense() -> dict[str, Any]:
    """Both processes agree on the steps when only one has NaN among its residuals."""
    pipe, kinds = tokenmerge.apply(build("flux"), Hold(tolerance=10.0, start=0.0)), []
    share(pipe, "ulysses")
    known = vars(pipe.transformer)[APPLIED]
    pipe.transformer.register_forward_pre_hook(lambda *_: kinds.append(known.state.step.kind))

    def spoil(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 3 and dist.get_rank() == 1:
            known.holding.runs[0].current.streams[0].value.fill_(torch.nan)
        return {}

    draw(pipe, "flux", callback_on_step_end=spoil)
    return {"kinds": kinds, "nonsense": tokenmerge.summary(pipe).nonsense}


def refused() -> dict[str, Any]:
    """The error message of each technique that needs all tokens, and whether anything is left behind."""
    pipe = build("flux")
    share(pipe, "ulysses")
    plain, before = draw(pipe, "flux"), left_on(pipe)
    messages = {name: error_of(partial(tokenmerge.apply, pipe, technique)) for name, technique in TOGETHER.items()}
    return {"errors": messages, "same": traces.same(before, left_on(pipe)), "off": off(draw(pipe, "flux"), plain)}


def refused_after() -> dict[str, Any]:
    """The error message of such a technique when tokens are split only after it was applied."""
    pipe = tokenmerge.apply(build("flux"), TOGETHER["whole"])
    share(pipe, "ulysses")
    message = error_of(lambda: draw(pipe, "flux"))
    return {"error": message, "off": off(draw(tokenmerge.remove(pipe), "flux"), alone("flux", "plain")[0])}


def straddling(regions: str, config: str, size: tuple[int, int]) -> dict[str, Any]:
    """The error messages for regions that straddle both shards."""
    pipe = build("flux")
    share(pipe, config)
    plain = draw(pipe, "flux", size)
    technique, (height, width) = Merge(regions=regions), size
    tokenmerge.apply(pipe, technique)
    message = error_of(lambda: draw(pipe, "flux", size))
    planned = error_of(lambda: tokenmerge.plan(pipe, technique, height=height, width=width))
    tokenmerge.remove(pipe)
    return {"error": message, "planned": planned, "off": off(draw(pipe, "flux", size), plain)}


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except TokenMergeError as error:
        return str(error)
    return ""


def removed(name: str) -> dict[str, Any]:
    """Whether `remove` leaves everything as it was, hooks of diffusers included."""
    pipe = build(name)
    share(pipe, "ulysses")
    plain, before = draw(pipe, name), left_on(pipe)
    tokenmerge.apply(pipe, TECHNIQUES["both"])
    changed = draw(pipe, name)
    tokenmerge.remove(pipe)
    same = traces.same(before, left_on(pipe))
    return {"same": same, "changed": not torch.equal(plain, changed), "equal": torch.equal(plain, draw(pipe, name))}


def left_on(pipe: Any) -> dict[str, Any]:
    """All attributes of the denoiser and of diffusers' hooks. The scheduler is left out: every picture changes it."""
    found = {name: value for name, value in traces.attributes(pipe).items() if name != "scheduler"}
    for name, module in pipe.transformer.named_modules():
        registry = vars(module).get("_diffusers_hook")
        for number, reference in enumerate(registry._fn_refs if registry is not None else ()):
            found[f"{name} {number}"] = dict(vars(reference))
    return found


def summed_up() -> dict[str, Any]:
    """What `summary` and `plan` report of a picture in two shards, and how `token_maps` refuses it."""
    pipe = build("flux")
    share(pipe, "ulysses")
    tokenmerge.apply(pipe, TECHNIQUES["both"])
    draw(pipe, "flux")
    group = tokenmerge.summary(pipe).groups[0]
    plan = tokenmerge.plan(pipe, TECHNIQUES["both"], height=64, width=64)
    maps = error_of(lambda: token_maps(pipe))
    return {
        **{key: group[key] for key in ("grid", "tokens", "regions")},
        "planned": plan.groups[0].merged,
        "maps": maps,
    }


def compiled() -> dict[str, Any]:
    """Every block compiles into one graph, and a second picture compiles nothing again."""
    pipe = tokenmerge.apply(build("flux"), TECHNIQUES["both"])
    expected = draw(pipe, "flux")
    share(pipe, "ulysses")
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        # Inductor would take longer, and its code does not depend on how tokens are split.
        block.compile(fullgraph=True, backend="eager")
    draw(pipe, "flux")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    distance = off(draw(pipe, "flux"), expected)
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    return {"off": distance, "graphs": graphs, "again": again}


CASES: dict[str, Callable[[], dict[str, Any]]] = {}
for _name, _techniques in {"flux": ("hold", "merge", "both"), "qwen": ("hold", "both")}.items():
    for _technique in _techniques:
        for _config in ("ulysses", "ring"):
            for _order in ("before", "after"):
                _case = partial(picture, _name, _technique, _config, _order)
                CASES[f"{_name}, {_technique}, {_config}, {_order}"] = _case
for _name, _technique in (
    ("flux2-dev", "both"),
    ("wan2.1", "both"),
    ("wan2.2-ti2v-image", "both"),
    # The second shard contains the references.
    ("qwen-edit-plus", "hold"),
    ("qwen-edit-plus", "stripes"),
):
    CASES[f"{_name}, {_technique}, ulysses, before"] = partial(picture, _name, _technique, "ulysses", "before")
# 7x5 tokens, and five tokens of text.
CASES["flux, hold, uneven, before"] = partial(picture, "flux", "hold", "uneven", "before", size=(28, 20), text=5)
CASES["qwen, hold, uneven, after"] = partial(picture, "qwen", "hold", "uneven", "after", size=(40, 56), text=5)
CASES["flux, both, uneven, before"] = partial(picture, "flux", "both", "uneven", "before", text=5)
# 3x17 tokens and 16 of the reference: shards of 34 and 33, with two stripes and one.
_wide = partial(picture, "qwen-edit-plus", "wide stripes", "uneven", "before", size=(24, 136))
CASES["qwen-edit-plus, wide stripes, uneven, before"] = _wide
for _order in ("before", "after"):
    CASES[f"without a table, {_order}"] = partial(without_a_table, "ChronoEditTransformer3DModel", _order)
# diffusers hooks the first block of Qwen-Image to split tokens.
CASES["removed"] = partial(removed, "qwen")
CASES["straddling tiles"] = partial(straddling, "tile:16x1", "ulysses", (64, 64))
# 7x5 tokens in shards of 18 and 17, which have no common divisor.
CASES["straddling stripes"] = partial(straddling, "stripe:7", "uneven", (28, 20))
CASES |= {"refused": refused, "refused after": refused_after, "nonsense": nonsense}
CASES |= {"summed up": summed_up, "compiled": compiled}


def gather_sizes(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
    """An `all_gather` for tensors of different sizes, which NCCL supports and gloo does not."""
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, group=group, group_src=rank)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> tuple[Any, ...]:
    """The CPU operator under the signature of the GPU operator that diffusers calls."""
    named.pop("return_debug_mask", None)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, *given[:2], **named)
    nothing = torch.zeros((), dtype=torch.int64)
    return output, lse, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # torch deprecates functions that diffusers calls.
    warnings.simplefilter("ignore", FutureWarning)
    diffusers.utils.logging.set_verbosity_error()
    # diffusers divides by the number of accelerators, which is 0 on a CPU.
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    dist.all_gather = gather_sizes
    # Ring attention needs flash attention, which has another name on CPUs.
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash_attention, "CPU")
    results = {}
    for name, case in CASES.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
