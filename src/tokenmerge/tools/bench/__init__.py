"""Latency, launches and memory of a denoiser, plain and with techniques: by phase, and over a whole schedule.

A denoising loop makes few kinds of call: full, merged (which select, reweigh or reuse) and held. `bench` times each
kind many times, multiplies its median by how often the schedule has it, and adds up. The sum covers selection and
weights, without running every step over and over.
"""

from .candidates import Candidate, candidates_for
from .comparison import Task, run
from .records import read
from .report import comparisons, pool, report, speed_up

__all__ = ["Candidate", "Task", "candidates_for", "comparisons", "pool", "read", "report", "run", "speed_up"]
