"""Two small trained diffusion models for tokenmerge: tiny-flux and tiny-sdxl."""

from pathlib import Path

FOLDER = Path(__file__).parent


def models() -> dict[str, Path]:
    """The folder of every model, by name."""
    return {folder.name: folder for folder in sorted(FOLDER.iterdir()) if (folder / "model_index.json").is_file()}
