"""Imports point one way, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "tokenmerge"

# From the top down: a module imports only from lines below its own.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["__init__"],
    ["tuning"],
    ["evaluation"],
    ["generate", "bench"],
    ["api"],
    ["compiling"],
    ["graphs"],
    ["planning"],
    ["adapters"],
    ["hooks"],
    ["sites"],
    ["state"],
    ["anchors"],
    ["groups"],
    ["slots", "watch", "tables", "pictures", "gaps", "calls", "clock", "noise"],
    ["methods"],
    ["mergemap", "clustermap"],
    ["ops"],
    ["grid"],
    ["quality", "measure"],
    ["files", "options", "catalog"],
    ["config"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Where heavy or optional packages may be imported at all.
ALLOWED = {
    "diffusers": {"adapters"},
    "accelerate": {"evaluation"},
    "huggingface_hub": {"adapters", "quality"},
    "matplotlib": {"evaluation"},
    "onnxruntime": {"quality"},
    "transformers": {"adapters", "quality"},
    "triton": {"ops"},
}


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[str, bool]]:
    """Layers and packages a file imports, each with whether it is one of ours."""
    parents = path.relative_to(PACKAGE).parts[:-1]
    found: list[tuple[str, bool]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(name.name.split(".")[0], False) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(((node.module or "").split(".")[0], False))
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1]
            inner = [*base, *((node.module or "").split(".") if node.module else [])]
            names = [inner[0]] if inner else [name.name if name.name in RANK else "__init__" for name in node.names]
            found += [(name, True) for name in names]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_point_down(path: Path) -> None:
    own = layer(path)
    for name, ours in imported(path):
        if ours and name != own:
            assert RANK[name] > RANK[own], f"{own} imports {name}, which is not below it"
        if not ours and name in ALLOWED:
            assert own in ALLOWED[name], f"{own} imports {name}"


def test_the_check_sees_an_upward_arrow(tmp_path: Path) -> None:
    """The parser above must find relative imports of every form, or the law would hold by blindness."""
    assert ("config", True) in imported(PACKAGE / "grid.py")
    assert ("config", True) in imported(PACKAGE / "methods" / "toma.py")
    assert ("diffusers", False) in imported(PACKAGE / "adapters" / "flux.py")
    assert ("api", True) in imported(PACKAGE / "cli.py")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, tokenmerge; "
        "heavy = {'torch', 'diffusers', 'transformers', 'triton', 'accelerate', 'matplotlib', 'onnxruntime', 'yaml'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import tokenmerge

    for name in tokenmerge.__all__:
        assert getattr(tokenmerge, name) is not None
    assert dir(tokenmerge) == sorted(tokenmerge.__all__)
    with pytest.raises(AttributeError):
        tokenmerge.nothing  # noqa: B018
