"""A span of ours as attributes and back, as OpenTelemetry's ReadableSpan, and through the queue before an exporter."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import rllm_trace as rllm
from rllm_trace._disclosure import Disclosure
from rllm_trace._guard import counters
from rllm_trace._span_attributes import span_attributes, span_from_attributes, span_name
from rllm_trace._spans import Span
from rllm_trace.episodes import build_episode
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.exporters import JSONLExporter, MemoryExporter, OTLPExporter, open_sinks
from rllm_trace.exporters._batch import BatchSink
from rllm_trace.exporters._readable import converter

ALL = Disclosure(content=True, tokens=True)
NOTHING = Disclosure(content=False, tokens=False)


def counted(outcome: Any) -> int:
    return counters.get(outcome, "span")


def back(span: Span, attributes: dict[str, Any]) -> Span | None:
    return span_from_attributes(
        attributes,
        name=span_name(span),
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
        started=span.started,
        ended=span.ended,
        links=span.links,
    )


@pytest.mark.parametrize("kind", ["workflow", "agent", "chat", "reward"])
def test_a_span_survives_the_trip_through_its_attributes(spans: dict[str, Span], kind: str) -> None:
    """What was exported with content and tokens is enough to make the span again in another process."""
    assert back(spans[kind], dict(span_attributes(spans[kind], content=True, tokens=True))) == spans[kind]


def test_spans_from_attributes_build_the_equal_episode(spans: dict[str, Span]) -> None:
    """The collecting process makes the same record as the process that ran the app."""
    spans["tool"].facts["gen_ai.tool.call.result"] = [1, "two"]
    sent = [back(span, dict(span_attributes(span, content=True, tokens=True))) for span in spans.values()]
    assert build_episode([span for span in sent if span is not None]) == build_episode(list(spans.values()))


def test_names_of_spans_follow_the_conventions(spans: dict[str, Span]) -> None:
    """Back ends list spans by these names."""
    assert {kind: span_name(span) for kind, span in spans.items()} == {
        "workflow": "invoke_workflow solve",
        "agent": "invoke_agent solver",
        "chat": "chat policy",
        "tool": "execute_tool add",
        "reward": "rllm.reward exact",
    }


def test_every_span_says_what_it_belongs_to(spans: dict[str, Span]) -> None:
    """Episode and conversation are on each span, so that a back end can group them; the icon is Phoenix's."""
    for kind, icon in (("workflow", "CHAIN"), ("agent", "AGENT"), ("chat", "LLM"), ("tool", "TOOL"), ("reward", "EVALUATOR")):
        found = span_attributes(spans[kind], content=False, tokens=False)
        assert found["rllm.episode.id"] == "ep-1"
        assert found["openinference.span.kind"] == icon
    assert span_attributes(spans["workflow"], content=False, tokens=False)["gen_ai.conversation.id"] == "s1"
    assert span_attributes(spans["agent"], content=False, tokens=False)["gen_ai.conversation.id"] == "ep-1"


def test_the_user_and_the_tags_of_an_episode_are_where_back_ends_look(recording: Any) -> None:
    """Given as metadata, at the decorator or while it runs, they are attributes of the workflow's span, and the record has them."""
    exporter = MemoryExporter()
    rllm.configure(exporters=[exporter])

    @rllm.workflow(metadata={"user_id": 7, "tags": ["paid"]})
    def app() -> None:
        episode = rllm.current_episode()
        assert episode is not None
        episode.set(tags=["paid", "beta"], team="shop")

    app()
    assert rllm.flush()
    rllm.configure()
    (span,) = exporter.spans
    found = dict(span.attributes or {})
    assert (found["user.id"], found["rllm.tags"]) == ("7", ["paid", "beta"])
    (episode,) = exporter.episodes
    assert episode.metadata == {"user_id": 7, "tags": ["paid", "beta"], "team": "shop"}


def test_a_reward_span_is_an_evaluation(spans: dict[str, Span]) -> None:
    """The score is a float under the names of the conventions, weighted as in the episode's total."""
    found = span_attributes(spans["reward"], content=True, tokens=False)
    assert found["gen_ai.evaluation.name"] == "exact"
    assert found["gen_ai.evaluation.score.value"] == 0.5
    assert found["rllm.reward.value"] == 1.0


def test_without_content_a_span_holds_no_text(spans: dict[str, Span]) -> None:
    """Input, output, arguments, results, prompts, replies and error messages stay; names, times, counts and rewards leave."""
    convert = converter("app")
    for span in spans.values():
        shown = convert(span, NOTHING)
        said = repr((shown.name, dict(shown.attributes or {}), shown.status.description, shown.events))
        assert "2+2" not in said
        assert "BAAA" not in said
    assert convert(spans["tool"], NOTHING).status.description == "ValueError"
    assert (convert(spans["chat"], NOTHING).attributes or {})["rllm.response.token_count"] == 2


def test_a_span_becomes_opentelemetrys(spans: dict[str, Span]) -> None:
    """Ids, parent, times, kind, status, links and the service are where any exporter looks for them."""
    convert = converter("my-app")
    shown = convert(spans["workflow"], ALL)
    assert shown.get_span_context().trace_id == 0x0123456789ABCDEF0123456789ABCDEF
    assert shown.get_span_context().span_id == 1
    assert shown.parent is None
    assert (shown.start_time, shown.end_time) == (1_700_000_000_000_000_000, 1_700_000_000_009_000_000)
    assert [link.context.span_id for link in shown.links] == [255]
    assert shown.resource.attributes["service.name"] == "my-app"
    assert convert(spans["chat"], ALL).kind.name == "CLIENT"
    assert convert(spans["chat"], ALL).parent.span_id == 0xA1
    failed = convert(spans["tool"], ALL)
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "no number in What is 2+2?")


def test_the_service_is_named_by_the_standard_variable(spans: dict[str, Span], monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument wins over it; without either the service is ``rllm``."""
    assert converter()(spans["agent"], ALL).resource.attributes["service.name"] == "rllm"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-env")
    assert converter()(spans["agent"], ALL).resource.attributes["service.name"] == "from-env"
    assert converter("given")(spans["agent"], ALL).resource.attributes["service.name"] == "given"


class Gate(SpanExporter):
    """An exporter that waits until it is let go on, and may refuse."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.open = threading.Event()
        self.busy = threading.Event()
        self.batches: list[list[str]] = []
        self.result = result
        self.closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.busy.set()
        assert self.open.wait(20)
        self.batches.append([span.name for span in spans])
        return self.result

    def shutdown(self) -> None:
        self.closed = True
        self.open.set()


def sink(exporter: SpanExporter, **options: Any) -> BatchSink:
    return BatchSink(exporter, ALL, converter("app"), **options)


def test_spans_leave_in_order_and_in_batches(spans: dict[str, Span]) -> None:
    """A flush sends what is waiting, oldest first, at most a batch at a time."""
    gate = Gate()
    gate.open.set()
    before = counted("exported")
    queue = sink(gate, batch_spans=2, delay=60)
    for span in spans.values():
        queue.put(span)
    assert queue.flush(20) is True
    queue.close(5)
    assert [name for batch in gate.batches for name in batch] == [span_name(span) for span in spans.values()]
    assert max(len(batch) for batch in gate.batches) == 2
    assert counted("exported") - before == 5
    assert gate.closed


def test_a_stuck_back_end_blocks_nobody(spans: dict[str, Span]) -> None:
    """With the queue full, further spans are dropped and counted; a flush ends at its deadline and says that not all was delivered."""
    gate = Gate()
    queue = sink(gate, queue_spans=4, batch_spans=1)
    queue.put(spans["agent"])
    assert gate.busy.wait(20)
    before = counted("dropped")
    for _ in range(7):
        queue.put(spans["agent"])
    assert counted("dropped") - before == 3
    assert queue.flush(0.05) is False
    gate.open.set()
    assert queue.flush(20) is True
    queue.close(5)


def test_large_spans_fill_the_queue_by_their_weight(spans: dict[str, Span]) -> None:
    """Bytes are bounded as well as spans, so that a stuck back end cannot take the memory."""
    gate = Gate()
    queue = sink(gate, queue_bytes=1_000_000, batch_spans=1)
    spans["chat"].call.request = b"x" * 400_000
    queue.put(spans["agent"])
    assert gate.busy.wait(20)
    before = counted("dropped")
    for _ in range(4):
        queue.put(spans["chat"])
    assert counted("dropped") - before == 2
    gate.open.set()
    queue.close(20)


def test_what_an_exporter_refuses_is_counted(spans: dict[str, Span]) -> None:
    """A flush that lost a span says so, once."""
    gate = Gate(SpanExportResult.FAILURE)
    gate.open.set()
    before = counted("failed")
    queue = sink(gate)
    queue.put(spans["agent"])
    assert queue.flush(20) is False
    assert counted("failed") - before == 1
    assert queue.flush(20) is True
    queue.close(5)


class Broken(Gate):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("boom")


def test_an_exporter_that_raises_is_contained(spans: dict[str, Span], caplog: pytest.LogCaptureFixture) -> None:
    """The thread lives on, the spans are counted as failed, and the fault is logged once."""
    queue = sink(Broken())
    with caplog.at_level(logging.WARNING, "rllm_trace"):
        queue.put(spans["agent"])
        assert queue.flush(20) is False
        queue.put(spans["agent"])
        assert queue.flush(20) is False
    queue.close(5)


def test_closing_ends_an_export_that_hangs(spans: dict[str, Span]) -> None:
    """Close waits no longer than it was told; what is left is dropped and counted."""
    gate = Gate()
    queue = sink(gate, batch_spans=1)
    queue.put(spans["agent"])
    assert gate.busy.wait(20)
    queue.put(spans["agent"])
    before = counted("dropped")
    queue.close(0.05)
    assert counted("dropped") - before == 1
    assert gate.closed
    queue.put(spans["agent"])
    assert counted("dropped") - before == 2


def child(queue: Any, out: Any) -> None:
    """Runs in a forked child: what the parent had waiting is not there, and what is put now is exported."""
    sink, exporter, span = queue
    exporter.open.set()
    sink.put(span)
    delivered = sink.flush(20)
    out.put((delivered, exporter.batches))


def test_a_forked_child_sends_its_own_spans_only(spans: dict[str, Span]) -> None:
    """The parent's waiting spans are the parent's; the child's thread starts with its first span."""
    gate = Gate()
    queue = sink(gate, batch_spans=1)
    queue.put(spans["agent"])
    assert gate.busy.wait(20)
    queue.put(spans["agent"])
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what this test is about
        process = context.Process(target=child, args=((queue, gate, spans["tool"]), out))
        process.start()
    assert out.get(timeout=30) == (True, [["execute_tool add"]])
    process.join(20)
    gate.open.set()
    queue.close(20)


def test_the_queue_obeys_the_standard_variables() -> None:
    """OTEL_BSP_* set sizes and delay; what is no positive number is refused by name."""
    assert BatchSink.limits({"OTEL_BSP_MAX_QUEUE_SIZE": "10", "OTEL_BSP_SCHEDULE_DELAY": "250"}) == {"queue_spans": 10, "delay": 0.25}
    assert BatchSink.limits({}) == {}
    with pytest.raises(ValueError, match="OTEL_BSP_MAX_EXPORT_BATCH_SIZE='-1': expected a whole number above 0"):
        BatchSink.limits({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "-1"})


def test_what_is_no_exporter_is_refused() -> None:
    """One sentence says what was given and what may be."""
    for wrong in (3, "jaegr", MemoryExporter, object()):
        with pytest.raises(ConfigurationError, match="exporters: got "):
            open_sinks([wrong])


def test_memory_keeps_spans_and_episodes(full_episode: Any, spans: dict[str, Span]) -> None:
    """Spans are there at once; ids stay behind unless they were asked for."""
    memory, whole = MemoryExporter(), MemoryExporter(tokens=True)
    takers, outlets = open_sinks([memory, whole])
    for taker in takers:
        taker.put(spans["chat"])
    for outlet in outlets:
        outlet.write(full_episode)
    assert [span.name for span in memory.spans] == ["chat policy"]
    assert "rllm.prompt.token_ids" not in memory.spans[0].attributes
    assert "rllm.prompt.token_ids" in whole.spans[0].attributes
    assert memory.episodes[0].trajectories[0].calls[0].prompt_token_ids is None
    assert whole.episodes == [full_episode]
    memory.clear()
    assert (memory.spans, memory.episodes) == ([], [])


def test_content_and_tokens_go_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and memory of the user's own get content by default, OTLP and foreign exporters only if they are told so."""

    def disclosed(exporter: Any, capture_content: bool | None = None) -> tuple[bool, bool]:
        takers, outlets = open_sinks([exporter], capture_content=capture_content)
        found = (takers or outlets)[0]._disclosure
        return found.content, found.tokens

    monkeypatch.delenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", raising=False)
    assert disclosed(MemoryExporter()) == (True, False)
    assert disclosed(JSONLExporter("x")) == (True, True)
    assert disclosed(JSONLExporter("x"), capture_content=False) == (False, False)
    assert disclosed(OTLPExporter()) == (False, False)
    assert disclosed(OTLPExporter(), capture_content=True) == (True, False)
    assert disclosed(OTLPExporter(tokens=True), capture_content=True) == (True, True)
    assert disclosed(Gate()) == (False, False)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    assert disclosed(OTLPExporter()) == (True, False)
    assert disclosed(Gate()) == (True, False)
    assert disclosed(OTLPExporter(), capture_content=False) == (False, False)


def test_tokens_without_content_are_refused() -> None:
    """Ids spell the text: asking for the one and not the other is a mistake that gets a sentence."""
    with pytest.raises(ConfigurationError, match=r"OTLPExporter\(tokens=True\) without content: token ids spell the text"):
        open_sinks([OTLPExporter(tokens=True)])


def test_a_workflow_reaches_a_foreign_exporter() -> None:
    """Any OpenTelemetry SpanExporter takes our spans, behind our own queue."""
    gate = Gate()
    gate.open.set()

    @rllm.workflow
    def solve() -> int:
        return 4

    rllm.configure(exporters=[gate])
    try:
        assert solve() == 4
        assert rllm.flush(20) is True
    finally:
        rllm.shutdown()
        rllm.configure()
    assert gate.batches == [["invoke_workflow solve"]]
