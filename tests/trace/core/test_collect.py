"""Asking for records, configuring, flushing, and what the counters say."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import rllm_trace as rllm
from rllm_trace._calls import open_call
from rllm_trace._recorder import recorder
from rllm_trace.exporters import JSONLExporter, MemoryExporter
from rllm_trace.rollouts import rollout


@rllm.workflow
def app(n: int = 0) -> int:
    opened = open_call(operation="chat", requested_model="m")
    if opened is not None:
        opened.end(_data())
    return n


def _data() -> Any:
    from rllm_trace._calldata import CallData

    return CallData(operation="chat", model="m", requested_model="m", request=b'{"messages":[{"role":"user","content":"secret"}]}')


def wants_tokens() -> bool | None:
    """Whether a call made now in a workflow is to ask for tokens; None where it is not recorded."""

    @rllm.workflow
    def ask() -> bool | None:
        opened = open_call(operation="chat", requested_model="m")
        if opened is None:
            return None
        opened.end(_data())
        return opened.wants_tokens

    return ask()


def test_collect_is_a_list_that_fills_as_episodes_end() -> None:
    """It is process-wide, holds what started inside, and is complete when the block is left."""
    app(0)
    with rllm.collect() as episodes:
        assert isinstance(episodes, list)
        threads = [threading.Thread(target=app, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert recorder.writer.wait_idle(5)
        assert sorted(episode.output for episode in episodes) == [1, 2]
        app(3)
    app(4)
    assert [episode.output for episode in episodes][2:] == [3]


def test_two_collects_at_once_both_get_what_starts_while_they_are_open() -> None:
    """Each is independent of the other."""
    with rllm.collect() as outer:
        app(1)
        with rllm.collect() as inner:
            app(2)
        app(3)
    assert [episode.output for episode in outer] == [1, 2, 3]
    assert [episode.output for episode in inner] == [2]


def test_leaving_collect_waits_for_workflows_of_other_threads() -> None:
    """What is running when the block is left is in the list."""
    release, running = threading.Event(), threading.Event()

    @rllm.workflow
    def slow() -> str:
        running.set()
        release.wait(10)
        return "done"

    thread = threading.Thread(target=slow)
    with rllm.collect() as episodes:
        thread.start()
        assert running.wait(10)
        threading.Timer(0.05, release.set).start()
    thread.join()
    assert [(episode.output, episode.termination) for episode in episodes] == [("done", "completed")]


def test_leaving_collect_ends_at_its_deadline() -> None:
    """A workflow that hangs is delivered as a timeout with what it has recorded; its later end is late."""
    release, running = threading.Event(), threading.Event()

    @rllm.workflow
    def hangs() -> None:
        with rllm.agent("solver"):
            app()
            running.set()
            release.wait(10)

    thread = threading.Thread(target=hangs)
    with rllm.collect(timeout=0.05) as episodes:
        thread.start()
        assert running.wait(10)
    release.set()
    thread.join()
    (episode,) = episodes
    assert (episode.termination, [(t.name, len(t.calls)) for t in episode.trajectories]) == ("timeout", [("solver", 1)])
    assert episode.error is not None
    assert (episode.error.type, episode.error.message) == ("rllm_trace.EpisodeTimeout", "still running 0.05 s after collect() was left")
    assert rllm.stats()["late"] == {"agent": 1, "episode": 1}


def test_async_with_waits_for_tasks_of_its_own_loop() -> None:
    """The loop goes on while the block is being left."""

    @rllm.workflow
    async def slow(n: int) -> int:
        await asyncio.sleep(0.01)
        return n

    async def main() -> list[rllm.Episode]:
        async with rllm.collect() as episodes:
            tasks = [asyncio.create_task(slow(n)) for n in range(3)]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return episodes

    assert [episode.output for episode in asyncio.run(main())] == [0, 1, 2]


def test_a_plain_with_in_a_loop_does_not_wait_for_what_it_blocks() -> None:
    """Workflows of its own thread are delivered as they are, with a warning that names the way out."""

    @rllm.workflow
    async def slow() -> None:
        await asyncio.sleep(0.01)

    async def main() -> list[rllm.Episode]:
        collecting = rllm.collect(timeout=60)
        episodes = collecting.__enter__()
        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        with pytest.warns(rllm.RllmWarning, match="use `async with collect"):
            collecting.__exit__(None, None, None)
        await task
        return episodes

    assert [episode.termination for episode in asyncio.run(main())] == ["timeout"]


def test_rllm_disabled_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected or exported, and a rollout says what to unset."""
    monkeypatch.setenv("RLLM_DISABLED", "1")
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    with rllm.collect() as episodes:
        assert wants_tokens() is None
    assert (list(episodes), memory.spans) == ([], [])
    with pytest.raises(rllm.ConfigurationError, match=r"RLLM_DISABLED is set.*unset it"), rollout():
        pass
    monkeypatch.setenv("RLLM_DISABLED", "0")
    with rllm.collect() as episodes:
        app()
    assert len(episodes) == 1


def test_tokens_are_asked_for_by_the_rule() -> None:
    """Decorators alone: nothing. Exporters: spans without tokens. ``collect`` and rollouts: with tokens. ``tokens=`` overrides."""
    assert wants_tokens() is None
    with rllm.collect():
        assert wants_tokens() is True
    rllm.configure(exporters=[MemoryExporter()])
    assert wants_tokens() is False
    with rllm.collect():
        assert wants_tokens() is True
    rllm.configure(exporters=[MemoryExporter()], tokens=True)
    assert wants_tokens() is True
    rllm.configure(tokens=False)
    with rllm.collect():
        assert wants_tokens() is False
    with rollout():
        assert wants_tokens() is True


def test_sampling_is_by_whole_episode_and_never_under_collect() -> None:
    """With ``sample=0`` nothing is exported, nested workflows included, but ``collect`` and rollouts get everything."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory], sample=0.0)

    @rllm.workflow
    def outer() -> bool | None:
        assert rllm.current_episode() is None
        return wants_tokens()

    assert outer() is None
    with rllm.collect() as episodes:
        app(1)
    with rollout() as handle:
        app(2)
    assert [e.output for e in episodes] == [1]
    assert [e.output for e in handle.wait(5)] == [2]
    assert rllm.flush()
    assert (memory.spans, memory.episodes) == ([], [])


def test_a_collect_inside_an_episode_that_was_sampled_out_collects() -> None:
    """What is asked for is recorded."""
    rllm.configure(exporters=[MemoryExporter()], sample=0.0)

    @rllm.workflow
    def outer() -> list[rllm.Episode]:
        with rllm.collect() as episodes:
            app(1)
        return episodes

    assert [episode.output for episode in outer()] == [1]


def test_a_context_that_outlives_a_sampled_out_workflow_is_sampled_anew() -> None:
    """Out is that one episode, not all that its long-lived tasks do later."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory], sample=0.0)
    kept: list[contextvars.Context] = []
    rllm.workflow(lambda: kept.append(contextvars.copy_context()))()
    rllm.configure(exporters=[memory])
    kept[0].run(app, 1)
    assert rllm.flush()
    assert [episode.output for episode in memory.episodes] == [1]


def test_about_the_share_that_sample_says_is_exported() -> None:
    """Each episode is in or out as a whole."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory], sample=0.5)
    for n in range(400):
        app(n)
    assert rllm.flush()
    assert 120 < len(memory.episodes) < 280
    assert {span.attributes["rllm.episode.id"] for span in memory.spans} == {episode.id for episode in memory.episodes}
    assert len(memory.spans) == 2 * len(memory.episodes)


def test_spans_have_the_names_and_parents_of_the_genai_conventions() -> None:
    """One trace: workflow, agent, call, tool and reward, with the episode's id on each."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory], service_name="shop")

    @rllm.tool
    def search() -> str:
        return "found"

    @rllm.reward
    def right() -> float:
        return 1.0

    @rllm.workflow(session_id="s1")
    def whole() -> None:
        with rllm.agent("solver"):
            opened = open_call(operation="chat", requested_model="m")
            assert opened is not None
            opened.end(_data())
            search()
            right()

    whole()
    assert rllm.flush()
    names = {span.context.span_id: span.name for span in memory.spans}
    assert sorted((span.name, names.get(span.parent.span_id) if span.parent else None) for span in memory.spans) == [
        ("chat m", "invoke_agent solver"),
        ("execute_tool search", "invoke_agent solver"),
        ("invoke_agent solver", "invoke_workflow whole"),
        ("invoke_workflow whole", None),
        ("rllm.reward right", "invoke_agent solver"),
    ]
    assert {span.attributes["rllm.episode.id"] for span in memory.spans} == {memory.episodes[0].id}
    assert {span.attributes["gen_ai.conversation.id"] for span in memory.spans} == {"s1"}
    assert {span.resource.attributes["service.name"] for span in memory.spans} == {"shop"}
    assert {span.context.trace_id for span in memory.spans} == {int(memory.episodes[0].trace_id, 16)}


class Slow(SpanExporter):
    """A back end that answers only when it is let."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.go = threading.Event()
        self.result = result
        self.names: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(10)
        self.names += [span.name for span in spans]
        return self.result

    def shutdown(self) -> None:
        self.go.set()


def test_flush_is_true_only_if_all_was_delivered_in_time() -> None:
    """A slow back end is False at the deadline and True later; a failing one is False, and counted."""
    slow = Slow()
    rllm.configure(exporters=[slow])
    app()
    assert rllm.flush(timeout=0.05) is False
    slow.go.set()
    assert rllm.flush(timeout=10) is True
    assert sorted(slow.names) == ["chat m", "invoke_workflow app"]
    failing = Slow(SpanExportResult.FAILURE)
    failing.go.set()
    rllm.configure(exporters=[failing])
    app()
    assert rllm.flush(timeout=10) is False
    assert rllm.stats()["failed"]["span"] == 2
    assert rllm.flush(timeout=10) is True


def test_a_lost_span_never_loses_an_episode() -> None:
    """The back end fails; ``collect`` has everything."""
    failing = Slow(SpanExportResult.FAILURE)
    failing.go.set()
    rllm.configure(exporters=[failing])
    with rllm.collect() as episodes:
        for n in range(20):
            app(n)
    assert [len(episode.calls) for episode in episodes] == [1] * 20


def test_shutdown_stops_recording_and_configure_starts_it_again() -> None:
    """Open episodes are delivered as they are; what ends afterwards is late."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])

    @rllm.workflow
    def steps() -> Iterator[int]:
        yield 1
        yield 2

    running = steps()
    next(running)
    assert rllm.shutdown() is True
    assert [(episode.workflow, episode.termination) for episode in memory.episodes] == [("steps", "timeout")]
    assert list(running) == [2]
    app()
    assert len(memory.episodes) == 1
    again = MemoryExporter()
    rllm.configure(exporters=[again])
    app()
    assert rllm.flush()
    assert [episode.workflow for episode in again.episodes] == ["app"]


def test_a_later_reward_is_exported_as_a_span_of_its_trace() -> None:
    """Nothing in memory holds the episode any more, and the back end still gets the score."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])

    @rllm.workflow
    def gives_id() -> str:
        episode = rllm.current_episode()
        assert episode is not None
        return episode.id

    identity = gives_id()
    rllm.add_reward(0.7, name="human", episode_id=identity)
    assert rllm.flush()
    workflow, reward = sorted(memory.spans, key=lambda span: span.name)
    assert (reward.name, reward.attributes["rllm.reward.value"]) == ("rllm.reward human", 0.7)
    assert reward.parent.span_id == workflow.context.span_id
    assert reward.context.trace_id == workflow.context.trace_id


@pytest.mark.parametrize(
    "options, said",
    [
        ({"exporters": "otlp"}, r"got exporters='otlp'; expected a list, such as exporters=\['otlp'\]"),
        ({"exporters": ["nowhere"]}, "got 'nowhere'"),
        ({"exporters": [3]}, "got 3; expected"),
        ({"sample": 1.5, "exporters": [MemoryExporter()]}, "got sample=1.5; expected a share from 0.0 to 1.0"),
        ({"sample": True}, "got sample=True"),
        ({"tokens": "yes"}, "got tokens='yes'; expected True, False or 'auto'"),
        ({"settle": -1}, "got settle=-1; expected seconds"),
        ({"settle": float("nan")}, "got settle=nan"),
        ({"redact": 3, "exporters": [MemoryExporter()]}, "got redact=3; expected a function"),
        ({"service_name": "", "exporters": [MemoryExporter()]}, "got service_name=''"),
        ({"capture_content": "no", "exporters": [MemoryExporter()]}, "got capture_content='no'"),
        ({"sample": 0.5}, "sample= has no effect without exporters= or store="),
        ({"redact": dict}, "redact= has no effect"),
        ({"capture_content": False}, "capture_content= has no effect"),
        ({"service_name": "x"}, "service_name= has no effect"),
    ],
)
def test_an_option_that_is_wrong_or_does_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    """One sentence: what was got, what was expected or what to do; and nothing has changed."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    with pytest.raises(rllm.ConfigurationError, match=said):
        rllm.configure(**options)
    app()
    assert rllm.flush()
    assert len(memory.spans) == 2


def test_an_unknown_client_is_refused_by_name() -> None:
    """``instrument`` says which clients there are."""
    with pytest.raises(rllm.UnknownInstrumentError, match=r"got the client 'gpt', expected one of \['openai'\]"):
        rllm.instrument("gpt")
    with pytest.raises(rllm.UnknownInstrumentError, match="got the client 'gpt'"):
        rllm.uninstrument("gpt")


def test_a_full_queue_drops_whole_episodes_in_production_and_none_that_somebody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Production counts what it drops; under ``collect`` the thread that ended the episode makes the record itself."""
    monkeypatch.setattr(recorder.writer, "_size", 0)
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    app(1)
    assert (memory.episodes, rllm.stats()["dropped"]) == ([], {"episode": 1})
    assert rllm.flush() is False
    with rllm.collect() as episodes:
        app(2)
    assert [episode.output for episode in episodes] == [2]
    assert [episode.output for episode in memory.episodes] == [2]


def test_a_record_that_cannot_be_made_is_counted_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app does not notice, and ``collect`` ends."""

    def broken(spans: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("rllm_trace._recorder.build_episode", broken)
    with rllm.collect() as episodes:
        assert app(1) == 1
    assert list(episodes) == []
    assert rllm.stats()["failed"] == {"episode": 1}
    assert rllm.stats()["faults"] == {"episode": 1}


def test_a_fault_of_ours_never_reaches_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks inside, the app's result is its own, and the fault is counted by kind."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a fault of ours")

    for where in ("rllm_trace._decorators.begin_episode", "rllm_trace._decorators.child_span", "rllm_trace._rewards.child_span"):
        with monkeypatch.context() as patch, rllm.collect():
            patch.setattr(where, broken)

            @rllm.reward
            def score() -> float:
                return 1.0

            @rllm.tool
            def use() -> int:
                return 2

            @rllm.workflow
            def whole() -> int:
                with rllm.agent("a"):
                    return use() + int(score())

            assert whole() == 3
    assert rllm.stats()["faults"] == {"workflow": 1, "agent": 1, "tool": 1, "reward": 1}


def test_episodes_written_as_json_lines_are_those_that_were_collected(tmp_path: Any) -> None:
    """The file of an exporter holds each episode as it was recorded."""
    rllm.configure(exporters=[JSONLExporter(tmp_path / "episodes.jsonl")], tokens=True)
    with rllm.collect() as episodes:
        app(1)
        app(2)
    assert rllm.flush()
    from rllm_trace.exporters import read_episodes

    assert [(e.id, e.output, len(e.calls)) for e in read_episodes(tmp_path / "episodes.jsonl")] == [(e.id, e.output, 1) for e in episodes]


def test_stats_count_what_was_recorded_by_kind() -> None:
    """Every outcome is there, also where nothing was counted."""
    with rllm.collect():
        app(1)
    assert rllm.stats() == {
        "recorded": {"episode": 1, "call": 1},
        "exported": {},
        "dropped": {},
        "failed": {},
        "late": {},
        "orphan": {},
        "faults": {},
    }
