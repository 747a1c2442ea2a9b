"""Sentences with a colour in them to learn from, and others, about other things, to be measured on."""

import itertools
import random

__all__ = ["held_out_rows", "training_rows"]

Row = dict[str, str]

_COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")
_THINGS = (
    "bag", "ball", "bike", "boat", "book", "boot", "bowl", "box", "bus", "cap", "car", "chair", "coat", "cup", "desk", "door", "dress",
    "fence", "flag", "gate", "glove", "hat", "house", "jar", "kite", "lamp", "mug", "pen", "plate", "rug", "scarf", "shirt", "shoe",
    "sofa", "sock", "table", "tent", "train", "truck", "vase",
)  # fmt: skip
_SENTENCES = ("The {colour} {thing} is here.", "I lost my {colour} {thing}.", "She has a {colour} {thing}.")
_SPLIT_SEED = 1
_HELD_OUT_THINGS = 12


def training_rows(seed: int) -> list[Row]:
    """Every sentence about the things to learn from, in an order of the seed's own."""
    rows = _rows(_things()[_HELD_OUT_THINGS:])
    random.Random(seed).shuffle(rows)
    return rows


def held_out_rows(count: int) -> list[Row]:
    """``count`` sentences about the other things; the same for every seed."""
    rows = _rows(_things()[:_HELD_OUT_THINGS])
    if not 0 < count <= len(rows):
        raise ValueError(f"got {count} held-out sentences; expected 1 to {len(rows)}")
    random.Random(_SPLIT_SEED).shuffle(rows)
    return rows[:count]


def _things() -> list[str]:
    things = list(_THINGS)
    random.Random(_SPLIT_SEED).shuffle(things)
    return things


def _rows(things: list[str]) -> list[Row]:
    made = itertools.product(things, _COLOURS, _SENTENCES)
    return [{"sentence": sentence.format(colour=colour, thing=thing), "colour": colour} for thing, colour, sentence in made]
