"""The ComfyUI nodes without a server (`make test-comfyui` runs them in one)."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.config import HELD, Techniques

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "comfyui"
WORKFLOWS = sorted((PACKAGE / "example_workflows").glob("*.json"))
# ComfyUI's own nodes: names of inputs that are links, and how many widgets the page shows.
STOCK = {
    "CheckpointLoaderSimple": ((), 1),
    "CLIPTextEncode": (("clip",), 1),
    "EmptyLatentImage": ((), 3),
    "EmptySD3LatentImage": ((), 3),
    "FluxGuidance": (("conditioning",), 1),
    # One widget says what becomes of the seed after a run.
    "KSampler": (("model", "positive", "negative", "latent_image"), 7),
    "Note": ((), 1),
    "SaveImage": (("images",), 1),
    "VAEDecode": (("samples", "vae"), 0),
}


def _loaded(name: str) -> ModuleType:
    """A module of the nodes that imports nothing from ComfyUI."""
    spec = importlib.util.spec_from_file_location(f"comfyui_{name}", PACKAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _package() -> ModuleType:
    """The whole package, as ComfyUI imports it."""
    spec = importlib.util.spec_from_file_location("comfyui_nodes", PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        for name in [name for name in sys.modules if name.startswith(spec.name)]:
            del sys.modules[name]
    return module


fields, needs = _loaded("fields"), _loaded("needs")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_metadata_is_what_the_registry_wants() -> None:
    import tomllib

    told = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    project, comfy = told["project"], told["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{2,99}", project["name"])
    assert "comfyui" not in project["name"]
    assert project["version"] == tokenmerge.__version__
    assert project["license"] == {"text": "Apache-2.0"}
    assert comfy["PublisherId"]
    assert comfy["DisplayName"]
    # No value is empty: unknown ones are left out.
    assert all(value for table in (project["urls"], comfy) for value in table.values())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_no_installer_replaces_torch() -> None:
    """An installer would replace torch if a requirement led to a newer one."""
    import tomllib

    required = (PACKAGE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in required if not line.startswith("#")]
    assert tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"] == []
    library = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert library["dependencies"] == [f"torch>={'.'.join(map(str, needs.LEAST_TORCH))}"]


@pytest.mark.parametrize("version", ["1.13.1", "2.6.0+cu124", "2.6.0a0+git123"])
def test_a_torch_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The check comes before all other imports: the next would fail here, where ComfyUI is missing."""
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=rf"torch {re.escape(version)} is older than 2\.7.*update torch as ComfyUI's"):
        _package()


@pytest.mark.parametrize("version", ["2.7.0", "2.7.0a0+git123", "2.13.0+cpu", "3.0.1", "unknown"])
def test_any_other_torch_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ModuleNotFoundError, match="comfy_api"):
        _package()


def test_a_library_that_is_missing_is_told() -> None:
    script = f"""
import sys
from pathlib import Path
sys.path[:] = [{str(ROOT)!r}, *(each for each in sys.path if not (Path(each) / "tokenmerge").is_dir())]
import comfyui
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("ImportError: the library tokenmerge is not installed")
    assert f'-m pip install --no-deps "{ROOT}", and start' in told


def test_nothing_is_imported_but_torch_comfyui_and_the_library() -> None:
    allowed = {"comfy", "comfy_api", "tokenmerge", "torch", *sys.stdlib_module_names}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in names} <= allowed, path
            # The registry refuses packages that call these.
            assert not (isinstance(node, ast.Name) and node.id in ("eval", "exec")), path


@pytest.mark.parametrize(("node", "technique"), [("TokenMergeHold", Hold), ("TokenMergeMerge", Merge)])
def test_widgets_are_fields_in_their_own_words(node: str, technique: Any) -> None:
    docs = technique.field_docs()
    page = (PACKAGE / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    for setting in fields.SETTINGS[node]:
        assert f"`{setting.name}`" in page
        if setting.name in docs:
            assert setting.tooltip.startswith(docs[setting.name])
        assert setting.default in setting.options if setting.options else setting.least <= setting.default


def test_every_node_has_a_page() -> None:
    pages = {path.stem for path in (PACKAGE / "web" / "docs").glob("*.md")}
    named = set(re.findall(r'"(TokenMerge\w+)"', (PACKAGE / "nodes.py").read_text(encoding="utf-8")))
    assert pages == named == fields.SETTINGS.keys()


def test_there_are_example_workflows() -> None:
    types = {node["type"] for path in WORKFLOWS for node in json.loads(path.read_text())["nodes"]}
    assert fields.SETTINGS.keys() <= types


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_nodes_and_inputs_that_exist(path: Path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        settings = fields.SETTINGS.get(node["type"])
        linked, widgets = STOCK[node["type"]] if settings is None else (("model",), len(settings))
        assert tuple(each["name"] for each in node["inputs"]) == linked
        assert len(node["widgets_values"]) == widgets
        for setting, value in zip(settings or (), node["widgets_values"], strict=bool(settings)):
            assert type(value) is type(setting.default)
            assert value in setting.options if setting.options else setting.least <= value <= setting.most
    for number, source, output, target, place, kind in workflow["links"]:
        given, taken = nodes[source]["outputs"][output], nodes[target]["inputs"][place]
        assert number in given["links"]
        assert taken["link"] == number
        assert given["type"] == taken["type"] == kind
    # Every input is linked.
    assert all(each["link"] for node in nodes.values() for each in node["inputs"])


def test_widgets_of_hold() -> None:
    usual = {setting.name: setting.default for setting in fields.HOLD}
    assert fields.hold_of(**usual) == Hold()
    assert fields.hold_of(**{**usual, "every": 3}) == Hold(every=3)
    assert fields.hold_of(**{**usual, "start": 0.3, "what": "blocks"}) == Hold(start=0.3, what="blocks")
    assert {fields.hold_of(**{**usual, "what": what}).what for what in fields.HOLD[-1].options} == set(HELD)
    with pytest.raises(TokenMergeError, match="0 <= start < stop"):
        fields.hold_of(**{**usual, "start": 0.9, "stop": 0.5})


@pytest.mark.parametrize("preset", ["auto", "toma", "tomesd", "pool"])
def test_widgets_of_merge(preset: str) -> None:
    usual = {setting.name: setting.default for setting in fields.MERGE}
    wanted = tokenmerge.presets()["dit" if preset == "auto" else preset]
    assert fields.merge_of(**{**usual, "preset": preset}, usual="dit") == wanted.replace(ratio=0.5)


def test_nodes_in_a_row() -> None:
    both = fields.joined(fields.joined(Techniques(), Merge()), Hold())
    assert both == Techniques(Merge(), Hold())
    assert fields.joined(both, Hold(every=3)) == Techniques(Merge(), Hold(every=3))
