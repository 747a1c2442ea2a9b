"""The questions that the assistant learns from and is measured on, with their answers worked out by this program.

Learning and measuring share no item and no stock count. The measured questions are the same for every seed.
"""

import csv
import random
from pathlib import Path
from typing import Any

__all__ = ["HELD_OUT", "held_out_rows", "training_rows"]

HELD_OUT = 24
"""Items at the end of the stock list that no training question names."""

WORDS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


def training_rows(seed: int) -> list[dict[str, Any]]:
    """Every question about the items to learn from, in an order drawn from ``seed``."""
    rows = [row for item, count in _stock()[:-HELD_OUT] for row in _about(item, count)]
    random.Random(seed).shuffle(rows)
    return rows


def held_out_rows(n: int) -> list[dict[str, Any]]:
    """``n`` different questions about the held-out items, the same at each call; items take turns."""
    by_item = [_about(item, count) for item, count in _stock()[-HELD_OUT:]]
    draw = random.Random(0)
    for rows in by_item:
        draw.shuffle(rows)
    turns = [row for turn in zip(*by_item, strict=True) for row in turn]
    if n > len(turns):
        raise ValueError(f"got n={n}, and there are {len(turns)} held-out questions; ask for fewer")
    return turns[:n]


def _stock() -> list[tuple[str, int]]:
    with (Path(__file__).parent / "stock.csv").open() as file:
        return [(row["item"], int(row["count"])) for row in csv.DictReader(file)]


def _about(item: str, count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"{item}: how many {word} {number}?", "answer": result(count, number)}
        for word, result in WORDS.items()
        for number in range(2, 10)
    ]
