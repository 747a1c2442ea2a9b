"""Every error that the SDK raises, as one tree. Each also is the standard error that it resembles, and pickles.

Tracing raises only for what the caller got wrong (a bad option, a reward for an unknown episode); faults of its own are
counted by ``_guard`` and never reach the app.
"""

from __future__ import annotations

__all__ = [
    "CallRefusedError",
    "ConfigurationError",
    "RewardError",
    "RllmError",
    "RllmWarning",
    "TokensRefusedError",
    "UnknownEpisodeError",
    "UnknownInstrumentError",
]


class RllmError(Exception):
    """Base of every error of ``rllm_trace``."""


class ConfigurationError(RllmError, ValueError):
    """An option, a decorator argument or an exporter that cannot be used as given."""


class UnknownInstrumentError(ConfigurationError):
    """``instrument(name)`` or ``uninstrument(name)`` with a client that is not known."""


class RewardError(RllmError, ValueError):
    """A reward that is no finite number."""


class UnknownEpisodeError(RllmError, LookupError):
    """``add_reward`` for an episode or span that this process does not know (any more)."""


class CallRefusedError(RllmError, NotImplementedError):
    """A call of the app that cannot be sent to the policy as it is."""


class TokensRefusedError(RllmError, RuntimeError):
    """The policy's server refused or left out the token ids that training needs."""


class RllmWarning(UserWarning):
    """What the SDK warns of, once for each cause."""
