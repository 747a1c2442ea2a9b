"""What a caller gives wrongly is refused in one sentence, and what an app's odd objects raise while they are copied costs it nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.exporters import JaegerJSONExporter, JSONLExporter
from rllm_trace.http_hops import Hop
from rllm_trace.importers import import_episodes
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trace.store import Store
from rllm_trace.testing import ScriptedServer

GOOD: Any = {"base_url": "http://127.0.0.1:1/v1", "api_key": "k", "model": "m"}


def entered(block: Any) -> None:
    with block:
        raise AssertionError("the block was entered")


def waited(timeout: Any) -> None:
    with rollout() as handle:
        pass
    handle.wait(timeout)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "collect": (lambda: rllm.collect(timeout="x"), "got timeout='x'; expected seconds, 0 or more"),  # type: ignore[arg-type]
    "collect nan": (lambda: rllm.collect(timeout=float("nan")), "got timeout=nan; expected seconds, 0 or more"),
    "flush": (lambda: rllm.flush("x"), "got timeout='x'; expected seconds, 0 or more"),  # type: ignore[arg-type]
    "flush negative": (lambda: rllm.flush(-1), "got timeout=-1; expected seconds, 0 or more"),
    "shutdown": (lambda: rllm.shutdown(None), "got timeout=None; expected seconds, 0 or more"),  # type: ignore[arg-type]
    "store": (lambda: rllm.configure(store=3), "got store=3; expected a path, such as store='runs/store'"),  # type: ignore[arg-type]
    "store empty": (lambda: rllm.configure(store=""), "got store=''; expected a path"),
    "exporters": (lambda: rllm.configure(exporters={"otlp": 1}), "got exporters={'otlp': 1}; expected a list"),
    "tokens": (lambda: rllm.configure(tokens=1), "got tokens=1; expected True, False or 'auto'"),  # type: ignore[arg-type]
    "processes": (lambda: rllm.configure(processes="yes"), "got processes='yes'; expected True or False"),  # type: ignore[arg-type]
    "attach": (lambda: entered(rllm.attach(3)), "got an object of type int as headers; expected a mapping, or pairs"),  # type: ignore[arg-type]
    "attach text": (lambda: entered(rllm.attach("traceparent")), "got an object of type str as headers"),  # type: ignore[arg-type]
    "attach pairs": (lambda: entered(rllm.attach([("a",)])), "got an object of type list as headers"),  # type: ignore[list-item]
    "headers": (lambda: rllm.headers(3), "got existing=3; expected a dict"),  # type: ignore[arg-type]
    "headers values": (lambda: rllm.headers({"a": 1}), "got 'a': 1 in existing; expected strings"),  # type: ignore[dict-item]
    "instrument": (lambda: rllm.instrument([]), "got the client [], expected one of ['openai']"),  # type: ignore[arg-type]
    "reward name": (lambda: rllm.add_reward(1, name=3, episode_id="e"), "got name=3; expected a non-empty string"),  # type: ignore[arg-type]
    "reward id": (lambda: rllm.add_reward(1, episode_id=[]), "got episode_id=[]; expected a non-empty string, or None"),  # type: ignore[arg-type]
    "new_episode": (lambda: rllm.workflow(new_episode="x"), "got new_episode='x'; expected True or False"),  # type: ignore[call-overload]
    "child_env": (lambda: rllm.child_env({"a": 1}), "got 'a': 1 in env; expected strings"),  # type: ignore[dict-item]
    "attach_env": (lambda: entered(rllm.attach_env(3)), "got environ=3; expected a dict"),  # type: ignore[arg-type]
    "rollout seed": (lambda: entered(rollout(seed="x")), "got seed='x'; expected a whole number or None"),  # type: ignore[arg-type]
    "rollout route": (lambda: entered(rollout(route="x")), "got route='x'; expected a rllm_trace.routing.Route or None"),  # type: ignore[arg-type]
    "wait": (lambda: waited("x"), "got timeout='x'; expected seconds, 0 or more"),
    "route": (lambda: Route(**{**GOOD, "base_url": 3}), "got base_url=3; expected a string"),
    "replaces": (lambda: Route(**GOOD, replaces="gpt"), "got replaces='gpt'; expected a frozenset of model names"),  # type: ignore[arg-type]
    "constrained": (lambda: Route(**GOOD, constrained="no"), "got constrained='no'; expected one of 'as_auto', 'inexact', 'refuse'"),  # type: ignore[arg-type]
    "script": (lambda: ScriptedServer(3), "got script=3; expected a function of the exchange, or replies"),  # type: ignore[arg-type]
    "script empty": (lambda: ScriptedServer([]), "got script=[]; expected at least one reply"),
    "jsonl": (lambda: JSONLExporter(3), "got path=3; expected a path"),  # type: ignore[arg-type]
    "jaeger": (lambda: JaegerJSONExporter(None), "got folder=None; expected a path"),  # type: ignore[arg-type]
    "read store": (lambda: Store(3), "got store=3; expected a path"),  # type: ignore[arg-type]
    "import": (lambda: import_episodes(3), "got path=3; expected a path"),  # type: ignore[arg-type]
    "hop": (lambda: Hop([3]), "got host=3; expected a non-empty string"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("call,said", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_meant_is_refused_in_one_sentence(call: Callable[[], Any], said: str, no_faults: None) -> None:
    """A wrong type or value is the caller's error: it says what was got and what is expected, and is no fault of ours."""
    with pytest.raises(rllm.ConfigurationError) as caught:
        call()
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


class Exits:
    """Its copying raises what is no Exception."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


class OddError(Exception):
    def __str__(self) -> str:
        raise SystemExit


def returns_odd(_: object = None) -> Any:
    return Exits(SystemExit)


def yields_odd(_: object = None) -> Any:
    yield Exits(SystemExit)


ODD: dict[str, Callable[[], Any]] = {
    "input": lambda: rllm.workflow(name="odd")(lambda given: None)(Exits(SystemExit)),
    "output": lambda: rllm.workflow(name="odd")(returns_odd)(),
    "item": lambda: list(rllm.workflow(name="odd")(yields_odd)()),
    "tool's argument": lambda: rllm.workflow(name="odd")(lambda: rllm.tool(lambda given: None)(Exits(SystemExit)))(),
    "tool's result": lambda: rllm.workflow(name="odd")(lambda: rllm.tool(returns_odd)())(),
}


@pytest.mark.parametrize("app", ODD.values(), ids=ODD.keys())
def test_an_object_that_exits_while_it_is_copied_costs_the_app_nothing(app: Callable[[], Any], no_faults: None) -> None:
    """A ``__repr__`` that only tracing calls raises SystemExit: the app never sees it, and its episode ends as completed."""
    with rllm.collect(timeout=0) as episodes:
        app()
    (episode,) = episodes
    assert (episode.workflow, episode.termination, episode.error) == ("odd", "completed", None)


def test_an_error_whose_text_exits_is_raised_and_recorded(no_faults: None) -> None:
    """The app gets its own exception; the record says that its message cannot be read."""

    @rllm.workflow
    def odd() -> None:
        raise OddError

    with rllm.collect(timeout=0) as episodes, pytest.raises(OddError):
        odd()
    (episode,) = episodes
    assert (episode.termination, episode.error.message) == ("failed", "<its message cannot be read>")


@pytest.mark.parametrize("name", ["input", "output"])
def test_ctrl_c_while_something_is_copied_is_the_apps_and_ends_the_episode(name: str, no_faults: None) -> None:
    """KeyboardInterrupt passes, and nothing is left open that leaving ``collect`` would have to wait for."""

    @rllm.workflow
    def odd(given: Any = None) -> Any:
        return Exits(KeyboardInterrupt)

    with rllm.collect(timeout=0) as episodes, pytest.raises(KeyboardInterrupt):
        odd(*([Exits(KeyboardInterrupt)] if name == "input" else []))
    (episode,) = episodes
    assert episode.termination == ("cancelled" if name == "input" else "completed")


MESSAGES: Any = [{"role": "user", "content": "hi"}]
OPTIONS: dict[str, dict[str, Any]] = {
    "extra_body list": {"extra_body": [1]},
    "extra_body empty list": {"extra_body": []},
    "extra_body text": {"extra_body": "x"},
    "extra_headers": {"extra_headers": [1]},
    "unserialisable": {"user": object()},
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("redirected", [False, True], ids=["own", "policy"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_that_the_client_refuses_are_the_apps_error(options: Any, redirected: bool, is_async: bool, recording: Any) -> None:
    """What the client raises for them it raises with us; the record is a failed call, no fault of ours, and nothing was sent."""

    async def later(server: ScriptedServer) -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k", http_client=http) as client:
            await client.chat.completions.create(model="m", messages=MESSAGES, **options)

    def app(server: ScriptedServer) -> None:
        if is_async:
            asyncio.run(later(server))
            return
        http = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(base_url=server.base_url, api_key="k", http_client=http) as client:
            client.chat.completions.create(model="m", messages=MESSAGES, **options)

    with ScriptedServer() as server:
        with pytest.raises(Exception) as bare:  # noqa: PT011 - whatever it is, it must be the same below
            app(server)
        route = Route(base_url=server.base_url, api_key=server.api_key, model="p") if redirected else None
        call = recording.call(lambda: app(server), route=route)
        assert server.log == []
    assert (type(recording.error), str(recording.error)) == (type(bare.value), str(bare.value))
    assert (call.error.type, call.trainable, call.messages) == (type(bare.value).__name__, False, MESSAGES)


@pytest.mark.parametrize("given", [[1], 3, "x"], ids=repr)
def test_stream_options_that_are_none_go_out_as_given(given: Any, recording: Any) -> None:
    """What the server is to refuse it gets to see."""
    http = openai.DefaultHttpxClient(verify=False)
    with ScriptedServer() as server, openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http) as client:
        recording.call(lambda: client.chat.completions.create(model="m", messages=MESSAGES, stream_options=given))
        assert server.log[0].body["stream_options"] == given
