"""Spans that other libraries make with OpenTelemetry are taken into the episode, and stay theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import rllm_trace as rllm
from rllm_trace.exporters import MemoryExporter


def test_agents_and_tools_of_other_libraries_become_trajectories_and_tool_calls(call: Any) -> None:
    """A call belongs to the innermost of their spans and our scopes; their own record is as it was."""
    theirs = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(theirs))
    rllm.attach_to(provider)
    rllm.attach_to(provider)
    tracer = provider.get_tracer("strands")

    @rllm.reward
    def right() -> float:
        return 0.5

    @rllm.workflow
    def app() -> None:
        call("before")
        with tracer.start_as_current_span("invoke_agent planner", attributes={"gen_ai.operation.name": "invoke_agent"}):
            with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
                call("planning")
            attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search", "gen_ai.tool.call.arguments": '{"q":1}'}
            with tracer.start_as_current_span("execute_tool search", attributes=attributes), rllm.agent("ours"):
                call("in the tool")
            right()
        call("after")

    with rllm.collect() as episodes, tracer.start_as_current_span("outside"):
        app()
    trajectories = {t.name: t for t in episodes[0].trajectories}
    assert {name: [c.messages[0]["content"] for c in t.calls] for name, t in trajectories.items()} == {
        "app": ["before", "after"],
        "planner": ["planning"],
        "ours": ["in the tool"],
    }
    assert [(tool.name, tool.arguments) for tool in trajectories["planner"].tools] == [("search", '{"q":1}')]
    assert trajectories["planner"].reward == 0.5
    assert trajectories["ours"].parent_id == trajectories["planner"].tools[0].span_id
    assert [span.name for span in theirs.get_finished_spans()] == ["chat", "execute_tool search", "invoke_agent planner", "outside"]


def test_what_is_taken_in_is_exported_in_our_trace_with_a_link_to_theirs() -> None:
    """Same span id, our trace, our parents; an error of theirs is an error."""
    memory = MemoryExporter()
    rllm.configure(exporters=[memory])
    provider = TracerProvider()
    rllm.attach_to(provider)
    tracer = provider.get_tracer("theirs")

    @rllm.workflow
    def app() -> None:
        with tracer.start_as_current_span("step") as step:
            step.set_status(trace.StatusCode.ERROR, "went wrong")
            contexts.append(step.get_span_context())

    contexts: list[Any] = []
    app()
    assert rllm.flush()
    step, workflow = sorted(memory.spans, key=lambda span: span.name, reverse=True)
    assert (step.name, step.parent.span_id, step.context.trace_id) == ("step", workflow.context.span_id, workflow.context.trace_id)
    assert [(link.context.trace_id, link.context.span_id) for link in step.links] == [(contexts[0].trace_id, contexts[0].span_id)]
    assert (step.status.status_code, step.status.description) == (trace.StatusCode.ERROR, "went wrong")


def test_a_provider_that_takes_no_processors_is_refused() -> None:
    """OpenTelemetry's placeholder, before one is set, says what to do."""
    with pytest.raises(rllm.ConfigurationError, match="got a ProxyTracerProvider, which takes no span processors; set up"):
        rllm.attach_to(trace.get_tracer_provider())


def test_a_users_provider_that_samples_everything_out_takes_nothing_from_us(call: Any) -> None:
    """Their sampler is theirs; ours records every call."""
    provider = TracerProvider(sampler=ALWAYS_OFF)

    @rllm.workflow
    def app() -> None:
        call()

    with rllm.collect() as episodes, provider.get_tracer("theirs").start_as_current_span("request"):
        app()
    assert len(episodes[0].calls) == 1


ENVIRONMENT = """
import random, sys
import rllm_trace as rllm
from rllm_trace._calls import open_call
from rllm_trace._calldata import CallData
assert not {"opentelemetry", "openai", "torch", "pydantic", "httpx"} & set(sys.modules)
from rllm_trace.exporters import MemoryExporter
memory = MemoryExporter()
rllm.configure(exporters=[memory])
provider = rllm.tracer_provider()
tracer = provider.get_tracer("theirs")

@rllm.workflow
def app():
    random.seed(7)
    call = open_call(operation="chat", requested_model="m")
    call.end(CallData(operation="chat", model="m", requested_model="m", request=b'{"messages":[]}'))
    with tracer.start_as_current_span("step") as span:
        span.set_attributes({f"k{i}": "x" * 300 for i in range(200)})

app(); app()
assert rllm.flush()
assert sorted(s.name for s in memory.spans) == ["chat m"] * 2 + ["invoke_workflow app"] * 2 + ["step"] * 2
assert len({(s.context.trace_id, s.context.span_id) for s in memory.spans}) == 6
steps = [s for s in memory.spans if s.name == "step"]
assert all(s.attributes[f"k{i}"] == "x" * 300 for s in steps for i in range(200))
from opentelemetry import trace
assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
print("ok")
"""


def test_no_variable_of_opentelemetry_reaches_us() -> None:
    """The SDK switched off, a sampler that drops all, and limits of one attribute: everything is recorded whole."""
    environment = {
        **os.environ,
        "OTEL_SDK_DISABLED": "true",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_ATTRIBUTE_COUNT_LIMIT": "1",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3",
    }
    ran = subprocess.run([sys.executable, "-c", ENVIRONMENT], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.returncode) == ("ok\n", 0), ran.stderr


THEIRS = """
import logging, os, signal, sys
import rllm_trace as rllm
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rllm_trace.exporters import MemoryExporter

theirs, ours = InMemorySpanExporter(), MemoryExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(theirs))

def of_the_process():
    signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    handlers = [logging.getLogger(name).handlers[:] for name in (None, "opentelemetry", "rllm_trace")]
    return [dict(os.environ), signals, handlers, propagate.get_global_textmap(), sys.excepthook]

@rllm.workflow
def app():
    with trace.get_tracer("theirs").start_as_current_span("inside"):
        with rllm.agent("solver"):
            return trace.get_current_span().name

def run():
    with trace.get_tracer("theirs").start_as_current_span("around"):
        return app()

if sys.argv[1] == "before":
    trace.set_tracer_provider(provider)
before = of_the_process()
rllm.configure(exporters=[ours])
with rllm.collect() as episodes:
    if sys.argv[1] == "after":
        rllm.workflow(lambda: None)()
        trace.set_tracer_provider(provider)
    assert run() == "inside"
assert rllm.flush()
assert trace.get_tracer_provider() is provider
assert of_the_process() == before
rllm.shutdown()
print([span.name for span in theirs.get_finished_spans()], episodes[-1].output)
print(sorted({span.name for span in ours.spans if "lambda" not in span.name}))
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_process_keeps_its_own_provider_and_all_that_is_global(order: str) -> None:
    """A provider set before ours or after stays the global one and gets their spans, all of them, no other. Handlers of signals and logs,
    propagators and the environment are what they were."""
    done = subprocess.run([sys.executable, "-c", THEIRS, order], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["['inside', 'around'] inside", "['invoke_agent solver', 'invoke_workflow app']"]
