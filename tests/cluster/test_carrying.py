"""What a replica told of a reply's parts is told of the whole reply: ids, logprobs, and the version of each token."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rllm_trainer.cluster.carrying import whole_reply


class Part(msgspec.Struct, kw_only=True):
    """What a replica answers."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]


def reply(*script: Part, most: int) -> tuple[Any, list[tuple[list[int], int]]]:
    """The reply that these parts make, and what was asked for each."""
    left, asked = list(script), []

    async def ask(ids: list[int], more: int) -> Part:
        asked.append((ids, more))
        return left.pop(0)

    return asyncio.run(whole_reply(ask, most=most, again=0.0)), asked


def test_parts_of_a_reply_that_updates_end_keep_their_versions() -> None:
    """Three tokens of version 3, none while version 4 came, two of version 5: one reply, asked for from where it was."""
    found, asked = reply(
        Part(token_ids=[1, 2, 3], log_probs=[-0.1, -0.2, -0.3], stop_reason="aborted", extra_fields={"global_steps": 3}),
        Part(token_ids=[], log_probs=[], stop_reason="abort", extra_fields={"global_steps": 4}),
        Part(token_ids=[4, 5], log_probs=[-0.4, -0.5], stop_reason="completed", extra_fields={"global_steps": 5}),
        most=9,
    )
    assert (found.token_ids, found.log_probs, found.stop_reason) == ([1, 2, 3, 4, 5], [-0.1, -0.2, -0.3, -0.4, -0.5], "completed")
    assert found.extra_fields["versions"] == [(3, 0, 3), (5, 3, 5)]
    assert asked == [([], 9), ([1, 2, 3], 6), ([1, 2, 3], 6)]


def test_versions_that_a_replica_tells_by_token_stay() -> None:
    """A replica that stood still during an update says itself where the newer weights begin."""
    told = {"global_steps": 4, "versions": [(3, 0, 2), (4, 2, 3)]}
    found, _ = reply(Part(token_ids=[1, 2, 3], log_probs=[-1.0] * 3, stop_reason="completed", extra_fields=told), most=9)
    assert found.extra_fields == {"versions": [(3, 0, 2), (4, 2, 3)], "global_steps": 4}


def test_a_reply_that_was_cut_short_at_its_last_token_is_whole() -> None:
    """Nothing is asked for beyond the most tokens, which are of all parts together; one version is one span."""
    found, asked = reply(
        Part(token_ids=[1, 2], log_probs=[-1.0] * 2, stop_reason="aborted", extra_fields={"global_steps": 3}),
        Part(token_ids=[3], log_probs=[-1.0], stop_reason="aborted", extra_fields={"global_steps": 3}),
        most=3,
    )
    assert (found.token_ids, found.stop_reason) == ([1, 2, 3], "length")
    assert found.extra_fields["versions"] == [(3, 0, 3)]
    assert [more for _, more in asked] == [3, 1]
