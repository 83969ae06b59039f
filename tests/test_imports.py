"""Imports point down, importing the package is cheap, and its root shows only the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tokenmerge

PACKAGE = Path(tokenmerge.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The parts of the package, from the top down. A part imports only from lower lines, so parts on one line do not know
# each other.
LAYERS = [
    ["__main__"],
    ["tools"],
    ["__init__"],
    ["api"],
    ["applying"],
    ["planning", "compiling"],
    ["merging", "holding"],
    ["runtime"],
    ["families"],
    ["presets"],
    ["config"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The engine knows what a family's table can express, but no table itself.
ENGINE = ("merging", "holding", "runtime", "planning")
TOLD_BY_FAMILIES = ("families.base", "families.calls")
# The only parts that may import each heavy or optional package.
ALLOWED = {
    "diffusers": ("families", "tools.loading", "tools.rivals", "tools.solvers"),
    "cache_dit": ("tools.rivals",),
    "DeepCache": ("tools.rivals",),
    "accelerate": ("tools.evaluation", "tools.healing"),
    "gradio": ("tools.demo",),
    "huggingface_hub": ("tools.loading", "tools.quality"),
    "matplotlib": ("tools.evaluation", "tools.paper"),
    "numpy": ("tools",),
    "onnxruntime": ("tools.quality",),
    "peft": ("tools.healing",),
    "PIL": ("tools",),
    "prometheus_client": ("tools.serving",),
    "psutil": ("tools.serving",),
    "ray": ("tools.serving",),
    "safetensors": ("merging.lora", "tools.healing"),
    "starlette": ("tools.demo", "tools.serving"),
    "tokenmerge_models": ("tools.loading",),
    "transformers": ("tools.loading", "tools.quality"),
    "triton": ("merging.ops.kernels",),
    "yaml": ("presets", "tools.tuning"),
}


def module_of(path: Path) -> str:
    """The module's name below the package; an `__init__` has the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> tuple[set[str], set[str]]:
    """The package's modules and the foreign packages that a file imports, at any depth of its code."""
    here = path.relative_to(PACKAGE).parts[:-1]
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            others |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            for name in node.names:
                inner = f"{base}.{name.name}" if base else name.name
                ours.add(inner if inner in MODULES else base or "__init__")
    return ours, others


def within(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_only_point_down(path: Path) -> None:
    module = module_of(path)
    own = module.split(".")[0]
    ours, others = imported(path)
    assert "tokenmerge" not in others, "write it as a relative import, which this test sees"
    for name in ours:
        assert name in MODULES, f"there is no module {name}"
        part = name.split(".")[0]
        if part != own:
            assert RANK[part] > RANK[own], f"{module} imports {name}, which is not below it"
        if own in ENGINE and part == "families":
            assert name in TOLD_BY_FAMILIES, f"{module} imports {name}: the engine knows no table"
    for name in others & ALLOWED.keys():
        assert within(module, ALLOWED[name]), f"{module} imports {name}"


def test_no_module_leads_back_to_itself() -> None:
    """Not even within a part, or by an import inside a function."""
    # `prepare` raises on a cycle.
    TopologicalSorter({module: imported(path)[0] for module, path in MODULES.items()}).prepare()


def test_the_check_sees_imports_of_every_form() -> None:
    """Otherwise the tests above could pass because they see no imports."""
    assert {"config", "errors", "families.calls"} <= imported(PACKAGE / "merging" / "grid.py")[0]
    assert "merging.grid" in imported(PACKAGE / "merging" / "methods" / "toma.py")[0]
    assert "merging.ops.reference" in imported(PACKAGE / "merging" / "ops" / "kernels" / "weighing.py")[0]
    assert {"families.generic", "families.base"} <= imported(PACKAGE / "families" / "__init__.py")[0]
    assert "diffusers" in imported(PACKAGE / "families" / "flux.py")[1]
    assert "__init__" in imported(PACKAGE / "tools" / "cli" / "main.py")[0]


def test_nothing_but_the_public_surface_lies_at_the_root() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        *("__init__", "__main__", "api", "config", "errors", "presets"),
    }
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {"applying", "compiling", "families", "holding", "merging", "planning", "runtime", "tools"}
    assert {*RANK} == folders | {path.stem for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_file_says_what_lives_there(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", ":")), "no sentence"
    assert path.name != "__init__.py" or len(first.split()) >= 5


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"torch", *ALLOWED}
    assert run(f"import sys, tokenmerge; print(sorted({heavy!r} & sys.modules.keys()))") == "[]"


# Kernels need Triton, and families' tables need diffusers.
CORE = sorted(
    f"tokenmerge.{module}"
    for module in MODULES
    if not within(module, ("__init__", "__main__", "tools", "merging.ops.kernels"))
    and "diffusers" not in imported(MODULES[module])[1]
)


def test_the_core_imports_without_diffusers() -> None:
    told = run(
        "import importlib, sys\n"
        "without = ('diffusers', 'transformers', 'accelerate', 'peft', 'numpy', 'PIL', 'triton', 'yaml')\n"
        "sys.modules.update(dict.fromkeys(without))\n"
        f"for name in {CORE!r}: importlib.import_module(name)\n"
        "import tokenmerge, torch\n"
        "from tokenmerge import Hold, Merge\n"
        "assert (tokenmerge.presets()['toma'].ratio, Merge(ratio=0.25).ratio, Hold(every=3).every) == (0.5, 0.25, 3)\n"
        "try: tokenmerge.apply(torch.nn.Linear(2, 2))\n"
        "except tokenmerge.TokenMergeError as error: print(error)\n"
    )
    assert told == "models need diffusers: pip install -U tokenmerge[diffusers]"


def test_every_public_name_is_there() -> None:
    assert tokenmerge.__all__ == sorted(tokenmerge.__all__)
    for name in tokenmerge.__all__:
        assert getattr(tokenmerge, name).__doc__
    assert dir(tokenmerge) == tokenmerge.__all__
    with pytest.raises(AttributeError):
        tokenmerge.nothing  # noqa: B018
