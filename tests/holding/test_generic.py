"""Hold without a table: one call shows how a denoiser's blocks connect, and so which of them can be held."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import tiny
import tokenmerge
import zoo
from denoisers import DENOISERS, Denoiser
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.families.generic import candidates
from tokenmerge.holding.learning import LearnedPorts

HOLD = Hold(every=2, start=0.0)
STEPS = 6
WIDTH = 8


class Block(nn.Module):
    """Changes its tokens; may read other tensors, and return more than the tokens."""

    def __init__(self, gives: Callable[[Tensor], Any] = lambda tokens: tokens) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._gives = gives

    def forward(self, hidden: Tensor, other: Any = None, skip: Tensor | None = None) -> Any:
        changed = hidden + torch.tanh(self.layer(hidden if skip is None else hidden + skip))
        return self._gives(changed)


class ImageBlock(Block):
    """Changes its first argument, and reads its second."""

    def forward(self, hidden: Tensor, other: Any = None, skip: Tensor | None = None) -> Any:
        return hidden + torch.tanh(self.layer(hidden) + other)


class Joint(nn.Module):
    """Changes two streams. first: the one it returns first."""

    def __init__(self, first: str = "text") -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._first = first

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        both = self.layer(image.mean(1, keepdim=True) + text.mean(1, keepdim=True)).tanh()
        return (text + both, image + both) if self._first == "text" else (image + both, text + both)


class OtherJoint(Joint):
    pass


class Writing(Block):
    def forward(self, hidden: Tensor, other: Any = None, skip: Tensor | None = None) -> Any:
        return hidden.add_(torch.tanh(self.layer(hidden)))


class Net(nn.Module):
    """A denoiser of lists of blocks; `body` runs them."""

    def __init__(self, body: Callable[[Any, Tensor], Any], **lists: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        for name, blocks in lists.items():
            setattr(self, name, nn.ModuleList(blocks))
        self.body = body

    def forward(self, sample: Tensor, timestep: Tensor, extra: Any = None) -> Any:
        self.extra = extra
        return self.body(self, self.embed(sample) + timestep.view(-1, 1, 1) / 1000)


def net(body: Callable[[Any, Tensor], Any], **lists: list[nn.Module]) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(body, **(lists or {"blocks": [Block() for _ in range(4)]})).eval().requires_grad_(False)


def chain(self: Any, tokens: Tensor) -> Tensor:
    for block in self.blocks:
        tokens = block(tokens)
    return tokens * 2


def run(denoiser: nn.Module, step: int = 0, size: tuple[int, ...] = (2, 6), seed: int = 0, **extra: Any) -> Any:
    with torch.no_grad():
        return denoiser(tiny.noise(*size, WIDTH, seed=seed), torch.full((size[0],), 900.0 - 50 * step), **extra)


def image(denoiser: nn.Module, steps: int = STEPS, **options: Any) -> list[Any]:
    return [run(denoiser, step, **options) for step in range(steps)]


def held(denoiser: nn.Module) -> str:
    return tokenmerge.summary(denoiser).held


def state(denoiser: nn.Module) -> list[dict[str, Any]]:
    return [
        {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for module in denoiser.modules()
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


# What a call shows


def skip_inside(self: Any, tokens: Tensor) -> Tensor:
    """Like HunyuanDiT: the last blocks read the outputs of the first."""
    first = self.blocks[0](tokens)
    second = self.blocks[1](first)
    third = self.blocks[2](second, skip=second)
    return self.blocks[3](third, skip=first) * 2


def skip_outside(self: Any, tokens: Tensor) -> Tensor:
    first = self.blocks[0](tokens)
    return self.blocks[3](self.blocks[2](self.blocks[1](first))) + first


def between(self: Any, tokens: Tensor) -> Tensor:
    tokens = self.blocks[1](self.blocks[0](tokens))
    return self.blocks[3](self.blocks[2](tokens * 2)) * 2


def twice(self: Any, tokens: Tensor) -> Tensor:
    for number in (0, 0, 1, 2, 3):
        tokens = self.blocks[number](tokens)
    return tokens * 2


def by_name(self: Any, tokens: Tensor) -> Tensor:
    for block in self.blocks:
        tokens = block(other=None, hidden=tokens)
    return tokens * 2


def in_a_tuple(self: Any, tokens: Tensor) -> Tensor:
    for block in self.blocks:
        tokens, _, _ = block(tokens)
    return tokens * 2


def two_lists(self: Any, tokens: Tensor) -> Tensor:
    for block in self.blocks:
        tokens = block(tokens)
    tokens = torch.cat([tokens, tokens], 1)
    for block in self.others:
        tokens = block(tokens)
    return tokens * 2


def one_list_after_the_other(self: Any, tokens: Tensor) -> Tensor:
    for block in (*self.blocks, *self.others):
        tokens = block(tokens)
    return tokens * 2


def text_then_image(self: Any, tokens: Tensor) -> Tensor:
    """Like Kandinsky: all image blocks read the text, which here has the shape of the image tokens."""
    text = tokens.flip(1) / 2
    for block in self.blocks:
        text = block(text)
    for block in self.others:
        tokens = block(tokens, text)
    return tokens * 2


def inner_output(self: Any, tokens: Tensor) -> Any:
    first = self.blocks[0](tokens)
    return [first, self.blocks[3](self.blocks[2](self.blocks[1](first)))]


def in_lists(self: Any, tokens: Tensor) -> Tensor:
    first = self.blocks[0](tokens)
    second = self.blocks[1](first, other=[first])
    return self.blocks[3](self.blocks[2](second)) * 2


def copies(self: Any, tokens: Tensor) -> Tensor:
    for block in self.blocks:
        tokens = block(tokens).clone()
    return tokens


def some(kind: Callable[..., nn.Module], *arguments: Any, count: int = 3) -> list[nn.Module]:
    return [kind(*arguments) for _ in range(count)]


SHOWN: dict[str, tuple[Callable[[], Net], str]] = {
    "chain": (lambda: net(chain), "4 of 4 blocks, in 1 run (blocks.0 to blocks.3)"),
    "skip read by held blocks": (lambda: net(skip_inside), "4 of 4 blocks, in 1 run (blocks.0 to blocks.3)"),
    "skip read by others": (lambda: net(skip_outside), "3 of 4 blocks, in 1 run (blocks.1 to blocks.3)"),
    "something between": (
        lambda: net(between),
        "4 of 4 blocks, in 2 runs (blocks.0 to blocks.1, blocks.2 to blocks.3)",
    ),
    "a block twice": (lambda: net(twice), "3 of 4 blocks, in 1 run (blocks.1 to blocks.3)"),
    "by name": (lambda: net(by_name), "4 of 4 blocks, in 1 run (blocks.0 to blocks.3)"),
    "tuples": (
        lambda: net(in_a_tuple, blocks=some(Block, lambda tokens: (tokens, None, 0.5))),
        "3 of 3 blocks, in 1 run (blocks.0 to blocks.2)",
    ),
    "lists": (
        lambda: net(in_a_tuple, blocks=some(Block, lambda tokens: [tokens, None, True])),
        "3 of 3 blocks, in 1 run (blocks.0 to blocks.2)",
    ),
    "two runs": (
        lambda: net(two_lists, blocks=some(Block), others=some(Block)),
        "6 of 6 blocks, in 2 runs (blocks.0 to blocks.2, others.0 to others.2)",
    ),
    "two classes in a row": (
        lambda: net(one_list_after_the_other, blocks=some(Block), others=some(type("Other", (Block,), {}))),
        "6 of 6 blocks, in 1 run (blocks.0 to others.2)",
    ),
    "a last block of another class": (
        lambda: net(one_list_after_the_other, blocks=some(Block), others=some(type("Other", (Block,), {}), count=1)),
        "3 of 4 blocks, in 1 run (blocks.0 to blocks.2)",
    ),
    "text, then an image of its shape": (
        lambda: net(text_then_image, blocks=some(Block), others=some(ImageBlock)),
        "6 of 6 blocks, in 2 runs (blocks.0 to blocks.2, others.0 to others.2)",
    ),
    "a last block that gives out less": (
        lambda: net(
            lambda self, tokens: self.blocks[3](self.blocks[2](self.blocks[1](self.blocks[0](tokens)[0])[0])[0])[1] * 2,
            blocks=[*some(Block, lambda tokens: (tokens, 1)), Block(lambda tokens: (None, tokens))],
        ),
        "3 of 4 blocks, in 1 run (blocks.0 to blocks.2)",
    ),
    "an inner output given out": (lambda: net(inner_output), "3 of 4 blocks, in 1 run (blocks.1 to blocks.3)"),
    "an output in a list": (lambda: net(in_lists), "3 of 4 blocks, in 1 run (blocks.1 to blocks.3)"),
    "one that writes in a list of its own": (
        lambda: net(one_list_after_the_other, blocks=some(Block), others=some(Writing, count=2)),
        "3 of 5 blocks, in 1 run (blocks.0 to blocks.2)",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_call_shows_what_can_be_held(name: str) -> None:
    build, told = SHOWN[name]
    denoiser = build()
    before, plain = state(denoiser), image(denoiser)
    for mode in (torch.no_grad, torch.inference_mode):
        tokenmerge.apply(denoiser, HOLD)
        assert held(denoiser) == "The first call will show which blocks can be held."
        with mode():
            if "writes" in name:
                # The block overwrites the run's output within the call, so the first image needs one more full step.
                image(denoiser)
            first, second = image(denoiser), image(denoiser)
        assert held(denoiser) == f"Held without a table: {told}."
        assert same(first, second)
        assert same(first[0], plain[0])
        assert not same(first[1], plain[1])
        assert not same(first[2], plain[2]), "a full step makes up for the held one before it"
        assert tokenmerge.summary(denoiser).steps == {"full": 3, "held": 3}
        tokenmerge.remove(denoiser)
        assert state(denoiser)[1:] == before[1:]
        assert same(image(denoiser), plain)


def ends(denoiser: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    told = held(denoiser).partition("(")[2].partition(")")[0]
    return [tuple(map(denoiser.get_submodule, run.split(" to "))) for run in told.split(", ")]  # type: ignore[misc]


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden"]


@pytest.mark.parametrize("name", SHOWN)
def test_a_held_step_adds_the_residuals_of_the_last_full_one(name: str) -> None:
    """The rest of the model runs. Hooks that replace the output of each run's last block by the held tokens give the
    same image."""
    build, _ = SHOWN[name]
    denoiser = build()
    tokenmerge.apply(denoiser, HOLD)
    image(denoiser)
    found = image(denoiser, steps=2)
    runs = ends(denoiser)
    tokenmerge.remove(denoiser)
    entered: dict[nn.Module, Tensor] = {}
    changes: dict[nn.Module, Tensor] = {}

    def enter(last: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[last] = tokens_of(args, kwargs)

    def leave(last: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        left = output if isinstance(output, Tensor) else output[0]
        if last not in changes:
            changes[last] = left - entered[last]
            return output
        moved = entered[last] + changes[last]
        return moved if isinstance(output, Tensor) else type(output)([moved, *output[1:]])

    for first, last in runs:
        first.register_forward_pre_hook(lambda _, args, kwargs, last=last: enter(last, args, kwargs), with_kwargs=True)
        last.register_forward_hook(leave)
    assert same(found, image(denoiser, steps=2))


@pytest.mark.parametrize("order", ["text", "image"])
def test_two_streams_are_held_in_the_order_they_are_given_out(order: str) -> None:
    def body(self: Any, tokens: Tensor) -> Tensor:
        image, text = tokens, tokens.flip(1)
        for block in self.blocks:
            one, other = block(image, text)
            text, image = (one, other) if order == "text" else (other, one)
        return torch.cat([image, text], 1)

    denoiser = net(body, blocks=some(Joint, order))
    entered = []
    denoiser.blocks[0].register_forward_pre_hook(lambda _, args: entered.append(torch.cat(args, 1)))
    plain = image(denoiser, 2)
    denoiser.blocks[0]._forward_pre_hooks.clear()
    tokenmerge.apply(denoiser, HOLD)
    assert same(image(denoiser, 2), [plain[0], entered[1] + (plain[0] - entered[0])])


def test_lists_that_give_out_their_streams_in_another_order_are_two_runs() -> None:
    def body(self: Any, tokens: Tensor) -> Tensor:
        image, text = tokens, tokens.flip(1)
        for block in self.blocks:
            text, image = block(image, text)
        for block in self.others:
            image, text = block(image, text)
        return image

    denoiser = net(body, blocks=some(Joint), others=some(OtherJoint, "image"))
    tokenmerge.apply(denoiser, HOLD)
    run(denoiser)
    assert "6 of 6 blocks, in 2 runs (blocks.0 to blocks.2, others.0 to others.2)" in held(denoiser)


class Pooling(Block):
    def forward(self, hidden: Tensor, other: Any = None, skip: Tensor | None = None) -> Any:
        return super().forward(hidden)[:, ::2]


REFUSED: dict[str, Callable[[], Net]] = {
    "something between all": lambda: net(copies),
    "shapes change": lambda: net(chain, blocks=some(Pooling, count=2)),
    # UNet stages return their skip connections like this.
    "tuples in tuples": lambda: net(
        lambda self, tokens: self.blocks[1](self.blocks[0](tokens)[0])[1][0],
        blocks=[Block(lambda tokens: (tokens, (tokens,))), Block(lambda tokens: (tokens, (tokens[:, ::2], None)))],
    ),
    "tokens are written": lambda: net(chain, blocks=some(Writing)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_with_the_reason(name: str) -> None:
    denoiser = REFUSED[name]()
    plain, before = image(denoiser), state(denoiser)
    tokenmerge.apply(denoiser, HOLD)
    for _ in range(2):
        with pytest.raises(TokenMergeError, match=r"Net cannot be held: of its \d blocks no two follow each other"):
            run(denoiser)
    tokenmerge.remove(denoiser)
    assert state(denoiser)[1:] == before[1:]
    assert same(image(denoiser), plain)


def test_lists_inside_of_blocks_and_single_layers_are_no_blocks() -> None:
    class Deep(Block):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(some(Block, count=2))

    denoiser = net(chain, blocks=[Deep(), Deep()], mixed=[Block(), Joint()], layers=some(nn.Linear, WIDTH, WIDTH))
    assert [block.name for block in candidates(denoiser)] == ["blocks.0", "blocks.1"]


# Changes after the first call


def test_a_chain_that_changes_is_refused_at_the_next_full_step() -> None:
    def body(self: Any, tokens: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            tokens = block(tokens if number != 2 or self.extra is None else tokens * self.extra)
        return tokens * 2

    denoiser = net(body)
    tokenmerge.apply(denoiser, HOLD)
    image(denoiser)
    with pytest.raises(TokenMergeError, match=r"'blocks.2' received other tokens than the block before it returned"):
        run(denoiser, extra=2.0)
    assert same(image(denoiser), image(denoiser))


def test_another_signature_or_output_is_refused() -> None:
    def body(self: Any, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(hidden=tokens) if self.extra == "name" else block(tokens)
            tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        return tokens * 2

    denoiser = net(body)
    tokenmerge.apply(denoiser, HOLD)
    image(denoiser)
    with pytest.raises(TokenMergeError, match="did not receive its tokens as positional argument 0, unlike"):
        run(denoiser, extra="name")
    denoiser.blocks[1]._gives = lambda tokens: (tokens, None)
    with pytest.raises(TokenMergeError, match=r"'blocks.1' returned other tensors or shapes than its run received"):
        run(denoiser)
    denoiser.blocks[1]._gives = lambda tokens: tokens[:, :1]
    with pytest.raises(TokenMergeError, match=r"'blocks.1' returned other tensors or shapes than its run received"):
        run(denoiser)


def test_a_failed_call_leaves_nothing_behind() -> None:
    denoiser = net(chain)
    plain = image(denoiser)
    tokenmerge.apply(denoiser, HOLD)
    applied = state(denoiser)
    for number in (0, 2):
        handle = denoiser.blocks[number].layer.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(denoiser)
        handle.remove()
        assert state(denoiser)[1:] == applied[1:]
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    found = image(denoiser)
    assert same(found[0], plain[0])
    tokenmerge.apply(denoiser, HOLD)
    assert same(image(denoiser), found)


def test_sizes_batches_and_guidance_take_turns() -> None:
    denoiser = net(chain)
    kinds = [{"size": (2, 6)}, {"size": (1, 6)}, {"size": (2, 9)}]
    expected = []
    for kind in kinds:
        tokenmerge.apply(denoiser, HOLD)
        expected.append(image(denoiser, **kind))
    for kind, found in [*zip(kinds, expected, strict=True)] * 2:
        assert same(image(denoiser, **kind), found)
    tokenmerge.apply(denoiser, HOLD)
    # Two calls a step; the first of all shows what can be held.
    pairs = [[run(denoiser, step, seed=seed) for seed in (0, 1)] for step in range(STEPS)]
    assert tokenmerge.summary(denoiser).steps == {"full": 3, "held": 3}
    for seed in (0, 1):
        tokenmerge.apply(denoiser, HOLD)
        single = image(denoiser, seed=seed)
        assert same([pair[seed] for pair in pairs], single)


def test_inference_mode_may_come_and_go() -> None:
    denoiser = net(chain)
    tokenmerge.apply(denoiser, HOLD)
    with torch.inference_mode():
        expected = image(denoiser)
    assert same(image(denoiser), expected)
    with torch.inference_mode():
        assert same(image(denoiser), expected)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_blocks_are_learned_and_held(compiled_first: bool) -> None:
    denoiser = net(chain)
    tokenmerge.apply(denoiser, HOLD)
    expected = image(denoiser)
    torch._dynamo.reset()
    tokenmerge.remove(denoiser)
    for block in denoiser.blocks:
        block.compile(backend="eager", fullgraph=True)
    if compiled_first:
        run(denoiser)
    tokenmerge.apply(denoiser, HOLD)
    for mine, theirs in zip(image(denoiser) + image(denoiser), expected * 2, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert "4 of 4" in held(denoiser)
    tokenmerge.remove(denoiser)
    assert all(block._compiled_call_impl is not None for block in denoiser.blocks)
    assert same(run(denoiser), expected[0])


def test_hooks_of_others_have_each_block_held_by_itself() -> None:
    """So that hooks between blocks act in held steps too."""
    denoiser = net(chain)
    handle = denoiser.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)
    plain = image(denoiser)
    tokenmerge.apply(denoiser, HOLD)
    found = image(denoiser)
    assert same(found[0], plain[0])
    ran = []
    denoiser.blocks[1].register_forward_hook(lambda *_: ran.append(1))
    image(denoiser)
    assert len(ran) == STEPS
    handle.remove()


def test_a_copy_is_refused_until_it_is_removed() -> None:
    denoiser = net(chain)
    plain = run(denoiser)
    tokenmerge.apply(denoiser, HOLD)
    run(denoiser)
    with pytest.raises(TokenMergeError, match="cannot be copied"):
        copy.deepcopy(denoiser)
    tokenmerge.remove(denoiser)
    assert same(run(copy.deepcopy(denoiser)), plain)


def test_a_denoiser_that_is_compiled_whole_is_held_or_refused_with_a_way_out() -> None:
    denoiser = net(chain)
    torch._dynamo.reset()
    compiled = torch.compile(denoiser, backend="eager")
    plain = run(compiled)
    tokenmerge.apply(compiled, HOLD)
    try:
        found = [run(compiled, step) for step in range(2)]
    except TokenMergeError as error:
        assert "take torch.compile off the denoiser" in str(error)  # noqa: PT017
    else:
        assert same(found[0], plain)
    tokenmerge.remove(compiled)


def test_plans_and_summaries_say_generic() -> None:
    denoiser = net(chain)
    plan = tokenmerge.plan(denoiser, HOLD, height=64, width=64, steps=10)
    assert str(plan) == "Net (generic): hold every 2, among 4 blocks"
    assert plan.to_dict()["family"] == "generic"
    tokenmerge.apply(denoiser, HOLD)
    image(denoiser)
    told = str(tokenmerge.summary(denoiser))
    assert told.startswith("Net (generic): hold every 2")
    assert "blocks.0 to blocks.3" in told
    assert "3 full, 3 held" in told


def test_ports_tell_what_a_block_returns() -> None:
    tokens = torch.ones(1, 2, 3)
    ports = LearnedPorts((0,), ((False, None), (True, 0)))
    assert ports.fits((None, tokens))
    assert not any(map(ports.fits, [tokens, (tokens, None), (None, tokens, None), [None, tokens]]))
    assert ports.output(ports.leaving((None, tokens))) == (None, tokens)
    assert LearnedPorts((0,), ((True, 0),), listed=True).output((tokens,)) == [tokens]


# Real classes

REAL = (
    "SanaTransformer2DModel",
    "ErnieImageTransformer2DModel",
    "Ideogram4Transformer2DModel",
    "Flux3Transformer2DModel",
    "HunyuanDiT2DModel",
    "LTX2VideoTransformer3DModel",
    "WanVACETransformer3DModel",
    "OmniGenTransformer2DModel",
)
RUNS = {
    "Flux3Transformer2DModel": "9 of 12 blocks, in 3 runs",
    "HunyuanDiT2DModel": "6 of 6 blocks, in 1 run (blocks.0 to blocks.5)",
    "WanVACETransformer3DModel": "5 of 8 blocks, in 2 runs",
}


@pytest.fixture(params=REAL, scope="module")
def case(request: Any) -> Denoiser:
    return DENOISERS[request.param]


@pytest.fixture(scope="module")
def built(case: Denoiser) -> nn.Module:
    return case.build()


@pytest.fixture
def real(built: nn.Module) -> Iterator[nn.Module]:
    yield built
    tokenmerge.remove(built)


def drawn(case: Denoiser, denoiser: nn.Module, steps: int = STEPS, **options: Any) -> list[list[Tensor]]:
    return [case.call(denoiser, step, **options) for step in range(steps)]


def test_the_contract_of_real_classes(real: nn.Module, case: Denoiser) -> None:
    plain, before = drawn(case, real), [dict(vars(module)) for module in real.modules()]
    tokenmerge.apply(real, Hold(every=1, start=0.0))
    assert same(drawn(case, real), plain)
    tokenmerge.apply(real, HOLD)
    first, second = drawn(case, real), drawn(case, real)
    assert same(first, second)
    assert same(first[0], plain[0])
    assert not same(first[1], plain[1])
    summary = tokenmerge.summary(real)
    assert summary.steps == {"full": 3, "held": 3}
    assert summary.residual_bytes > 0
    name = type(real).__name__
    assert str(summary).startswith(f"{name} (generic): hold every 2")
    assert f"Held without a table: {RUNS.get(name, '3 of 3 blocks, in 1 run')}" in str(summary)
    tokenmerge.remove(real)
    assert same(drawn(case, real), plain)
    assert [dict(vars(module)) for module in real.modules()] == before


def test_real_classes_at_sizes_in_turn_and_with_guidance(real: nn.Module, case: Denoiser) -> None:
    kinds = [{"size": (8, 8)}, {"size": (4, 8)}, {"batch": 1}]
    expected = []
    for kind in kinds:
        tokenmerge.apply(real, HOLD)
        expected.append(drawn(case, real, 4, **kind))
    for kind, found in [*zip(kinds, expected, strict=True)] * 2:
        assert same(drawn(case, real, 4, **kind), found)
    tokenmerge.apply(real, HOLD)
    pairs = [[case.call(real, step, batch=batch) for batch in (2, 1)] for step in range(4)]
    assert same([pair[0] for pair in pairs], expected[0])
    assert same([pair[1] for pair in pairs], expected[2])


@pytest.mark.parametrize("name", [name for name, case in DENOISERS.items() if case.rises])
def test_rising_times_are_the_steps_of_one_image(name: str) -> None:
    denoiser = DENOISERS[name].build()
    tokenmerge.apply(denoiser, HOLD)
    drawn(DENOISERS[name], denoiser, 4)
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 2}


def test_both_denoisers_of_a_pipeline_are_held() -> None:
    """Ideogram 4 has a second denoiser for the unconditional call."""
    case = DENOISERS["Ideogram4Transformer2DModel"]
    denoisers = {"transformer": case.build(), "unconditional_transformer": case.build()}
    pipe = zoo._pipeline("Ideogram4Pipeline", scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **denoisers)
    packed = case.given(1, 8, 8)
    names = ("encoder_hidden_states", "position_ids", "segment_ids", "indicator")
    # This pipeline takes no prompt embeddings, so we replace its text encoding.
    pipe.encode_prompt = lambda **_: tuple(packed[name] for name in names)
    text = packed["hidden_states"].shape[1] - 64

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        sides = {"height": 128, "width": 128, "max_sequence_length": text, "num_inference_steps": 4}
        guidance = {"guidance_scale": 4.0, "guidance_schedule": None}
        return pipe("", generator=generator, output_type="latent", **sides, **guidance).images

    plain = draw()
    tokenmerge.apply(pipe, HOLD)
    assert not torch.equal(draw(), plain)
    summary = tokenmerge.summary(pipe)
    assert [each.steps for each in (summary, *summary.others)] == [{"full": 3, "held": 1}] * 2
    tokenmerge.remove(pipe)
    assert torch.equal(draw(), plain)
    pipe.unconditional_transformer = torch.compile(pipe.unconditional_transformer)
    with pytest.raises(TokenMergeError, match="already compiled as a whole"):
        tokenmerge.compile(pipe)


# With a table and without

TABLES = ("flux2-klein-base", "flux1-kontext", "wan2.1", "pixart-sigma", "cogvideox-2b", "hunyuanvideo", "zimage")


@pytest.mark.parametrize("name", TABLES)
def test_without_the_table_pictures_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.MODELS[name]
    pipe = model.build()
    denoiser = zoo.denoisers(pipe)[0]
    hold = Hold(every=3, start=0.2)
    tokenmerge.apply(pipe, hold)
    expected, runs = zoo.draw(pipe, model, steps=10), len(tokenmerge.summary(pipe).plan.runs)
    blocks = {block.name for block in family_of(denoiser).blocks(denoiser)}
    monkeypatch.setattr("tokenmerge.families.families", lambda: ())
    # Leave out blocks that the table does not list, such as text refiners.
    monkeypatch.setattr(
        "tokenmerge.families.generic.candidates",
        lambda module: [block for block in candidates(module) if block.name in blocks],
    )
    tokenmerge.apply(pipe, hold)
    # Only a table knows that several runs change the same tokens, so that the last makes up for the error of all.
    assert torch.equal(zoo.draw(pipe, model, steps=10), expected) == (runs == 1)
    summary = tokenmerge.summary(pipe)
    assert summary.plan.family == "generic"
    assert f"Held without a table: {len(blocks)} of {len(blocks)} blocks" in summary.held


def test_merging_needs_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build("flux")
    monkeypatch.setattr("tokenmerge.families.families", lambda: ())
    with pytest.raises(TokenMergeError, match="FluxTransformer2DModel cannot be merged: no table says"):
        tokenmerge.apply(pipe, Merge())


# Key-value caches


def test_calls_that_fill_a_cache_are_refused() -> None:
    case = DENOISERS["QwenImage21Transformer2DModel"]
    denoiser = case.build()
    tokenmerge.apply(denoiser, HOLD)
    given = case.given(1, 8, 8)
    with pytest.raises(TokenMergeError, match="fills a cache of keys and values, which held blocks would not"):
        denoiser(**given, kv_cache=object(), kv_cache_mode="extract")
    drawn(case, denoiser, 3)
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 1}
