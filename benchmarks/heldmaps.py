"""Measures what held steps should do with merging's maps: renew them as due, or keep them once Hold begins.

    python benchmarks/heldmaps.py --out benchmarks/results/heldmaps.jsonl

After a map is renewed, holding restarts from one residual; with kept maps it can extrapolate from two. Both draw the
same pictures with the bundled models. Drift is measured against the plain picture, and against the picture that merges
in the same steps and holds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from bundled import STEPS, draw, load, parser_for, write_records

import tokenmerge
from tokenmerge import Hold, Merge

# Each with the share of blocks that runs whole at the start.
MODELS = {"tiny-flux": 0.25, "tiny-sdxl": 0}
RATIOS, EVERY, SIDE = (0.5, 0.75), (2, 3, 5), 256
# More steps than any picture has.
_NEVER = 1000
RULES = {"renewed": {}, "kept": {"destinations_every": _NEVER, "weights_every": _NEVER}}
PROMPTS = ("a photo of a sunflower", "a photo of an oxeye daisy")


def measured() -> Iterator[dict[str, Any]]:
    for model, skip in MODELS.items():
        pipe, call = load(model, SIDE)
        plain = draw(pipe, call, PROMPTS)
        for ratio in RATIOS:
            merges = {rule: Merge(ratio=ratio, skip_first=skip, start=0.2, **more) for rule, more in RULES.items()}
            merged = draw(tokenmerge.apply(pipe, merges["renewed"]), call, PROMPTS)
            for every, rule in itertools.product(EVERY, RULES):
                held = draw(tokenmerge.apply(pipe, [merges[rule], Hold(every=every)]), call, PROMPTS)
                record = {"model": model, "size": SIDE, "steps": STEPS, "pictures": len(held)}
                record |= {"ratio": ratio, "every": every, "maps": rule, "mse_to_plain": mse(held, plain)}
                yield record | {"mse_to_merged": mse(held, merged), "kinds": tokenmerge.summary(pipe).steps}
            tokenmerge.remove(pipe)


def mse(one: np.ndarray, other: np.ndarray) -> float:
    return round(float(((one - other) ** 2).mean()), 1)


if __name__ == "__main__":
    write_records(parser_for(__doc__).parse_args().out, measured())
