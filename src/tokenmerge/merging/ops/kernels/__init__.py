"""The operations of `reference.py` in Triton, with the same signatures.

Kernels read and write tokens row-major, through the table of a partition's order and with any strides. Nothing is
permuted or copied, so a tile costs no more than a stripe. Products accumulate in fp32. The reference takes what kernels
do not cover: other selections, regions too large to be local, and dtypes other than fp32, fp16 and bf16. Merging has
its own gradients, computed by the same kernels.

Programs are small and many, because all kernels are bound by memory or latency. Launch shapes depend on the sizes only:
autotuning at the first call would take seconds and break the capture of CUDA graphs.
"""

from ..reference import pinv_weights
from .common import INTERPRETED
from .merging import merge, unmerge
from .selection import select
from .weighing import weigh

__all__ = [
    "INTERPRETED",
    "merge",
    "pinv_weights",
    "select",
    "unmerge",
    "weigh",
]
