"""Stored episodes become the groups that a run would have made of them; what cannot be in one is set aside with its reason."""

from collections import Counter

import pytest

from rllm_trace.exporters.jsonl import write_episodes
from rllm_trace.store import Store
from rllm_trace.types import ErrorInfo, Reward
from rllm_trainer.exceptions import DatasetError
from rllm_trainer.rollout.rewards import given_functions
from rllm_trainer.rollout.stored import StoredBatches, read_recorded, scored_again, stored_groups
from rllm_trainer.testing import make_call, make_episode


def recorded(episode_id, task="a", reward=None, **fields):
    rewards = [] if reward is None else [Reward(name="r", value=reward)]
    call = make_call(f"{episode_id}-call", [1, 2], [3, 4])
    return make_episode(call, episode_id=episode_id, task_id=task, rewards=rewards, reward=reward, **fields)


def groups(episodes, smallest=2):
    rollouts, steps, aside = read_recorded(episodes)
    found = stored_groups(rollouts, steps, smallest=smallest, aside=aside)
    return [(g.step, g.group.task_id, [r.episode.id for r in g.group.rollouts]) for g in found], dict(+aside)


def test_episodes_of_one_task_are_a_group():
    """Without a run, the whole store's episodes of a task are compared; one that is alone is set aside."""
    episodes = [recorded("1", "a", 1.0), recorded("2", "b", 1.0), recorded("3", "a", 0.0), recorded("4", "c", 1.0), recorded("5", "b", 0.5)]
    assert groups(episodes) == (
        [(None, "a", ["1", "3"]), (None, "b", ["2", "5"])],
        {"alone in its group: there is nothing to compare it with": 1},
    )
    assert len(groups(episodes, smallest=1)[0]) == 3


def test_episodes_without_a_task_are_grouped_by_what_went_in():
    """Equal inputs of one workflow are one task; an episode that has neither is set aside."""
    same = [recorded(str(i), None, 1.0, input={"question": "2 + 3"}) for i in range(2)]
    other = recorded("2", None, 1.0, input={"question": "2 + 4"})
    bare = recorded("3", None, 1.0)
    found, aside = groups([*same, other, bare])
    assert [ids for _, _, ids in found] == [["0", "1"]]
    assert aside == {
        "no task: it has neither a task id nor an input": 1,
        "alone in its group: there is nothing to compare it with": 1,
    }


def test_a_run_in_a_store_is_grouped_by_step():
    """Steps are apart, and attempts that were followed, further episodes and evaluations are not trained."""

    def of_run(name, step, index, attempt=0, split="train", **fields):
        metadata = {"step": step, "split": split, "index": index, "attempt": attempt}
        return recorded(name, "a", 1.0, metadata=metadata, **fields)

    episodes = [
        of_run("1", 1, 0),
        of_run("2", 1, 1),
        of_run("3", 1, 1, attempt=1),
        of_run("4", 2, 1),
        of_run("5", 2, 0),
        of_run("6", 2, 0, started=5),
        of_run("7", 2, 0, split="eval"),
        of_run("8", 2, 0, split="eval_greedy"),
    ]
    assert groups(episodes) == (
        [(1, "a", ["1", "3"]), (2, "a", ["5", "4"])],
        {"made for an evaluation": 2, "an attempt that another one followed": 1, "a further episode of the same run of the app": 1},
    )


def test_what_a_stored_episode_is_worth():
    """Its rewards, later ones included; else 0 where the policy ended it, and a fault where nothing scored it."""
    boom = ErrorInfo(type="ValueError", message="no action")
    gone = ErrorInfo(type="openai.APIConnectionError", message="gone")
    episodes = [
        recorded("1", reward=0.25),
        recorded("2", termination="failed", error=boom),
        recorded("3"),
        recorded("4", reward=1.0, termination="failed", error=gone),
        recorded("5", reward=1.0, termination="timeout", error=ErrorInfo(type="x", message="it ran past 3 s")),
    ]
    rollouts, _, _ = read_recorded(episodes)
    assert [(r.reward, r.fault, r.reason) for r in rollouts] == [
        (0.25, None, None),
        (0.0, "policy", "the app raised ValueError: no action"),
        (None, "reward", "no reward was given (task a)"),
        (None, "infrastructure", "the app raised openai.APIConnectionError: gone"),
        (None, "infrastructure", "it ran past 3 s"),
    ]


def test_new_rewards_take_the_place_of_old_ones():
    """Functions see output, row and the old rewards; only what they return counts. One that raises costs its episode."""
    rollouts, _, _ = read_recorded([recorded("1", reward=0.25, output="abc"), recorded("2", reward=0.5, output=None)])

    def length(output, episode):
        return len(output) + episode.rewards[0].value if episode.rewards else len(output)

    again = [scored_again(r, given_functions(length), awaited=None) for r in rollouts]
    assert [(r.reward, r.rewards, r.fault) for r in again] == [(3.0, {"length": 3.0}, None), (None, {}, "reward")]
    assert again[1].reason == "the reward length raised TypeError: object of type 'NoneType' has no len() (task a)"


def test_whatever_holds_episodes(tmp_path):
    """A folder of a store, a store, a file and a list give the same; rewards that came later are among them."""
    episodes = [recorded("1", reward=1.0), recorded("2", reward=0.0)]
    with Store(tmp_path / "store") as store:
        for episode in episodes:
            store.append(episode)
        store.add_reward(0.5, name="human", episode_id="2")
        later = [r.reward for r in read_recorded(store)[0]]
    write_episodes(tmp_path / "episodes.jsonl", episodes)
    assert later == [r.reward for r in read_recorded(str(tmp_path / "store"))[0]] == [1.0, 0.5]
    assert [r.reward for r in read_recorded(tmp_path / "episodes.jsonl")[0]] == [1.0, 0.0]


@pytest.mark.parametrize(
    "source, words",
    [
        (3, "store: got int; expected the folder of a store"),
        ({"a": 1}, "store: got dict; expected"),
        ("/nowhere", "store: got '/nowhere', which holds no episodes; expected"),
        ([1], "store: item 0 is a int; expected rllm_trace.Episode"),
    ],
)
def test_what_holds_none(source, words):
    """Anything else is refused with what was expected."""
    with pytest.raises(DatasetError) as caught:
        read_recorded(source)
    assert words in str(caught.value)


def test_batches_are_the_recorded_steps_or_so_many_groups():
    """Recorded steps keep their order and their size; with a number, groups are dealt as rows are, from any step on."""
    rollouts, _, _ = read_recorded([recorded(f"{task}{i}", task, 1.0) for task in "abc" for i in range(2)])
    found = stored_groups(rollouts, [2, 2, 1, 1, 1, 1], smallest=2, aside=Counter())
    of_steps = StoredBatches(found, batch_tasks=None, shuffle=False, seed=0)
    assert of_steps.steps(2) == 4
    assert [[g.id for g in batch] for batch in of_steps.batches(epochs=2, start=1)] == [["a@2"], ["b@1", "c@1"], ["a@2"]]
    in_twos = StoredBatches(found, batch_tasks=2, shuffle=False, seed=0)
    assert in_twos.steps(1) == 2
    assert [[g.id for g in batch] for batch in in_twos.batches(epochs=1, start=0)] == [["b@1", "c@1"], ["a@2"]]
