"""Code of README and the first pages runs as written, with a tiny SDXL pipeline in place of the real one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tokenmerge
from saved import save_sdxl
from tokenmerge.tools.cli.main import parser

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
# Pages outside the site: the repository's notes, and cards beside models, scripts and nodes.
OTHERS = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(path for folder in ("comfyui", "examples", "models", "training") for path in (ROOT / folder).rglob("*.md")),
]
MODEL = "stabilityai/stable-diffusion-xl-base-1.0"
# Names of version 0.1, which only the pages in `TELL_OF_GONE` may mention.
GONE = (
    "MergeConfig",
    "anchor",
    "unet-hold",
    "gap_dtype",
    "step_ratios",
    "block_ratios",
    "coverage=",
    "span=",
    'sites="span"',
)
TELL_OF_GONE = ("log.md", "upgrading.md")


def blocks(path: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


@pytest.fixture(scope="module")
def saved_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sdxl(tmp_path_factory.mktemp("sdxl"))


def run(code: list[str], saved: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if names is None else names
    for block in code:
        exec(compile(block.replace(MODEL, str(saved)), "README.md", "exec"), names)
    return names


def test_the_code_of_readme_runs(saved_pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks(README, "python")
    assert MODEL in code[0]
    names = run(code, saved_pipeline)
    out = capsys.readouterr().out
    assert "hold within 0.2" in out
    assert re.search(r"\d+ full, \d+ held", out)
    assert "_tokenmerge" not in vars(names["pipe"].unet)
    assert torch.is_grad_enabled()


def test_the_code_of_the_first_pages_runs(saved_pipeline: Path) -> None:
    # Compiling takes long; examples/compile.py does it.
    code = [block for block in blocks(DOCS / "getting-started.md", "python") if "tokenmerge.compile" not in block]
    assert len(code) >= 4
    names = run(code, saved_pipeline)
    assert names["held"].size == names["image"].size
    for page in ("merging.md", "holding.md", "index.md"):
        run(blocks(DOCS / page, "python"), saved_pipeline, names)


def test_the_new_calls_of_the_upgrade_guide_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (DOCS / "upgrading.md").read_text()
    calls = re.findall(r"^\| `.*?` .*?\| `((?:apply|applied|plan|Merge|Hold)\(.*?\))`", text, flags=re.MULTILINE)
    assert len(calls) >= 12
    (tmp_path / "mine.yaml").write_text("technique: hold\nevery: 4\n")
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(tokenmerge, name) for name in tokenmerge.__all__} | {"pipe": tiny.build("sdxl")}
    for call in calls:
        if "..." not in call and "N" not in call:
            eval(call, names)


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1300


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_parse(page: Path) -> None:
    """The parser accepts every command that a page shows."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            # Skips outlines ("...") and argument files (@FILE), which benchmarks/test_results.py parses.
            if words[:1] == ["tokenmerge"] and "..." not in words and not any("@" in word for word in words):
                parser().parse_args(words[1:])


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_is_gone_has_left_the_pages(page: Path) -> None:
    if page.name not in TELL_OF_GONE:
        text = page.read_text()
        assert [name for name in GONE if re.search(rf"\b{re.escape(name)}", text)] == []
