"""Draws README's strip: one picture plain, merged, held and with both, and the steps and drift of each.

    python scripts/strip.py    # writes docs/strip.jpg

`tokenmerge generate` draws the same with times. The strip has none, since they depend on the machine that draws it.
"""

from __future__ import annotations

from pathlib import Path

from tokenmerge.tools.drawing.comparison import Comparison, Shot, draw_rows
from tokenmerge.tools.drawing.pictures import Panel, save_picture, strip
from tokenmerge.tools.drawing.studio import Studio
from tokenmerge.tools.typed import read_configurations

OUT = Path(__file__).parent.parent / "docs" / "strip.jpg"
STEPS = 28
TITLES = {
    "none": "plain",
    "unet:ratio=0.5": "Merge(ratio=0.5)",
    "hold": "Hold()",
    "unet:ratio=0.5 + hold": "Merge(ratio=0.5), Hold()",
}


def panel(shot: Shot, title: str) -> Panel:
    # The steps of the plain model are not counted.
    kinds = shot.kinds or {"full": STEPS}
    steps = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    drift = f"; MSE {shot.drift['mse']:.0f}, SSIM {shot.drift['ssim']:.3f}" if shot.drift else ""
    return Panel(shot.picture, title, f"{steps}{drift}")


def main() -> None:
    prompt = "a photo of an oxeye daisy"
    comparison = Comparison(model="tiny-sdxl", prompt=prompt, size=(512, 512), steps=STEPS, device="cpu")
    configurations = read_configurations(list(TITLES)[1:])
    (row,) = draw_rows(Studio(comparison), comparison, configurations)
    save_picture(strip([[panel(*each) for each in zip(row, TITLES.values(), strict=True)]], prompt), OUT)


if __name__ == "__main__":
    main()
