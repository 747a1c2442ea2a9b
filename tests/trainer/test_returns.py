"""Returns to go along the token tree, on literal ids: whose reward reaches which reply, and through what."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_trainer.advantages.returns import returns_to_go
from rllm_trainer.samples import build_samples
from rllm_trainer.testing import make_call, make_choice, make_episode


def returns(episode: Any, *, own: dict[str, float], final: dict[str, float | None], discount: float = 0.5) -> dict[tuple[str, int], float]:
    return returns_to_go(build_samples(episode), own=own, final=final, discount=discount)


def test_a_chain_is_discounted_call_by_call() -> None:
    """a -> b -> c, b has 1, the end is worth 4: c 4, b 1 + 2, a 1.5."""
    chain = make_episode(make_call("a", [1], [7, 2]), make_call("b", [1, 7, 2, 3], [8]), make_call("c", [1, 7, 2, 3, 8, 4], [9]))
    assert returns(chain, own={"b": 1.0}, final={"main": 4.0}) == {("a", 0): 1.5, ("b", 0): 3.0, ("c", 0): 4.0}


def test_agents_that_take_turns_in_time_do_not_see_each_others_rewards() -> None:
    """Calls x1, y1, x2, y2 in time: x1's return is of x2 alone."""
    x = ("x", [make_call("x1", [1], [7], started=1), make_call("x2", [1, 7, 3], [8], started=3)])
    y = ("y", [make_call("y1", [2], [7], started=2), make_call("y2", [2, 7, 3], [8], started=4)])
    found = returns(make_episode(agents=[x, y]), own={}, final={"x-0": 8.0, "y-1": 2.0})
    assert found == {("x1", 0): 4.0, ("x2", 0): 8.0, ("y1", 0): 1.0, ("y2", 0): 2.0}


def test_a_reply_that_two_others_continue_gets_their_mean_over_ends() -> None:
    """One branch ends at once, the other forks again: three ends, so the first reply gets a third of each."""
    root = make_call("r", [1], [7])
    left = make_call("l", [1, 7, 2], [8])
    right = make_call("m", [1, 7, 3], [8])
    ends = [make_call("m1", [1, 7, 3, 8, 4], [9]), make_call("m2", [1, 7, 3, 8, 5], [9])]
    episode = make_episode(root, left, right, *ends)
    found = returns(episode, own={"l": 6.0, "m1": 3.0, "m2": 0.0}, final={"main": None}, discount=1.0)
    assert (found["m", 0], found["r", 0]) == (1.5, 3.0)
    assert returns(episode, own={}, final={"main": 1.0}, discount=1.0) == dict.fromkeys(found, 1.0)


def test_of_four_samples_only_the_one_that_was_continued_has_what_came_after() -> None:
    """The other three are ends of their own."""
    four = make_call("a", [1], [7], [8], [9], [10])
    episode = make_episode(four, make_call("b", [1, 9, 3], [11]))
    found = returns(episode, own={"b": 2.0}, final={"main": 4.0})
    assert [found["a", choice] for choice in range(4)] == [4.0, 4.0, 3.0, 4.0]


def test_the_last_reply_of_an_agent_that_another_goes_on_from_is_an_end_besides() -> None:
    """A planner, worth 4, whose only reply an executor, worth 2, continues: the reply has the mean of both, not the executor's alone."""
    planner = ("planner", [make_call("p", [1], [7])])
    executor = ("executor", [make_call("x", [1, 7, 3], [8])])
    found = returns(make_episode(agents=[planner, executor]), own={}, final={"planner-0": 4.0, "executor-1": 2.0}, discount=1.0)
    assert found == {("p", 0): 3.0, ("x", 0): 2.0}


def test_a_compacted_history_follows_what_it_broke_off() -> None:
    """The second prompt holds a summary of the first: no prefix, and yet the first call has its discounted return."""
    first = make_call("a", [1, 2], make_choice([7, 2], "long"), messages=[{"role": "user", "content": "q"}])
    summary = [{"role": "user", "content": "q"}, {"role": "user", "content": "summary: long"}]
    second = make_call("b", [1, 2, 5], make_choice([9], "end"), messages=summary)
    samples = build_samples(make_episode(first, second))
    found = returns_to_go(samples, own={}, final={"main": 4.0}, discount=0.5)
    assert [b.recorded_span_id for b in samples.breaks] == ["a"]
    assert found == {("a", 0): 2.0, ("b", 0): 4.0}


def test_what_nothing_scored_has_no_return() -> None:
    """No reward below it, none at its end: it is left without one, not given 0."""
    assert returns(make_episode(make_call("a", [1], [7])), own={}, final={"main": None}) == {}


@pytest.mark.parametrize("discount, expected", [(1.0, 4.0), (0.0, 0.0)])
def test_the_ends_of_the_discount(discount: float, expected: float) -> None:
    """1: every reply has the whole; 0: only its own."""
    chain = make_episode(make_call("a", [1], [7]), make_call("b", [1, 7, 3], [8]))
    assert returns(chain, own={}, final={"main": 4.0}, discount=discount)["a", 0] == expected
