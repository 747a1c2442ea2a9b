"""Messages to a help desk, each with the queue that it belongs to. The held-out ones are about things that no other message names."""

import random
from typing import Any

__all__ = ["held_out_rows", "training_rows"]

THINGS = ["lamp", "desk", "phone", "jacket", "kettle", "mirror", "carpet", "camera", "guitar", "printer", "blender", "tent"]
HELD_OUT = ["bike", "sofa", "radio", "scarf", "clock", "drill"]

MESSAGES = {
    "billing": ["I was charged twice for my {}.", "The invoice for my {} is wrong.", "Why did my card pay more than the price of the {}?"],
    "delivery": ["My {} has not come.", "Where is the parcel with my {}?", "The driver left my {} at another house."],
    "returns": ["I want to send my {} back.", "My {} is broken, please take it back.", "How do I give back a {} that does not fit?"],
}


def training_rows(seed: int) -> list[dict[str, Any]]:
    """Every message about the things to learn from, in an order drawn from ``seed``."""
    rows = _rows(THINGS)
    random.Random(seed).shuffle(rows)
    return rows


def held_out_rows() -> list[dict[str, Any]]:
    """Every message about the held-out things."""
    return _rows(HELD_OUT)


def _rows(things: list[str]) -> list[dict[str, Any]]:
    return [{"message": text.format(thing), "queue": queue} for thing in things for queue, texts in MESSAGES.items() for text in texts]
