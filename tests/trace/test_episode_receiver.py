"""Episodes out of the spans of other processes: late, out of order, incomplete."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

import rllm_trace as rllm
from rllm_trace._assembly import INCOMPLETE, Assembly
from rllm_trace._disclosure import Disclosure
from rllm_trace._guard import counters
from rllm_trace._spans import Span
from rllm_trace.episode_receiver import EpisodeReceiver
from rllm_trace.episodes import build_episode
from rllm_trace.exporters import OTLPExporter
from rllm_trace.exporters._readable import converter
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer


@pytest.fixture
def assembly() -> Assembly:
    return Assembly(settle=2.0, deadline=60.0)


def test_an_episode_is_given_once_it_is_whole_and_quiet(assembly: Assembly, spans: dict[str, Span]) -> None:
    """In whatever order its spans come; two seconds after the last one, not before, and once."""
    for second, kind in enumerate(("chat", "workflow", "reward", "tool", "agent")):
        assembly.add([spans[kind]], float(second))
    assert assembly.next_due() == 6.0
    assert assembly.due(5.9) == []
    assert assembly.due(6.0) == [build_episode(list(spans.values()))]
    assert assembly.due(100.0) == []
    assert assembly.next_due() is None


def test_an_episode_waits_for_a_parent_that_is_missing(assembly: Assembly, spans: dict[str, Span]) -> None:
    """Its workflow has ended and its agent's span is on the way: the settle time does not count until it is there."""
    assembly.add([spans["workflow"], spans["chat"]], 0.0)
    assert assembly.due(59.0) == []
    assembly.add([spans["agent"]], 59.0)
    assert [episode.metadata for episode in assembly.due(60.0)] == [{"index": 3}]


def test_at_the_deadline_it_says_what_is_missing(assembly: Assembly, spans: dict[str, Span]) -> None:
    """An agent's span that never came leaves its calls where they belong, and is named."""
    assembly.add([spans["workflow"], spans["chat"]], 0.0)
    (episode,) = assembly.due(60.0)
    assert episode.metadata == {"index": 3, "rllm.missing": {"workflow": False, "spans": ["00000000000000a1"]}}
    (solver,) = [found for found in episode.trajectories if found.calls]
    assert (solver.id, solver.name) == ("00000000000000a1", "solver")


def test_a_workflow_that_never_came_is_said(assembly: Assembly, spans: dict[str, Span]) -> None:
    """A process that died leaves what it had exported: the calls are kept, the episode ends as a timeout with its error."""
    assembly.add([spans["agent"], spans["chat"]], 0.0)
    (episode,) = assembly.due(60.0)
    assert (episode.id, episode.termination, episode.error.type) == ("ep-1", "timeout", INCOMPLETE)
    assert (episode.task_id, episode.session_id) == ("t7", "s1")
    assert episode.metadata["rllm.missing"] == {"workflow": True, "spans": ["0000000000000001"]}
    assert len(episode.calls) == 1


def test_what_comes_after_that_is_late(assembly: Assembly, spans: dict[str, Span]) -> None:
    """It is counted, and makes no second episode; a span that comes twice counts once."""
    assembly.add([spans["workflow"], spans["workflow"]], 0.0)
    assert len(assembly.due(10.0)) == 1
    before = counters.get("late", "chat")
    assembly.add([spans["chat"]], 11.0)
    assert counters.get("late", "chat") - before == 1
    assert len(assembly) == 0


def test_episodes_do_not_mix(assembly: Assembly, spans: dict[str, Span]) -> None:
    """Spans go by the episode's id alone."""
    other = [msgspec.structs.replace(span, episode_id="ep-2") for span in spans.values()]
    for mine, theirs in zip(spans.values(), other, strict=True):
        assembly.add([mine, theirs], 0.0)
    assert [episode.id for episode in assembly.due(2.0)] == ["ep-1", "ep-2"]


CHILD = """
import os, sys
import openai
import rllm_trace as rllm
from rllm_trace.exporters import OTLPExporter
from rllm_trace.exporters._readable import converter

rllm.configure(exporters=[OTLPExporter(tokens=True, compression="gzip")], capture_content=True, tokens=True)
client = openai.OpenAI(base_url=sys.argv[1], api_key="scripted", max_retries=0)

@rllm.workflow
def solve(question):
    with rllm.agent("solver"):
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}]).choices[0].message.content

for number in range(3):
    assert solve(f"question {number}") == "4"
assert rllm.shutdown(20)
"""


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_child_process_exports_its_episodes(protocol: str) -> None:
    """Ids and logprobs that the server sent to the child are those in the parent's episodes, exact and trainable."""
    reply = Reply(choices=[ReplyChoice(text="4", token_ids=[52, 2], logprobs=[-0.75, -0.5])], prompt_token_ids=[1, 2, 3])
    with ScriptedServer([reply]) as server, EpisodeReceiver(settle=0.1, grpc=True) as receiver:
        environ = os.environ | receiver.environ(protocol)
        subprocess.run([sys.executable, "-c", CHILD, server.base_url], env=environ, check=True, timeout=120)
        assert receiver.wait(3, 30)
    assert sorted(episode.input["question"] for episode in receiver.episodes) == ["question 0", "question 1", "question 2"]
    for episode in receiver.episodes:
        (call,) = episode.calls
        assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == ([1, 2, 3], [52, 2], [-0.75, -0.5])
        assert (call.exact, call.trainable) == (True, True)
        assert episode.output == "4"
        assert "rllm.missing" not in episode.metadata


def test_leaving_delivers_what_is_open(spans: dict[str, Span]) -> None:
    """Without waiting for the deadline; a function that takes them gets each once, and its own fault is contained."""
    got: list[Any] = []

    def take(episode: Any) -> None:
        got.append(episode)
        raise RuntimeError("boom")

    with EpisodeReceiver(on_episode=take) as receiver:
        send(receiver, spans["chat"])
    assert [episode.id for episode in got] == ["ep-1"]
    assert receiver.episodes == []


def send(receiver: EpisodeReceiver, *spans: Span) -> None:
    from rllm_trace._disclosure import Disclosure
    from rllm_trace.exporters._readable import converter

    exporter = OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers)
    convert = converter("child")
    assert exporter.deliver([convert(span, Disclosure(content=True, tokens=True)) for span in spans]) == len(spans)
    exporter.shutdown()


def test_a_workflow_of_this_process_takes_the_spans_of_others_in(spans: dict[str, Span]) -> None:
    """A call that another process made for it is part of its record, under the agent that asked."""

    @rllm.workflow
    def solve() -> None:
        handle = rllm.current_episode()
        assert handle is not None
        remote = msgspec.structs.replace(spans["chat"], episode_id=handle.id, trace_id=handle.trace_id, parent_id=None)
        send(receiver, remote)

    with EpisodeReceiver() as receiver, rllm.collect() as episodes:
        solve()
    (episode,) = episodes
    assert [call.span_id for call in episode.calls] == ["00000000000000c1"]
    assert receiver.episodes == []


def test_a_span_that_is_sent_twice_is_in_the_record_once(spans: dict[str, Span]) -> None:
    """A sender that has not heard that its batch arrived sends it again, also to a workflow that runs here."""

    @rllm.workflow
    def app() -> None:
        handle = rllm.current_episode()
        assert handle is not None
        chat = spans["chat"].copy()
        chat.episode_id = handle.id
        for _ in range(2):
            with EpisodeReceiver() as receiver:
                sink = OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers, tokens=True, environ={})
                convert = converter("test")
                assert sink.deliver([convert(chat, Disclosure(content=True, tokens=True))]) == 1
                sink.shutdown()

    with rllm.collect() as episodes:
        app()
    assert [call.span_id for call in episodes[0].calls] == ["00000000000000c1"]
