"""Token arrays are found and taken out of any layout of JSON, and a stream in any pieces gives the reply of the whole body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm_trace._wire import Reply as Scripted
from rllm_trace._wire import ReplyChoice, stream_events, whole_body
from rllm_trace.clients._cut import CutError, cut, without
from rllm_trace.clients._decode import Keep, Reply, read_body, read_reply, shown, shown_unread
from rllm_trace.clients._events import EventReader
from rllm_trace.types import Logprobs, Usage

FIXED = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The same examples each time, however slow the machine is."""
STRIP = Keep(ids=False, logprobs=False, usage_chunk=False, versions=False)
ASKING: Any = {"model": "m", "return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}


def seen(body: bytes, keep: Keep = STRIP) -> bytes:
    """What the app is to see of a body."""
    return shown(body, read_body(body), keep)


def test_arrays_are_removed_with_their_comma_and_logprobs_become_null() -> None:
    """First, middle and last members, with and without spaces, leave valid JSON behind and everything else as it was."""
    body = b'{"prompt_token_ids": [1, 2],"choices":[{"token_ids":[3],"logprobs":{"content":[{"logprob":-0.5}]} , "text":"x"}],"id":"a"}'
    assert seen(body) == b'{"choices":[{"logprobs":null , "text":"x"}],"id":"a"}'
    assert seen(body, Keep(ids=True, logprobs=False)) == body.replace(b'{"content":[{"logprob":-0.5}]}', b"null")


@pytest.mark.parametrize(
    "body,rest",
    [
        (b'{"prompt_token_ids":[1],"choices":[{"token_ids":[2]}]}', b'{"choices":[{}]}'),
        (b'{"choices":[{"prompt_token_ids":[1],"token_ids":[2],"index":1}]}', b'{"choices":[{"index":1}]}'),
        (b'{"choices":[{"index":1,"prompt_token_ids":[1],"token_ids":[2]}]}', b'{"choices":[{"index":1}]}'),
        (b'{"choices":[{"index":1 , "prompt_token_ids": [1] , "token_ids": [2] , "text":"b"}]}', b'{"choices":[{"index":1 , "text":"b"}]}'),
        (b'{"choices":[{"token_ids":[2]},{"token_ids":[2],"index":1}]}', b'{"choices":[{},{"index":1}]}'),
    ],
)
def test_neighbouring_arrays_are_removed(body: bytes, rest: bytes) -> None:
    """Two in a row at the start, the middle and the end of an object, and the same array in two choices."""
    assert json.loads(seen(body)) == json.loads(rest)


def test_texts_that_look_like_keys_are_left_alone() -> None:
    """A key inside a string is escaped there, and a string that equals a key is not followed by a colon."""
    message = {"content": 'say "token_ids": [7] and "logprobs": {"content": []}', "refusal": "token_ids"}
    body = json.dumps({"choices": [{"message": message, "token_ids": [7]}]}, separators=(",", ":")).encode()
    assert json.loads(seen(body)) == {"choices": [{"message": message}]}
    assert cut(body, [(b'"token_ids":', b"[7]", False)]) == body.replace(b',"token_ids":[7]}', b"}")


def test_what_cannot_be_found_says_so() -> None:
    """A member that does not stand in the body is not cut by guesswork."""
    with pytest.raises(CutError):
        cut(b'{"token_ids":[1]}', [(b'"token_ids":', b"[2]", False)])


def test_odd_white_space_is_taken_apart_by_parsing() -> None:
    """A layout that the search does not know gives the same content."""
    body = (
        b'{"id":"r",\n"choices"\t:[{"index":0,"logprobs"\n:\n{"content":[{"logprob":-0.5}]},"token_ids"  :  [5]}],"prompt_token_ids":\t[1]}'
    )
    assert json.loads(seen(body)) == {"id": "r", "choices": [{"index": 0, "logprobs": None}]}


def test_top_logprobs_that_nobody_asked_for_are_taken_out_too() -> None:
    """Nested logprobs are part of the value."""
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}
    body = {"id": "r", "choices": [{"index": 0, "logprobs": {"content": [entry]}, "token_ids": [5], "message": {"content": "a"}}]}
    raw = json.dumps(body).encode()
    assert json.loads(seen(raw)) == {"id": "r", "choices": [{"index": 0, "logprobs": None, "message": {"content": "a"}}]}
    (choice,) = read_body(raw).choices or ()
    assert (choice.ids(), choice.logprob_values()) == ([5], [-0.5])


def test_names_of_other_servers_are_read() -> None:
    """SGLang's ids stand in the choice under names of its own, and a prompt per choice must be one prompt."""
    choice = {"index": 0, "message": {"content": "a"}, "response_token_ids": [5], "prompt_token_ids": [1, 2], "matched_stop": 5,
              "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}  # fmt: skip
    reply, rest = read_reply(json.dumps({"choices": [choice, {**choice, "index": 1}]}).encode(), STRIP)
    assert reply.prompt_token_ids == [1, 2]
    assert [(c.token_ids, c.stop_reason) for c in reply.choices] == [([5], 5), ([5], 5)]
    assert reply.fault is None
    assert b"token_ids" not in rest
    different = {**choice, "index": 1, "prompt_token_ids": [9]}
    reply, _ = read_reply(json.dumps({"choices": [choice, different]}).encode(), STRIP)
    assert (reply.prompt_token_ids, reply.fault) == (None, "prompt ids differ within the reply")


def test_ids_beside_logprobs_are_read() -> None:
    """llama.cpp gives each sampled id with its logprob, and no ids of the prompt: such a call is recorded and cannot be exact."""
    logprobs = (
        b'{"content":[{"id":5,"token":"\\"id\\":9","bytes":[1],"logprob":-0.5,"top_logprobs":[{"id":7,"token":"b","logprob":-1.0}]},'
        b'{"id":6,"token":"c","bytes":[2],"logprob":-0.25,"top_logprobs":[]}]}'
    )
    raw = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop","logprobs":' + logprobs + b"}]}"
    reply, rest = read_reply(raw, STRIP)
    (choice,) = reply.choices
    assert (choice.token_ids, choice.logprobs) == ([5, 6], Logprobs([-0.5, -0.25]))
    assert reply.prompt_token_ids is None
    assert json.loads(rest)["choices"][0]["logprobs"] is None
    without_ids = raw.replace(b'{"id":5,', b"{").replace(b'{"id":6,', b"{").replace(b'{"id":7,', b"{")
    assert [choice.token_ids for choice in read_reply(without_ids, STRIP)[0].choices] == [None]


def test_the_logprob_that_was_sampled_with_is_recorded() -> None:
    """Fireworks tells the model's logprob and, beside it, the one at the temperature used; where it does not, there is one only."""
    entry = {"token": "a", "token_id": 5, "bytes": [1], "text_offset": 0, "logprob": -0.5, "sampling_logprob": -0.25, "top_logprobs": []}
    told = {"content": [entry, {**entry, "sampling_logprob": None}, {**entry, "sampling_logprob": -1.5}]}
    choice = {"index": 0, "message": {"content": "aaa"}, "finish_reason": "stop", "logprobs": told, "token_ids": [5, 5, 5]}
    reply, _ = read_reply(json.dumps({"choices": [choice]}).encode(), STRIP)
    assert reply.choices[0].logprobs == Logprobs([-0.25, -0.5, -1.5])
    delta = {**{name: value for name, value in choice.items() if name != "message"}, "delta": {"content": "aaa"}}
    events = EventReader(STRIP)
    events.feed(b"data: " + json.dumps({"choices": [delta]}).encode() + b"\n\n" + b"data: [DONE]\n\n")
    assert events.reply().choices[0].logprobs == Logprobs([-0.25, -0.5, -1.5])


texts = st.text(max_size=12) | st.sampled_from(
    ['"token_ids":[1]', '\\"logprobs\\":{', "]}", '{"a": [1]}', "logprob", "token_ids", "\n\n", "data: x"]
)
tokens = st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0, width=32, allow_nan=False)), max_size=9)
tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text("abc1", min_size=1, max_size=4),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text("fgh", min_size=1, max_size=5), "arguments": texts}),
        }
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def scripted(draw: st.DrawFn) -> Scripted:
    choices: list[ReplyChoice] = []
    for _ in range(draw(st.integers(1, 3))):
        pairs = draw(tokens)
        choices.append(
            ReplyChoice(
                text=draw(texts | st.none()),
                token_ids=[token for token, _ in pairs],
                logprobs=[logprob for _, logprob in pairs],
                reasoning=draw(texts | st.none()),
                refusal=draw(texts | st.none()),
                tool_calls=draw(tool_calls | st.none()),
                finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
                stop_reason=draw(st.none() | st.integers(0, 9) | texts),
            )
        )
    omit = draw(st.frozensets(st.sampled_from(["prompt_token_ids", "token_ids", "logprobs", "usage"]), max_size=2))
    versions = draw(st.lists(st.tuples(st.integers(0, 5), st.just(0), st.just(1)), max_size=2))
    return Scripted(
        choices=choices,
        prompt_token_ids=draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=6)),
        omit=omit,
        weight_versions=versions,
        tokens_per_chunk=draw(st.integers(1, 4)),
        spells_nulls=draw(st.booleans()),
    )


def comparable(reply: Reply) -> Any:
    choices = [{name: getattr(choice, name) for name in choice.__struct_fields__} for choice in reply.choices]
    return {**{name: getattr(reply, name) for name in reply.__struct_fields__}, "choices": choices}


def settled(choice: ReplyChoice) -> dict[str, Any]:
    """A scripted choice as its record must be."""
    other = bool(choice.tool_calls or choice.reasoning or choice.refusal)
    return {
        "text": choice.text or (None if other else ""),
        "tool_calls": choice.tool_calls,
        "reasoning": choice.reasoning or None,
        "refusal": choice.refusal or None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


@settings(FIXED, max_examples=100)
@given(scripted(), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_any_body_is_read_as_it_was_sent_and_shown_without_the_arrays(reply: Scripted, chat: bool, separators: tuple[str, str]) -> None:
    """Every id, logprob, text and tool call comes out as it went in; the caller's JSON is the one of a request that asked for nothing."""
    sent = json.loads(whole_body(ASKING, reply, chat=chat, number=1))
    read, rest = read_reply(json.dumps(sent, separators=separators).encode(), STRIP)
    bare = json.loads(whole_body({"model": "m"}, reply, chat=chat, number=1))
    bare.pop("metadata", None)
    assert json.loads(rest) == bare
    assert len(read.choices) == len(reply.choices)
    for record, choice in zip(read.choices, reply.choices, strict=True):
        if "token_ids" not in reply.omit:
            assert record.token_ids == list(choice.token_ids)
            if "logprobs" not in reply.omit and choice.token_ids:
                assert record.logprobs == list(choice.logprobs)
        if chat:
            assert {name: getattr(record, name) for name in settled(choice)} == settled(choice)
    assert read.prompt_token_ids == (None if "prompt_token_ids" in reply.omit else list(reply.prompt_token_ids))
    written = sum(len(choice.token_ids) for choice in reply.choices)
    assert read.usage == (None if "usage" in reply.omit else Usage(prompt_tokens=len(reply.prompt_token_ids), completion_tokens=written))


@settings(FIXED, max_examples=100)
@given(scripted(), st.booleans(), st.integers(1, 400), st.booleans())
def test_a_stream_in_any_pieces_gives_the_reply_of_the_whole_body(reply: Scripted, chat: bool, size: int, carriage: bool) -> None:
    """However the bytes of a stream are cut, the reply equals the unstreamed one, and the app sees the events of a bare request."""
    whole, _ = read_reply(whole_body(ASKING, reply, chat=chat, number=1), STRIP)
    data = b"".join(stream_events({**ASKING, "stream": True}, reply, chat=chat, number=1))
    if carriage:
        data = data.replace(b"\n\n", b"\r\n\r\n")
    reader = EventReader(STRIP)
    shown_bytes = b"".join([reader.feed(data[start : start + size]) for start in range(0, len(data), size)]) + reader.flush()
    assert reader.done
    assert comparable(reader.reply()) == comparable(whole)
    bare = stream_events({"model": "m", "stream": True}, reply, chat=chat, number=1)
    if not reply.spells_nulls:
        assert [json_of(event) for event in shown_bytes.split(b"\n\n") if event] == [json_of(event.strip()) for event in bare]


def json_of(event: bytes) -> Any:
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return data
    parsed = json.loads(data)
    parsed.pop("metadata", None)
    return parsed


@settings(FIXED, max_examples=100)
@given(scripted(), st.booleans())
def test_searching_and_parsing_agree(reply: Scripted, chat: bool) -> None:
    """What searching bytes leaves is what parsing leaves."""
    body = whole_body(ASKING, reply, chat=chat, number=1)
    assert json.loads(seen(body)) == json.loads(without(body, ids=True, logprobs=True, versions=True))


def test_pieces_pass_through_at_once_where_nothing_is_taken_out() -> None:
    """A stream that the app asked everything of itself is passed on byte by byte as it comes."""
    data = b"".join(stream_events({**ASKING, "stream": True}, Scripted(), chat=True, number=1))
    reader = EventReader(Keep(ids=True, logprobs=True))
    assert [reader.feed(data[at : at + 1]) for at in range(len(data))] == [data[at : at + 1] for at in range(len(data))]
    assert reader.reply().choices[0].token_ids == [104, 105, 2]


def test_comments_event_names_and_several_data_lines_are_understood() -> None:
    """The event-stream format in full: comments, event names, data over several lines, no space after the colon."""
    reader = EventReader(STRIP)
    head = b": ping\n\nevent: message\n"
    data = head + b'data:{"id":"r",\ndata:"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5]}]}\n\ndata:[DONE]\n\n'
    assert reader.feed(data) == head + b'data: {"id":"r",\ndata: "choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata:[DONE]\n\n'
    assert (reader.reply().choices[0].token_ids, reader.reply().choices[0].text, reader.done) == ([5], "a", True)


TWO_TOKENS: Any = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "token_ids": [3, 4],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}


def told(token_ids: str, prompt: str = "[1, 2]") -> bytes:
    """A whole body that tells these as its ids."""
    return json.dumps(TWO_TOKENS).replace("[3, 4]", token_ids).replace("[1, 2]", prompt).encode()


@pytest.mark.parametrize(
    "token_ids,reason",
    [
        ("[3, -1]", "not a token id: -1"),
        ("[3, 2147483648]", "not a token id: 2147483648"),
        ("[3, 4.5]", "not a token id: [3, 4.5]"),
        ('["3", "4"]', 'not a token id: ["3", "4"]'),
        ("[true, false]", "not a token id: [true, false]"),
        ('{"0": 3}', 'not a token id: {"0": 3}'),
    ],
)
def test_what_is_no_token_id_is_named_and_the_rest_is_read(token_ids: str, reason: str) -> None:
    """Streamed or not, sampled or the prompt's: the reply has its text, no ids there, the reason, and the app sees nothing added."""
    reply, shown_body = read_reply(told(token_ids), STRIP)
    assert (reply.fault, reply.choices[0].text, reply.choices[0].token_ids) == (reason, "hi", None)
    assert b"token_ids" not in shown_body
    reply, _ = read_reply(told("[3, 4]", token_ids), STRIP)
    assert (reply.fault, reply.choices[0].token_ids, reply.prompt_token_ids) == (reason, [3, 4], None)
    event = told(token_ids).replace(b'"message"', b'"delta"')
    reader = EventReader(STRIP)
    assert b"token_ids" not in reader.feed(b"data: " + event + b"\n\n")
    assert (reader.reply().fault, reader.reply().choices[0].text) == (reason, "hi")


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(TWO_TOKENS | {"score": float("nan")}).encode(),
        json.dumps(TWO_TOKENS | {"id": 5}).encode(),
        json.dumps(TWO_TOKENS | {"usage": "none"}).encode(),
        b"\xef\xbb\xbf" + json.dumps(TWO_TOKENS).encode(),
    ],
)
def test_a_body_that_cannot_be_read_shows_nothing_added_either(body: bytes) -> None:
    """NaN, other types, a byte order mark: the client's ``json`` reads them, so the app gets them, without what it did not ask for."""
    expected = json.loads(body)
    del expected["prompt_token_ids"], expected["choices"][0]["token_ids"]
    expected["choices"][0]["logprobs"] = None
    assert repr(json.loads(shown_unread(body, STRIP))) == repr(expected)


@pytest.mark.parametrize("body", [b"<html>no</html>", b"", b"[1]", b'{"a":' * 100_000])
def test_what_is_no_json_object_is_passed_on(body: bytes) -> None:
    """There is nothing of ours in it."""
    assert shown_unread(body, STRIP) is body
