"""One app, every way out at once: memory, JSON lines, store, Jaeger file, OTLP over HTTP and gRPC hold the same episode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.episodes import build_episode
from rllm_trace.exporters import JaegerJSONExporter, JSONLExporter, MemoryExporter, OTLPExporter, read_episodes
from rllm_trace.otlp_receiver import OTLPReceiver
from rllm_trace.store import Store
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import Episode


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    replies = [
        Reply(choices=[ReplyChoice(text="think", token_ids=[7, 8, 2], logprobs=[-0.5, -0.25, -0.125])], prompt_token_ids=[1, 2, 3]),
        Reply(choices=[ReplyChoice(text="4", token_ids=[52, 2], logprobs=[-0.75, -0.5])], prompt_token_ids=[1, 2, 3, 7, 8, 2, 9]),
    ]
    with ScriptedServer(replies, api_key="sk-SECRET") as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[OTLPReceiver]:
    with OTLPReceiver(grpc=True) as running:
        yield running


@pytest.fixture(autouse=True)
def unconfigured(receiver: OTLPReceiver) -> Iterator[None]:
    yield
    rllm.shutdown()
    rllm.configure()


def run(server: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="sk-SECRET", max_retries=0)

    @rllm.tool
    def add(a: int, b: int) -> dict[str, int]:
        return {"sum": a + b}

    @rllm.reward
    def right(answer: str) -> float:
        return float(answer == "4")

    @rllm.workflow(session_id="s1", metadata={"index": 3})
    def solve(question: str) -> tuple[str, int]:
        with rllm.agent("solver"):
            messages: list[Any] = [{"role": "user", "content": question}]
            thought = client.chat.completions.create(model="gpt-4o-mini", messages=messages, temperature=1.0).choices[0].message.content
            messages += [{"role": "assistant", "content": thought}, {"role": "user", "content": str(add(2, 2))}]
            answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages, temperature=1.0).choices[0].message.content
            right(answer)
        return str(answer), 1

    assert solve("What is 2+2?") == ("4", 1)


def rebuilt(receiver: OTLPReceiver) -> list[Episode]:
    spans = [span.ours() for span in receiver.take()]
    by_root = [span for span in spans if span is not None]
    return [build_episode(by_root)]


def test_every_way_out_holds_the_same_episode(server: ScriptedServer, tmp_path: Path, receiver: OTLPReceiver) -> None:
    """What collect() gives is what the file, the store and both protocols carry, ids and logprobs bit for bit."""
    memory = MemoryExporter(tokens=True)
    rllm.configure(
        exporters=[
            memory,
            JSONLExporter(tmp_path / "episodes.jsonl"),
            JaegerJSONExporter(tmp_path / "jaeger"),
            OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers, tokens=True, compression="gzip"),
        ],
        store=tmp_path / "store",
        capture_content=True,
    )
    with rllm.collect() as episodes:
        run(server)
    assert rllm.flush(20) is True
    (episode,) = episodes
    assert [call.exact for call in episode.calls] == [True, True]
    assert [list(call.choices[0].token_ids) for call in episode.calls] == [[7, 8, 2], [52, 2]]
    assert memory.episodes == [episode]
    assert read_episodes(tmp_path / "episodes.jsonl") == [episode]
    assert list(Store(tmp_path / "store")) == [episode]
    assert rebuilt(receiver) == [episode]
    assert [span.name for span in memory.spans] == [
        "chat gpt-4o-mini",
        "execute_tool add",
        "chat gpt-4o-mini",
        "rllm.reward right",
        "invoke_agent solver",
        "invoke_workflow solve",
    ]
    assert build_episode([span for span in map(received, memory.spans) if span is not None]) == episode


def test_an_episode_over_grpc(server: ScriptedServer, receiver: OTLPReceiver) -> None:
    """The other protocol carries the same."""
    rllm.configure(
        exporters=[OTLPExporter(receiver.grpc_endpoint, protocol="grpc", headers=receiver.headers, tokens=True)], capture_content=True
    )
    with rllm.collect() as episodes:
        run(server)
    assert rllm.flush(20) is True
    assert rebuilt(receiver) == episodes


def received(span: Any) -> Any:
    """A span that an exporter got, as if it had come from another process."""
    from rllm_trace._span_attributes import span_from_attributes

    return span_from_attributes(
        dict(span.attributes),
        name=span.name,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        started=span.start_time,
        ended=span.end_time,
    )


def test_the_jaeger_file_of_a_workflow(server: ScriptedServer, tmp_path: Path) -> None:
    """One file for the trace, valid JSON without NaN, every span under its parent, the GenAI names that open Jaeger's own view."""
    rllm.configure(exporters=[JaegerJSONExporter(tmp_path)])
    with rllm.collect() as episodes:
        run(server)
    assert rllm.flush(20) is True
    document = json.loads((tmp_path / f"{episodes[0].trace_id}.jaeger.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    (trace,) = document["data"]
    by_id = {span["spanID"]: span for span in trace["spans"]}
    parents = {
        span["operationName"]: by_id[reference["spanID"]]["operationName"] for span in trace["spans"] for reference in span["references"]
    }
    assert parents == {
        "chat gpt-4o-mini": "invoke_agent solver",
        "execute_tool add": "invoke_agent solver",
        "rllm.reward right": "invoke_agent solver",
        "invoke_agent solver": "invoke_workflow solve",
    }
    chat = {tag["key"]: tag["value"] for span in trace["spans"] if span["operationName"].startswith("chat") for tag in span["tags"]}
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.request.model"] == "gpt-4o-mini"
    assert json.loads(chat["gen_ai.input.messages"])[0] == {"role": "user", "parts": [{"type": "text", "content": "What is 2+2?"}]}
    assert {span["processID"] for span in trace["spans"]} == set(trace["processes"])


def test_no_key_is_in_anything_that_leaves(server: ScriptedServer, tmp_path: Path, receiver: OTLPReceiver) -> None:
    """The client's key is in no span, line, file or log."""
    rllm.configure(
        exporters=[
            JSONLExporter(tmp_path / "episodes.jsonl"),
            JaegerJSONExporter(tmp_path / "jaeger", tokens=True),
            OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers, tokens=True),
        ],
        store=tmp_path / "store",
        capture_content=True,
    )
    with rllm.collect():
        run(server)
    assert rllm.flush(20) is True
    assert "SECRET" not in repr(receiver.spans())
    assert repr(list(Store(tmp_path / "store"))).count("SECRET") == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"SECRET" not in path.read_bytes(), path


def test_content_stays_where_it_may_not_leave(server: ScriptedServer, tmp_path: Path, receiver: OTLPReceiver) -> None:
    """With capture_content=False the question is in nothing that leaves, and collect() still has the exact episode."""
    rllm.configure(
        exporters=[
            JSONLExporter(tmp_path / "episodes.jsonl"),
            JaegerJSONExporter(tmp_path / "jaeger"),
            OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers),
        ],
        store=tmp_path / "store",
        capture_content=False,
    )
    with rllm.collect() as episodes:
        run(server)
    assert rllm.flush(20) is True
    assert [call.exact for call in episodes[0].calls] == [True, True]
    assert episodes[0].input == {"question": "What is 2+2?"}
    said = repr(receiver.spans()) + repr(read_episodes(tmp_path / "episodes.jsonl")) + repr(list(Store(tmp_path / "store")))
    assert "2+2" not in said
    assert all(b"2+2" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    chat = next(span for span in receiver.spans() if span.name.startswith("chat"))
    assert (chat.attributes["rllm.prompt.token_count"], chat.attributes["rllm.response.token_count"]) == (3, 3)


def test_redaction_reaches_every_way_out(server: ScriptedServer, tmp_path: Path, receiver: OTLPReceiver) -> None:
    """One function masks a word everywhere; what collect() holds is untouched."""

    def redact(record: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(record).replace("2+2", "[x]"))

    rllm.configure(
        exporters=[
            JSONLExporter(tmp_path / "episodes.jsonl"),
            OTLPExporter(f"{receiver.http_endpoint}/v1/traces", headers=receiver.headers, tokens=True),
        ],
        store=tmp_path / "store",
        capture_content=True,
        redact=redact,
    )
    with rllm.collect() as episodes:
        run(server)
    assert rllm.flush(20) is True
    assert episodes[0].input == {"question": "What is 2+2?"}
    for found in (*read_episodes(tmp_path / "episodes.jsonl"), *Store(tmp_path / "store"), *rebuilt(receiver)):
        assert found.input == {"question": "What is [x]?"}
        assert found.calls[0].messages == [{"role": "user", "content": "What is [x]?"}]
        assert (found.calls[0].prompt_token_ids, found.calls[0].inexact_reason) == (None, "redacted")


SCRIPT = """
import sys
import rllm_trace as rllm
from rllm_trace.exporters import JSONLExporter

@rllm.workflow
def solve(number):
    return number

rllm.configure(exporters=["otlp", JSONLExporter(sys.argv[1] + "/episodes.jsonl")], store=sys.argv[1] + "/store")
for number in range(3):
    solve(number)
"""


def test_a_script_that_just_ends_loses_nothing(tmp_path: Path, receiver: OTLPReceiver) -> None:
    """No flush, no shutdown: what was recorded is delivered at exit, to the back end, the file and the store, and stderr stays empty."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", SCRIPT, str(tmp_path)],
        env=os.environ | receiver.environ(),
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.stderr) == ("", "")
    assert [span.name for span in receiver.spans()] == ["invoke_workflow solve"] * 3
    assert [episode.output for episode in read_episodes(tmp_path / "episodes.jsonl")] == [0, 1, 2]
    assert [episode.output for episode in Store(tmp_path / "store")] == [0, 1, 2]
