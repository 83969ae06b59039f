"""Tables and figures that look inside a model: watched tokens are those the model computes, and figures count
correctly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import tokenmerge
from tokenmerge import presets
from tokenmerge.families import denoiser_of
from tokenmerge.families.calls import TokenGrid
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.paper import overlap
from tokenmerge.tools.paper.hidden import Hidden, watch
from tokenmerge.tools.paper.locality import CLUSTERS, cluster, coloured_labels, neighbours_alike
from tokenmerge.tools.paper.overlap import _Selector
from tokenmerge.tools.paper.studies import INQUIRIES, Inquiry


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-sdxl"])
def test_watching_sees_every_block_at_every_step_and_changes_nothing(model: str) -> None:
    studio = Studio(Setup(model=model, size=(64, 96), steps=3, device="cpu"))
    studio.pipe.set_progress_bar_config(disable=True)
    seen: list[Hidden] = []
    picture = watch(studio, "a rose", 3, seen.append)
    plan = tokenmerge.plan(studio.pipe, "toma-once", height=96, width=64)
    names = [site.name for site in plan.sites]
    assert [(hidden.step, hidden.block) for hidden in seen] == [(step, name) for step in range(3) for name in names]
    assert all(hidden.tokens.shape[0] == hidden.grid.count for hidden in seen)
    assert {hidden.grid.height / hidden.grid.width for hidden in seen} == {1.5}
    again: list[Hidden] = []
    assert picture.tobytes() == watch(studio, "a rose", 3, again.append).tobytes()
    assert all(torch.equal(one.tokens, two.tokens) for one, two in zip(seen, again, strict=True))
    # The tokens are those of the prompt, not of the negative prompt.
    other: list[Hidden] = []
    watch(studio, "a tulip", 3, other.append)
    assert not torch.equal(seen[-1].tokens, other[-1].tokens)
    assert not any(module._forward_pre_hooks for module in denoiser_of(studio.pipe).modules())


def test_clusters_are_found_and_neighbours_counted() -> None:
    grid = TokenGrid(8, 16)
    # Eight directions, each in its own block of 4x4 tokens.
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(16), indexing="ij")
    truth = ((rows // 4) * 4 + columns // 4).flatten()
    noise = 0.05 * torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    labels = cluster(torch.eye(32)[truth] * 3 + noise, CLUSTERS)
    assert len({(int(a), int(b)) for a, b in zip(labels, truth, strict=True)}) == CLUSTERS
    alike, chance = neighbours_alike(labels, grid)
    # The grid has 8 x 15 + 7 x 16 neighbouring pairs; three borders of 8 and one of 16 separate the blocks.
    assert alike == pytest.approx(1 - (3 * 8 + 16) / (8 * 15 + 7 * 16))
    assert chance == pytest.approx(1 / 8)
    picture = coloured_labels(labels, grid)
    assert picture.size == (256, 128)
    assert len(picture.getcolors()) == CLUSTERS


def test_overlap_of_the_same_and_of_other_tokens() -> None:
    config = presets()["toma-tile"].replace(regions="tile:8")
    grid = TokenGrid(16, 16)
    selector = _Selector(config)
    first, second = torch.randn(2, 256, 12, generator=torch.Generator().manual_seed(0))
    assert selector.compare(Hidden(0, "block", grid, first), True) == (1.0, 0.5)
    assert selector.compare(Hidden(1, "block", grid, first * 2), False) == (1.0, 0.5)
    share, _ = selector.compare(Hidden(2, "block", grid, second), False)
    assert 0.3 < share < 0.7


@pytest.mark.parametrize("steps", [3, 4, 8, 28])
def test_the_plot_of_overlap_has_whole_steps(steps: int) -> None:
    records = [{"block": "one", "step": step, "overlap": 0.5, "chance": 0.5} for step in range(steps)]
    drawn = overlap._draw(records, 10, presets()["toma-tile"])
    drawn.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in drawn.axes[0].get_xticks())


@pytest.mark.parametrize("inquiry", INQUIRIES, ids=lambda inquiry: inquiry.folder)
def test_every_inquiry_runs_quickly(inquiry: Inquiry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about_models = inquiry.names[0].startswith("fig")
    batch = 3 if inquiry.names[0] == "table5" else 1
    options = ["--size", "64x64", "--number", "1"] if about_models else ["--batch", str(batch)]
    arguments = ["reproduce", inquiry.names[-1], "--quick", "--device", "cpu", *options]
    assert main([*arguments, "--json", "--out", str(tmp_path)]) == 0
    records = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "values.jsonl").read_text().splitlines()]
    assert records == lines
    if about_models:
        assert min(Image.open(tmp_path / "figure.png").size) > 300
        assert {record["step"] for record in records} == {0, 1, 2, 3}
    else:
        assert {record["preset"] for record in records} >= {"toma", "tomesd"}
        # Guidance doubles the batch.
        assert {record["batch"] for record in records} == {2 * batch}
        assert all(record[name] > 0 for record in records for name in ("select", "merge", "unmerge"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fig4", ["--metrics", "mse"], "--metrics is not for fig4, which compares no pictures"),
        ("fig9", ["--resume"], "--resume is not for fig9, which compares no pictures"),
        ("fig3", ["--batch", "1"], "--batch is not for fig3, which times nothing"),
        ("fig3", ["--repeats", "2"], "--repeats is not for fig3, which times nothing"),
        ("table4", ["--compile"], "--compile is not for table4, which compares no pictures"),
        *(
            (
                name,
                [f"--{option}", "64x64" if option == "size" else "1"],
                f"--{option} is not for {name}, which draws no pictures; leave it out",
            )
            for name, option in itertools.product(
                ("table4", "table5"),
                ("model", "prompts", "column", "template", "number", "seeds", "steps", "guidance", "size"),
            )
        ),
        *(
            (name, [f"--{option}", given], f"--{option}: {given} is out of range; it must be 1 or more")
            for name, option in (("fig4", "threads"), ("fig3", "steps"), ("fig4", "steps"), ("table4", "threads"))
            for given in ("0", "-1")
        ),
        ("table4", ["--repeats", "0"], "--repeats is 0; table4 measures time and needs 1 or more"),
        ("table5", ["--batch", "0"], "--batch: 0 is out of range"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    name: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", name, "--quick", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
