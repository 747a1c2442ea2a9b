"""Turns a running app into exact records: ``import rllm_trace as rllm``.

Importing does nothing and loads no client, exporter or model library.
"""

from rllm_trace._collect import EpisodeHandle, collect, current_episode, stats
from rllm_trace._configure import configure, flush, shutdown
from rllm_trace._decorators import agent, no_train, tool, workflow
from rllm_trace._handover import attach_env, child_env
from rllm_trace._instruments import attach_to, instrument, tracer_provider, uninstrument
from rllm_trace._propagation import attach, bind, headers
from rllm_trace._rewards import add_reward, reward
from rllm_trace.exceptions import (
    CallRefusedError,
    ConfigurationError,
    RewardError,
    RllmError,
    RllmWarning,
    TokensRefusedError,
    UnknownEpisodeError,
    UnknownInstrumentError,
)
from rllm_trace.log_filter import LogFilter
from rllm_trace.types import Choice, Episode, ErrorInfo, Logprobs, ModelCall, Reward, TokenIds, ToolCall, Trajectory, Usage

__all__ = [
    "CallRefusedError",
    "Choice",
    "ConfigurationError",
    "Episode",
    "EpisodeHandle",
    "ErrorInfo",
    "LogFilter",
    "Logprobs",
    "ModelCall",
    "Reward",
    "RewardError",
    "RllmError",
    "RllmWarning",
    "TokenIds",
    "TokensRefusedError",
    "ToolCall",
    "Trajectory",
    "UnknownEpisodeError",
    "UnknownInstrumentError",
    "Usage",
    "add_reward",
    "agent",
    "attach",
    "attach_env",
    "attach_to",
    "bind",
    "child_env",
    "collect",
    "configure",
    "current_episode",
    "flush",
    "headers",
    "instrument",
    "no_train",
    "reward",
    "shutdown",
    "stats",
    "tool",
    "tracer_provider",
    "uninstrument",
    "workflow",
]
