"""Wheels are small and complete, torch is the only requirement, and versions agree everywhere."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import tokenmerge
from tokenmerge.tools.loading import BUNDLED

ROOT = Path(__file__).parents[2]
LARGEST = 1_000_000
# Larger files that two models share must be links.
LARGEST_COPY = 50_000


def built(project: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(project)]
    subprocess.run([*command, "--wheel-dir", str(folder)], check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_small_and_holds_the_library_alone(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"tokenmerge", f"tokenmerge-{tokenmerge.__version__}.dist-info"}
    assert "tokenmerge/py.typed" in names
    assert not [name for name in names if name.endswith((".safetensors", ".pt", ".bin"))]


def test_torch_is_the_only_requirement(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("METADATA"))
        required = re.findall(r"^Requires-Dist: (.+)$", files.read(metadata).decode(), flags=re.MULTILINE)
    # Only a lower bound, so that an installed torch is not replaced.
    assert [each for each in required if "extra ==" not in each] == ["torch>=2.7"]


def test_the_wheel_of_models_holds_whole_models_and_the_repository_no_file_twice(tmp_path: Path) -> None:
    package = ROOT / "models" / "tokenmerge_models"
    seen: dict[str, str] = {}
    with zipfile.ZipFile(built(ROOT / "models", tmp_path)) as files:
        for sums in sorted(package.glob("*/SHA256SUMS")):
            for line in sums.read_text().splitlines():
                digest, name = line.split("  ")
                path = f"{package.name}/{sums.parent.name}/{name}"
                content = files.read(path)
                assert hashlib.sha256(content).hexdigest() == digest
                again = seen.setdefault(digest, path) != path
                assert (ROOT / "models" / path).is_symlink() == (again and len(content) > LARGEST_COPY), path
    assert {path.split("/")[1] for path in seen.values()} == set(BUNDLED)


def test_versions_agree() -> None:
    version = tokenmerge.__version__
    oldest = re.search(r'"diffusers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    for page in ("getting-started", "compatibility"):
        told = re.findall(r"diffusers`? \(?([\d.]+) or newer", (ROOT / "docs" / f"{page}.md").read_text())
        assert told == [oldest]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1] == version
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]
    assert f"ruff=={hooks['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_the_workflow_runs_the_two_commands_of_readme() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    job = jobs.pop("run")
    commands = job["strategy"]["matrix"]["command"]
    readme = (ROOT / "README.md").read_text()
    assert commands == re.findall(r"^make (\w+)", readme, flags=re.MULTILINE)
    assert job["steps"][-1]["run"] == "make ${{ matrix.command }}"
    # Every other job runs an existing target of the Makefile, with the same environment.
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {name: other["steps"][-1]["run"] for name, other in jobs.items()} == {"comfyui": "make test-comfyui"}
    assert "test-comfyui" in targets
    assert all(other["env"] == job["env"] for other in jobs.values())
