"""Workflows that a real ComfyUI runs, with the nodes and without."""

from __future__ import annotations

import importlib.util
import re
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


LOADERS = {"flux": FLUX, **{kind: random(kind) for kind in ("unet", "sd3", "wan", "qwen")}}
EVERY = {"every": 3}


class Drawn:
    """What one workflow gave: the latent, and how many steps were of each kind."""

    def __init__(self, server: Server, *args: Any, **sampling: Any) -> None:
        before = len(server.log())
        file = server.run(sampled(*args, **sampling))["save"]
        self.latent: Tensor = load_file(file)["latent_tensor"]
        told = re.findall(r"Steps of the last image: (.*)", server.log()[before:])
        self.steps = {
            kind: int(count) for count, kind in re.findall(r"(\d+) (full|merged|held)", told[-1] if told else "")
        }

    def drift(self, plain: Drawn) -> float:
        return float((self.latent - plain.latent).norm() / plain.latent.norm())


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
            # ComfyUI adds a widget that says what becomes of a seed.
            widgets = [each for each in node["widgets_values"] if each != "fixed"]
            assert len(widgets) == len(told.keys() - linked)


@pytest.mark.parametrize("kind", LOADERS)
def test_hold_holds_and_leaves_nothing_behind(server: Server, plain: Any, kind: str) -> None:
    first = plain(kind)
    held = Drawn(server, LOADERS[kind], hold(server, **EVERY))
    again = Drawn(server, LOADERS[kind], hold(server, **EVERY))
    assert held.steps["held"] >= 3
    assert sum(held.steps.values()) == 12
    assert 0 < held.drift(first) < 0.5
    assert torch.equal(held.latent, again.latent)
    # Bypassed.
    assert torch.equal(Drawn(server, LOADERS[kind]).latent, first.latent)


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_a_tolerance_holds_less_where_it_is_small(server: Server, plain: Any, kind: str) -> None:
    first = plain(kind, steps=20)
    some, more = (
        Drawn(server, LOADERS[kind], hold(server, tolerance=tolerance), steps=20) for tolerance in (0.01, 0.1)
    )
    assert some.steps.get("held", 0) < more.steps["held"]
    assert some.drift(first) < more.drift(first) < 0.5


@pytest.mark.parametrize("when", ["always", "odd", "late"])
@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_conditions_may_be_split_and_joined(server: Server, plain: Any, kind: str, when: str) -> None:
    """Residuals are of conditions, and not of calls: it is the same picture, and as much is held."""
    joined = Drawn(server, LOADERS[kind], hold(server, **EVERY))
    split = Drawn(server, LOADERS[kind], ("TestSplit", {"when": when}), hold(server, **EVERY))
    assert split.steps == joined.steps
    assert split.drift(joined) < 1e-3 < joined.drift(plain(kind))


def test_conditions_of_other_lengths(server: Server) -> None:
    loader = random("unet", text=12)
    held, split = (
        Drawn(server, loader, *patches, hold(server, **EVERY)) for patches in ((), (("TestSplit", {"when": "odd"}),))
    )
    assert held.steps == split.steps
    assert split.drift(held) < 1e-3


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_batches(server: Server, kind: str) -> None:
    name, inputs = LOADERS[kind]
    loader = name, {**inputs, "batch": 2}
    first, held = Drawn(server, loader), Drawn(server, loader, hold(server, **EVERY))
    assert held.latent.shape[0] == 2
    assert held.steps["held"] >= 4
    assert held.drift(first) < 0.5


@pytest.mark.parametrize(
    ("kind", "layer"), [("flux", "double_blocks.1.img_attn.proj"), ("unet", "middle_block.0.in_layers.2")]
)
def test_lora(server: Server, plain: Any, kind: str, layer: str) -> None:
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
        for patches in ((lora, hold(server, **EVERY)), (hold(server, **EVERY), lora))
    )
    assert whole.drift(plain(kind)) > 0.01
    assert torch.equal(before.latent, after.latent)
    assert before.steps["held"] >= 4
    assert before.drift(whole) < 0.5


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_controlnet(server: Server, plain: Any, kind: str) -> None:
    control = {"side": 64 if kind == "flux" else 128}
    whole = Drawn(server, LOADERS[kind], control=control)
    held = Drawn(server, LOADERS[kind], hold(server, every=2, start=0.001), control=control)
    assert whole.drift(plain(kind)) > 0.01
    assert held.steps["held"] >= 4
    assert held.drift(whole) < held.drift(plain(kind))


def test_an_interrupted_run_leaves_nothing_behind(server: Server, plain: Any) -> None:
    first = plain("unet")
    before = server.log().count("held")
    number = server.queue(sampled(random("unet", scale=2), hold(server, **EVERY), steps=2000))
    while not re.search(r"\b\d+/2000", server.log()):
        time.sleep(0.1)
    server.post("/interrupt", {})
    assert server.wait(number)["status"]["status_str"] == "error"
    assert server.log().count("held") == before
    assert torch.equal(Drawn(server, LOADERS["unet"]).latent, first.latent)
    assert Drawn(server, LOADERS["unet"], hold(server, **EVERY)).steps["held"] >= 4


def test_samplers_that_add_noise(server: Server, plain: Any) -> None:
    """A UNet holds its blocks then, around which the convolutions see the noise; Flux is refused."""
    held = Drawn(server, LOADERS["unet"], hold(server, **EVERY), sampler_name="euler_ancestral")
    assert held.steps["held"] >= 4
    assert held.drift(plain("unet", sampler_name="euler_ancestral")) < 0.5
    with pytest.raises(
        Failed, match=r"euler_ancestral adds noise at its steps.*such as euler or dpmpp_2m, or use the M"
    ):
        Drawn(server, FLUX, hold(server, **EVERY), sampler_name="euler_ancestral")
    with pytest.raises(Failed, match="or set what to blocks or auto"):
        Drawn(server, LOADERS["unet"], hold(server, every=3, what="stages"), sampler_name="euler_ancestral")


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "uni_pc", "dpm_adaptive", "euler_cfg_pp"])
def test_samplers(server: Server, plain: Any, sampler: str) -> None:
    # CFG++ is made for guidance of about 1.
    sampling = {"sampler_name": sampler, "cfg": 1.2 if sampler.endswith("cfg_pp") else 4.0}
    held = Drawn(server, FLUX, hold(server, every=2), **sampling)
    assert held.steps["held"] >= 2
    assert held.drift(plain("flux", **sampling)) < 0.5


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_merge(server: Server, plain: Any, kind: str) -> None:
    whole, less, more = plain(kind), *(Drawn(server, LOADERS[kind], merge(server, ratio=each)) for each in (0.05, 0.5))
    assert less.steps == more.steps == {"merged": 12}
    assert 0 < less.drift(whole) < more.drift(whole)
    assert torch.equal(Drawn(server, LOADERS[kind], merge(server, ratio=0.5)).latent, more.latent)
    split = Drawn(server, LOADERS[kind], ("TestSplit", {"when": "odd"}), merge(server, ratio=0.5))
    assert split.steps == more.steps


def test_merge_and_hold_go_together(server: Server) -> None:
    merged = Drawn(server, LOADERS["unet"], merge(server))
    orders = [(merge(server), hold(server, **EVERY)), (hold(server, **EVERY), merge(server))]
    first, second = (Drawn(server, LOADERS["unet"], *patches) for patches in orders)
    assert torch.equal(first.latent, second.latent)
    assert first.steps["merged"] + first.steps["held"] == 12
    assert first.steps["held"] >= 3
    assert first.drift(merged) < 0.5


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
            "cannot be merged: in ComfyUI, Merge has tables for UNets, Flux and Chroma only; use Hold",
        ),
        ("aura", "TokenMergeHold", "this MODEL is a MMDiT, for which tokenmerge has no table.*connect one of those"),
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
    # Before anything was sampled.
    assert server.log().count("sampled in") == before


def test_it_beats_easycache_at_its_own_threshold(server: Server, plain: Any) -> None:
    """By drift, where as many steps run (benchmarks/comfyui.py measures both at several settings)."""
    first = plain("flux", steps=20)
    held = Drawn(server, FLUX, hold(server, tolerance=0.1), steps=20)
    cached = Drawn(server, FLUX, server.usual("EasyCache", verbose=True), steps=20)
    skipped = int(re.findall(r"skipped (\d+)/\d+ steps", server.log())[-1])
    assert 0 < skipped <= held.steps["held"]
    assert held.drift(first) < cached.drift(first)
