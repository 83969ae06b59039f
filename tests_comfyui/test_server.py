"""Workflows that a real ComfyUI runs, with the nodes and without."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import time
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from server import Failed, Server, sampled
from torch import Tensor

from tokenmerge import Hold, Merge

FLUX = ("TestFlux", {"prompt": "a photo of a sunflower", "side": 64, "batch": 1})


def random(kind: str, **changes: int) -> tuple[str, dict[str, Any]]:
    return "TestRandom", {"kind": kind, "batch": 1, "text": 8, "scale": 1, **changes}


KINDS = ("flux", "chroma", "unet", "sdxl", "sd3", "wan", "qwen")
LOADERS = {kind: FLUX if kind == "flux" else random(kind) for kind in KINDS}
MERGED = ("flux", "chroma", "unet", "sdxl")
# An early start, because these tests run fewer steps than users do.
EVERY = {"every": 2, "start": 0.2}
# The node that each test puts on a MODEL, and its changed widgets.
NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "hold": ("TokenMergeHold", EVERY),
    "prediction": ("TokenMergeHold", {**EVERY, "start": 0.3, "what": "prediction"}),
    "merge": ("TokenMergeMerge", {"ratio": 0.5}),
}
STEPS = 12
# Bound on rounding where terms are summed in another order.
SAME = 1e-3


class Drawn:
    """The result of one workflow: the latent, and the number of steps of each kind."""

    def __init__(self, server: Server, *args: Any, **sampling: Any) -> None:
        before = len(server.log())
        self.file = server.run(sampled(*args, **sampling))["save"]
        self.latent: Tensor = load_file(self.file)["latent_tensor"]
        told = re.findall(r"Steps of the last image: (.*)", server.log()[before:])
        self.steps = {
            kind: int(count) for count, kind in re.findall(r"(\d+) (full|merged|held)", told[-1] if told else "")
        }

    def drift(self, plain: Drawn | Tensor) -> float:
        other = plain.latent if isinstance(plain, Drawn) else plain
        return float((self.latent - other).norm() / other.norm())

    @property
    def left_out(self) -> int:
        return self.steps.get("held", 0)

    def acted(self, node: str, steps: int = STEPS) -> bool:
        """Whether every step was counted, and enough of them were merged or held."""
        some = self.steps.get("merged") == steps if node == "merge" else self.left_out >= steps // 4
        return some and sum(self.steps.values()) == steps


@pytest.fixture(scope="session")
def plain(server: Server) -> Any:
    """Pictures without the nodes, each drawn once."""

    @cache
    def draw(kind: str, **sampling: Any) -> Drawn:
        return Drawn(server, LOADERS[kind], **sampling)

    return draw


def hold(server: Server, **changes: Any) -> tuple[str, dict[str, Any]]:
    return server.usual("TokenMergeHold", **changes)


def merge(server: Server, **changes: Any) -> tuple[str, dict[str, Any]]:
    return server.usual("TokenMergeMerge", **changes)


def node_of(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    kind, changes = NODES[name]
    return server.usual(kind, **changes)


@pytest.fixture(scope="session")
def done(server: Server) -> Any:
    """Pictures with one node, each drawn once."""

    @cache
    def draw(kind: str, node: str) -> Drawn:
        return Drawn(server, LOADERS[kind], node_of(server, node))

    return draw


def test_the_environment_has_no_diffusers() -> None:
    assert importlib.util.find_spec("diffusers") is None


@pytest.mark.parametrize(("node", "technique"), [("TokenMergeHold", Hold), ("TokenMergeMerge", Merge)])
def test_widgets_are_told_in_the_words_of_the_fields(server: Server, node: str, technique: Any) -> None:
    told = server.get(f"/object_info/{node}")[node]
    docs = technique.field_docs()
    inputs = {name: options for name, (_, options) in told["input"]["required"].items()}
    assert len(inputs) > 5
    assert all(options["tooltip"] for options in inputs.values())
    shared = inputs.keys() & docs.keys()
    assert len(shared) >= 4
    assert all(inputs[name]["tooltip"].startswith(docs[name]) for name in shared)
    assert told["output"] == ["MODEL"]
    assert f"`{next(iter(shared))}`" in server.get(f"/extensions/tokenmerge/docs/{node}.md")


def test_example_workflows_are_offered(server: Server) -> None:
    offered = server.get("/workflow_templates")["tokenmerge"]
    assert sorted(offered) == ["flux-hold", "sdxl-merge-hold"]
    for name in offered:
        workflow = server.get(f"/api/workflow_templates/tokenmerge/{name}.json")
        for node in workflow["nodes"]:
            if node["type"] == "Note":
                continue
            told = server.get(f"/object_info/{node['type']}")[node["type"]]["input"]["required"]
            linked = {each["name"] for each in node["inputs"]}
            assert linked <= told.keys()
            # ComfyUI adds a widget that says what becomes of the seed after a run.
            widgets = [each for each in node["widgets_values"] if each != "fixed"]
            assert len(widgets) == len(told.keys() - linked)


@pytest.mark.parametrize(
    ("kind", "node"), [(kind, node) for kind in KINDS for node in NODES if node != "merge" or kind in MERGED]
)
def test_a_node_acts_and_leaves_nothing_behind(server: Server, plain: Any, done: Any, kind: str, node: str) -> None:
    first, acted = plain(kind), done(kind, node)
    assert acted.acted(node)
    assert acted.latent.isfinite().all()
    if node == "merge":
        less = Drawn(server, LOADERS[kind], merge(server, ratio=0.05))
        assert 0 < less.drift(first) < acted.drift(first)
    else:
        # Held steps bring the picture nearer to the plain one than the full steps alone.
        fewer = plain(kind, steps=STEPS - acted.left_out)
        assert 0 < acted.drift(first) < fewer.drift(first)
    assert torch.equal(Drawn(server, LOADERS[kind], node_of(server, node)).latent, acted.latent)
    # Without the node, the model draws as before.
    assert torch.equal(Drawn(server, LOADERS[kind]).latent, first.latent)


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_a_tolerance_holds_less_where_it_is_small(server: Server, plain: Any, kind: str) -> None:
    first = plain(kind, steps=20)
    some, more = (Drawn(server, LOADERS[kind], hold(server, tolerance=tolerance), steps=20) for tolerance in (0.1, 0.8))
    assert some.steps.get("held", 0) < more.steps["held"]
    fewer = plain(kind, steps=20 - more.left_out)
    assert some.drift(first) < more.drift(first) < fewer.drift(first)


@pytest.mark.parametrize(
    ("kind", "when"),
    [*((kind, "odd") for kind in KINDS), *((kind, when) for kind in ("flux", "unet") for when in ("always", "late"))],
)
@pytest.mark.parametrize("node", ["hold", "prediction"])
def test_conditions_may_be_split_and_joined(server: Server, done: Any, kind: str, node: str, when: str) -> None:
    """Hold works per condition or per evaluation, not per call, so the picture stays the same."""
    split = Drawn(server, LOADERS[kind], ("TestSplit", {"when": when}), node_of(server, node))
    assert split.steps == done(kind, node).steps
    assert split.drift(done(kind, node)) < SAME


@pytest.mark.parametrize("kind", MERGED)
def test_conditions_may_be_split_under_a_merge(server: Server, plain: Any, done: Any, kind: str) -> None:
    joined = done(kind, "merge")
    always, odd = (
        Drawn(server, LOADERS[kind], ("TestSplit", {"when": when}), node_of(server, "merge"))
        for when in ("always", "odd")
    )
    assert always.drift(joined) < SAME
    # Where ComfyUI alternates, maps are made anew: the picture differs, but is merged as well as the first.
    assert odd.acted("merge")
    assert odd.drift(plain(kind)) < 1.25 * joined.drift(plain(kind))


def test_conditions_of_other_lengths(server: Server) -> None:
    loader = random("unet", text=12)
    held, split = (
        Drawn(server, loader, *patches, hold(server, **EVERY)) for patches in ((), (("TestSplit", {"when": "odd"}),))
    )
    assert held.steps == split.steps
    assert split.drift(held) < SAME


@pytest.mark.parametrize("kind", ["flux", "unet"])
@pytest.mark.parametrize("node", NODES)
def test_batches(server: Server, done: Any, kind: str, node: str) -> None:
    """No picture of a batch depends on the others."""
    name, inputs = LOADERS[kind]
    both = Drawn(server, (name, {**inputs, "batch": 2}), node_of(server, node))
    assert both.latent.shape[0] == 2
    assert both.steps == done(kind, node).steps
    assert done(kind, node).drift(both.latent[:1]) < SAME
    assert done(kind, node).drift(both.latent[1:]) > 0.1


@pytest.mark.parametrize(
    ("kind", "layer"), [("flux", "double_blocks.1.img_attn.proj"), ("unet", "middle_block.0.in_layers.2")]
)
@pytest.mark.parametrize("node", NODES)
def test_lora(server: Server, plain: Any, done: Any, kind: str, layer: str, node: str) -> None:
    shape = {"flux": (256, 256), "unet": (128, 128, 3, 3)}[kind]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"diffusion_model.{layer}.lora_up.weight": torch.randn(
            shape[0], 4, *(1,) * (len(shape) - 2), generator=generator
        ),
        f"diffusion_model.{layer}.lora_down.weight": 0.1 * torch.randn(4, *shape[1:], generator=generator),
    }
    save_file(tensors, server.base / "models" / "loras" / f"{kind}.safetensors")
    lora = ("LoraLoaderModelOnly", {"lora_name": f"{kind}.safetensors", "strength_model": 1.0})
    whole = Drawn(server, LOADERS[kind], lora)
    before, after = (
        Drawn(server, LOADERS[kind], *patches)
        for patches in ((lora, node_of(server, node)), (node_of(server, node), lora))
    )
    assert whole.drift(plain(kind)) > 0.01
    assert before.acted(node)
    assert torch.equal(before.latent, after.latent)
    # The LoRA shows in the picture, also in held steps.
    assert before.drift(whole) < done(kind, node).drift(whole)


@pytest.mark.parametrize("kind", ["flux", "unet"])
@pytest.mark.parametrize("node", NODES)
def test_controlnet(server: Server, plain: Any, done: Any, kind: str, node: str) -> None:
    control = {"side": 64 if kind == "flux" else 128}
    whole = Drawn(server, LOADERS[kind], control=control)
    acted, split = (
        Drawn(server, LOADERS[kind], *patches, node_of(server, node), control=control)
        for patches in ((), (("TestSplit", {"when": "always"}),))
    )
    assert whole.drift(plain(kind)) > 0.01
    assert acted.acted(node)
    assert split.steps == acted.steps
    assert split.drift(acted) < SAME
    assert acted.drift(whole) < acted.drift(plain(kind))


@pytest.mark.parametrize("node", NODES)
def test_an_interrupted_run_leaves_nothing_behind(server: Server, plain: Any, done: Any, node: str) -> None:
    before = len(server.log())
    number = server.queue(sampled(random("unet", scale=2), node_of(server, node), steps=2000))
    while not re.search(r"\b[1-9]\d*/2000", server.log()[before:]):
        time.sleep(0.05)
    server.post("/interrupt", {})
    assert server.wait(number)["status"]["status_str"] == "error"
    assert "Steps of the last image" not in server.log()[before:]
    assert torch.equal(Drawn(server, LOADERS["unet"]).latent, plain("unet").latent)
    assert torch.equal(Drawn(server, LOADERS["unet"], node_of(server, node)).latent, done("unet", node).latent)


@pytest.mark.parametrize("kind", ["flux", "unet"])
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("left", [False, True], ids=["whole", "left"])
def test_a_picture_that_is_drawn_over(server: Server, plain: Any, kind: str, node: str, left: bool) -> None:
    """The sampler starts halfway, with noise on an existing picture or on half of it."""
    shutil.copy(plain(kind).file, server.base / "input" / f"{kind}.latent")
    over = {"start": f"{kind}.latent", "denoise": 0.6, "seed": 1, "left": left}
    whole, acted = (Drawn(server, LOADERS[kind], *patches, **over) for patches in ((), (node_of(server, node),)))
    fewer = Drawn(server, LOADERS[kind], **over, steps=STEPS - acted.left_out)
    assert acted.acted(node)
    assert 0.01 < whole.drift(plain(kind)) < plain(kind, seed=1).drift(plain(kind))
    rest = slice(3 * whole.latent.shape[-1] // 4, None) if left else slice(0, 0)
    assert torch.allclose(acted.latent[..., rest], plain(kind).latent[..., rest], rtol=1e-4, atol=1e-4)
    assert acted.drift(whole) > 0
    assert node == "merge" or acted.drift(whole) < fewer.drift(whole)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m_sde", "dpmpp_sde"])
@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_samplers_that_add_noise(server: Server, plain: Any, kind: str, sampler: str) -> None:
    """Here Hold holds a UNet's blocks, whose convolutions see the noise; elsewhere the clean prediction."""
    sampling, number = {"sampler_name": sampler, "steps": 20}, 39 if sampler == "dpmpp_sde" else 20
    first = plain(kind, **sampling)
    held = Drawn(server, LOADERS[kind], hold(server, every=2), **sampling)
    assert held.acted("hold", number)
    # Solvers with two evaluations per step make only one in the last.
    alone = -(-held.steps["full"] * 20 // number)
    assert 0 < held.drift(first) < plain(kind, **{**sampling, "steps": alone}).drift(first)
    what = {"flux": "prediction", "unet": "blocks"}[kind]
    assert torch.equal(held.latent, Drawn(server, LOADERS[kind], hold(server, every=2, what=what), **sampling).latent)
    # Without the node, the model draws as before.
    assert torch.equal(Drawn(server, LOADERS[kind], **sampling).latent, first.latent)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [*((kind, "euler_ancestral") for kind in ("chroma", "sd3", "wan", "qwen")), ("sdxl", "euler_ancestral_cfg_pp")],
)
def test_every_model_holds_under_noise(server: Server, plain: Any, kind: str, sampler: str) -> None:
    sampling = {"sampler_name": sampler, "cfg": 1.2 if sampler.endswith("cfg_pp") else 4.0}
    held = Drawn(server, LOADERS[kind], hold(server, every=2, start=0.2), **sampling)
    assert held.acted("hold")
    fewer = plain(kind, **sampling, steps=held.steps["full"])
    assert 0 < held.drift(plain(kind, **sampling)) < fewer.drift(plain(kind, **sampling))


def test_a_prediction_is_held_of_the_whole_model(server: Server) -> None:
    """A held step calls neither the model nor what others have put on guidance."""
    before = len(server.log())
    held = Drawn(server, FLUX, ("TestCalls", {}), node_of(server, "prediction"))
    calls = re.findall(r"test: (\w+)", server.log()[before:])
    assert held.acted("prediction")
    assert calls.count("guided") == held.steps["full"]
    assert held.steps["full"] <= calls.count("called") <= 2 * held.steps["full"]


@pytest.mark.parametrize(
    ("kind", "sampler", "changes", "told"),
    [
        ("flux", "euler_ancestral", {"what": "blocks"}, "adds noise at its steps.*: set what to auto, choose another"),
        ("unet", "euler_ancestral", {"what": "stages"}, "adds noise at its steps.*: set what to auto, choose another"),
        (
            "flux",
            "euler_ancestral_cfg_pp",
            {},
            "reads the two parts of guidance.*such as euler_ancestral, or use the",
        ),
        ("flux", "euler_cfg_pp", {"what": "prediction"}, "reads the two parts.*: set what to auto, choose another"),
    ],
)
def test_samplers_that_are_refused(server: Server, kind: str, sampler: str, changes: Any, told: str) -> None:
    with pytest.raises(Failed, match=told):
        Drawn(server, LOADERS[kind], hold(server, every=3, **changes), sampler_name=sampler, cfg=1.2)


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "uni_pc", "dpm_adaptive", "euler_cfg_pp"])
def test_samplers(server: Server, plain: Any, sampler: str) -> None:
    # CFG++ is meant for a guidance scale of about 1.
    sampling = {"sampler_name": sampler, "cfg": 1.2 if sampler.endswith("cfg_pp") else 4.0}
    held = Drawn(server, FLUX, hold(server, every=2), **sampling)
    assert held.left_out >= 2
    share = held.steps["full"] / sum(held.steps.values())
    fewer = plain("flux", **sampling, steps=math.ceil(share * STEPS))
    # dpm_adaptive chooses its steps itself, so its bound is fixed.
    bound = 0.2 if sampler == "dpm_adaptive" else fewer.drift(plain("flux", **sampling))
    assert held.drift(plain("flux", **sampling)) < bound


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("unet", "euler"), ("flux", "euler"), ("unet", "euler_ancestral"), ("flux", "euler_ancestral")],
)
def test_merge_and_hold_go_together(server: Server, kind: str, sampler: str) -> None:
    sampling = {"sampler_name": sampler}
    little = merge(server, ratio=0.25)
    merged = Drawn(server, LOADERS[kind], little, **sampling)
    orders = [(little, hold(server, **EVERY)), (hold(server, **EVERY), little)]
    first, second = (Drawn(server, LOADERS[kind], *patches, **sampling) for patches in orders)
    assert torch.equal(first.latent, second.latent)
    assert first.steps["merged"] + first.steps["held"] == STEPS
    assert first.left_out >= 3
    fewer = Drawn(server, LOADERS[kind], little, **sampling, steps=first.steps["merged"])
    assert first.drift(merged) < fewer.drift(merged)


@pytest.mark.parametrize("preset", ["toma", "tomesd", "todo", "pool"])
def test_methods(server: Server, plain: Any, preset: str) -> None:
    drawn = Drawn(server, LOADERS["unet"], merge(server, preset=preset))
    assert drawn.steps == {"merged": 12}
    assert drawn.drift(plain("unet")) > 0


@pytest.mark.parametrize(
    ("kind", "node", "told"),
    [
        (
            "sd3",
            "TokenMergeMerge",
            "cannot be merged: in ComfyUI, Merge works with UNets, Flux and Chroma only; use Hold",
        ),
        ("aura", "TokenMergeHold", "this MODEL is a MMDiT, which tokenmerge does not support.*connect one of those"),
        ("flux", "TokenMergeHold", "what='stages' holds the stages of a UNet.*use what='blocks'"),
        ("unet", "TokenMergeHold", "window is 0.9 to 0.5; it must satisfy"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(server: Server, kind: str, node: str, told: str) -> None:
    changes = {"what": "stages"} if kind == "flux" else {"start": 0.9, "stop": 0.5} if kind == "unet" else {}
    before = server.log().count("sampled in")
    loader = LOADERS.get(kind, random(kind))
    with pytest.raises(Failed, match=told):
        Drawn(server, loader, ("TestClock", {"run": 0}), server.usual(node, **changes))
    # The refusal comes before anything is sampled.
    assert server.log().count("sampled in") == before


def test_it_beats_easycache_at_its_own_threshold(server: Server, plain: Any) -> None:
    """Hold drifts less while it skips at least as many steps (benchmarks/comfyui.py measures several settings)."""
    first = plain("flux", steps=20)
    held = Drawn(server, FLUX, hold(server, tolerance=0.4), steps=20)
    cached = Drawn(server, FLUX, server.usual("EasyCache", verbose=True), steps=20)
    skipped = int(re.findall(r"skipped (\d+)/\d+ steps", server.log())[-1])
    assert 0 < skipped <= held.steps["held"]
    assert held.drift(first) < cached.drift(first)
