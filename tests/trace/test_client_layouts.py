"""Where bytes are only compared with those of another event or body, the app sees, and the record says, what taking each apart gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_trace.clients._ask import _ask, ask
from rllm_trace.clients._decode import Keep, is_bare, read_body, shown
from rllm_trace.clients._events import EventReader

ASKED_BY_US = Keep(ids=False, logprobs=False, usage_chunk=False)
ASKED_BY_THE_APP = Keep(ids=True, logprobs=True)
KEEPS = (ASKED_BY_US, ASKED_BY_THE_APP, Keep(ids=False, logprobs=True), Keep(ids=True, logprobs=False, usage_chunk=False, versions=False))
TEXTS = st.text(st.sampled_from('ab "\\\n\u2028é[]{}:,😀') | st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ['"token_ids":[1]', "[DONE]", "\\", '\\"', "data: {}\n\n", '"finish_reason":"stop"', '"content":"']
)
NUMBERS = st.sampled_from([-0.5, -1e-05, 0.0, -12.25])


class SlowReader(EventReader):
    """Takes every event apart."""

    def quickly(self, chunk: bytes) -> bytes | None:
        return None

    def _simply(self, chunk: bytes) -> bytes | None:
        return None

    def _is_simple(self, chunk: bytes) -> bool:
        return False


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """One event of a stream: the usual layout, or one that differs from it in one thing."""
    text = draw(TEXTS)
    choice: dict[str, Any] = {"index": draw(st.sampled_from([0, 0, 0, 1])), "delta": {"content": text}, "logprobs": None}
    if draw(st.integers(0, 7)) == 0:
        choice["delta"] = draw(st.sampled_from([{}, {"role": "assistant", "content": text}, {"content": None}, {"reasoning": text}]))
    with_ids = draw(st.booleans())
    if with_ids:
        entry = {"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": list(text.encode()[:3]), "top_logprobs": []}
        choice["logprobs"] = {"content": [entry] * draw(st.integers(1, 2)), "refusal": None}
    choice["finish_reason"] = draw(st.sampled_from([None, None, None, None, "stop"]))
    if with_ids:
        choice["token_ids"] = draw(st.lists(st.integers(0, 99), max_size=2))
    body: dict[str, Any] = {"id": draw(st.sampled_from(["c", "c", "c", "d"])), "model": "m", "choices": [choice]}
    extra = draw(st.integers(0, 15))
    if extra == 0:
        body["usage"] = {"prompt_tokens": 1, "completion_tokens": 2}
    elif extra == 1:
        body["prompt_token_ids"] = [1, 2]
    elif extra == 2:
        body["metadata"] = {"weight_version": "3"}
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (",", ":"), (", ", ": ")]))
    data = json.dumps(body, separators=separators, ensure_ascii=draw(st.booleans())).encode()
    before = draw(st.sampled_from([b"", b"", b"", b"", b"", b": ping\n\n", b"event: x\n"]))
    return before + b"data: " + data + draw(st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n"]))


def told(reader: EventReader, chunks: list[bytes]) -> tuple[bytes, Any, bool]:
    seen = b"".join([*(reader.feed(chunk) for chunk in chunks), reader.flush()])
    return seen, reader.reply(), reader.done


@settings(max_examples=400, deadline=None)
@given(st.lists(events(), min_size=1, max_size=12), st.sampled_from(KEEPS), st.booleans(), st.integers(0, 40))
def test_events_that_are_alike_are_shown_and_read_as_if_each_were_taken_apart(
    stream: list[bytes], keep: Keep, ends: bool, size: int
) -> None:
    """Whole events or pieces of any size, with our fields taken out or not: the same bytes for the app, the same reply for the record."""
    chunks = [*stream, *([b"data: [DONE]\n\n"] if ends else [])]
    if size:
        whole = b"".join(chunks)
        chunks = [whole[start : start + 8 * size] for start in range(0, len(whole), 8 * size)]
    assert told(EventReader(keep), chunks) == told(SlowReader(keep), chunks)


def test_an_end_that_comes_with_the_last_event_is_an_end() -> None:
    """Nothing is taken out, and the event that ends nothing and the end of the stream come as one piece."""
    reader = EventReader(ASKED_BY_THE_APP)
    piece = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\ndata: [DONE]\n\n'
    assert (reader.feed(piece), reader.done) == (piece, True)


def test_the_events_of_a_stream_are_not_taken_apart_one_by_one() -> None:
    """Of a hundred events, the first is taken apart, and the ninety-nine that are like it are shown by what they have in common."""
    event = '{"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":%s,"finish_reason":null%s}]}\n\n'
    logprobs = '{"content":[{"token":"%s","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]}'
    for added, ids in (("null", ""), (logprobs % "x", ',"token_ids":[7]')):
        reader = EventReader(ASKED_BY_US)
        stream = [f"data: {event % (text, added, ids)}".encode() for text in ["a", '\\"b', "\\\\", "é", ""] * 20]
        seen = [reader.feed(stream[0]), *(reader.quickly(chunk) for chunk in stream[1:])]
        assert seen == [f"data: {event % (text, 'null', '')}".encode() for text in ["a", '\\"b', "\\\\", "é", ""] * 20]
        assert reader.reply().choices[0].text == 'a"b\\é' * 20


BESIDE_THE_TEXT: list[tuple[str, str]] = [
    ('{"content":"%s"}', "null"),
    ('{"content":"%s","reasoning":"hm"}', "null"),
    ('{"reasoning_content":"hm","content":"%s"}', "null"),
    ('{"content":"%s","refusal":"no"}', "null"),
    ('{"content":"%s","tool_calls":[{"index":0,"function":{"arguments":"a"}}]}', "null"),
    ('{"content":"%s","function_call":{"arguments":"a"}}', "null"),
    ('{"extra":{"content":"%s"},"content":"b"}', "null"),
    ('{"extra":{"content":"%s"}, "content" : "b"}', "null"),
    ('{"content":"%s","content":"b"}', "null"),
    ('{"content":"%s","\\u0063ontent":"b"}', "null"),
    ('{"content":"%s"}', '{"content":null,"refusal":null}'),
]


@pytest.mark.parametrize("delta, logprobs", BESIDE_THE_TEXT)
@pytest.mark.parametrize("keep", KEEPS)
def test_what_stands_beside_the_text_is_read_as_often_as_it_came(delta: str, logprobs: str, keep: Keep) -> None:
    """Events that differ in nothing but a text may say more than that text, each time."""
    event = 'data: {"id":"c","choices":[{"index":0,"delta":%s,"logprobs":%s,"finish_reason":null}]}\n\n'
    chunks = [(event % (delta % text, logprobs)).encode() for text in ("x", "", '\\"', "\\u00e9", "é")]
    assert told(EventReader(keep), chunks) == told(SlowReader(keep), chunks)


def test_a_text_that_is_cut_within_a_character_is_whole_in_the_record() -> None:
    """Two events carry the halves of a surrogate pair, as servers that write JSON in ASCII may cut it: the record has the character."""
    event = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n'
    reader = EventReader(ASKED_BY_US)
    chunks = [(event % text).encode() for text in ("a", "\\ud83d", "\\ude00", "b")]
    assert [reader.feed(chunk) for chunk in chunks] == chunks
    assert reader.reply().choices[0].text == "a😀b"


def test_a_text_that_no_one_can_read_takes_no_other_with_it() -> None:
    """Half of a surrogate pair alone: its event is unreadable and the record says so; the texts before and after it are there."""
    event = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n'
    reader = EventReader(ASKED_BY_US)
    for text in ("a", "b", "\\ud83d", "c"):
        reader.feed((event % text).encode())
    reply = reader.reply()
    assert (reply.choices[0].text, reply.fault) == ("abc", "response unreadable")


def test_an_escape_that_an_event_breaks_off_does_not_go_on_in_the_next() -> None:
    """``\\u12`` is no JSON, for the client neither: its event is unreadable, and the digits that follow are the text that they are."""
    event = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n'
    reader = EventReader(ASKED_BY_US)
    for text in ("a", "b", "\\u12", "34", "c"):
        reader.feed((event % text).encode())
    reply = reader.reply()
    assert (reply.choices[0].text, reply.fault) == ("ab34c", "response unreadable")


@pytest.mark.parametrize("keep", KEEPS)
def test_what_comes_after_the_end_is_no_part_of_the_reply(keep: Keep) -> None:
    """The client reads nothing behind ``[DONE]``, and the record may be under way by then."""
    event = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null}]}\n\n'
    reader = EventReader(keep)
    for text in ("a", "b"):
        reader.feed((event % text).encode())
    reader.feed(b"data: [DONE]\n\n")
    for text in ("c", "d", "e"):
        reader.feed((event % text).encode())
    assert reader.reply().choices[0].text == "ab"


@settings(max_examples=200, deadline=None)
@given(events(), st.sampled_from(KEEPS))
def test_a_body_that_is_called_bare_has_nothing_to_take_out(event: bytes, keep: Keep) -> None:
    """Where searching bytes finds nothing, taking the body apart finds nothing either."""
    raw = event.partition(b"data: ")[2].strip()
    if is_bare(raw, keep):
        assert shown(raw, read_body(raw), keep) is raw


@pytest.mark.parametrize("operation", ["chat", "text_completion", "responses"])
@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"model": "m"},
        {"model": "m", "stream": True},
        {"model": "m", "logprobs": None, "stream": False},
        {"model": "m", "logprobs": False},
        {"model": "m", "logprobs": 3, "stream": True},
        {"model": "m", "stream": True, "stream_options": {"include_usage": False}},
        {"model": "m", "return_token_ids": True},
    ],
)
def test_what_is_asked_for_is_worked_out_once_for_bodies_that_ask_for_nothing(body: dict[str, Any], policy: bool, operation: Any) -> None:
    """The remembered answer is the one that looking at each field gives, for any fields that were refused."""
    for refused in (frozenset[str](), frozenset({"logprobs"}), frozenset({"logprobs", "return_token_ids"}), frozenset({"stream_options"})):
        quick, slow = ask(body, operation, refused, policy=policy), _ask(body, operation, refused, policy)
        assert (quick.body, quick.added, quick.keep) == (slow.body, slow.added, slow.keep)
