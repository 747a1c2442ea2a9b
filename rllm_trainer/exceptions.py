"""What the trainer raises, as one tree: each class is named after the boundary where the fault was seen.

Every message says what was got, what was expected and what to do. Each class also is the builtin error that it amounts to,
and all of them pickle.
"""

from __future__ import annotations

__all__ = [
    "AppArgumentsError",
    "BeyondLimits",
    "CheckpointError",
    "DatasetError",
    "EngineError",
    "ModelError",
    "NoSignal",
    "RewardError",
    "RunStopped",
    "ServerError",
    "SettingError",
    "TooManyFaults",
    "TrainerError",
]


class TrainerError(Exception):
    """Root of the tree."""


class SettingError(TrainerError, ValueError):
    """A setting is unknown, has the wrong type or range, or would have no effect where it was given."""


class DatasetError(TrainerError, ValueError):
    """The rows cannot be read, are none, or mix training and evaluation."""


class AppArgumentsError(TrainerError, TypeError):
    """The row's columns do not fill the app's parameters."""


class RewardError(TrainerError, ValueError):
    """A reward function gave something that is not a finite number, or no reward can be found at all."""


class ModelError(TrainerError, ValueError):
    """The model's folder or name does not lead to a model that can be trained and served."""


class EngineError(TrainerError, RuntimeError):
    """The training engine could not start, or failed."""


class ServerError(TrainerError, RuntimeError):
    """The model server could not start, or failed."""


class CheckpointError(TrainerError, ValueError):
    """A run folder cannot be written, read or continued."""


class RunStopped(TrainerError, RuntimeError):
    """The run ended itself, because going on would train nothing or the wrong thing."""


class TooManyFaults(RunStopped):
    """More rollouts of a batch were lost to faults that are not the policy's than a gradient may stand on."""


class BeyondLimits(RunStopped):
    """A step is beyond a limit of ``limits={...}``; the message names it, and what it was."""


class NoSignal(RunStopped):
    """No call of a batch can carry a gradient; the message names the setting that changes it."""
