"""One thread per worker: the models are tiny, and workers share few cores."""

import os

import torch

torch.set_num_threads(1)
# Inductor's pool of compiling processes costs more than it saves on tiny graphs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
