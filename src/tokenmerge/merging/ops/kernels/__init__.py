"""The operations of `reference.py` in Triton, with the same signatures.

Tokens are read and written row-major, through the table of a partition's order and with whatever strides they come, so
that a tile costs what a stripe costs: nothing is permuted or copied. Products accumulate in fp32. What a kernel does
not cover goes to the reference: other selections, regions too large to be local, and dtypes other than fp32, fp16 and
bf16. Merging has its own gradients, by the same kernels.

Programs are small and many, since all of these are bound by memory or latency. Launch shapes come from the sizes alone:
trying several at the first call would take seconds and would break the capture of CUDA graphs.
"""

from ..reference import pick_weights, pinv_weights
from .common import INTERPRETED
from .merging import merge, unmerge
from .selection import select
from .weighing import weigh

__all__ = [
    "INTERPRETED",
    "merge",
    "pick_weights",
    "pinv_weights",
    "select",
    "unmerge",
    "weigh",
]
