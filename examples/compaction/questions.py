"""Chats of four sentences with a colour in each to learn from, and others, about other things, to be measured on."""

import random

__all__ = ["held_out_rows", "training_rows"]

Row = dict[str, list[str]]

_COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")
_THINGS = (
    "bag", "ball", "bike", "boat", "book", "boot", "bowl", "box", "bus", "cap", "car", "chair", "coat", "cup", "desk", "door", "dress",
    "fence", "flag", "gate", "glove", "hat", "house", "jar", "kite", "lamp", "mug", "pen", "plate", "rug", "scarf", "shirt", "shoe",
    "sofa", "sock", "table", "tent", "train", "truck", "vase",
)  # fmt: skip
_SENTENCES = ("The {colour} {thing} is here.", "I lost my {colour} {thing}.", "She has a {colour} {thing}.")
_HELD_OUT_THINGS = 12
_TURNS = 4
_SPLIT_SEED = 2


def training_rows(seed: int) -> list[Row]:
    """400 chats about the things to learn from, in an order of the seed's own."""
    rows = _chats(_things()[_HELD_OUT_THINGS:], 400)
    random.Random(seed).shuffle(rows)
    return rows


def held_out_rows(count: int) -> list[Row]:
    """``count`` chats about the other things; the same for every seed."""
    return _chats(_things()[:_HELD_OUT_THINGS], count)


def _things() -> list[str]:
    things = list(_THINGS)
    random.Random(_SPLIT_SEED).shuffle(things)
    return things


def _chats(things: list[str], count: int) -> list[Row]:
    draw = random.Random(_SPLIT_SEED)
    rows: list[Row] = []
    for _ in range(count):
        colours = [draw.choice(_COLOURS) for _ in range(_TURNS)]
        sentences = [draw.choice(_SENTENCES).format(colour=colour, thing=draw.choice(things)) for colour in colours]
        rows.append({"sentences": sentences, "colours": colours})
    return rows
