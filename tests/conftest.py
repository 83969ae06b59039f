"""One thread per worker, since the models are tiny and workers share few cores; and compiled code of one's own."""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.util import find_spec

import torch

# `make test` runs those by themselves: where their packages are found, each import of diffusers takes a second more.
collect_ignore = [] if find_spec("torchao") else ["backends"]
torch.set_num_threads(1)
# Inductor's pool of compiling processes costs more than it saves on tiny graphs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Its cache is shared by all processes of a user, and a file that one of them was killed over breaks the others. Those
# that this one starts share its own, so that headers are compiled once.
_PREFIX = "tokenmerge-inductor-"
if _PREFIX not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""):
    _cache = tempfile.mkdtemp(prefix=_PREFIX)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


# Until tests run, nearly all that is made stays, and to walk it again and again takes a third of the time of imports.
gc.disable()


def pytest_collection_finish() -> None:
    """What imports made stays until the end: a collection need not walk it, which takes half a second."""
    gc.collect()
    gc.freeze()
    # Compilers make so much that by default a tenth of the time would go into looking for what nobody refers to.
    gc.set_threshold(50_000, 10, 10)
    gc.enable()
