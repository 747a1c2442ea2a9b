"""The patch reaches every client, leaves others' patches alone, and without a workflow it only calls on."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai._utils import _transform

from rllm_trace import clients
from rllm_trace.clients import _parameters
from rllm_trace.clients import openai as patch
from rllm_trace.exceptions import UnknownInstrumentError
from rllm_trace.testing import ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CREATE: Any = {"model": "m", "messages": MESSAGES}
CLASSES = (openai.OpenAI, openai.AsyncOpenAI)
METHODS = ("request", "_prepare_request", "_process_response", "_send_request")


def own_attributes() -> dict[tuple[str, str], Any]:
    return {(cls.__name__, name): cls.__dict__.get(name) for cls in CLASSES for name in METHODS}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    clients.uninstrument("openai")
    before = own_attributes()
    yield
    for (cls, name), method in before.items():
        if method is None and name in getattr(openai, cls).__dict__:
            delattr(getattr(openai, cls), name)
        elif method is not None:
            setattr(getattr(openai, cls), name, method)
    clients.instrument("openai")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def client_of(server: ScriptedServer, cls: type[Any] = openai.OpenAI) -> Any:
    return cls(base_url=server.base_url, api_key=server.api_key, http_client=openai.DefaultHttpxClient(verify=False))


def test_instrument_is_idempotent_and_uninstrument_restores() -> None:
    """Twice is once, and what was there before is there again, inherited or own."""
    before = own_attributes()
    assert clients.instrument("openai") is True
    once = own_attributes()
    assert clients.instrument("openai") is True
    assert own_attributes() == once
    assert all(once[key] is not before[key] for key in once if hasattr(getattr(openai, key[0]), key[1]))
    clients.uninstrument("openai")
    assert own_attributes() == before


def test_an_unknown_client_is_named() -> None:
    """The error lists what can be instrumented."""
    with pytest.raises(UnknownInstrumentError, match=r"got the client 'cohere', expected one of \['openai'\]"):
        clients.instrument("cohere")


def test_signatures_and_names_are_kept() -> None:
    """Whoever looks at the method sees the SDK's own."""
    before = (openai.OpenAI.request.__name__, openai.OpenAI.request.__qualname__, openai.OpenAI.request.__doc__)
    clients.instrument("openai")
    assert (openai.OpenAI.request.__name__, openai.OpenAI.request.__qualname__, openai.OpenAI.request.__doc__) == before


def test_turned_off_stays_off(server: ScriptedServer, recording: Any) -> None:
    """After ``uninstrument`` a workflow records no call and the request is the app's own."""
    clients.instrument("openai")
    clients.uninstrument("openai")
    with client_of(server) as client:
        assert recording.calls(lambda: client.chat.completions.create(**CREATE)) == []
    assert "return_token_ids" not in server.log[0].body


def test_outside_a_workflow_nothing_is_changed_or_recorded(server: ScriptedServer) -> None:
    """The request is the app's own."""
    clients.instrument("openai")
    with client_of(server) as client:
        client.chat.completions.create(**CREATE)
    assert server.log[0].body == CREATE


def test_clients_made_before_and_methods_bound_before_are_captured(server: ScriptedServer, recording: Any) -> None:
    """A module-level client, a bound method and a warm raw-response wrapper from before the patch are recorded."""
    with client_of(server) as client:
        bound, raw = client.chat.completions.create, client.chat.completions.with_raw_response
        clients.instrument("openai")

        def app() -> None:
            bound(**CREATE)
            raw.create(**CREATE)

        calls = recording.calls(app)
    assert [call.exact for call in calls] == [True, True]


def test_the_module_level_client_is_captured(server: ScriptedServer, recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``openai.chat.completions.create`` without a client object is recorded."""
    clients.instrument("openai")
    monkeypatch.setattr(openai, "base_url", server.base_url)
    monkeypatch.setattr(openai, "api_key", server.api_key)
    openai._reset_client()
    try:
        call = recording.call(lambda: openai.chat.completions.create(**CREATE))
        openai.completions._client.close()
    finally:
        openai._reset_client()
    assert call.exact


def test_sub_classes_are_captured(server: ScriptedServer, recording: Any) -> None:
    """A sub-class that overrides methods and calls on is recorded once."""

    class Mine(openai.OpenAI):
        def request(self, *args: Any, **kwargs: Any) -> Any:
            return super().request(*args, **kwargs)

        def _prepare_request(self, request: Any) -> None:
            request.headers["x-mine"] = "1"

    clients.instrument("openai")
    with client_of(server, Mine) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE))
    assert (call.exact, call.attempts) == (True, 1)
    assert server.log[0].headers["x-mine"] == "1"


def wrap(cls: type[Any], *, honest: bool) -> list[Any]:
    """Another instrumentor's patch of ``request``; an honest one shows what it wraps."""
    seen: list[Any] = []
    original = cls.request

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[1].url)
        return original(self, *args, **kwargs)

    cls.request = functools.wraps(original)(request) if honest else request
    return seen


@pytest.mark.parametrize("honest", [True, False], ids=["with __wrapped__", "without"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_both_record_beside_another_instrumentor(first: str, honest: bool, server: ScriptedServer, recording: Any) -> None:
    """In either order of installation each records the call once."""
    if first == "ours":
        clients.instrument("openai")
    seen = wrap(openai.OpenAI, honest=honest)
    clients.instrument("openai")
    with client_of(server) as client:
        calls = recording.calls(lambda: [client.chat.completions.create(**CREATE) for _ in range(3)])
    assert [(call.exact, call.attempts) for call in calls] == [(True, 1)] * 3
    assert seen == ["/chat/completions"] * 3
    assert len(server.log) == 3


def test_our_uninstrument_leaves_theirs_on_top(server: ScriptedServer, recording: Any) -> None:
    """While another wrapper sits on ours, ours goes inert instead of taking theirs off."""
    clients.instrument("openai")
    seen = wrap(openai.OpenAI, honest=True)
    theirs = openai.OpenAI.request
    clients.uninstrument("openai")
    assert openai.OpenAI.request is theirs
    with client_of(server) as client:
        assert recording.calls(lambda: client.chat.completions.create(**CREATE)) == []
    assert seen == ["/chat/completions"]
    assert server.log[0].body == CREATE


def test_a_wrapper_that_somebody_took_off_is_put_on_again(server: ScriptedServer, recording: Any) -> None:
    """Another's uninstrument that restores what was before us is noticed at the next workflow."""
    original = openai.OpenAI.request
    clients.instrument("openai")
    openai.OpenAI.request = original  # type: ignore[method-assign]
    assert not patch._is_reachable(openai.OpenAI, "request")
    with client_of(server) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE))
    assert call.exact


def test_a_fault_of_ours_leaves_the_call_alone(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks in the recording is counted, and the app gets its answer."""
    from rllm_trace import _guard
    from rllm_trace._decorators import workflow
    from rllm_trace.rollouts import rollout

    clients.instrument("openai")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    before = _guard.counters.get("faults", "client")
    recorded: list[Any] = []
    places = ("openai._opened", "openai.with_call", "_call.reply_of", "_parameters.copied")
    with client_of(server) as client:
        for place in places:
            with monkeypatch.context() as patched, rollout() as handle:
                patched.setattr(f"rllm_trace.clients.{place}", broken)
                answer = workflow(lambda: client.chat.completions.create(**CREATE))()
                (episode,) = handle.wait(5)
            assert answer.choices[0].message.content == "ok"
            recorded.append([(call.exact, call.complete) for call in episode.calls])
    assert recorded == [[], [(False, True)], [(False, False)], [(True, True)]]
    walks_anyway = _parameters.agrees(_transform.transform) is False  # a release whose walk is never left out
    assert _guard.counters.get("faults", "client") == before + (3 if walks_anyway else 4)


def test_importing_the_sdk_imports_no_client() -> None:
    """``openai``, ``httpx`` and ``pydantic`` are loaded by the app, or by the first workflow, and by nothing else."""
    code = "import sys, rllm_trace, rllm_trace.testing, rllm_trace.routing, rllm_trace.clients\n"
    code += "print(sorted(m for m in ('openai', 'httpx', 'httpx2', 'pydantic', 'numpy') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
