"""Latency, launches and memory of a denoiser, by phase and over a whole schedule, plain and with techniques.

A denoising loop makes few kinds of call: full ones, merged ones that select, reweigh or reuse, and held ones. Each kind
is timed many times, and the medians are summed as often as a schedule has them: the time of all steps, selection and
weights included, without running every step again and again.
"""

from .candidates import Candidate, candidates_for
from .comparison import Task, run
from .records import read
from .report import comparisons, pool, report, speed_up

__all__ = ["Candidate", "Task", "candidates_for", "comparisons", "pool", "read", "report", "run", "speed_up"]
