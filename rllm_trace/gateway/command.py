"""``rllm gateway``: options in, a gateway that serves until it is interrupted out. Needs nothing of the trainer.

    rllm gateway --upstream http://127.0.0.1:8000/v1 --store runs/store
    OPENAI_BASE_URL=http://127.0.0.1:8788/e/run-17/v1 OPENAI_API_KEY=$RLLM_GATEWAY_TOKEN some-agent

Keys come from the environment, never from the command line, where other users of the machine could read them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rllm_trace import attributes as A
from rllm_trace._configure import configure, shutdown
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.gateway._gateway import Gateway, Limits
from rllm_trace.gateway._upstream import Upstream
from rllm_trace.routing import Route

__all__ = ["add_arguments", "main", "run"]

_PORT: Final = 8788
_DESCRIPTION: Final = (
    "An OpenAI-compatible and Anthropic-Messages reverse proxy that records what passes through it. "
    "A call belongs to the episode of its headers (baggage, x-rllm-parent), else of its path (/e/{episode}/v1), else of its key; "
    "POST /rllm/episodes opens an episode, POST /rllm/episodes/{id}/rewards scores it, POST /rllm/episodes/{id}/end ends it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--upstream", metavar="URL", help=f"an OpenAI-compatible server, with /v1; its key is in {A.ENV_GATEWAY_UPSTREAM_KEY}")
    add("--anthropic", metavar="URL", help=f"a server of Anthropic's API; its key is in {A.ENV_GATEWAY_ANTHROPIC_KEY}")
    add("--model", metavar="NAME", help="ask the upstream for this model and for token ids, whatever model the app names")
    add("--store", metavar="FOLDER", help="keep episodes, with tokens, in this folder")
    add("--otlp", action="store_true", help="export spans, as the OTEL_* variables say")
    add(
        "--commit-to",
        metavar="URL",
        help="send spans of other processes' episodes to their EpisodeReceiver before answering; "
        f"its token is in {A.ENV_GATEWAY_COMMIT_TOKEN}",
    )
    add("--host", default="127.0.0.1", help="where to listen (default: loopback only)")
    add("--port", type=int, default=_PORT, help=f"default: {_PORT}; 0: any")
    add("--no-token", action="store_true", help=f"ask for no token (loopback only); else it is that in {A.ENV_GATEWAY_TOKEN}, or made up")
    add("--idle", type=float, default=600.0, metavar="SECONDS", help="an episode without calls for so long has ended")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="how long the upstream may say nothing")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; gives the exit code: 0, or 2 for what was refused."""
    parser = argparse.ArgumentParser(prog="rllm gateway", description=_DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(asked: argparse.Namespace) -> int:
    """The command with its options parsed."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        gateway = _gateway(asked, os.environ)
        _record(asked, os.environ)
        gateway.serve(_announce)
    except ConfigurationError as error:
        _say(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        pass
    finally:
        shutdown()
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(number: int, frame: object) -> None:
    """A request to end is an end in order: what is open is recorded."""
    raise KeyboardInterrupt


def _announce(gateway: Gateway) -> None:
    _say(f"rllm gateway: {gateway.base_url}, or {gateway.root}/e/EPISODE/v1")
    if A.ENV_GATEWAY_TOKEN not in os.environ and not gateway.open_access:
        _say(f"token: {gateway.token}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _gateway(asked: argparse.Namespace, environ: Mapping[str, str]) -> Gateway:
    if asked.upstream is None and asked.anthropic is None:
        raise ConfigurationError("got neither --upstream nor --anthropic; say where calls are to go")
    if asked.model and asked.upstream is None:
        raise ConfigurationError("got --model without --upstream; the model is asked of an OpenAI-compatible server")
    upstream = asked.upstream and Upstream(base_url=asked.upstream, api_key=environ.get(A.ENV_GATEWAY_UPSTREAM_KEY))
    anthropic = asked.anthropic and Upstream(
        base_url=asked.anthropic, api_key=environ.get(A.ENV_GATEWAY_ANTHROPIC_KEY), protocol="anthropic"
    )
    route = None
    if asked.model:
        key = environ.get(A.ENV_GATEWAY_UPSTREAM_KEY) or "unused"
        route = Route(base_url=str(asked.upstream), api_key=key, model=asked.model, constrained="inexact")
    return Gateway(
        upstream=upstream or None,
        anthropic=anthropic or None,
        route=route,
        host=asked.host,
        port=asked.port,
        token=environ.get(A.ENV_GATEWAY_TOKEN) or None,
        open_access=asked.no_token,
        opens_episodes=True,
        limits=Limits(idle=asked.idle, silence=asked.timeout),
        commit=_committing(asked, environ),
    )


def _committing(asked: argparse.Namespace, environ: Mapping[str, str]) -> Any:
    if asked.commit_to is None:
        return None
    from rllm_trace.exporters import OTLPExporter

    token = environ.get(A.ENV_GATEWAY_COMMIT_TOKEN)
    headers = {A.HEADER_AUTHORIZATION: f"Bearer {token}"} if token else {}
    return OTLPExporter(
        asked.commit_to.rstrip("/") + "/v1/traces", protocol="http/protobuf", headers=headers, capture_content=True, tokens=True
    )


def _record(asked: argparse.Namespace, environ: Mapping[str, str]) -> None:
    if asked.store is None and not asked.otlp and asked.commit_to is None:
        _say("nothing is kept: give --store, --otlp or --commit-to to record what passes through")
        return
    wants_tokens = bool(asked.store) or asked.commit_to is not None
    configure(exporters=["otlp"] if asked.otlp else [], store=asked.store, tokens=True if wants_tokens and asked.commit_to else "auto")
