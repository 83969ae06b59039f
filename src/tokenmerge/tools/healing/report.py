"""The report of a heal run: a card with figures, a strip of pictures, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ...planning.tables import counted
from ...planning.tables import markdown as table
from ..drawing.pictures import Panel, save_picture, strip
from ..evaluation.results import Results
from ..evaluation.table import markdown
from ..files import finite, to_json, write_text
from ..quality.metrics import BY_NAME
from ..quality.statistics import Estimate, jackknife
from ..typed import PLAIN
from .training import Progress

# Rows of the strip, and parts of the training that have a mean loss each.
_SHOWN, _PARTS = 4, 10


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    lora: Path
    settings: Mapping[str, Any]
    pictures: int  # to train with, held-out ones excluded
    progress: Progress
    results: Results
    environment: Mapping[str, str]

    @property
    def loss(self) -> list[float]:
        """The mean loss of each tenth of the steps."""
        losses = self.progress.losses
        size = max(1, len(losses) // _PARTS)
        parts = [losses[first : first + size] for first in range(0, len(losses), size)]
        return [sum(part) / len(part) for part in parts]

    @property
    def fid_loss(self) -> dict[str, Estimate]:
        """FID that merged and healed pictures lose against plain ones, and the share of the loss that healing cuts."""
        found = {row.configuration.label: row.sets.get("fid", []) for row in self.results.rows}
        merged, healed = found["merged"], found["healed"]
        # Without photographs, plain pictures are the reference.
        plain = found[PLAIN] or [0.0] * len(merged)
        losses = {
            "merged": [each - base for each, base in zip(merged, plain, strict=True)],
            "healed": [each - base for each, base in zip(healed, plain, strict=True)],
        }
        if all(losses["merged"]):
            pairs = zip(losses["healed"], losses["merged"], strict=True)
            losses["cut"] = [1.0 - after / before for after, before in pairs]
        return {name: jackknife(values[0], values[1:]) for name, values in losses.items() if values}

    def to_dict(self) -> Any:
        return finite(
            {
                "lora": self.lora.name,
                "settings": dict(self.settings),
                "pictures": self.pictures,
                "loss": self.loss,
                "held_out_loss": self.progress.held_out,
                "fid_loss": {name: vars(value) for name, value in self.fid_loss.items()},
                "results": [row.to_dict() for row in self.results.rows],
                "environment": dict(self.environment),
            }
        )

    def __str__(self) -> str:
        return f"Loss of held-out pictures: {self.held_out}.\n\n{self.figures}"

    @property
    def held_out(self) -> str:
        before, after = self.progress.held_out["merged"], self.progress.held_out["healed"]
        return f"{before:.4g} merged, {after:.4g} healed ({1 - after / before:.0%} less)"

    @property
    def figures(self) -> str:
        """The table of metrics, below the FID loss of merging and healing where FID was measured."""
        loss = self.fid_loss
        if "cut" not in loss:
            return markdown(self.results)
        merged, healed, cut = (_figure(loss[name], unit) for name, unit in (("merged", 1), ("healed", 1), ("cut", 100)))
        text = f"FID loss against plain pictures: {merged} merged, {healed} healed ({cut} % less)."
        noise = loss["merged"].interval
        if noise is None or loss["merged"].mean <= noise:
            text += " The loss does not exceed its noise, so the cut says nothing: hold out more pictures."
        return f"{text}\n\n{markdown(self.results)}"


def write_outcome(outcome: Outcome, out: Path) -> None:
    """Write all files that are made from the outcome, and replace older ones."""
    save_picture(_strip(outcome.results), out / "strip.png")
    write_text(out / "results.json", to_json(outcome.to_dict(), indent=2))
    write_text(out / "README.md", _card(outcome))


def _strip(results: Results) -> Image.Image:
    """The first samples, each plain, merged and healed."""
    rows = []
    for sample in results.samples[:_SHOWN]:
        row = []
        for each in results.rows:
            with Image.open(results.folder.image(each.configuration, sample)) as picture:
                values = results.values.get((each.configuration.label, sample), {})
                name = next((name for name in ("lpips", "psnr") if name in values), None)
                caption = "" if name is None else f"{BY_NAME[name].title} {values[name]:.3f}"
                row.append(
                    Panel(picture.copy(), "plain" if each.configuration.is_plain else each.configuration.label, caption)
                )
        rows.append(row)
    return strip(rows)


def _card(outcome: Outcome) -> str:
    settings = outcome.settings
    merge, (width, height) = settings["merge"], settings["size"]
    fields = ", ".join(f"{name}={value!r}" for name, value in merge.items() if name not in ("technique", "lora"))
    rows = {
        "base model": settings["model"],
        "technique": fields,
        "data": f"{settings['data'] or 'drawn by the plain model'}, {counted(outcome.pictures, 'picture')}",
        "training": f"{settings['steps']} steps of {settings['batch']} x {settings['processes']} pictures, "
        f"{width}x{height}, rank {settings['rank']}, learning rate {settings['lr']:g}",
        "loss, by tenths of the steps": ", ".join(f"{each:.4g}" for each in outcome.loss),
        "loss of held-out pictures": outcome.held_out,
        "measured on": ", ".join(f"{name} {value}" for name, value in outcome.environment.items()),
    }
    return f"""# A LoRA that heals merging

`{outcome.lora.name}` makes the merged model draw what the plain one draws. It acts in merged steps only:

```python
tokenmerge.apply(pipe, Merge({fields}, lora="{outcome.lora.name}"))
```

{table(["", ""], [[name, value] for name, value in rows.items()])}

Pictures of held-out captions, with seeds that training has not seen, against the plain model's:

{outcome.figures}

![plain, merged and healed](strip.png)

`evaluation/report.html` has all pictures. A LoRA inherits the licences of its base model and its data.
"""


def _figure(value: Estimate, unit: float) -> str:
    """A figure times `unit`, with its interval."""
    mean = f"{unit * value.mean:.1f}"
    return mean if value.interval is None else f"{mean} ± {unit * value.interval:.1f}"
