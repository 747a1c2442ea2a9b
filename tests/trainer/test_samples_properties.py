"""Random episodes, checked against definitions that look at whole sequences: once, order, size, read-back, lineage, breaks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm_trace.types import Episode, Logprobs, ModelCall
from rllm_trainer.samples import SampleSet, build_samples, reconstruct
from rllm_trainer.testing import make_call, make_choice, make_episode

MODES = ("tree", "prefix", "call")
ROLES = ("solver", "solver", "judge")

tokens = st.lists(st.integers(0, 2), min_size=0, max_size=4)
"""Three ids only, so that prefixes are shared, replies coincide and edges are cut."""
steps = st.tuples(
    st.sampled_from(["fresh", "continue", "again", "drift", "cut"]),
    st.integers(0, 1 << 16),
    tokens,
    st.lists(tokens, min_size=1, max_size=3),
    st.integers(0, len(ROLES) - 1),
    st.sampled_from([1.0, 1.0, 1.0, 0.5]),
    st.sampled_from([True, True, True, True, False]),
)


def text(ids: list[int]) -> str:
    return "".join("ab "[token] for token in ids)


def grow(plan: list[Any]) -> list[tuple[int, ModelCall]]:
    """An app that begins, continues, repeats, rewrites and cuts conversations, as (trajectory, call)."""
    logprob = 0.0
    grown: list[tuple[int, ModelCall]] = []
    sequences: list[tuple[list[int], list[dict[str, Any]]]] = []
    for number, (kind, pick, more, replies, trajectory, temperature, exact) in enumerate(plan):
        prompt, messages = [2, *more], [{"role": "user", "content": text(more)}]
        if kind != "fresh" and sequences:
            begun, said = sequences[pick % len(sequences)]
            if kind == "again":
                prompt, messages = begun, said
            elif kind == "drift":
                at = pick % len(begun)
                prompt = [*begun[:at], *more, *begun[at:], 1]
                messages = [*said[:-1], {**said[-1], "content": text(more)}, *messages]
            elif kind == "cut":
                prompt, messages = [*begun[: 1 + pick % len(begun)], *more], [said[0], *messages]
            else:
                prompt, messages = [*begun, *more], [*said, *messages]
        choices = []
        for reply in replies:
            logprobs = []
            for _ in reply:
                logprob -= 1.0
                logprobs.append(logprob)
            choices.append(make_choice(reply, text(reply), logprobs=Logprobs(logprobs)))
            sequences.append(([*prompt, *reply], [*messages, {"role": "assistant", "content": text(reply)}]))
        call = make_call(
            f"{number:03}",
            prompt,
            *choices,
            messages=messages,
            started=number // 2,
            sampling={"temperature": temperature},
            exact=exact,
            trainable=exact,
        )
        grown.append((trajectory, call))
    return grown


def episode_of(grown: list[tuple[int, ModelCall]]) -> Episode:
    return make_episode(agents=[(role, [call for owner, call in grown if owner == index]) for index, role in enumerate(ROLES)])


plans = st.lists(steps, min_size=1, max_size=12)
relaxed = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def replies_of(call: ModelCall) -> list[list[int]]:
    return [list(choice.token_ids or ()) for choice in call.choices]


def prompt_of(call: ModelCall) -> list[int]:
    return list(call.prompt_token_ids or ())


def trained(samples: SampleSet) -> list[tuple[float, tuple[int, ...]]]:
    """(logprob, which is unique to each sampled token; the row up to and with the token), sorted."""
    found = []
    for row in samples.samples:
        ids, logprobs = row.token_ids.tolist(), row.logprobs.tolist()
        found += [(logprobs[at], tuple(ids[: at + 1])) for at in np.flatnonzero(row.trained_mask).tolist()]
    return sorted(found)


def expected(grown: list[tuple[int, ModelCall]]) -> list[tuple[float, tuple[int, ...]]]:
    found = []
    for _, call in grown:
        if call.exact:
            for choice, reply in zip(call.choices, replies_of(call), strict=True):
                found += [(logprob, tuple(prompt_of(call) + reply[: at + 1])) for at, logprob in enumerate(choice.logprobs or ())]
    return sorted(found)


def plain(samples: SampleSet) -> Any:
    """Everything a set says, as builtin values."""
    assert samples.tree is not None
    rows = [
        (
            row.id,
            row.token_ids.tolist(),
            row.trained_mask.tolist(),
            row.versions.tolist(),
            row.temperature,
            row.cause,
            row.spans,
            str(row.logprobs),
        )
        for row in samples.samples
    ]
    tree = [getattr(samples.tree, field).tolist() for field in ("tokens", "parents", "depths", "offsets", "prompt_ends", "reply_ends")]
    return rows, tree, list(samples.breaks), list(samples.set_aside), samples.counters


@relaxed
@given(plans)
def test_each_sampled_token_is_trained_once_under_its_own_context(plan: list[Any]) -> None:
    """In every mode, what is trained is each exact call's reply after exactly its prompt, with its own logprobs, and nothing else."""
    grown = grow(plan)
    for mode in MODES:
        samples = build_samples(episode_of(grown), mode=mode)
        assert trained(samples) == expected(grown)
        counters = samples.counters
        assert counters.trained_tokens == len(expected(grown)) == sum(int(row.trained_mask.sum()) for row in samples.samples)
        assert counters.sampled_tokens == counters.trained_tokens + sum(counters.lost_tokens.values())
        assert counters.rows == len(samples.samples)
        assert counters.row_tokens == sum(len(row.token_ids) for row in samples.samples)


@relaxed
@given(plans, st.randoms(use_true_random=False))
def test_arrival_order_decides_nothing(plan: list[Any], random: Any) -> None:
    """The same calls, listed in any order, give the same rows, tree, breaks and counters."""
    grown = grow(plan)
    shuffled = random.sample(grown, len(grown))
    once = episode_of(grown)
    other = episode_of(shuffled)
    other = msgspec.structs.replace(other, trajectories=random.sample(other.trajectories, len(other.trajectories)))
    assert plain(build_samples(once)) == plain(build_samples(other))


@relaxed
@given(plans)
def test_the_tree_is_as_large_as_its_distinct_prefixes(plan: list[Any]) -> None:
    """Stored tokens are the distinct prefixes of all sequences; nodes are at most two for each prompt and reply."""
    grown = grow(plan)
    prefixes = {tuple(prompt_of(call) + reply)[:end] for _, call in grown for reply in replies_of(call) for end in range(1, 99)}
    tree = build_samples(episode_of(grown)).tree
    assert tree is not None
    assert len(tree.tokens) == len(prefixes - {()})
    assert len(tree.parents) <= 1 + 2 * sum(1 + len(call.choices) for _, call in grown)
    assert tree.nbytes <= 4 * len(tree.tokens) + 24 * len(tree.parents) + 12 * sum(1 + len(call.choices) for _, call in grown) + 8


@relaxed
@given(plans)
def test_each_call_is_read_back_from_the_tree(plan: list[Any]) -> None:
    """Prompt and reply of every choice, trained or not."""
    grown = grow(plan)
    samples = build_samples(episode_of(grown))
    for _, call in grown:
        for choice, reply in zip(call.choices, replies_of(call), strict=True):
            prompt, back = reconstruct(samples, call.span_id, choice.index)
            assert (prompt.tolist(), back.tolist()) == (prompt_of(call), reply)


@relaxed
@given(plans)
def test_a_parent_is_the_longest_recorded_sequence(plan: list[Any]) -> None:
    """No recorded reply's sequence that the prompt starts with is longer than its parent's."""
    grown = grow(plan)
    samples = build_samples(episode_of(grown))
    sequences = {
        (call.span_id, choice.index): prompt_of(call) + list(choice.token_ids or ()) for _, call in grown for choice in call.choices
    }
    prompts = {call.span_id: prompt_of(call) for _, call in grown}
    sampled = {key: sequence for key, sequence in sequences.items() if len(sequence) > len(prompts[key[0]])}
    for span in samples.spans:
        prompt = prompts[span.span_id]
        longest = max((len(sequence) for sequence in sampled.values() if prompt[: len(sequence)] == sequence), default=None)
        assert (samples.spans[span.parent].stop if span.parent >= 0 else None) == longest


@relaxed
@given(plans, st.booleans())
def test_what_continues_nothing_is_a_break_at_its_first_differing_token(plan: list[Any], decoded: bool) -> None:
    """A trained call that neither starts with an earlier sequence nor is a beginning of one has one cause; every break is where it says."""
    grown = grow(plan)
    samples = build_samples(episode_of(grown), decode=text if decoded else None)
    calls = sorted((call for _, call in grown), key=lambda call: (call.started, call.span_id))
    causes = Counter(broken.span_id for broken in samples.breaks)
    assert all(times == 1 for times in causes.values())
    by_span = {call.span_id: call for call in calls}
    for number, call in enumerate(calls):
        prompt = prompt_of(call)
        earlier = [prompt_of(before) + reply for before in calls[:number] for reply in replies_of(before)]
        everywhere = [prompt_of(other) + reply for other in calls for reply in replies_of(other) if reply and other is not call]
        continues = any(prompt[: len(sequence)] == sequence for sequence in [*earlier, *everywhere])
        begins = any(sequence[: len(prompt)] == prompt for sequence in earlier)
        if earlier and call.exact and any(replies_of(call)) and not continues and not begins:
            assert causes[call.span_id] == 1
        if begins or not earlier:
            assert causes[call.span_id] == 0
    for broken in samples.breaks:
        prompt = prompt_of(by_span[broken.span_id])
        before = by_span[broken.recorded_span_id]
        recorded = prompt_of(before) + replies_of(before)[broken.recorded_choice]
        assert prompt[: broken.position] == recorded[: broken.position]
        assert prompt[broken.position :][:12] == broken.prompt_ids
        assert recorded[broken.position :][:12] == broken.recorded_ids
        assert broken.prompt_ids[0] != broken.recorded_ids[0]


@relaxed
@given(plans, st.integers(2, 12))
def test_over_long_rows_lose_nothing_unsaid(plan: list[Any], max_len: int) -> None:
    """Split: each token once, in rows that fit, with one context in every mode. Mask: what is lost is counted, in each mode alike."""
    grown = grow(plan)
    for overlong in ("split", "mask"):
        per_mode = [build_samples(episode_of(grown), mode=mode, max_len=max_len, overlong=overlong) for mode in MODES]
        assert all(len(row.token_ids) <= max_len and not row.trained_mask[0] for samples in per_mode for row in samples.samples)
        assert trained(per_mode[0]) == trained(per_mode[1]) == trained(per_mode[2])
        logprobs = [logprob for logprob, _ in trained(per_mode[0])]
        if overlong == "split":
            assert logprobs == [logprob for logprob, _ in expected(grown)]
        else:
            lost = per_mode[0].counters.lost_tokens.get("over-long", 0)
            assert len(logprobs) + lost == len(expected(grown))


@relaxed
@given(plans)
def test_spans_say_what_stands_in_the_row(plan: list[Any]) -> None:
    """Spans are in row order, do not overlap, hold the reply's own ids, and together are the sampled tokens of the row."""
    grown = grow(plan)
    replies = {(call.span_id, choice.index): list(choice.token_ids or ()) for _, call in grown for choice in call.choices}
    exact = {call.span_id: call.exact for _, call in grown}
    for mode in MODES:
        for row in build_samples(episode_of(grown), mode=mode).samples:
            end = 0
            covered = np.zeros(len(row.token_ids), np.bool_)
            for span in row.spans:
                assert span.start >= end
                end = span.stop
                assert row.token_ids[span.start : span.stop].tolist() == replies[span.span_id, span.choice]
                assert bool(row.trained_mask[span.start : span.stop].all()) is span.trained
                covered[span.start : span.stop] = exact[span.span_id]
            assert (~np.isnan(row.logprobs) == covered).all()
            assert not (row.trained_mask & ~covered).any()
            assert any(span.trained for span in row.spans)
