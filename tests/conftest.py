"""One thread per worker, since the models are tiny and workers share few cores; and a separate compiler cache."""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.util import find_spec

import torch

# `make test` runs the backends separately: with their packages installed, importing diffusers takes a second longer.
collect_ignore = [] if find_spec("torchao") else ["backends"]
torch.set_num_threads(1)
# Inductor's pool of compiling processes costs more than it saves on tiny graphs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# By default all of a user's processes share Inductor's cache, and a file left half-written by a killed process breaks
# the others. Child processes share the cache made here, so that headers are compiled once.
_PREFIX = "tokenmerge-inductor-"
if _PREFIX not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""):
    _cache = tempfile.mkdtemp(prefix=_PREFIX)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


# Nearly everything that imports allocate survives, and collecting garbage would take a third of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Exempts what imports made from collections: it stays until the end, and walking it takes half a second."""
    gc.collect()
    gc.freeze()
    # Compilers allocate so much that the default thresholds would spend a tenth of the time on collections.
    gc.set_threshold(50_000, 10, 10)
    gc.enable()
