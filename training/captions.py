"""Captions: what people might type who want one of the 102 flowers, and sentences about other things."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

TEMPLATES = (
    "{}",
    "a {}",
    "a photo of a {}",
    "a photo of the {}",
    "a photograph of a {}",
    "a picture of a {}",
    "an image of a {}",
    "a {} flower",
    "a blooming {}",
    "a close-up of a {}",
    "a close-up of a {} flower",
    "a close up photo of a {}",
    "a macro photograph of a {}",
    "a detailed photo of one {}",
    "a {} in a garden",
    "a {} in the wild",
    "a {} in full bloom",
    "a {} on a green background",
    "a {} with green leaves",
    "a bunch of {}",
    "a bouquet of {}",
    "many {} in a field",
    "several {} growing together",
    "the petals of a {}",
    "the blossom of a {}",
    "{}, a kind of flower",
    "{}, photo",
    "photo of {}",
    "flower: {}",
    "one {} seen from above",
    "a single {} against the sky",
    "a {} after the rain",
    "this is a {}",
    "please draw a {}",
    "show me a {}",
    "generate an image of a {}",
    "I would like to see a {}",
    "my favourite flower is the {}",
    "a painting of a {}",
    "a drawing of a {}",
    "a {} next to a {other}",
    "a {other} and a {}",
    "a {} on a {other}",
    "{other}, {}",
)
HELD_OUT_TEMPLATES = (
    "a snapshot of a {} by the river",
    "what does a {} look like?",
    "two {} standing near a wooden fence",
    "an old postcard showing the {}",
    "wild {} at dawn, shot on film",
    "there is a {} behind the {other}",
)
ADJECTIVES = (
    "beautiful", "pretty", "small", "large", "fresh", "wild", "delicate", "lovely", "tall", "wet", "single",
    "red", "yellow", "white", "pink", "purple", "blue", "orange", "bright", "colorful", "fading",
)  # fmt: skip
ENDINGS = (
    ", highly detailed", ", 4k", ", 8k, sharp focus", " in the morning light", " at sunset", ", soft light",
    " on a sunny day", ", bokeh", " in spring", " in a vase", ", best quality", ", national geographic photo",
    " on a dark background", " with a bee on it", ", professional photography", ", natural colors", ".", "!",
)  # fmt: skip
ENDING_SHARE, ADJECTIVE_SHARE, PLURAL_SHARE, CASE_SHARE, CLAUSE_SHARE = 0.25, 0.15, 0.15, 0.15, 0.08
SCATTER_SHARE = 0.2


def plural(name: str) -> str:
    """A plural as people write it; names that already end in s stay."""
    if name.endswith("s"):
        return name
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + ("es" if name.endswith(("sh", "ch", "x")) else "s")


class Captioner:
    """Draws captions. `others` are general sentences, used as companions and as distracting clauses."""

    def __init__(self, others: list[str], seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.others = others
        self.short_others = [text for text in others if len(text.split()) <= 3]

    def snippet(self) -> str:
        """Up to six words in a row out of a general sentence."""
        words = self.random.choice(self.others).split()
        start = self.random.randrange(len(words))
        return " ".join(words[start : start + self.random.randint(0, 6)])

    def caption(self, name: str, templates: tuple[str, ...] = TEMPLATES) -> str:
        """One caption that names the flower, in varied spelling, with and without other words."""
        draw = self.random
        if "-" in name and draw.random() < 0.3:
            name = name.replace("-", " ")
        if draw.random() < PLURAL_SHARE:
            name = plural(name)
        if draw.random() < ADJECTIVE_SHARE:
            name = f"{draw.choice(ADJECTIVES)} {name}"
        text = draw.choice(templates).format(name, other=draw.choice(self.short_others))
        if draw.random() < SCATTER_SHARE:
            text = f"{self.snippet()} {name} {self.snippet()}".strip()
        if draw.random() < ENDING_SHARE:
            text += draw.choice(ENDINGS)
        if draw.random() < CLAUSE_SHARE:
            clause = draw.choice(self.others)
            text = f"{text}, {clause}" if draw.random() < 0.5 else f"{clause}, {text}"
        if draw.random() < CASE_SHARE:
            text = draw.choice((str.capitalize, str.title, str.upper))(text)
        return text


def read_sentences(folder: Path) -> list[str]:
    """General English from the prompt files: PartiPrompts, GEMRec's own prompts, ImageNet class names."""
    with (folder / "parti.tsv").open(newline="") as file:
        sentences = [row["Prompt"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    with (folder / "gemrec_v3.csv").open(newline="") as file:
        sentences += [row["prompt"] for row in csv.DictReader(file)]
    sentences += (folder / "imagenet_classes.txt").read_text().splitlines()
    return [text.strip() for text in sentences if text.strip()]


def without_flowers(sentences: list[str], names: list[str]) -> list[str]:
    """Only the sentences in which no word of a flower's name occurs, so that they can never mislabel one."""
    common = {"in", "the", "of", "deep", "red", "blue", "black", "pink", "orange", "yellow", "white", "ball",
              "giant", "great", "tree", "water", "wild", "garden", "fire", "king", "common", "desert",
              "spring", "morning", "grape", "tiger", "moon", "english", "mexican", "japanese", "love", "cape",
              "sweet", "eyed", "bird", "flower", "hard", "wales", "alpine", "sea", "globe", "purple", "bee",
              "trumpet", "balloon", "blanket", "sword", "colt's", "foot", "apple", "californian"}  # fmt: skip
    words = {word for name in names for word in re.split(r"[ -]", name)} - common
    words |= {word + "s" for word in words} | {"flower", "flowers", "blossom", "blossoms"}
    return [text for text in sentences if not words & set(re.findall(r"[a-z']+", text.lower()))]
