"""What a batch was sampled with in, what leaves it without a gradient out: each finding with the setting that changes it.

A group learns from differences. Temperature 0 or one seed for all makes its rollouts equal; top_p, top_k and penalties make the
server's logprobs something else than the policy's. Such call sites are named after the first batch; where no call is left that
can carry a gradient, the run stops instead of training nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rllm_trace.routing import CallSite
from rllm_trace.types import Episode
from rllm_trainer.exceptions import NoSignal, SettingError, TooManyFaults
from rllm_trainer.rollout.faults import leaves_gradient
from rllm_trainer.samples import SampleSet
from rllm_trainer.types import Group, Rollout

__all__ = [
    "WARN_EXCLUDED",
    "excluded_share",
    "require_replaced_names",
    "require_signal",
    "require_sound",
    "role_findings",
    "site_findings",
    "training_view",
]

WARN_EXCLUDED = 0.2
STOP_EXCLUDED = 0.5
_MOST_REASONS = 3

_OFF: dict[str, tuple[Any, ...]] = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1)}
_ON = {"top_p": 1.0, "top_k": -1}


def training_view(episodes: Iterable[Episode]) -> list[Episode]:
    """The episodes as training may see them: where any call went to the policy, calls that went elsewhere are another model's."""
    episodes = list(episodes)
    if not any(call.endpoint == "policy" for episode in episodes for call in episode.calls):
        return episodes
    return [_without_own_calls(episode) for episode in episodes]


def role_findings(algorithm: str | Mapping[str, str], groups: Sequence[Group]) -> list[str]:
    """One sentence for the roles that have a rule of their own and no trajectory in these groups."""
    if isinstance(algorithm, str):
        return []
    seen = {t.name for group in groups for r in group.rollouts if r.episode is not None for t in r.episode.trajectories}
    idle = sorted(set(algorithm) - seen)
    if not idle or not seen:
        return []
    return [
        f"algorithm names {', '.join(map(repr, idle))}, and no trajectory of the step has such a name; there are {', '.join(sorted(seen))}"
    ]


def site_findings(sites: Sequence[CallSite]) -> list[str]:
    """One sentence for each call site whose sampling leaves a group without signal or its logprobs truncated."""
    found: list[str] = []
    for site in sites:
        if not (site.trained and site.endpoint == "policy"):
            continue
        who = f"calls that ask for {site.model!r}"
        zero = _values(site, "temperature")[0]
        if zero:
            found.append(
                f"{who} use temperature 0 ({zero} of {site.calls}): replies to one prompt are all equal, so a group has no signal; "
                "fit(sampling={'temperature': 1.0}) changes it"
            )
        seeds = {value: count for value, count in _values(site, "seed").items() if value is not None}
        if len(seeds) == 1:
            found.append(
                f"{who} set one seed ({sum(seeds.values())} of {site.calls}): the rollouts of a group repeat each other, so it has "
                "no signal; fit(sampling={'seed': None}) changes it"
            )
        for field, off in _OFF.items():
            cut = sum(count for value, count in _values(site, field).items() if value not in off)
            if cut:
                found.append(
                    f"{who} use {field} ({cut} of {site.calls}): the server's logprobs are those of a truncated distribution, so these "
                    f"calls are not trained; fit(sampling={{{field!r}: {_ON[field]}}}) changes it"
                )
    return found


def require_replaced_names(replaces: Iterable[str] | None, sites: Sequence[CallSite]) -> None:
    """Raises ``SettingError`` for a name in ``replaces`` that no call has asked for."""
    seen = sorted({site.model for site in sites})
    missing = [name for name in replaces or () if name not in seen]
    if missing:
        raise SettingError(
            f"replaces names {', '.join(map(repr, missing))}, and no call of the first batch asked for it; the names asked for are "
            f"{', '.join(map(repr, seen)) or 'none'}: correct the name or leave replaces out"
        )


def excluded_share(rollouts: Sequence[Rollout], *, faults: Mapping[Any, str] | None = None) -> float:
    """Share of the rollouts that leave the gradient because of their fault; ``faults``: the setting's overrides of which do."""
    return sum(leaves_gradient(r.fault, faults) for r in rollouts) / len(rollouts) if rollouts else 0.0


def require_sound(rollouts: Sequence[Rollout], *, faults: Mapping[Any, str] | None = None) -> None:
    """Raises ``TooManyFaults`` where more than half of a batch is lost to faults that are not trained."""
    share = excluded_share(rollouts, faults=faults)
    if share > STOP_EXCLUDED:
        lost = [r for r in rollouts if leaves_gradient(r.fault, faults)]
        reasons = Counter(r.reason or r.fault or "" for r in lost)
        whose = "are not trained" if any(r.fault == "policy" for r in lost) else "are not the policy's"
        raise TooManyFaults(
            f"{share:.0%} of {len(rollouts)} rollouts were lost to faults that {whose}; at most {STOP_EXCLUDED:.0%} may be: "
            f"{_most(reasons)}; mend what they name, then run again (with resume=True to go on from the last checkpoint)"
        )


def require_signal(groups: Sequence[Group], samples: Mapping[str, SampleSet], sites: Sequence[CallSite]) -> None:
    """Raises ``NoSignal`` where no call of the batch can carry a gradient, or every group's rollouts repeat one seed."""
    calls = sum(s.counters.calls for s in samples.values())
    if not calls:
        raise NoSignal(
            "no rollout called a model: the app must make its calls with an OpenAI client, inside the workflow, in its own process; "
            "check that it does not answer from a cache and that replaces names the models that it asks for"
        )
    findings = site_findings(sites)
    if not any(s.counters.trained_tokens for s in samples.values()):
        reasons: Counter[str] = Counter()
        for sample_set in samples.values():
            reasons.update(f"{aside.reason} ({aside.detail})" for aside in sample_set.set_aside)
        hint = "; ".join(findings) or _most(reasons)
        raise NoSignal(f"no call of {sum(len(g.rollouts) for g in groups)} rollouts can be trained: {hint}")
    trained = [site for site in sites if site.trained and site.endpoint == "policy"]
    if trained and all(_one_seed(site) for site in trained) and all(len(g.rollouts) > 1 for g in groups):
        raise NoSignal(f"every call has one and the same seed: {'; '.join(findings)}")


def _without_own_calls(episode: Episode) -> Episode:
    trajectories = [
        msgspec.structs.replace(
            trajectory,
            calls=[
                call if call.endpoint == "policy" else msgspec.structs.replace(call, no_train=True, trainable=False)
                for call in trajectory.calls
            ],
        )
        for trajectory in episode.trajectories
    ]
    return msgspec.structs.replace(episode, trajectories=trajectories)


def _values(site: CallSite, field: str) -> Counter[Any]:
    return site.values.get(field, Counter())


def _one_seed(site: CallSite) -> bool:
    seeds = _values(site, "seed")
    return len(seeds) == 1 and None not in seeds


def _most(reasons: Counter[str]) -> str:
    return "; ".join(f"{reason} ({count} times)" for reason, count in reasons.most_common(_MOST_REASONS)) or "no reason was recorded"
