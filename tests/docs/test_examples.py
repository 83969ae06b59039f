"""Every example runs on small pictures and writes what it should."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each example prints, and the pictures that it writes (None: a single one).
EXPECTED = {
    "text_to_image": ("6 blocks", None),
    "img2img": ("held", None),
    "controlnet": ("merged", None),
    "lora": ("held", None),
    "compile": ("14 blocks", None),
    "compare": ("both", ["both.png", "held.png", "merged.png", "plain.png"]),
    "tune": ("Steps of the last image", []),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, drawn = EXPECTED[name]
    out = tmp_path / (name if drawn is not None else f"{name}.png")
    monkeypatch.chdir(tmp_path)
    # A search draws many pictures, so they are smaller, and writes none.
    size, steps = ("64", "3") if drawn == [] else ("128", "6")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--size", size, "--steps", steps, "--out", str(out)])
    # Runs in this process, where everything is already imported.
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
    for path in [out] if drawn is None else [out / each for each in drawn]:
        assert Image.open(path).size == (128, 128)


def test_every_example_is_listed_and_run() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == EXPECTED.keys()
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in scripts if f"`{name}.py`" not in listed] == []
