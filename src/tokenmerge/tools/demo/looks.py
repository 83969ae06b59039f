"""The page's HTML: progress, times, drift and error messages."""

from __future__ import annotations

import math
from html import escape

from ...runtime.timeline import FULL, HELD, MERGED
from ..quality.metrics import BY_NAME
from .pairs import Pair, Progress, Side

# Kinds of step, as the legend explains them.
_KINDS = {FULL: "full", MERGED: "merged: fewer tokens", HELD: "held: blocks skipped"}

HEADER = """<header class="tm-header"><h1>tokenmerge</h1>
<p>One prompt, one seed, two pictures: the plain model's and a faster one. Compare them.</p></header>"""
WELCOME = '<p class="tm-note">Write a prompt, choose a speed, and press <b>Draw</b>.</p>'
STOPPED = '<p class="tm-note" role="status">Stopped. The model is free for the next picture.</p>'


def problem(sentence: str) -> str:
    """An error message, with a capital letter and a full stop."""
    text = sentence[:1].upper() + sentence[1:]
    return f'<p class="tm-problem" role="alert">{escape(text)}{"" if text.endswith((".", "?", "!")) else "."}</p>'


def progress(now: Progress, doing: str | None = None) -> str:
    """Both pictures as strips of steps. doing: replaces the status line of the progress."""
    name, steps = title_of(now.order.configuration.label), now.order.request.steps
    kinds = [kind for kind in _KINDS if kind in {*now.plain.kinds, *now.fast.kinds}]
    legend = "".join(f'<span><i class="tm-{kind}"></i>{_KINDS[kind]}</span>' for kind in kinds)
    return (
        f'<div class="tm-progress"><p class="tm-doing" role="status">{escape(doing or f"{now.doing} ...")}</p>'
        f"{_strip('plain', now.plain, steps)}{_strip(name, now.fast, steps)}"
        f'<p class="tm-legend">{legend}</p></div>'
    )


def done(pair: Pair) -> str:
    """The strips of a finished pair."""
    prompt = pair.order.prompt if len(pair.order.prompt) <= 80 else f"{pair.order.prompt[:80]}..."
    return progress(pair.progress, f"{prompt}, seed {pair.order.seed}, {pair.order.model}")


def figures(pair: Pair) -> str:
    """Times and drift."""
    plain, fast = pair.plain, pair.fast
    cells = [
        ("plain", f"{plain.seconds:.2f} s", "time to draw the plain picture"),
        (title_of(fast.configuration.label), f"{fast.seconds:.2f} s", "time to draw the fast picture"),
        ("speed-up", f"{fast.speed_up:.2f}x", "how many times faster"),
    ]
    for name, value in fast.drift.items():
        metric = BY_NAME[name]
        shown = f"{value:.{metric.digits}f}" if math.isfinite(value) else "equal"
        unit = " dB" if name == "psnr" and math.isfinite(value) else ""
        cells.append((metric.title, f"{shown}{unit}", metric.meaning))
    if fast.estimate is not None:
        cells.append(
            ("estimated PSNR", f"{fast.estimate.short} dB", "Hold's own estimate, made without the plain picture")
        )
    if fast.tokens:
        cells.append(
            ("tokens", fast.tokens.replace("->", "→"), "tokens before and after merging, for each group of layers")
        )
    return f'<dl class="tm-figures">{"".join(map(_cell, *zip(*cells, strict=True)))}</dl>'


def sides(pair: Pair) -> str:
    """Which picture is on which side of the slider."""
    name = escape(title_of(pair.fast.configuration.label))
    return f'<p class="tm-sides"><span>◧ plain</span><span>{name} ◨</span></p>'


def merged(pair: Pair) -> str:
    """Explains the picture of merged tokens, or says why there is none."""
    if pair.fast.overlay is None:
        return '<p class="tm-note">Nothing was merged. To merge tokens, switch on Merge under Details.</p>'
    return (
        '<p class="tm-note">Dots are the tokens that were kept. A red line runs from every other token to the one it '
        "merged into. Grey lines bound regions. Shown is the last map of the group with the most tokens.</p>"
    )


def summary(pair: Pair) -> str:
    """The library's summary of the fast picture. Sentences wrap, and tables scroll."""
    parts = pair.summary.split("\n\n")
    kinds = ["tm-table" if "\n---" in part else "tm-text" for part in parts]
    shown = [f'<pre class="{kind}">{escape(part)}</pre>' for kind, part in zip(kinds, parts, strict=True)]
    return f'<div class="tm-summary">{"".join(shown)}</div>'


def _strip(name: str, side: Side, steps: int) -> str:
    count = len(side.kinds)
    cells = "".join(f'<i class="tm-{kind}"></i>' for kind in side.kinds) + "<i></i>" * (steps - count)
    time = f"{side.seconds:.1f} s" if side.seconds else ""
    return (
        f'<div class="tm-strip"><b>{escape(name)}</b>'
        f'<span class="tm-cells" style="--tm-steps: {steps}" role="progressbar" '
        f'aria-label="{escape(name, quote=True)}" aria-valuemin="0" aria-valuenow="{count}" aria-valuemax="{steps}">'
        f'{cells}</span><span class="tm-count">{count}/{steps}</span><span class="tm-time">{time}</span></div>'
    )


def _cell(title: str, value: str, meaning: str) -> str:
    return f'<div title="{escape(meaning, quote=True)}"><dt>{escape(title)}</dt><dd>{escape(value)}</dd></div>'


def title_of(label: str) -> str:
    """A configuration's name for visitors. With `plain`, both pictures are the same."""
    return "same picture" if label == "plain" else label
