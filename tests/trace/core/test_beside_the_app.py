"""What is made of a call when the app has its answer already: on the writer's thread, whatever the app does then."""

from __future__ import annotations

import os
import threading
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace import _writer
from rllm_trace._recorder import recorder
from rllm_trace._spans import Span, _Making, made
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer


def reply(exchange: Any) -> Reply:
    return Reply(choices=[ReplyChoice(text="ok", token_ids=[7, 2], logprobs=[-0.5, -0.25])], prompt_token_ids=[1, 2, 3])


def client_of(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)


def test_what_the_app_changes_after_the_answer_is_not_in_the_record() -> None:
    """The body that the app gave, emptied and turned into something else as soon as the call has returned, is recorded as it was sent."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [part]}], "temperature": 0.5, "n": 1}

    @rllm.workflow
    def app(client: openai.OpenAI) -> None:
        client.post("/chat/completions", body=body, cast_to=object)
        body["messages"][0]["content"][0].clear()
        body["messages"].clear()
        body.update(temperature=0, n=5, model="other", top_k=3)

    with ScriptedServer(reply) as server, rllm.collect() as episodes, client_of(server) as client:
        app(client)
    (call,) = episodes[0].calls
    assert (call.model, call.sampling, call.multimodal, call.exact) == ("m", {"temperature": 0.5, "n": 1}, True, True)
    assert call.messages == [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    assert (call.prompt_token_ids, call.choices[0].token_ids) == ([1, 2, 3], [7, 2])


def test_spans_that_find_the_queue_full_are_taken_by_the_thread_that_ended_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost, and their records are there before the calls return."""
    monkeypatch.setattr(_writer, "_MAX_SPANS", 0)
    pending: list[bool] = []

    @rllm.workflow
    def app(client: openai.OpenAI) -> None:
        for _ in range(3):
            client.chat.completions.create(model="m", messages=[])
        (episode,) = recorder.open_episodes.values()
        pending.extend(span.call is None for span in episode.spans)

    with ScriptedServer(reply) as server, rllm.collect() as episodes, client_of(server) as client:
        app(client)
    assert [call.exact for call in episodes[0].calls] == [True] * 3
    assert pending == [False] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_while_a_record_is_made_makes_its_own() -> None:
    """The lock that a thread of the parent holds is not the child's."""
    recorder.check_environment()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with _Making.lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        fields: Any = dict.fromkeys(("name", "trace_id", "span_id", "episode_id", "trajectory_id", "trajectory_name"), "")
        done = threading.Event()

        def make() -> None:
            made(Span(kind="chat", parent_id=None, started=0, pending=lambda: None, **fields))  # type: ignore[arg-type, return-value]
            done.set()

        threading.Thread(target=make, daemon=True).start()
        os._exit(0 if done.wait(30) else 1)
    release.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
