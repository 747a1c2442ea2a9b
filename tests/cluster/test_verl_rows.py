"""What verl's queue holds of a group, and what credit adds to each of its rows."""

from __future__ import annotations

import numpy as np

from rllm_trainer.cluster.verl_rows import INERT, columns_of, group_rows
from rllm_trainer.types import Group, Rollout, Row, Sample, SampledSpan


def sample() -> Sample:
    """Prompt [5, 6], reply [7, 2], tool text [8], reply [9, 2]."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.bool_)
    return Sample(
        id="e:s:0",
        episode_id="e",
        task_id="t",
        token_ids=np.array([5, 6, 7, 2, 8, 9, 2], np.int32),
        trained_mask=mask,
        logprobs=np.array([np.nan, np.nan, -0.5, -1.0, np.nan, -1.5, -2.0], np.float32),
        versions=np.array([-1, -1, 3, 3, -1, 4, 4], np.int32),
        temperature=0.7,
        spans=[SampledSpan(span_id="s", choice=0, trajectory_id="t", role="solver", start=2, stop=7)],
    )


def test_columns_begin_at_the_first_trained_token_and_hold_no_nan() -> None:
    """verl's response is everything from there on; what the policy did not sample is 0 in every column."""
    one = sample()
    row = Row(
        sample=one,
        advantages=np.array([0, 0, 1, 1, 0, 2, 2], np.float32),
        weights=np.array([0, 0, 0.5, 0.5, 0, 0.5, 0.5], np.float32),
        old_logprobs=one.logprobs,
        group="t",
    )
    ((sample_id, columns),) = columns_of([row])
    assert sample_id == "e:s:0"
    assert columns.advantages.tolist() == [1, 1, 0, 2, 2]
    assert columns.weights.tolist() == [0.5, 0.5, 0, 0.5, 0.5]
    assert columns.old_logprobs.tolist() == [-0.5, -1.0, 0.0, -1.5, -2.0]
    assert columns.is_weights.tolist() == [1, 1, 1, 1, 1]


def test_a_group_without_a_trained_token_is_one_inert_row() -> None:
    """It is in some batch, so that it is counted; its mask is 0, so that it has no gradient."""
    lost = [
        Rollout(
            task_id="t", index=index, row={}, episode=None, reward=None, rewards={}, fault="infrastructure", reason="the node went away"
        )
        for index in range(2)
    ]
    (row,) = group_rows(Group(task_id="t", rollouts=lost), {}, version=5, pad=0)
    assert (row.sample_id, row.mask.tolist(), row.prompt_len) == (INERT, [0], 1)
    assert (row.min_version, row.max_version) == (5, 5)
