"""One episode's replies and scores in, each reply's return out: its own reward and, discounted, what came of it. Pure.

What comes after a reply is what continues it on the token tree, not what was called later: two agents that take turns in time do not
see each other's rewards. Where a prompt broke off a recorded lineage (thinking stripped, history compacted), it follows that lineage
all the same. A reply that several others continue gets the mean over the ends below it; an end gets its trajectory's reward, or the
episode's where the role has none of its own.

Example, discount 0.5: calls a -> b -> c of one trajectory, b has a reward of 1, the episode 4: c 4, b 1 + 0.5 * 4 = 3, a 0.5 * 3 = 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rllm_trainer.samples import SampleSet

__all__ = ["returns_to_go"]

_OTHER_AGENT = "other agent"


def returns_to_go(
    sample_set: SampleSet, *, own: Mapping[str, float], final: Mapping[str, float | None], discount: float
) -> dict[tuple[str, int], float]:
    """(span id, choice) -> return of every reply on the tree below which something was scored.

    Args:
        own: span id -> the call's own reward, where it has one.
        final: trajectory id -> what its end is worth; None: nothing scored it.
        discount: what one call further on is worth.
    """
    spans = sample_set.spans
    parents = _parents(sample_set)
    below: list[list[tuple[float | None, int]]] = [[] for _ in spans]
    """(return, number of ends) of each reply's continuations."""
    waiting = [0] * len(spans)
    for parent in parents:
        if parent >= 0:
            waiting[parent] += 1
    last = _last_of_trajectories(sample_set, parents)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    found: dict[tuple[str, int], float] = {}
    while ready:
        index = ready.pop()
        span = spans[index]
        ends = list(below[index])
        if not ends or index in last:
            ends.append((final.get(span.trajectory_id), 1))
        value = _with_own(own.get(span.span_id), _mean(ends))
        if value is not None:
            found[span.span_id, span.choice] = value
        parent = parents[index]
        if parent >= 0:
            below[parent].append((None if value is None else discount * value, sum(count for _, count in ends)))
            waiting[parent] -= 1
            if waiting[parent] == 0:
                ready.append(parent)
    return found


def _parents(sample_set: SampleSet) -> list[int]:
    """The reply that each one follows: the one that its prompt starts with, else the one that it broke off. -1: none."""
    spans = sample_set.spans
    index = {(span.span_id, span.choice): number for number, span in enumerate(spans)}
    left = {b.span_id: index.get((b.recorded_span_id, b.recorded_choice), -1) for b in sample_set.breaks if b.cause != _OTHER_AGENT}
    return [span.parent if span.parent >= 0 else left.get(span.span_id, -1) for span in spans]


def _last_of_trajectories(sample_set: SampleSet, parents: Sequence[int]) -> set[int]:
    """The last reply of each trajectory whose every reply is continued, by another one: it is an end besides."""
    continued = {parent for parent in parents if parent >= 0}
    last: dict[str, int] = {}
    ended: set[str] = set()
    for index, span in enumerate(sample_set.spans):
        last[span.trajectory_id] = index
        if index not in continued:
            ended.add(span.trajectory_id)
    return {index for trajectory_id, index in last.items() if trajectory_id not in ended}


def _mean(ends: Sequence[tuple[float | None, int]]) -> float | None:
    scored = [(value, count) for value, count in ends if value is not None]
    total = sum(count for _, count in scored)
    return sum(value * count for value, count in scored) / total if total else None


def _with_own(own: float | None, later: float | None) -> float | None:
    return later if own is None else own + (later or 0.0)
