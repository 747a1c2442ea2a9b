"""What the SDK's own walk through a call's parameters gives is given without it, wherever that is an equal copy."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._utils import PropertyInfo
from openai._utils import _transform as theirs
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

import rllm_trace as rllm
from rllm_trace.clients._parameters import agrees, copied, renames, uninstall
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

CHAT: Any = chat_params.CompletionCreateParamsNonStreaming
COMPLETION: Any = completion_create_params.CompletionCreateParamsNonStreaming
KINDS = [CHAT, COMPLETION]
if importlib.util.find_spec("openai.types.responses") is not None:  # releases before 1.66 have none
    KINDS.append(importlib.import_module("openai.types.responses.response_create_params").ResponseCreateParamsNonStreaming)
LEFT_OUT: Any = getattr(openai, "omit", openai.NOT_GIVEN)
ATOMS: Any = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
PLAIN: Any = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "function"])
MESSAGE: Any = {"role": ROLES, "content": PLAIN}
MESSAGE_MORE: Any = {"name": PLAIN, "tool_calls": PLAIN, "tool_call_id": ATOMS, "audio": PLAIN, "refusal": PLAIN, "other": PLAIN}
FIELDS: Any = {"model": ATOMS, "temperature": ATOMS}
FIELDS_MORE: Any = dict.fromkeys(("tools", "stop", "metadata", "prompt", "input", "response_format", "other"), PLAIN)


@pytest.fixture(autouse=True)
def _own_transform() -> Iterator[None]:
    uninstall()
    yield
    rllm.instrument("openai")


class Model(BaseModel):
    a: int


class Renamed(TypedDict, total=False):
    inner_name: Annotated[str, PropertyInfo(alias="innerName")]


class Holds(TypedDict, total=False):
    many: list[dict[str, Renamed | str]]


class Itself(TypedDict, total=False):
    children: list[Itself]
    name: str


class Unknown(TypedDict, total=False):
    field: NoSuchType  # pyright: ignore[reportUndefinedVariable]  # noqa: F821


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.fixed_dictionaries(MESSAGE, optional=MESSAGE_MORE), max_size=3),
    st.fixed_dictionaries(FIELDS, optional=FIELDS_MORE),
)
def test_a_copy_is_what_the_walk_gives(kind: Any, messages: Any, fields: dict[str, Any]) -> None:
    """Plain parameters of each kind of call, with fields of any type and one left out, which old releases drop a step later."""
    parameters = {**fields, "messages": messages, "seed": LEFT_OUT}
    walked = {name: value for name, value in theirs.transform(parameters, kind).items() if value is not LEFT_OUT}
    assert copied(parameters, kind) == {**fields, "messages": messages}
    assert copied(parameters, kind) == walked or not agrees(theirs.transform)


@pytest.mark.parametrize(
    "value",
    [
        datetime.date(2026, 1, 2),
        io.BytesIO(b"x"),
        b"bytes",
        ("a", "tuple"),
        (item for item in "ab"),
        {1, 2},
        {"nested": LEFT_OUT},
        [LEFT_OUT],
        type("Text", (str,), {})("x"),
        type("Table", (dict,), {})(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_that_is_not_plain_is_left_to_the_walk(value: Any) -> None:
    """Dates, files, models, iterators, what is left out within: the SDK turns them into something else."""
    assert copied({"model": "m", "metadata": value}, CHAT) is None
    assert copied({"model": "m", "messages": [{"role": "user", "content": value}]}, CHAT) is None


def test_parameters_that_hold_themselves_are_left_to_the_walk() -> None:
    """They have no copy."""
    circle: list[Any] = []
    circle.append(circle)
    assert copied({"model": "m", "messages": circle}, CHAT) is None


@pytest.mark.parametrize(
    "kind, expected",
    [*((kind, False) for kind in KINDS), (Renamed, True), (Holds, True), (Itself, False), (Unknown, True)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_type_that_renames_a_field_is_known_by_its_annotations(kind: Any, expected: bool) -> None:
    """At any depth; a type that cannot be looked at counts as one that does."""
    assert renames(kind) is expected
    assert (copied({"a": 1}, kind) is None) is expected


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(
        lambda exchange: Reply(choices=[ReplyChoice(text="a", token_ids=[1], logprobs=[-0.5])], prompt_token_ids=[2])
    ) as up:
        yield up


def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the SDK walks through from here on."""
    seen: list[Any] = []
    original: Callable[..., Any] = theirs._transform_typeddict

    def counted(data: Any, expected_type: Any) -> Any:
        seen.append(expected_type)
        return original(data, expected_type)

    async def counted_async(data: Any, expected_type: Any) -> Any:
        return counted(data, expected_type)

    monkeypatch.setattr(theirs, "_transform_typeddict", counted)
    monkeypatch.setattr(theirs, "_async_transform_typeddict", counted_async)
    return seen


def test_the_walk_is_left_out_inside_a_workflow_alone(server: ScriptedServer, recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request goes out with it and without; outside a workflow, and once turned off, the SDK walks as ever."""
    messages: Any = [{"role": "user", "content": "hi"}]
    rllm.instrument("openai")
    seen = walks(monkeypatch)

    async def later() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            await client.chat.completions.create(model="m", messages=messages, temperature=0.5)

    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        ask: Callable[[], Any] = lambda: client.chat.completions.create(model="m", messages=messages, temperature=0.5)  # noqa: E731
        recording.episode(lambda: (ask(), asyncio.run(later())))
        inside = len(seen)
        assert (inside == 0) is agrees(theirs.transform)
        ask()
        asyncio.run(later())
        outside = len(seen)
        assert outside > inside
        rllm.uninstrument("openai")
        ask()
        assert len(seen) > outside
    bodies = [{name: exchange.body[name] for name in ("model", "messages", "temperature")} for exchange in server.log]
    assert bodies == [{"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}] * 5


def test_what_the_app_changes_later_is_not_sent() -> None:
    """A retry sends what the call was made with, also where the app has added to its list of messages meanwhile."""
    messages: Any = [{"role": "user", "content": ["hi"]}]
    made = copied({"messages": messages}, CHAT)
    messages[0]["content"].append("more")
    messages.append("other")
    assert made == {"messages": [{"role": "user", "content": ["hi"]}]}
