"""Writes the results of an evaluation: JSON lines, Markdown, CSV, plots and a page for the browser."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from ..files import to_json, write_text
from .folder import Sample
from .plots import write_plots
from .results import Results, Row
from .table import cells, comma_separated, markdown, notes
from .yardstick import fine_pictures

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --grey: #6a6a72; --line: #d9d9de; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e9ee; --grey: #a2a2ab; --line: #3a3a42; --paper: #17171a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 90rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; }
ul.note { padding-left: 1.1rem; font-size: .9rem; }
ul.note, figcaption { color: var(--grey); } figcaption { font-size: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
td small { color: var(--grey); }
figure:first-child { position: sticky; left: 0; background: var(--paper); }
/* One row each for names, pictures and captions, however long the names are. */
.strip { display: grid; grid-auto-flow: column; grid-auto-columns: 16rem; grid-template-rows: repeat(3, auto);
         gap: 0 .8rem; overflow-x: auto; padding-bottom: .6rem; }
figure { margin: 0; display: grid; grid-row: span 3; grid-template-rows: subgrid; }
figure strong { align-self: end; overflow-wrap: anywhere; } figure img { width: 100%; height: auto; display: block; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 36rem), 1fr)); gap: 1rem; }
.plots img { width: 100%; background: #fff; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--grey); }
dd { margin: 0; }
"""


def write_report(results: Results, out: Path) -> None:
    """Write, or rewrite, every file that depends on all results."""
    write_text(out / "metrics.jsonl", "".join(_picture_lines(results)))
    write_text(out / "results.jsonl", "".join(to_json(line) for line in _result_lines(results)))
    write_text(out / "table.md", markdown(results))
    write_text(out / "table.csv", comma_separated(results))
    plots = write_plots(results, out / "plots")
    write_text(out / "report.html", _page(results, plots))


def _picture_lines(results: Results) -> Iterable[str]:
    for row in results.rows:
        for sample in results.samples:
            label = row.configuration.label
            line = {"label": label, "prompt": sample.prompt, "seed": sample.seed, "image": _image(results, row, sample)}
            yield to_json({**line, **results.values[label, sample]})


def _image(results: Results, row: Row, sample: Sample) -> str:
    """The path of a picture in the folder of the evaluation."""
    return results.folder.image(row.configuration, sample).relative_to(results.folder.root).as_posix()


def _result_lines(results: Results) -> Iterable[dict[str, object]]:
    settings = results.settings
    names = ("model", "size", "steps", "scheduler", "reference_steps", "dtype", "compile", "networks", "environment")
    conditions = {name: settings[name] for name in names}
    counts = {"prompts": len(settings["prompts"]), "seeds": 1 if settings["paired"] else len(settings["seeds"])}
    for row in results.rows:
        yield {**results.line(row), **counts, **conditions}


def _page(results: Results, plots: list[Path]) -> str:
    settings = results.settings
    title = f"Techniques on {settings['model']}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        '<div class="wide">',
        _html_table(results),
        "</div>",
        '<ul class="note">',
        *(f"<li>{html.escape(note)}</li>" for note in notes(results)),
        "</ul>",
    ]
    if plots:
        parts += ["<h2>Quality against cost</h2>", '<div class="plots">']
        parts += [f'<img src="plots/{quote(path.name)}" alt="{html.escape(path.stem)}">' for path in plots]
        parts.append("</div>")
    parts.append("<h2>Pictures</h2>")
    for place, sample in enumerate(results.samples):
        if place == 0 or results.samples[place - 1].place != sample.place:
            parts.append(f"<h3>{html.escape(sample.prompt)}</h3>")
        parts += ['<div class="strip">', *(_figure(results, row, place) for row in _shown(results)), "</div>"]
    parts += ["<h2>Made with</h2><dl>"]
    for name, value in settings["environment"].items():
        parts.append(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>")
    return "\n".join([*parts, "</dl></body></html>"]) + "\n"


def _html_table(results: Results) -> str:
    header, rows = cells(results, arrows=True)
    lines = ["<table><thead><tr>", *(f"<th>{html.escape(cell)}</th>" for cell in header), "</tr></thead><tbody>"]
    for row in rows:
        columns = []
        for cell in row:
            mean, _, interval = html.escape(cell).partition(" +- ")
            columns.append(f"<td>{mean}{f' <small>± {interval}</small>' if interval else ''}</td>")
        lines.append(f"<tr>{''.join(columns)}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _shown(results: Results) -> list[Row]:
    """All rows; after the plain one, the plain pictures with more steps, unless they are a row already."""
    plain, *others = results.rows
    fine = Row(fine_pictures(results.reference_steps), {}, None, {}) if results.distance else None
    if fine is None or fine.configuration.what in [row.configuration.what for row in others]:
        return [plain, *others]
    return [plain, fine, *others]


def _figure(results: Results, row: Row, place: int) -> str:
    sample, label = results.samples[place], row.configuration.label
    # The pictures with more steps are a yardstick, and have no values.
    values = results.values.get((label, sample), {})
    figures = [
        f"{metric.title} {values[metric.name]:.{min(metric.digits, 3)}f}"
        for metric in results.metrics
        if metric.name in values
    ]
    seed = f"seed {sample.seed}" if row.configuration.is_plain else ""
    caption = html.escape(", ".join([part for part in (seed, *figures) if part]))
    width, height = results.settings["size"]
    return (
        f'<figure><strong>{html.escape(label)}</strong><img loading="lazy" width="{width}" height="{height}" '
        f'src="{quote(_image(results, row, sample))}" alt="{html.escape(f"{sample.prompt}, {label}")}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
