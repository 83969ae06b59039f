"""What only a CUDA device can show: dtypes, offload, calls that never wait for the device, compile, CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tokenmerge
import zoo
from healed import healed
from tokenmerge import Hold, Merge
from tokenmerge.families import family_of
from tokenmerge.merging.ops import reference
from tokenmerge.runtime.levels import noise_levels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ["facility-location", "graph-cut", "stochastic", "random", "uniform"])
def test_selection_on_the_device_covers_as_well_as_on_the_cpu(dtype: torch.dtype, selection: str) -> None:
    tokens = torch.randn(2, 1024, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(1)
        chosen = reference.select(tokens.to(device), None, 16, 32, selection=selection, generator=generator).cpu()
        assert all(len(set(region.tolist())) == 32 for region in chosen.flatten(0, 1))
        similarity = reference.pairwise_similarity(tokens.float().view(2, 16, 64, 64), "cosine")
        values.append(reference.coverage(similarity, chosen % 64))
    torch.testing.assert_close(values[0], values[1], rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unmerge", ["transpose", "pinv"])
def test_merge_and_unmerge_on_the_device_equal_the_cpu(dtype: torch.dtype, unmerge: str) -> None:
    tokens = F.normalize(torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(0)), dim=-1).to(dtype)
    chosen = reference.select(tokens.float(), None, 16, 8)
    results = []
    for device in ("cpu", "cuda"):
        here = tokens.to(device)
        merge, spread = reference.weigh(here, None, chosen.to(device), temperature=0.05)
        if unmerge == "pinv":
            spread = reference.pinv_weights(merge, spread)
        merged = reference.merge(here, None, merge)
        results.append(reference.unmerge(merged, None, None, spread, residual=here).float().cpu())
    tolerance = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]
Build = Callable[[], Built]


def _unet() -> Built:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 32, 64),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        cross_attention_dim=32,
        attention_head_dim=8,
        use_linear_projection=True,
    )
    return unet, {"sample": torch.randn(2, 4, 32, 32), "encoder_hidden_states": torch.randn(2, 7, 32)}


def _sd3() -> Built:
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    arguments = {
        "hidden_states": torch.randn(2, 4, 32, 32),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
    }
    return transformer, arguments


def _flux() -> Built:
    from diffusers import FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    arguments = {
        "hidden_states": torch.randn(2, 256, 16),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return transformer, arguments


class _Loop:
    """A denoiser on the device, driven by a scheduler for a few steps as a pipeline would."""

    time = "timestep"  # the name of the denoiser's time argument

    def __init__(self, build: Build, dtype: torch.dtype, calls: int = 1, steps: int = 4) -> None:
        torch.manual_seed(0)
        denoiser, arguments = build()
        arguments = {
            name: value.cuda() if name.endswith("ids") else value.to("cuda", dtype) for name, value in arguments.items()
        }
        times = [0.9 - 0.6 * step / (steps - 1) for step in range(steps)]
        self._drive(denoiser.to("cuda", dtype), arguments, calls)
        self.times = [torch.full((2,), time, device="cuda", dtype=dtype) for time in times]

    def _drive(self, denoiser: torch.nn.Module, arguments: dict[str, Any], calls: int = 1) -> None:
        from diffusers import EulerDiscreteScheduler

        self.denoiser, self.arguments = denoiser.eval(), arguments
        self.scheduler = EulerDiscreteScheduler()
        self.calls = calls  # calls per step; guidance makes two

    @classmethod
    def of_family(cls, name: str, steps: int) -> _Loop:
        """The loop of a tiny model in `zoo.py`, with the example arguments of its table."""
        loop = cls.__new__(cls)
        denoiser = zoo.denoisers(zoo.MODELS[name].build())[0].cuda()
        given = family_of(denoiser).example(denoiser, 2, 16, 16, 3)
        loop.time = "t" if "t" in given else "timestep"
        time = given.pop(loop.time)
        loop._drive(denoiser, given)
        loop.times = [(time * (1.0 - 0.1 * step)).to(time.dtype) for step in range(steps)]
        return loop

    def apply(self, *techniques: Merge | Hold) -> None:
        tokenmerge.apply(self.denoiser, list(techniques), scheduler=self.scheduler)

    def merge(self, **fields: Any) -> None:
        self.apply(Merge(**fields))

    def run(self) -> torch.Tensor:
        """The outputs of all calls, stacked."""
        return torch.stack(self.steps())

    def steps(self) -> list[torch.Tensor]:
        """The output of every call."""
        return list(self.walk())

    @torch.no_grad()
    def walk(self) -> Iterator[torch.Tensor]:
        self.scheduler.set_timesteps(len(self.times))
        sample = torch.zeros(1)
        for timestep, schedule_time in zip(self.times, self.scheduler.timesteps, strict=True):
            for number in range(self.calls):
                arguments = dict(self.arguments)
                if number:
                    arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"] - number
                output = self.denoiser(**{self.time: timestep}, **arguments, return_dict=False)[0]
                yield output if isinstance(output, torch.Tensor) else torch.stack(output)
            sample = self.scheduler.step(torch.zeros(1), schedule_time, sample).prev_sample

    @property
    def compiled(self) -> str:
        return tokenmerge.summary(self.denoiser).compiled

    @property
    def graphs(self) -> int:
        """The number of recorded kinds of call; fails if any could not be recorded."""
        told = self.compiled
        assert "cannot" not in told, told
        return int(told.split(" CUDA graphs so far")[0].split()[-1])


BUILDERS = [pytest.param(builder, id=builder.__name__.strip("_")) for builder in (_unet, _sd3, _flux)]
FORMS = ["component", "block"]
HOLD = Hold(every=2, start=0.0)  # steps 0 to 4 are: kept, held, kept, held, kept; the last is always full
WAYS: dict[str, list[Any]] = {
    **{f"merged {sites}s": [Merge(sites=sites)] for sites in FORMS},
    "held": [HOLD],
    **{f"merged {sites}s, held": [Merge(sites=sites), HOLD] for sites in FORMS},
}
ways = pytest.mark.parametrize("techniques", WAYS.values(), ids=WAYS)


@pytest.mark.parametrize("build", BUILDERS)
@ways
@pytest.mark.parametrize("dtype", DTYPES)
def test_techniques_run_on_the_device_and_leave_no_trace(
    build: Build, techniques: list[Any], dtype: torch.dtype
) -> None:
    loop = _Loop(build, dtype)
    before = loop.run()
    loop.apply(*techniques)
    changed = loop.run()
    assert changed.isfinite().all()
    assert not torch.equal(changed, before)
    assert torch.equal(loop.run(), changed)
    tokenmerge.remove(loop.denoiser)
    assert torch.equal(loop.run(), before)


@contextmanager
def _waiting_refused(refused: bool) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if refused else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("build", BUILDERS)
@ways
def test_no_call_waits_for_the_device(build: Build, techniques: list[Any]) -> None:
    loop = _Loop(build, torch.float16)
    loop.apply(*(each.replace(weights_every=1) if isinstance(each, Merge) else each for each in techniques))
    # The first image copies the regions to the device.
    loop.run()
    calls = loop.walk()
    for number in range(len(loop.times)):
        # The first call of an image reads the grid from the ids.
        with _waiting_refused(number > 0 or "img_ids" not in loop.arguments):
            next(calls)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", FORMS)
def test_inductor_on_the_device_agrees_with_eager_and_compiles_once(build: Build, sites: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    loop = _Loop(build, torch.float32)
    # Mutual nearest neighbours tie and rounding decides between them, so compare selection by position.
    loop.merge(sites=sites, destinations_every=2, selection="uniform")
    eager = loop.run()
    counter = CompileCounterWithBackend("inductor")
    blocks = ("BasicTransformerBlock", "JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock")
    for module in loop.denoiser.modules():
        if type(module).__name__ in blocks:
            module.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(loop.run(), eager, rtol=1e-2, atol=1e-2)
    graphs = counter.frame_count
    loop.run()
    assert counter.frame_count == graphs


@pytest.mark.parametrize("build", BUILDERS)
def test_a_reusing_call_can_be_captured_and_replayed(build: Build) -> None:
    loop = _Loop(build, torch.float16)
    loop.merge()
    loop.scheduler.set_timesteps(4)
    timestep = loop.times[0].clone()

    def call() -> torch.Tensor:
        return loop.denoiser(timestep=timestep, **loop.arguments, return_dict=False)[0]

    def step(number: int) -> None:
        loop.scheduler.step(torch.zeros(1), loop.scheduler.timesteps[number], torch.zeros(1))

    with torch.no_grad():
        call()
        step(0)
        expected = call()
        step(1)
        torch.cuda.synchronize()
        # No map is due at this step, so the capture contains merging alone.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
    graph.replay()
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("first", ["apply", "offload"])
@ways
def test_offload_and_techniques_in_either_order(offload: str, first: str, techniques: list[Any]) -> None:
    from accelerate import cpu_offload, cpu_offload_with_hook

    loop = _Loop(_flux, torch.float32)

    def start_offload() -> None:
        if offload == "model":
            loop.denoiser.to("cpu")
            cpu_offload_with_hook(loop.denoiser, torch.device("cuda"))
        else:
            cpu_offload(loop.denoiser.to("cpu"), torch.device("cuda"))

    def apply() -> None:
        loop.apply(*techniques)

    apply()
    expected = loop.run()
    tokenmerge.remove(loop.denoiser)
    plain = loop.run()
    for step in (apply, start_offload) if first == "apply" else (start_offload, apply):
        step()
    torch.testing.assert_close(loop.run(), expected, rtol=1e-4, atol=1e-4)
    tokenmerge.remove(loop.denoiser)
    torch.testing.assert_close(loop.run(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", [None, *FORMS])
def test_graphs_of_every_kind_of_step_give_what_launches_give(build: Build, sites: str | None) -> None:
    loop = _Loop(build, torch.float16)
    if sites:
        # Every second step selects and every other one weighs, so that each kind is recorded and replayed.
        loop.merge(sites=sites, destinations_every=2, weights_every=1)
    launched = [loop.run() for _ in range(2)]
    tokenmerge.compile(loop.denoiser, blocks=False)
    assert all(torch.equal(loop.run(), launched[1]) for _ in range(3))
    assert loop.graphs == (2 if sites else 1)
    if sites:
        groups = tokenmerge.summary(loop.denoiser).groups
        assert {(group["selected"], group["weighed"]) for group in groups} == {(2, 4)}
    tokenmerge.uncompile(loop.denoiser)
    assert torch.equal(loop.run(), launched[1])
    assert "forward" not in vars(loop.denoiser)


@pytest.mark.parametrize("build", BUILDERS)
def test_graphs_notice_what_changes_under_them(build: Build) -> None:
    loop = _Loop(build, torch.float16)
    plain = loop.run()
    tokenmerge.compile(loop.denoiser, blocks=False)
    for _ in range(3):
        assert torch.equal(loop.run(), plain)
    seen = [plain]
    for techniques in ([Merge()], [HOLD], [Merge(), HOLD]):
        loop.apply(*techniques)
        changed = loop.run()
        assert not any(torch.equal(changed, other) for other in seen)
        seen.append(changed)
        for _ in range(3):
            assert torch.equal(loop.run(), changed)
    tokenmerge.remove(loop.denoiser)
    assert torch.equal(loop.run(), plain)
    with torch.no_grad():
        layer = next(module for module in loop.denoiser.modules() if isinstance(module, torch.nn.Linear))
        before = layer.weight
        layer.weight = torch.nn.Parameter(torch.zeros_like(before))
    assert not torch.equal(loop.run(), plain)
    layer.weight = before
    for _ in range(3):
        assert torch.equal(loop.run(), plain)


def test_graphs_notice_an_exchanged_buffer() -> None:
    loop = _Loop(_sd3, torch.float16)
    plain = loop.run()
    tokenmerge.compile(loop.denoiser, blocks=False)
    assert all(torch.equal(loop.run(), plain) for _ in range(3))
    before = loop.denoiser.pos_embed.pos_embed
    loop.denoiser.pos_embed.pos_embed = torch.zeros_like(before)
    other = loop.run()
    assert not torch.equal(other, plain)
    assert all(torch.equal(loop.run(), other) for _ in range(3))
    loop.denoiser.pos_embed.pos_embed = before
    assert all(torch.equal(loop.run(), plain) for _ in range(3))
    assert loop.graphs == 1


def _assert_steps_equal(loop: _Loop, expected: list[torch.Tensor], runs: int = 4) -> None:
    for run in range(runs):
        for number, (output, wanted) in enumerate(zip(loop.steps(), expected, strict=True)):
            told = f"call {number} of run {run}: "
            torch.testing.assert_close(output, wanted, rtol=0, atol=0, msg=lambda reason, told=told: told + reason)


HELD = [(_unet, "blocks"), (_unet, "stages"), (_sd3, "blocks"), (_flux, "blocks")]
# Merge options beside Hold, and the number of kinds of step apart from the held one.
TOGETHER: dict[str, tuple[dict[str, Any] | None, int]] = {
    "held": (None, 1),
    "merged, maps reused": ({}, 2),
    "merged, weights renewed": ({"weights_every": 1}, 2),
    "merged, destinations renewed": ({"destinations_every": 1}, 1),
    "merged components": ({"sites": "component"}, 2),
    "merged at first": ({"stop": 0.3}, 2),
}
together = pytest.mark.parametrize(("merge", "kinds"), TOGETHER.values(), ids=TOGETHER)


def _hold(loop: _Loop, what: str, merge: dict[str, Any] | None, **fields: Any) -> None:
    loop.apply(*([] if merge is None else [Merge(**merge)]), HOLD.replace(what=what, **fields))


@pytest.mark.parametrize(("build", "what"), HELD)
@together
def test_graphs_of_held_steps(build: Build, what: str, merge: dict[str, Any] | None, kinds: int) -> None:
    loop = _Loop(build, torch.float16, steps=5)
    plain = loop.run()
    _hold(loop, what, merge)
    launched = loop.steps()
    assert not torch.equal(torch.stack(launched), plain)
    memory = tokenmerge.summary(loop.denoiser).residual_bytes
    tokenmerge.compile(loop.denoiser, blocks=False)
    # The first run records the last step of each kind.
    _assert_steps_equal(loop, launched)
    assert loop.graphs == kinds + 1
    told = tokenmerge.summary(loop.denoiser)
    assert told.steps["held"] == 2
    assert told.residual_bytes == memory, "a run has more than one residual"


@pytest.mark.parametrize(("build", "what"), HELD)
@pytest.mark.parametrize("merge", [None, {"selection": "uniform"}], ids=["held", "merged, held"])
def test_graphs_of_held_steps_with_compiled_blocks(build: Build, what: str, merge: dict[str, Any] | None) -> None:
    torch._dynamo.reset()
    loop = _Loop(build, torch.float32, steps=5)
    _hold(loop, what, merge)
    eager = loop.steps()
    # A call that compiles may run other code than later calls: once a block is compiled for any stride, that code also
    # replaces code compiled earlier for one stride. Kernels are chosen per code by timing, and may round differently.
    tokenmerge.compile(loop.denoiser, graphs=False)
    loop.run()
    launched = loop.steps()
    torch.testing.assert_close(launched, eager, rtol=0, atol=0.01)
    tokenmerge.compile(loop.denoiser)
    _assert_steps_equal(loop, launched)
    assert loop.graphs == (2 if merge is None else 3)


@pytest.mark.parametrize(("build", "what"), HELD)
@together
def test_graphs_of_guidance_in_two_calls(build: Build, what: str, merge: dict[str, Any] | None, kinds: int) -> None:
    loop = _Loop(build, torch.float16, calls=2, steps=5)
    _hold(loop, what, merge)
    launched = loop.steps()
    assert not any(torch.equal(one, other) for one, other in zip(launched[::2], launched[1::2], strict=True))
    tokenmerge.compile(loop.denoiser, blocks=False)
    _assert_steps_equal(loop, launched)
    # Each call has its own residuals, and so its own recording.
    assert loop.graphs == 2 * (kinds + 1)


# The first model of each family; model names begin with the family.
FAMILIES = list({name.split("-")[0]: name for name in reversed(zoo.MODELS)}.values())
# Their forwards copy tensors from the CPU, or read from the device how many entries of a mask are set.
UNRECORDED = {"chroma", "cogview4", "hunyuanimage", "hunyuanvideo15", "kandinsky5", "lumina2", "mochi"}


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_of_every_family(name: str) -> None:
    loop = _Loop.of_family(name, steps=5)
    plain = loop.steps()
    loop.apply(Merge(selection="uniform"), HOLD)
    launched = loop.steps()
    assert all(output.isfinite().all() for output in launched)
    assert not any(torch.equal(*pair) for pair in zip(launched, plain, strict=True))
    tokenmerge.compile(loop.denoiser, blocks=False)
    _assert_steps_equal(loop, launched)
    if name.split("-")[0] in UNRECORDED:
        assert "some calls cannot be recorded" in loop.compiled
    else:
        assert loop.graphs == 3


def test_residuals_follow_noise_levels_that_a_scheduler_keeps_on_the_device() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    loop, scheduler = _Loop(_flux, torch.float16), FlowMatchEulerDiscreteScheduler()
    tokenmerge.apply(loop.denoiser, Hold(every=2, start=0.2), scheduler=scheduler)
    scheduler.set_timesteps(4, device="cuda")
    assert scheduler.sigmas.is_cuda
    clock = loop.denoiser._tokenmerge.state.follower.clock
    assert clock._levels == noise_levels(scheduler)


@pytest.mark.parametrize("build", BUILDERS)
def test_compiled_blocks_inside_of_graphs(build: Build) -> None:
    torch._dynamo.reset()
    loop = _Loop(build, torch.float32)
    loop.merge(destinations_every=2, selection="uniform")
    eager = loop.run()
    tokenmerge.compile(loop.denoiser)
    for _ in range(3):
        torch.testing.assert_close(loop.run(), eager, rtol=1e-2, atol=1e-2)
    assert loop.graphs == 2


@pytest.mark.parametrize("preset", ["pool", "random", "tomesd", "lower-bound"])
def test_what_cannot_be_recorded_runs_as_it_is(preset: str) -> None:
    loop = _Loop(_unet, torch.float16)
    tokenmerge.apply(loop.denoiser, preset, scheduler=loop.scheduler)
    launched = [loop.run() for _ in range(2)][1]
    tokenmerge.compile(loop.denoiser, blocks=False)
    for _ in range(3):
        torch.testing.assert_close(loop.run(), launched, rtol=1e-2, atol=1e-2)
    assert "cannot" not in loop.compiled


def test_autocast_is_not_recorded() -> None:
    loop = _Loop(_unet, torch.float32)
    tokenmerge.compile(loop.denoiser, blocks=False)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            results = [loop.run() for _ in range(3)]
        assert all(torch.equal(results[0], each) for each in results)
    assert loop.graphs == 0


@pytest.mark.parametrize("build", BUILDERS)
def test_calls_in_inference_mode_with_arguments_from_outside_are_recorded(build: Build) -> None:
    """Compiled blocks distinguish inference-mode tensors from others and would recompile during recording."""
    torch._dynamo.reset()
    loop = _Loop(build, torch.float16)
    tokenmerge.compile(loop.denoiser)
    with torch.inference_mode():
        for _ in range(3):
            loop.denoiser(timestep=loop.times[0], **loop.arguments)
    assert loop.graphs == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", FORMS)
def test_kernels_and_reference_give_the_same_denoiser(build: Build, sites: str, dtype: torch.dtype) -> None:
    loop = _Loop(build, dtype)
    results = []
    for backend in ("reference", "triton"):
        # Selection by position: rounding would decide between tied destinations.
        loop.merge(sites=sites, selection="uniform", backend=backend)
        results.append(loop.run().float())
    tolerance = 2e-2 if dtype == torch.float16 else 1e-1
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("build", BUILDERS)
@ways
def test_a_deleted_model_leaves_the_device(build: Build, techniques: list[Any], graphs: bool) -> None:
    """Weights that wait for the garbage collector would leave no room for the next model."""
    loop = _Loop(build, torch.float16)
    loop.apply(*techniques)
    if graphs:
        tokenmerge.compile(loop.denoiser, blocks=False)
    for _ in range(3):
        loop.run()
    weight = weakref.ref(next(loop.denoiser.parameters()))
    gc.collect()
    gc.disable()
    try:
        del loop
        assert weight() is None
    finally:
        gc.enable()


@pytest.fixture
def _without_cudnn_attention() -> Iterator[None]:
    """cuDNN attention's backward gives NaN in bfloat16 for heads of 16 channels, even without any technique."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("_without_cudnn_attention")
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_reference_give_the_same_gradients(build: Build, dtype: torch.dtype) -> None:
    """Under autocast and with gradient checkpointing, as in training."""
    found = []
    for backend in ("reference", "triton"):
        loop = _Loop(build, torch.float32)
        loop.apply(Merge(selection="uniform", backend=backend))
        loop.denoiser.train().enable_gradient_checkpointing()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = loop.denoiser(timestep=loop.times[0], **loop.arguments, return_dict=False)[0]
        output.float().square().mean().backward()
        gradients = [each.grad.flatten() for each in loop.denoiser.parameters() if each.grad is not None]
        found.append(torch.cat(gradients).double())
    least = 0.99 if dtype == torch.bfloat16 else 0.999999
    assert torch.cosine_similarity(*found, dim=0) > least


@pytest.mark.parametrize("build", BUILDERS)
def test_graphs_replay_a_healed_lora_in_merged_steps(build: Build, tmp_path: Path) -> None:
    """Merged and full steps have separate graphs, and the LoRA adds none."""
    merge = Merge(destinations_every=10, weights_every=10)
    torch.manual_seed(0)
    denoiser, _ = build()
    with_lora = healed(denoiser, merge, tmp_path / "lora.safetensors", torch.float16)
    results = []
    for technique in (merge, with_lora):
        loop = _Loop(build, torch.float16, steps=6)
        loop.apply(technique.replace(start=0.5))
        launched = loop.steps()
        tokenmerge.compile(loop.denoiser, blocks=False)
        for _ in range(3):
            assert all(torch.equal(*pair) for pair in zip(loop.steps(), launched, strict=True))
        results.append((launched, loop.graphs))
    (plain, graphs), (changed, graphs_with_lora) = results
    assert [torch.equal(*pair) for pair in zip(plain, changed, strict=True)] == [True] * 3 + [False] * 3
    assert graphs_with_lora == graphs
