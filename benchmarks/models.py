"""Times large models that were never timed on a GPU, one after the other, each into its own file.

    python benchmarks/models.py               # all of them, to benchmarks/results; a killed run resumes
    python benchmarks/models.py wan-480p      # some of them
    python benchmarks/models.py --plan        # without a GPU: check the runs, and show what merges and what is held

Weights are random, with the shapes of the published models. Merging is timed beside its bound. CUDA graphs are used
where a step is short. A step of Wan 14B takes seconds, so the cost of launches does not show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenmerge.tools.bench import candidates_for
from tokenmerge.tools.cli.main import main as tokenmerge
from tokenmerge.tools.cli.main import parser as command_line
from tokenmerge.tools.loading import outline
from tokenmerge.tools.typed import read_configurations

RESULTS = Path(__file__).parent / "results"
_VIDEO = "--frames 81 --techniques video hold:every=3"
_SLOW = "--warmups 0 --settle 0 --repeats"
# Most wanted first. Distilled models have few steps, of which Hold's default would hold none. Where steps take seconds,
# the trial is warm-up enough.
RUNS = {
    "flux2-klein": "--model flux2-klein-random --steps 4 --techniques dit hold:every=2,start=0 --modes graph",
    "qwen": "--model qwen-random --techniques dit hold:every=3 --modes graph --repeats 8 --warmups 2",
    "z-image": "--model z-image-random --steps 8 --techniques dit hold:every=2,start=0 --modes graph --repeats 10",
    "wan-480p": f"--model wan-random --sizes 832x480 {_VIDEO} {_SLOW} 3",
    "wan-720p": f"--model wan-random --sizes 1280x720 {_VIDEO} {_SLOW} 2",
    "wan-1.3b": f"--model wan-1.3b-random --sizes 832x480 {_VIDEO} --modes graph --repeats 5 --warmups 2",
}
RATIOS = "--ratios 0.5,0.75"


def words(name: str) -> list[str]:
    """The arguments of a run's command."""
    return ["bench", *RUNS[name].split(), *RATIOS.split()]


def print_plan(name: str) -> None:
    """Print what every technique of a run does. Raises where one cannot be applied."""
    options = command_line().parse_args(words(name))
    model = outline(options.model)
    print(f"{name}: tokenmerge {' '.join(words(name))}\n")
    for width, height in options.sizes or (model.own_size,):
        for each in candidates_for(read_configurations(options.techniques, options.ratios)):
            plan = model.plan(each.techniques, width, height, steps=options.steps, frames=options.frames)
            print(f"{each.label}: {plan}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    unknown = set(options.names) - set(RUNS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(RUNS)}")
    for name in options.names or RUNS:
        if options.plan:
            print_plan(name)
        elif code := tokenmerge([*words(name), "--out", str(RESULTS / f"{name}.jsonl"), "--resume"]):
            sys.exit(code)


if __name__ == "__main__":
    main()
