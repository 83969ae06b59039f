"""What only a CUDA device can show: dtypes and offload on the device, no waiting for it, compile, and graph capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
import tokenmerge
from tokenmerge.merging.ops import reference

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


def _unet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
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


def _sd3() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
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


def _flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
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

    def __init__(self, build: object, dtype: torch.dtype) -> None:
        from diffusers import EulerDiscreteScheduler

        torch.manual_seed(0)
        denoiser, arguments = build()  # type: ignore[operator]
        self.denoiser = denoiser.to("cuda", dtype).eval()
        self.arguments = {
            name: value.cuda() if name.endswith("ids") else value.to("cuda", dtype) for name, value in arguments.items()
        }
        self.scheduler = EulerDiscreteScheduler()
        self.times = [torch.full((2,), time, device="cuda", dtype=dtype) for time in (0.9, 0.7, 0.5, 0.3)]

    def merge(self, **options: Any) -> None:
        tokenmerge.apply(self.denoiser, scheduler=self.scheduler, **{**tiny.PLAIN, "ratio": 0.5, **options})

    def run(self) -> torch.Tensor:
        return self.steps()[-1]

    @torch.no_grad()
    def steps(self) -> list[torch.Tensor]:
        """What every step gives."""
        self.scheduler.set_timesteps(len(self.times))
        outputs, sample = [], torch.zeros(1)
        for timestep, schedule_time in zip(self.times, self.scheduler.timesteps, strict=True):
            outputs.append(self.denoiser(timestep=timestep, **self.arguments, return_dict=False)[0])
            sample = self.scheduler.step(torch.zeros(1), schedule_time, sample).prev_sample
        return outputs


BUILDERS = [pytest.param(builder, id=builder.__name__.strip("_")) for builder in (_unet, _sd3, _flux)]
FORMS = ["component", "block", "span"]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_runs_on_the_device_and_leaves_no_trace(build: object, sites: str, dtype: torch.dtype) -> None:
    loop = _Loop(build, dtype)
    before = loop.run()
    loop.merge(sites=sites)
    merged = loop.run()
    assert merged.isfinite().all()
    assert not torch.equal(merged, before)
    tokenmerge.remove(loop.denoiser)
    assert torch.equal(loop.run(), before)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", FORMS)
def test_merging_never_waits_for_the_device(build: object, sites: str) -> None:
    loop = _Loop(build, torch.float16)
    loop.merge(sites=sites, weights_every=1)
    # The first image reads the grid from the ids and copies the regions to the device, once.
    loop.run()
    reads_ids = "img_ids" in loop.arguments
    loop.scheduler.set_timesteps(4)
    if reads_ids:
        with torch.no_grad():
            loop.denoiser(timestep=loop.times[0], **loop.arguments)
        loop.scheduler.step(torch.zeros(1), loop.scheduler.timesteps[0], torch.zeros(1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            loop.denoiser(timestep=loop.times[1], **loop.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", ["component", "block"])
def test_inductor_on_the_device_agrees_with_eager_and_compiles_once(build: object, sites: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    loop = _Loop(build, torch.float32)
    # Two tokens nearest to each other are a tie that rounding decides, so selection by position is compared.
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
def test_a_reusing_call_can_be_captured_and_replayed(build: object) -> None:
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
        # Nothing is due at this step, so what is captured is merging alone.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
    graph.replay()
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("first", ["apply", "offload"])
@pytest.mark.parametrize("sites", FORMS)
def test_offload_and_merging_in_either_order(offload: str, first: str, sites: str) -> None:
    from accelerate import cpu_offload, cpu_offload_with_hook

    loop = _Loop(_flux, torch.float32)

    def start_offload() -> None:
        if offload == "model":
            loop.denoiser.to("cpu")
            cpu_offload_with_hook(loop.denoiser, torch.device("cuda"))
        else:
            cpu_offload(loop.denoiser.to("cpu"), torch.device("cuda"))

    loop.merge(sites=sites)
    expected = loop.run()
    tokenmerge.remove(loop.denoiser)
    plain = loop.run()
    steps = [
        lambda: loop.merge(sites=sites),
        start_offload,
    ]
    for step in steps if first == "apply" else reversed(steps):
        step()
    torch.testing.assert_close(loop.run(), expected, rtol=1e-4, atol=1e-4)
    tokenmerge.remove(loop.denoiser)
    torch.testing.assert_close(loop.run(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", [None, *FORMS])
def test_graphs_of_every_phase_give_what_launches_give(build: object, sites: str | None) -> None:
    loop = _Loop(build, torch.float16)
    if sites:
        # Every second step selects and every other one weighs, so that each phase is recorded and replayed.
        schedule = {"destinations_every": 2, "weights_every": 1}
        loop.merge(sites=sites, **schedule)
    launched = [loop.run() for _ in range(2)]
    tokenmerge.compile(loop.denoiser, blocks=False)
    assert all(torch.equal(loop.run(), launched[1]) for _ in range(3))
    told = tokenmerge.summary(loop.denoiser)
    assert f" {2 if sites else 1} CUDA graphs" in told.compiled
    assert "cannot" not in told.compiled
    if sites:
        assert {(group["selected"], group["weighed"]) for group in told.groups} == {(10, 20)}
    tokenmerge.uncompile(loop.denoiser)
    assert torch.equal(loop.run(), launched[1])
    assert "forward" not in vars(loop.denoiser)


@pytest.mark.parametrize("build", BUILDERS)
def test_graphs_notice_what_changes_under_them(build: object) -> None:
    loop = _Loop(build, torch.float16)
    plain = loop.run()
    tokenmerge.compile(loop.denoiser, blocks=False)
    for _ in range(3):
        assert torch.equal(loop.run(), plain)
    loop.merge()
    merged = loop.run()
    assert not torch.equal(merged, plain)
    for _ in range(3):
        assert torch.equal(loop.run(), merged)
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
    assert " 1 CUDA graphs so far" in tokenmerge.summary(loop.denoiser).compiled


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("option", [{}, {"gap": "linear"}, {"gap": "sigma"}, {"trust": 0.5}])
def test_graphs_of_anchored_steps(build: object, option: dict[str, object]) -> None:
    loop = _Loop(build, torch.float16)
    loop.merge(anchor_every=2, **option)
    launched = loop.run()
    tokenmerge.compile(loop.denoiser, blocks=False)
    assert all(torch.equal(loop.run(), launched) for _ in range(4))
    # Steps 0 to 3 are: anchor and select, reuse, anchor, reuse.
    assert " 3 CUDA graphs so far" in tokenmerge.summary(loop.denoiser).compiled
    assert "cannot" not in tokenmerge.summary(loop.denoiser).compiled


@pytest.mark.parametrize(("build", "sites"), [(_unet, "block"), (_unet, "stage"), (_sd3, "block"), (_flux, "block")])
@pytest.mark.parametrize("blocks", [False, True])
def test_graphs_of_held_steps(build: object, sites: str, blocks: bool) -> None:
    torch._dynamo.reset()
    loop = _Loop(build, torch.float16)
    plain = loop.run()
    tokenmerge.apply(loop.denoiser, scheduler=loop.scheduler, preset="hold", sites=sites, start=0.0, anchor_every=2)
    launched = loop.steps()
    assert not torch.equal(launched[-1], plain)
    if blocks:
        # Some calls that compile run other code than those after them: what is compiled for a block with strides of its
        # own is for any stride, and then also taken where code for one stride was compiled before. Kernels are chosen
        # for each code by timing them, and may round differently.
        tokenmerge.compile(loop.denoiser, graphs=False)
        loop.run()
        eager, launched = launched, loop.steps()
        torch.testing.assert_close(launched, eager, rtol=0, atol=0.02)
    tokenmerge.compile(loop.denoiser, blocks=blocks)
    # Steps 0 to 3 are: anchor, held, anchor, held. In the first run the last two are recorded.
    for run in range(4):
        for step, (output, expected) in enumerate(zip(loop.steps(), launched, strict=True)):
            told = f"step {step} of run {run}: "
            torch.testing.assert_close(output, expected, rtol=0, atol=0, msg=lambda reason, told=told: told + reason)
    assert " 2 CUDA graphs so far" in tokenmerge.summary(loop.denoiser).compiled
    assert "cannot" not in tokenmerge.summary(loop.denoiser).compiled


def test_gaps_follow_noise_levels_that_a_scheduler_keeps_on_the_device() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    loop, scheduler = _Loop(_flux, torch.float16), FlowMatchEulerDiscreteScheduler()
    tokenmerge.apply(loop.denoiser, scheduler=scheduler, anchor_every=2, gap="sigma")
    scheduler.set_timesteps(4, device="cuda")
    assert scheduler.sigmas.is_cuda
    assert loop.denoiser._tokenmerge.state.clock.levels == scheduler.sigmas.tolist()


@pytest.mark.parametrize("build", BUILDERS)
def test_graphs_of_a_ratio_that_coverage_chooses(build: object) -> None:
    loop = _Loop(build, torch.float16)
    loop.merge(ratio=0.75, coverage=0.0, destinations_every=2)
    launched = loop.run()
    tokenmerge.compile(loop.denoiser, blocks=False)
    assert all(torch.equal(loop.run(), launched) for _ in range(3))
    told = tokenmerge.summary(loop.denoiser)
    # Steps 0 to 3 are: select and reuse at a third, select and reuse at all of the ratio.
    assert " 4 CUDA graphs so far" in told.compiled
    assert "cannot" not in told.compiled
    assert all(group["ratio"] == 0.75 and 0 < group["coverage"] <= 1 for group in told.groups)


@pytest.mark.parametrize("build", BUILDERS)
def test_compiled_blocks_inside_of_graphs(build: object) -> None:
    torch._dynamo.reset()
    loop = _Loop(build, torch.float32)
    loop.merge(destinations_every=2, selection="uniform")
    eager = loop.run()
    tokenmerge.compile(loop.denoiser)
    for _ in range(3):
        torch.testing.assert_close(loop.run(), eager, rtol=1e-2, atol=1e-2)
    assert " 2 CUDA graphs so far" in tokenmerge.summary(loop.denoiser).compiled
    assert "cannot" not in tokenmerge.summary(loop.denoiser).compiled


@pytest.mark.parametrize("method", ["pool", "random", "tomesd", "lower-bound"])
def test_what_cannot_be_recorded_runs_as_it_is(method: str) -> None:
    loop = _Loop(_unet, torch.float16)
    loop.merge(preset=method)
    launched = [loop.run() for _ in range(2)][1]
    tokenmerge.compile(loop.denoiser, blocks=False)
    for _ in range(3):
        torch.testing.assert_close(loop.run(), launched, rtol=1e-2, atol=1e-2)
    assert "cannot" not in tokenmerge.summary(loop.denoiser).compiled


def test_autocast_is_not_recorded() -> None:
    loop = _Loop(_unet, torch.float32)
    tokenmerge.compile(loop.denoiser, blocks=False)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            results = [loop.run() for _ in range(3)]
        assert all(torch.equal(results[0], each) for each in results)
    assert " 0 CUDA graphs so far" in tokenmerge.summary(loop.denoiser).compiled


@pytest.mark.parametrize("build", BUILDERS)
def test_calls_in_inference_mode_with_arguments_from_outside_are_recorded(build: object) -> None:
    """Compiled blocks tell tensors of inference mode from others, and would be compiled anew in a recording."""
    torch._dynamo.reset()
    loop = _Loop(build, torch.float16)
    tokenmerge.compile(loop.denoiser)
    with torch.inference_mode():
        for _ in range(3):
            loop.denoiser(timestep=loop.times[0], **loop.arguments)
    compiled = tokenmerge.summary(loop.denoiser).compiled
    assert " 1 CUDA graphs so far" in compiled
    assert "cannot be recorded" not in compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("sites", FORMS)
def test_kernels_and_reference_give_the_same_denoiser(build: object, sites: str, dtype: torch.dtype) -> None:
    loop = _Loop(build, dtype)
    results = []
    for backend in ("reference", "triton"):
        # By position: rounding decides between destinations that tie.
        loop.merge(sites=sites, selection="uniform", backend=backend)
        results.append(loop.run().float())
    tolerance = 2e-2 if dtype == torch.float16 else 1e-1
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
