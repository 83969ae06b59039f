"""Tables of families match their models' forwards, and a call is read alike by name and by position."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import Family, denoiser_of, families, family_of
from tokenmerge.families.base import Argument, Ports, arguments

DENOISERS = {kind: tiny.denoiser_of(tiny.build(kind)) for kind in tiny.FAMILIES}


def taken(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def ports_of(denoiser: nn.Module) -> Iterator[tuple[nn.Module, Ports]]:
    """Every module that tokens enter, with its ports from the table."""
    for block in family_of(denoiser).blocks(denoiser):
        yield block.module, block.kind.ports
        inside, listed = dict(block.module.named_modules()), [*block.kind.components.values(), block.kind.keys_values]
        for component in (part for parts in listed for part in parts):
            # Some blocks lack optional components.
            if component.entry in inside:
                yield inside[component.entry], component.ports
    for stage in (family_of(denoiser).stages or (lambda _: []))(denoiser):
        yield stage.module, stage.kind.ports


@pytest.mark.parametrize("kind", DENOISERS)
def test_arguments_of_modules_are_where_their_signatures_have_them(kind: str) -> None:
    seen = 0
    for module, ports in ports_of(DENOISERS[kind]):
        names = taken(type(module).forward)
        for argument in (ports.tokens, ports.text_tokens, *(each.argument for each in ports.per_token)):
            if argument is not None:
                assert names[argument.position] == argument.name, f"{type(module).__name__} has {names}"
                seen += 1
    assert seen > 10


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_arguments_of_denoisers_are_where_their_signatures_have_them(family: Family) -> None:
    names = taken(family.denoiser.forward)
    for argument in filter(None, (family.attention_kwargs, *family.between_blocks, *family.masks)):
        assert names[argument.position] == argument.name


def test_positions_come_from_the_signature() -> None:
    class Module(nn.Module):
        def forward(self, first: Tensor, second: Tensor, third: Tensor | None = None) -> None: ...

    argument = arguments(Module)
    assert [argument(name) for name in ("third", "first")] == [Argument("third", 2), Argument("first", 0)]
    with pytest.raises(ValueError, match="fourth"):
        argument("fourth")


def test_an_argument_is_read_and_written_however_it_comes() -> None:
    argument = Argument("tokens", 1)
    assert argument.read((1, 2), {}) == argument.read((1,), {"tokens": 2}) == 2
    assert argument.read((1,), {}) is None
    assert argument.write((1, 2, 3), {"more": 4}, 5) == ((1, 5, 3), {"more": 4})
    given = {"tokens": 2, "more": 4}
    assert argument.write((1,), given, 5) == ((1,), {"tokens": 5, "more": 4})
    assert given["tokens"] == 2, "the caller's own was changed"


def example(denoiser: nn.Module) -> dict[str, Any]:
    return {**family_of(denoiser).example(denoiser, 2, 16, 24), "return_dict": False}


def positional(denoiser: nn.Module, given: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in order, with defaults for those that are not given."""
    parameters = inspect.signature(denoiser.forward).parameters
    return tuple(given.get(name, parameter.default) for name, parameter in parameters.items())


@pytest.mark.parametrize("kind", DENOISERS)
def test_a_call_is_read_alike_by_name_and_by_position(kind: str) -> None:
    denoiser = DENOISERS[kind]
    given, read = example(denoiser), family_of(denoiser).calls.read
    one, other = read(denoiser, (), given), read(denoiser, positional(denoiser, given), {})
    assert one.size == other.size
    assert (one.batch, one.text_tokens) == (other.batch, other.text_tokens)
    assert torch.equal(one.timestep, other.timestep)
    assert one.batch == 2
    assert one.tokens == {"sd": 384, "sdxl": 384}.get(kind, 96)


@pytest.mark.parametrize(
    "technique", [Merge(), Merge(sites="component"), Hold(every=3, what="blocks", start=0.0)], ids=str
)
@pytest.mark.parametrize("kind", DENOISERS)
@torch.no_grad()
def test_a_call_by_position_gives_what_one_by_name_gives(kind: str, technique: Merge | Hold) -> None:
    denoiser = DENOISERS[kind]
    given = example(denoiser)
    with tokenmerge.applied(denoiser, technique):
        named = denoiser(**given)[0]
    with tokenmerge.applied(denoiser, technique):
        assert torch.equal(denoiser(*positional(denoiser, given))[0], named)


@pytest.mark.parametrize("kind", DENOISERS)
def test_blocks_are_all_there_in_the_order_they_run(kind: str) -> None:
    denoiser, ran = DENOISERS[kind], []
    blocks = family_of(denoiser).blocks(denoiser)
    handles = [block.module.register_forward_pre_hook(lambda *_, name=block.name: ran.append(name)) for block in blocks]
    with torch.no_grad():
        denoiser(**example(denoiser))
    for handle in handles:
        handle.remove()
    assert ran == [block.name for block in blocks]
    assert all(denoiser.get_submodule(block.name) is block.module for block in blocks)
    classes = {type(block.module) for block in blocks}
    assert len(blocks) == sum(type(module) in classes for module in denoiser.modules())


def test_denoisers_are_found_in_pipelines_and_in_what_is_compiled() -> None:
    pipe = tiny.build("flux")
    assert denoiser_of(pipe) is denoiser_of(pipe.transformer) is pipe.transformer
    assert denoiser_of(torch.compile(pipe.transformer)) is pipe.transformer


def test_models_are_told_by_their_denoisers() -> None:
    told = tokenmerge.supported_models()
    assert len(told) == len(families()) >= 24
    assert told["FluxTransformer2DModel"].startswith("Flux.1")
    assert all(hasattr(diffusers, name) for name in told)


def test_pipelines_of_tables_are_tested() -> None:
    """Tests build every pipeline that a table names. The contract tests that tables name those of `zoo.py`."""
    tested = {pipeline.__name__ for pipeline in tiny._PIPELINES.values()}
    files = (Path(tiny.__file__).with_name("zoo.py"), Path(__file__).with_name("test_pitfalls.py"))
    built = "".join(file.read_text(encoding="utf-8") for file in files)
    for family in families():
        assert family.pipelines
        for name in family.pipelines:
            assert name in tested or re.search(rf"\b{name}\b", built), f"{family.name}: no test builds a {name}"


@pytest.mark.parametrize(
    ("model", "words"), [(nn.Linear(2, 2), "Linear is not supported"), (object(), "object is neither a module nor")]
)
def test_other_models_are_refused_with_those_that_are_supported(model: Any, words: str) -> None:
    with pytest.raises(TokenMergeError, match=rf"{words}.*supported_models\(\)"):
        tokenmerge.apply(model)


def test_an_old_diffusers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", "0.36.0")
    with pytest.raises(TokenMergeError, match=r"diffusers 0\.36\.0 is too old .*pip install -U tokenmerge"):
        families.__wrapped__()
