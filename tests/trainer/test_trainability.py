"""What leaves a batch without a gradient is named, with the setting that changes it."""

from collections import Counter

import pytest

from rllm_trace.routing import CallSite
from rllm_trainer.exceptions import NoSignal, SettingError, TooManyFaults
from rllm_trainer.samples import build_samples
from rllm_trainer.testing import make_call, make_episode
from rllm_trainer.trainability import (
    excluded_share,
    require_replaced_names,
    require_signal,
    require_sound,
    role_findings,
    site_findings,
    training_view,
)
from rllm_trainer.types import Group, Rollout


def site(model="gpt", endpoint="policy", trained=True, **values):
    counts = {name: Counter(value) for name, value in values.items()}
    return CallSite(model=model, endpoint=endpoint, trained=trained, calls=8, values=counts)


def rollout(index=0, fault=None, reason=None, reward=1.0, episode=None):
    return Rollout(task_id="t", index=index, row={}, episode=episode, reward=reward, rewards={}, fault=fault, reason=reason)


def group(*rollouts):
    return Group(task_id="t", rollouts=list(rollouts))


def samples_of(*episodes):
    return {episode.id: build_samples(episode) for episode in episodes}


def test_good_sampling_has_no_findings():
    """Temperature 1, no seed, no truncation: nothing to say."""
    assert site_findings([site(temperature=[None] * 8, seed=[None] * 8, top_p=[1.0] * 8, top_k=[-1] * 8)]) == []


def test_each_finding_names_its_setting():
    """Temperature 0, one seed, top_p and top_k are each named with what changes them."""
    found = site_findings([site(temperature=[0] * 6 + [1.0] * 2, seed=[7] * 8, top_p=[0.9] * 8, top_k=[50, None])])
    assert [sentence.rpartition("; ")[2] for sentence in found] == [
        "fit(sampling={'temperature': 1.0}) changes it",
        "fit(sampling={'seed': None}) changes it",
        "fit(sampling={'top_p': 1.0}) changes it",
        "fit(sampling={'top_k': -1}) changes it",
    ]
    assert found[0].startswith("calls that ask for 'gpt' use temperature 0 (6 of 8)")


def test_untrained_sites_have_no_findings():
    """What is not trained may be sampled as it likes; different seeds are no finding."""
    assert site_findings([site(trained=False, temperature=[0]), site(endpoint="own", temperature=[0]), site(seed=[1, 2, 3])]) == []


def test_a_replaced_name_that_nobody_asks_for():
    """A name in ``replaces`` that no call used is an error that lists the names used."""
    require_replaced_names(["gpt"], [site()])
    require_replaced_names(None, [site()])
    with pytest.raises(
        SettingError, match="replaces names 'gpt-5', and no call of the first batch asked for it; the names asked for are 'gpt'"
    ):
        require_replaced_names(["gpt", "gpt-5"], [site()])


def test_more_than_half_lost_stops_the_run():
    """Half may be lost; more than half stops, with the most frequent reasons."""
    good, lost = rollout(), rollout(fault="infrastructure", reason="the app raised APIConnectionError")
    require_sound([good, lost])
    assert excluded_share([good, lost, lost, good]) == 0.5
    with pytest.raises(TooManyFaults, match=r"67% of 3 rollouts were lost .* the app raised APIConnectionError \(2 times\)"):
        require_sound([good, lost, lost])
    require_sound([rollout(fault="policy")] * 5)


def test_what_is_lost_follows_the_overrides():
    """Faults that a run trains are not lost, and those of the policy that it leaves are."""
    app, policy = rollout(fault="app", reason="it raised KeyError"), rollout(fault="policy", reason="the context ran over")
    assert excluded_share([app, policy], faults={"app": "train"}) == 0
    require_sound([app] * 3, faults={"app": "train"})
    assert excluded_share([app, policy, rollout(), rollout()], faults={"app": "train", "policy": "leave"}) == 0.25
    with pytest.raises(
        TooManyFaults, match=r"100% of 3 rollouts were lost to faults that are not trained; .*the context ran over \(3 times\)"
    ):
        require_sound([policy] * 3, faults={"policy": "leave"})


def test_no_call_at_all():
    """A batch without any call says what an app must do to be trained."""
    episode = make_episode()
    with pytest.raises(NoSignal, match="no rollout called a model: the app must make its calls with an OpenAI client"):
        require_signal([group(rollout(episode=episode))], samples_of(episode), [])


def test_temperature_zero_everywhere():
    """Where every call is inexact for its temperature, the run stops with the setting."""
    call = make_call("a", [1], [2], exact=False, trainable=False, inexact_reason="sampling: temperature 0")
    episode = make_episode(call)
    with pytest.raises(NoSignal, match=r"no call of 1 rollouts can be trained: .*fit\(sampling=\{'temperature': 1.0\}\)"):
        require_signal([group(rollout(episode=episode))], samples_of(episode), [site(temperature=[0] * 8)])


def test_calls_that_cannot_be_trained_say_why():
    """Without a finding about sampling, the reasons of the calls are told."""
    call = make_call("a", [1], [2], exact=False, trainable=False, inexact_reason="token ids missing")
    episode = make_episode(call)
    with pytest.raises(NoSignal, match="token ids missing"):
        require_signal([group(rollout(episode=episode))], samples_of(episode), [site()])


def test_one_seed_for_all():
    """One seed at every call site stops the run; a site without it lets it go on."""
    episode = make_episode(make_call("a", [1], [2]))
    groups = [group(rollout(0, episode=episode), rollout(1, episode=episode))]
    with pytest.raises(NoSignal, match=r"one and the same seed: .*fit\(sampling=\{'seed': None\}\)"):
        require_signal(groups, samples_of(episode), [site(seed=[7] * 8)])
    require_signal(groups, samples_of(episode), [site(seed=[7] * 8), site("other", seed=[None])])


def test_other_models_calls_are_not_trained():
    """Where calls went to the policy, calls to other endpoints are left out; where none did, the episodes are as recorded."""
    mixed = make_episode(make_call("a", [1], [2]), make_call("b", [1, 2, 3], [4], endpoint="own"))
    (seen,) = training_view([mixed])
    assert build_samples(seen).counters.trained_calls == 1
    recorded = make_episode(make_call("b", [1], [4], endpoint="own"))
    assert training_view([recorded]) == [recorded]


def test_a_rule_for_a_role_that_nobody_plays():
    """A role that has a rule and no trajectory is named, with the roles that there are; a rule for all has nothing to say."""
    groups = [group(rollout(episode=make_episode(make_call("a", [1], [2]))))]
    (name,) = {t.name for t in groups[0].rollouts[0].episode.trajectories}
    assert role_findings({name: "grpo", "juge": "rloo"}, groups) == [
        f"algorithm names 'juge', and no trajectory of the step has such a name; there are {name}"
    ]
    assert role_findings({name: "grpo"}, groups) == []
    assert role_findings("grpo", groups) == []
