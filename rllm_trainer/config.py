"""The settings of a run: keyword arguments in, one frozen table out, every entry effective or refused.

An unknown name is refused with the nearest known one; a wrong type or range with what was expected; a setting that would do
nothing beside the others given (an evaluation interval without evaluation rows) with what it needs. The table is printed at
the start and saved in the run folder, so what is not in it does not exist.
"""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast

import msgspec

from rllm_trainer.cluster.layout import ClusterLayout
from rllm_trainer.exceptions import SettingError
from rllm_trainer.limits import Limits
from rllm_trainer.sampling import check_sampling
from rllm_trainer.serving_settings import FireworksSettings, InFlight, LocalSettings, Serving, VllmSettings, check_serving

__all__ = [
    "Constrained",
    "Continuation",
    "KlEstimator",
    "LoraSettings",
    "LossAgg",
    "OverlongPenalty",
    "Schedule",
    "SettingRow",
    "Settings",
    "SettingsKw",
    "make_settings",
    "table",
]

Schedule = Literal["constant", "linear", "cosine"]
LossAgg = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Constrained = Literal["as_auto", "inexact", "refuse"]
Continuation = Literal["rendered", "exact"]

_MOST_ROLLOUTS = 100_000
"""Of one step: each is in memory with its episode until the step's update."""

FULL_LR = 1e-5
LORA_LR = 1e-4

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train an adapter instead of all weights: ``lora={"r": 16, "alpha": 32}``."""

    r: _Positive = 16
    """Rank."""
    alpha: Annotated[float, msgspec.Meta(gt=0)] = 32.0
    """Scale; the adapter's output is multiplied by alpha / r."""
    targets: str | list[str] = "all-linear"
    """Module names, or ``"all-linear"``."""


class OverlongPenalty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lower scores of replies that nearly fill ``max_tokens``: by nothing ``buffer`` tokens before it, by ``factor`` at it."""

    buffer: _Positive
    factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a run, with its default."""

    algorithm: str | dict[str, str] = "grpo"
    """Advantage estimator, under verl's name; or one for each role: {"solver": "grpo", "judge": "reinforce_plus_plus"}."""
    group_by: Literal["role", "step", "task"] = "role"
    """Who is compared: one role of one task; of its scored calls only those of one number (step); or every role of a task (task)."""
    returns: Literal["whole", "to_go"] = "whole"
    """What a reply is worth: its call's, agent's or episode's reward (whole), or its call's own and what came after it (to_go)."""
    discount: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """What one call further on along the token tree is worth, with returns="to_go"."""
    faults: dict[Literal["infrastructure", "app", "reward", "policy"], Literal["train", "leave"]] = {}
    """Overrides of which failed rollouts are trained, such as {"policy": "leave"}; trained without a reward, they are worth 0."""
    reject_below: float | None = None
    """Rollouts with a lower reward are compared with the others, but not trained (rejection sampling)."""
    refill: _Count = 0
    """Rounds of further rows that replace groups without signal, which are then left out (dynamic sampling); 0: they stay."""
    overlong_penalty: OverlongPenalty | None = None
    """Soft punishment of long replies: {"buffer": tokens before max_tokens, "factor": largest deduction}."""
    group_size: _Positive = 8
    """Rollouts of one row that a baseline is taken over."""
    steps: _Positive | None = None
    """Rollout batches to train on; None: as many as ``epochs`` make."""
    epochs: _Positive | None = None
    """Passes over the rows; 1 if neither this nor ``steps`` is given."""
    batch_tasks: _Positive = 8
    """Rows of one batch; a batch has ``batch_tasks * group_size`` rollouts."""
    shuffle: bool = True
    """Draw rows in a seeded order; False: in the order given. A generator's rows are always taken as they come."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Fixes task order, per-call seeds, evaluation intervals and the engine's random states."""

    lr: _NotNegative | None = None
    """Learning rate; None: 1e-5, or 1e-4 with ``lora``."""
    schedule: Schedule = "constant"
    """How the learning rate goes after the warm-up; linear and cosine reach 0 after the last step."""
    warmup_steps: _Count = 0
    """Steps over which the learning rate rises linearly to ``lr``."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: _NotNegative = 0.0
    """AdamW's weight decay."""
    clip_grad: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Largest gradient norm."""
    ppo_epochs: _Positive = 1
    """Optimizer steps taken on one batch, each over all of it."""
    policy_loss: str = "vanilla"
    """Policy loss, under verl's name."""
    loss_agg: LossAgg = "token-mean"
    """How token losses become one number, under verl's names."""
    clip_low: _NotNegative = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: _NotNegative = 0.2
    """The ratio is clipped at 1 + clip_high."""
    norm_by_std: bool = True
    """Divide advantages by the group's standard deviation, where the algorithm does."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: _NotNegative = 0.0
    """Weight of the KL term to the run's initial weights; 0: no reference is loaded."""
    kl_estimator: KlEstimator = "low_var_kl"
    """How the KL is estimated, under verl's names."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term is applied."""
    mask_truncated: bool = False
    """Leave replies that were cut by max_tokens out of the gradient."""
    lora: LoraSettings | None = None
    """Train an adapter of this shape; None: all weights."""
    micro_batch_tokens: _Positive | None = None
    """Most tokens that go through the model at once; changes memory and speed, not the gradient. None: the engine's choice."""
    verl: dict[str, Any] = {}
    """Passed to verl's configuration as it is; an entry that verl does not know is refused."""

    sample_mode: Literal["tree", "prefix", "call"] = "tree"
    """How calls become rows: rows that share prefixes, one row per unbroken lineage, or one row per call."""
    overlong: Literal["refuse", "mask", "split"] = "refuse"
    """What happens to a row that is longer than ``max_model_len``."""
    sampling: dict[str, Any] | None = None
    """Fields that override the app's own in redirected calls, such as {"temperature": 1.0}."""
    max_tokens: _Positive | None = None
    """Short for sampling={"max_tokens": ...}."""
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Most tokens of prompt and reply together; None: what model and memory allow."""
    replaces: list[str] | None = None
    """Redirect only calls that ask for these model names; None: every chat, completion and responses call."""
    constrained: Constrained = "as_auto"
    """What happens to calls whose reply a grammar would force: tool_choice "auto" instead, kept inexact, or refused."""
    continuation: Continuation = "rendered"
    """What the next prompt of a chat is made of: the chat template alone, or (exact) the recorded ids and the template for what is new."""

    serving: Serving = "auto"
    """What serves the policy; auto: the embedded server."""
    serving_url: str | list[str] | None = None
    """A server that is there already, or several; None: one is started. Ends in ``/v1``."""
    serving_key: str | None = None
    """Environment variable that holds the key of such a server."""
    replicas: _Positive = 1
    """Servers that are started; an episode stays with the one that it began on."""
    in_flight: InFlight | None = None
    """Calls in flight at a swap: ``keep`` (they go on with the new weights, versions told token by token), ``abort`` (they end as they
    are) or ``wait`` (they end first); None: keep where the server can tell versions, else wait."""
    local: LocalSettings | None = None
    """How the local server reads replies: {"tool_format": "llama", "reasoning": "think"}."""
    vllm: VllmSettings | None = None
    """How vLLM is started."""
    fireworks: FireworksSettings | None = None
    """Which deployment of Fireworks it is."""
    engine: Literal["auto", "verl", "cluster", "direct-ray"] = "auto"
    """What updates the weights; auto: verl in a process of ours. ``cluster``: verl's own trainer on Ray, which also serves the policy.
    ``direct-ray``: this loop, over ranks that are Ray workers."""
    cluster: ClusterLayout = ClusterLayout()
    """How the run lies on Ray, with ``engine="cluster"`` or ``"direct-ray"``: ``{"nodes": 2, "gpus_per_node": 8}``."""
    ray: dict[str, Any] = {}
    """Passed to ``ray.init`` as it is, where Ray is not running in this process yet."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of the local server on loopback; 0: a free one."""
    threads: _Positive | None = None
    """Torch threads of engine and server each; None: all cores."""
    concurrency: _Positive = 48
    """Rollouts that run at the same time."""
    call_timeout: _Seconds = 300.0
    """Seconds that one redirected call may take."""
    rollout_timeout: _Seconds = 900.0
    """Seconds that one rollout may take, its rewards included; then it is given up, and its stack printed."""
    batch_timeout: _Seconds = 3600.0
    """Seconds that one batch of rollouts may take; then what is still running is given up."""
    retries: _Count = 1
    """New attempts of a rollout that an infrastructure fault ended."""
    quorum: _Share = 1.0
    """Share of each group that must have ended before the rest of it may be given up."""
    quorum_grace: _Seconds = 30.0
    """Seconds that the rest still gets once every group has its quorum."""
    staleness: _Count = 0
    """Updates that the weights may have got ahead of the ones a rollout began under. 0: rollouts and updates take turns."""
    correction: str | dict[str, Any] = "decoupled_token_is"
    """verl's correction of tokens that older weights sampled: a decoupled preset, or fields of its RolloutCorrectionConfig."""

    limits: Limits = Limits()
    """Where the run stops rather than train on what is left: ``limits={"share_trained": 0.9, "ratio_p99": 2.0}``; None: never for that."""

    eval_every: _Positive | None = None
    """Evaluate after every so many steps; None: before the first and after the last."""
    eval_n: _Positive = 1
    """Sampled rollouts of each evaluation row; their mean is the row's score."""
    eval_greedy: bool = True
    """Also evaluate at temperature 0 before and after the run, one rollout a row."""
    save_every: _Positive = 10
    """Write a checkpoint after every so many steps; one is always written at the end and on Ctrl-C."""
    keep: _Positive = 2
    """Checkpoints kept, the newest."""
    progress: bool = True
    """Print the run's tables and one line a step."""


class SettingsKw(TypedDict, total=False):
    """The settings that ``fit`` takes as further keywords; meanings and defaults stand in ``Settings``."""

    group_by: Literal["role", "step", "task"]
    returns: Literal["whole", "to_go"]
    discount: float
    faults: dict[Literal["infrastructure", "app", "reward", "policy"], Literal["train", "leave"]]
    reject_below: float | None
    refill: int
    overlong_penalty: OverlongPenalty | dict[str, Any] | None
    steps: int | None
    epochs: int | None
    batch_tasks: int
    shuffle: bool
    seed: int
    lr: float | None
    schedule: Schedule
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    ppo_epochs: int
    policy_loss: str
    loss_agg: LossAgg
    clip_low: float
    clip_high: float
    norm_by_std: bool
    entropy_coef: float
    kl_coef: float
    kl_estimator: KlEstimator
    kl_in: Literal["loss", "reward"]
    mask_truncated: bool
    lora: LoraSettings | dict[str, Any] | None
    micro_batch_tokens: int | None
    verl: dict[str, Any]
    cluster: ClusterLayout | dict[str, Any]
    ray: dict[str, Any]
    sample_mode: Literal["tree", "prefix", "call"]
    overlong: Literal["refuse", "mask", "split"]
    max_tokens: int | None
    max_model_len: int | None
    constrained: Constrained
    continuation: Continuation
    serving_url: str | list[str] | None
    serving_key: str | None
    replicas: int
    in_flight: InFlight | None
    local: LocalSettings | dict[str, Any] | None
    vllm: VllmSettings | dict[str, Any] | None
    fireworks: FireworksSettings | dict[str, Any] | None
    port: int
    threads: int | None
    concurrency: int
    call_timeout: float
    rollout_timeout: float
    batch_timeout: float
    retries: int
    quorum: float
    quorum_grace: float
    staleness: int
    correction: str | dict[str, Any]
    limits: Limits | dict[str, Any]
    eval_every: int | None
    eval_n: int
    eval_greedy: bool
    save_every: int
    keep: int
    progress: bool
    resume: bool | str | Path


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the printed table."""

    name: str
    value: str
    given: bool
    """False: the default."""


_NEEDS: dict[str, tuple[str, Any, str]] = {
    "discount": ("returns", "whole", "return to go"),
    "kl_estimator": ("kl_coef", 0, "KL term"),
    "kl_in": ("kl_coef", 0, "KL term"),
    "quorum_grace": ("quorum", 1, "giving up of stragglers"),
}
"""A setting that only means something where another one is not at its default: (the other, its idle value, what it makes)."""

_UNCLIPPED = ("policy_loss", frozenset({"dro", "gpg", "kl_cov", "sapo"}))
_NOT_READ_BY: dict[str, tuple[str, frozenset[str]]] = {
    "norm_by_std": (
        "algorithm",
        frozenset(
            {
                "gpg",
                "opo",
                "optimal_token_baseline",
                "reinforce_plus_plus",
                "reinforce_plus_plus_baseline",
                "remax",
                "rloo",
                "rloo_vectorized",
                "tir_optimal_token_baseline",
            }
        ),
    ),
    "clip_low": _UNCLIPPED,
    "clip_high": _UNCLIPPED,
}
"""A setting that verl's functions of these names do not look at: (the setting that names the function, the names)."""


def make_settings(given: Mapping[str, Any], *, refused: Mapping[str, str] | None = None) -> Settings:
    """The table, from what the user gave.

    Args:
        given: name -> value, as written.
        refused: names that this command does not use -> why; given, they are an error.

    Raises:
        SettingError: a name is unknown or without effect here, or a value has the wrong type or range.
    """
    for name in given:
        if name not in Settings.__struct_fields__:
            raise SettingError(_unknown(name, Settings.__struct_fields__))
    for name, reason in (refused or {}).items():
        if name in given:
            raise SettingError(f"{name}={_shown(given[name])} would have no effect: {reason}; leave it out")
    settings = _convert(given)
    _check_together(settings, given)
    check_serving(settings, given)
    sampling = dict(settings.sampling or {})
    if settings.max_tokens is not None:
        sampling["max_tokens"] = settings.max_tokens
    lr = settings.lr if settings.lr is not None else (FULL_LR if settings.lora is None else LORA_LR)
    epochs = settings.epochs if settings.steps is not None or settings.epochs is not None else 1
    return msgspec.structs.replace(settings, lr=lr, epochs=epochs, sampling=sampling or None)


def table(settings: Settings, given: Iterable[str]) -> list[SettingRow]:
    """One line per setting, in the order of the table."""
    names = set(given)
    return [SettingRow(name=name, value=_shown(getattr(settings, name)), given=name in names) for name in Settings.__struct_fields__]


def _convert(given: Mapping[str, Any]) -> Settings:
    values = {name: _builtin(value) for name, value in given.items()}
    if isinstance(values.get("replaces"), str):
        raise SettingError(
            f"replaces={values['replaces']!r}: got a string, expected a list of model names: replaces=[{values['replaces']!r}]"
        )
    if values.get("replaces") == []:
        raise SettingError("replaces=[] names no model, so no call would go to the policy; leave it out to replace all of them")
    for nested, struct in (
        ("lora", LoraSettings),
        ("cluster", ClusterLayout),
        ("overlong_penalty", OverlongPenalty),
        ("local", LocalSettings),
        ("limits", Limits),
    ):
        known = struct.__struct_fields__
        if isinstance(values.get(nested), Mapping):
            values[nested] = dict(cast("Mapping[str, Any]", values[nested]))
            for name in values[nested]:
                if name not in known:
                    raise SettingError(f"{nested}: " + _unknown(name, known))
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise SettingError(_validation_words(str(error), given)) from None
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingError(f"{name}={value}: expected a finite number")
    return settings


def _builtin(value: Any) -> Any:
    """A path as text, a scalar of numpy as the number that it is."""
    if isinstance(value, Path):
        return str(value)
    return value.item() if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)) else value


def _validation_words(message: str, given: Mapping[str, Any]) -> str:
    what, _, path = message.partition(" - at ")
    name = path.rpartition(" in ")[2].strip("`").removeprefix("$.")
    expected = what[0].lower() + what[1:].replace("`", "")
    choices = _choices(name)
    hint = f"; choose one of {', '.join(repr(choice) for choice in choices)}" if choices else ""
    value = _shown(_at(given, name)) if name.split(".")[0].split("[")[0] in given else "?"
    if value != "?" and "got" not in expected:
        expected += f", got {value}"
    return f"{name}={value}: {expected}{hint}"


def _at(given: Mapping[str, Any], path: str) -> Any:
    """What was given there, ``cluster.nodes`` or ``betas[1]``; of the last part that can be followed."""
    found: Any = given
    for part in path.split("."):
        name = part.split("[")[0]
        if not isinstance(found, Mapping) or name not in found:
            return cast("object", found)
        found = cast("Mapping[str, Any]", found)[name]
    return found


def _choices(path: str) -> tuple[Any, ...]:
    hint: Any = Settings
    for part in path.split("."):
        of = next((one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
        hint = typing.get_type_hints(of).get(part) if of is not None else None
    literals = (one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is Literal)
    return next((typing.get_args(one) for one in literals), ())


def _check_together(settings: Settings, given: Mapping[str, Any]) -> None:
    if settings.steps is not None and settings.epochs is not None:
        raise SettingError(f"got steps={settings.steps} and epochs={settings.epochs}; expected one of them: they both fix the run's length")
    check_sampling(settings.sampling or {}, embedded=settings.serving in ("auto", "local") and settings.serving_url is None)
    rollouts = settings.batch_tasks * settings.group_size
    if rollouts > _MOST_ROLLOUTS:
        raise SettingError(
            f"batch_tasks={settings.batch_tasks} and group_size={settings.group_size} make {rollouts} rollouts a step; at most "
            f"{_MOST_ROLLOUTS} can be held at once: lower one of them"
        )
    if settings.max_tokens is not None and "max_tokens" in (settings.sampling or {}):
        raise SettingError("got max_tokens as a setting and inside sampling; expected one of them")
    if settings.overlong_penalty is not None and (settings.max_tokens or 0) < settings.overlong_penalty.buffer:
        raise SettingError(
            f"overlong_penalty={_shown(settings.overlong_penalty)} counts back from max_tokens, which is {settings.max_tokens}; "
            "set max_tokens to at least its buffer"
        )
    if settings.group_by == "task" and isinstance(settings.algorithm, dict) and len(set(settings.algorithm.values())) > 1:
        raise SettingError("group_by='task' compares roles with each other, so they need one rule; give one algorithm for all")
    for name, (other, idle, made) in _NEEDS.items():
        if name in given and getattr(settings, other) == idle:
            raise SettingError(
                f"{name}={_shown(given[name])} would have no effect: {other}={idle} means no {made}; set {other} or leave {name} out"
            )
    for name, (chooses, names) in _NOT_READ_BY.items():
        chosen = getattr(settings, chooses)
        if name in given and names.issuperset([chosen] if isinstance(chosen, str) else chosen.values()):
            raise SettingError(f"{name}={_shown(given[name])} would have no effect: {chooses}={chosen!r} does not use it; leave it out")
    if settings.schedule != "constant" and settings.steps is not None and settings.warmup_steps >= settings.steps:
        raise SettingError(
            f"warmup_steps={settings.warmup_steps} leaves no step for the {settings.schedule} schedule: steps is {settings.steps}"
        )


def _unknown(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"got the unknown setting {name!r}; did you mean {close[0]!r}?"
    return f"got the unknown setting {name!r}; the settings are {', '.join(names)}"


def _shown(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return repr(msgspec.to_builtins(value))
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
