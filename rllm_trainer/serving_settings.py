"""What a run says of its server: where it is, how it is started, what becomes of calls in flight; what would do nothing is refused.

Keys are named by the environment variable that holds them, so that none stands in a settings file or a log.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from rllm_trainer.exceptions import SettingError

if TYPE_CHECKING:
    from rllm_trainer.config import Settings

__all__ = [
    "FireworksSettings",
    "InFlight",
    "LocalSettings",
    "Serving",
    "VllmSettings",
    "check_serving",
    "in_flight_of",
    "key_name",
    "require_trainable",
    "urls_of",
]

Serving = Literal["auto", "local", "vllm", "sglang", "fireworks", "openai-compatible"]
InFlight = Literal["keep", "abort", "wait"]


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the local server, or with ``engine="cluster"`` each node's front, reads what the model writes.

    ``local={"tool_format": "llama", "reasoning": "think"}``
    """

    tool_format: Literal["hermes", "qwen", "llama", "deepseek"] | None = None
    """How it writes tool calls; None: as its chat template shows."""
    reasoning: Literal["think"] | None = None
    """``think``: what stands between <think> and </think> is told apart from the content; None: it is content."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vLLM is started: ``vllm={"python": "/opt/vllm/bin/python", "args": ["--tensor-parallel-size", "2"]}``."""

    python: str | None = None
    """An interpreter that has vLLM; None: the one of ``make vllm``."""
    args: list[str] = []
    """Further arguments of vLLM's server; they win over ours."""
    start_timeout: Annotated[float, msgspec.Meta(gt=0)] = 900.0
    """Seconds until it must answer."""


class FireworksSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hot-load deployment: ``fireworks={"model": "accounts/A/models/M", "deployment": "accounts/A/deployments/D", "bucket": "/mnt"}``."""

    model: str
    deployment: str
    bucket: str | None = None
    """Where the deployment's bucket is mounted; None: it is asked, and not trained with."""
    base_url: str = "https://api.fireworks.ai/inference/v1"


_CONTINUES = frozenset({"auto", "local", "vllm"})
"""Kinds whose prompts can be continued exactly."""
_NEEDS_URL = frozenset({"sglang", "openai-compatible"})
_TAKES_URL = frozenset({"vllm", *_NEEDS_URL})
_OURS = frozenset({"auto", "local", "vllm"})
_DRAINED = frozenset({"fireworks"})
_FIREWORKS_KEY = "FIREWORKS_API_KEY"


def check_serving(settings: Settings, given: Collection[str]) -> None:
    """Raises ``SettingError`` where what is said of the server is not enough, or would have no effect."""
    serving = settings.serving
    attached = settings.serving_url is not None
    if serving in _NEEDS_URL and not attached:
        raise SettingError(f"serving={serving!r} needs serving_url=, such as http://127.0.0.1:8000/v1")
    if serving == "fireworks" and settings.fireworks is None:
        raise SettingError("serving='fireworks' needs fireworks={'model': ..., 'deployment': ..., 'bucket': ...}")
    ours = serving in _OURS and not attached
    idle: dict[str, tuple[bool, str]] = {
        "serving_url": (serving not in _TAKES_URL, f"serving={serving!r} goes to no given URL"),
        "serving_key": (ours, "a server of ours makes its own key"),
        "local": (serving not in ("auto", "local"), f"serving is {serving!r}"),
        "vllm": (serving != "vllm" or attached, "no vLLM is started"),
        "fireworks": (serving != "fireworks", f"serving is {serving!r}"),
        "replicas": (not ours, "no server is started"),
        "in_flight": (serving == "openai-compatible", "such a server is never swapped"),
    }
    for name, (without_effect, why) in idle.items():
        if without_effect and name in given:
            raise SettingError(f"{name} would have no effect: {why}; leave it out")
    if settings.continuation == "exact" and serving not in _CONTINUES:
        raise SettingError(
            f"continuation='exact' needs a server that takes a prompt's ids; serving={serving!r} does not, 'local' and 'vllm' do"
        )
    if serving in _DRAINED and settings.in_flight not in (None, "wait"):
        raise SettingError(
            f"in_flight={settings.in_flight!r}: {serving} does not say which weights sampled which token, so calls must end before a swap; "
            "give 'wait', or leave it out"
        )
    if (len(urls_of(settings)) > 1 or settings.replicas > 1) and settings.port:
        raise SettingError(f"port={settings.port} is one port, and there are several servers; leave it out")


def require_trainable(settings: Settings) -> None:
    """Raises ``SettingError`` for a server that can be asked and not be given weights."""
    if settings.serving == "openai-compatible":
        raise SettingError(
            "serving='openai-compatible' cannot be trained with: nothing is known of such a server but OpenAI's API, which has no way to "
            "give it new weights, and tells token ids only where the server adds them. evaluate(...) and rllm.collect() work with it; to "
            "train, give serving='vllm', 'sglang', 'fireworks' or 'local'"
        )
    if settings.fireworks is not None and settings.fireworks.bucket is None:
        raise SettingError(
            "fireworks has no bucket, so there is nowhere to put new weights; give fireworks={..., 'bucket': '/mounted/folder'}"
        )


def in_flight_of(settings: Settings) -> InFlight:
    """What is done with calls in flight: what was set, else ``keep`` where the server can tell versions token by token."""
    return settings.in_flight or ("wait" if settings.serving in _DRAINED else "keep")


def urls_of(settings: Settings) -> list[str]:
    """Servers that are there already."""
    given = settings.serving_url
    return [] if given is None else [given] if isinstance(given, str) else list(given)


def key_name(settings: Settings) -> str | None:
    """The environment variable that holds the server's key."""
    return settings.serving_key or (_FIREWORKS_KEY if settings.serving == "fireworks" else None)


def weights_kept(settings: Settings) -> int:
    """How many versions of weights stay on file: a lone embedded server goes back to those before by itself, others get them again."""
    return 1 if settings.serving in ("auto", "local") and settings.replicas == 1 else 2
