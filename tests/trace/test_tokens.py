"""Packing of token arrays, and a call to span attributes and back."""

from __future__ import annotations

import math
import random
import string

import pytest

from rllm_trace import attributes as names
from rllm_trace._calldata import CallData
from rllm_trace._tokens import call_attributes, call_from_attributes, pack_ids, pack_logprobs, token_digest, unpack_ids, unpack_logprobs
from rllm_trace.types import Choice, ErrorInfo, Logprobs, TokenIds, Usage


def the_call() -> CallData:
    return CallData(
        operation="chat",
        model="policy",
        requested_model="gpt-4o-mini",
        endpoint="policy",
        server="127.0.0.1:8000",
        request=b'{"model":"policy","messages":[{"role":"user","content":"2+2?"}],"temperature":1,"max_tokens":8,"return_token_ids":true}',
        requested={"model": "gpt-4o-mini", "tool_choice": "required"},
        choices=[
            Choice(index=0, token_ids=TokenIds([52, 2]), logprobs=Logprobs([-0.25, -0.5]), text="4", finish_reason="stop"),
            Choice(index=1, token_ids=TokenIds([7]), logprobs=None, text=None, tool_calls=[{"id": "a", "type": "function"}]),
        ],
        prompt_token_ids=TokenIds([1, 50, 10, 50]),
        usage=Usage(prompt_tokens=4, completion_tokens=3),
        response_id="chatcmpl-1",
        attempts=2,
        exact=True,
        complete=True,
        policy_version_start=3,
        policy_version_end=4,
        version_spans=[(3, 0, 1), (4, 1, 2)],
    )


def test_ids_are_base64_of_little_endian_int32() -> None:
    """An id is four bytes, the lowest first."""
    assert pack_ids(TokenIds([1, 258])) == "AQAAAAIBAAA="
    assert unpack_ids("AQAAAAIBAAA=") == [1, 258]
    assert isinstance(unpack_ids("AQAAAAIBAAA="), TokenIds)


def test_logprobs_are_base64_of_little_endian_float32() -> None:
    """A logprob is four bytes of a float32, infinities included."""
    assert pack_logprobs(Logprobs([-0.5, -math.inf])) == "AAAAvwAAgP8="
    assert unpack_logprobs("AAAAvwAAgP8=") == [-0.5, -math.inf]


def test_text_that_is_no_packed_array_is_refused() -> None:
    """Three bytes are no int32, and a comma is no base64."""
    with pytest.raises(ValueError, match="multiple of"):
        unpack_ids("AQAA")
    with pytest.raises(ValueError, match=r"base64|characters"):
        unpack_ids("AQ,AAA==")


def test_a_call_survives_the_trip_through_its_attributes() -> None:
    """What is exported with content and tokens is enough to rebuild the call exactly."""
    assert call_from_attributes(call_attributes(the_call(), content=True, tokens=True)) == the_call()


def test_every_attribute_is_a_string_number_bool_or_list_of_strings() -> None:
    """A bytes value loses the whole span in some back ends, a None or a list of numbers elsewhere."""
    for key, value in call_attributes(the_call(), content=True, tokens=True).items():
        assert type(value) in (str, bool, int, float) or (type(value) is list and {type(item) for item in value} == {str}), key


def test_attributes_of_a_call_are_these() -> None:
    """The names and values that other people's viewers, and ours, look for."""
    found = call_attributes(the_call(), content=True, tokens=True)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "policy"
    assert found["gen_ai.request.temperature"] == 1.0
    assert type(found["gen_ai.request.temperature"]) is float
    assert found["gen_ai.request.max_tokens"] == 8
    assert found["gen_ai.usage.input_tokens"] == 4
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["server.address"] == "127.0.0.1"
    assert found["server.port"] == 8000
    assert found["openinference.span.kind"] == "LLM"
    assert found["rllm.call.requested_model"] == "gpt-4o-mini"
    assert found["rllm.call.attempts"] == 2
    assert found["rllm.policy.version"] == 3
    assert found["rllm.prompt.token_count"] == 4
    assert found["rllm.response.token_count"] == 3
    assert found["rllm.response.logprob.mean"] == -0.375
    assert found["rllm.response.logprob.min"] == -0.5
    assert found["rllm.prompt.token_ids"] == "AQAAADIAAAAKAAAAMgAAAA=="
    assert found["rllm.response.token_ids"] == "NAAAAAIAAAA="
    assert found["rllm.response.1.token_ids"] == "BwAAAA=="
    assert found["rllm.response.logprobs"] == "AACAvgAAAL8="
    assert "rllm.response.1.logprobs" not in found
    assert found["rllm.tokens.encoding"] == "b64:i32le,f32le"
    assert found["gen_ai.input.messages"] == '[{"role":"user","parts":[{"type":"text","content":"2+2?"}]}]'


def test_without_tokens_counts_and_digest_stay() -> None:
    """Ids and logprobs are left out, what is needed to compare them stays, and the call comes back as inexact."""
    found = call_attributes(the_call(), content=True, tokens=False)
    assert "rllm.prompt.token_ids" not in found
    assert "rllm.tokens.encoding" not in found
    assert found["rllm.prompt.token_count"] == 4
    assert found["rllm.tokens.sha256"] == token_digest(the_call().prompt_token_ids, the_call().choices)
    back = call_from_attributes(found)
    assert back is not None
    assert back.prompt_token_ids is None
    assert back.choices[0].text == "4"
    assert (back.exact, back.inexact_reason) == (False, "tokens were not exported")


def test_without_content_no_text_stays() -> None:
    """Neither prompt, reply, tool call, tool definition nor error text is among the attributes."""
    call = the_call()
    call.request = b'{"messages":[{"role":"user","content":"SECRET"}],"tools":[{"type":"function","function":{"name":"SECRET"}}]}'
    call.requested = {"user": "SECRET"}
    call.choices = [
        Choice(index=0, token_ids=TokenIds([9]), logprobs=None, text="SECRET", tool_calls=[{"id": "SECRET"}], reasoning="SECRET")
    ]
    call.error = ErrorInfo(type="openai.BadRequestError", message="SECRET", status_code=400)
    found = call_attributes(call, content=False, tokens=False)
    assert "SECRET" not in repr(found)
    assert found["error.type"] == "openai.BadRequestError"
    assert found["http.response.status_code"] == 400
    assert found["rllm.response.token_count"] == 1


def test_the_digest_changes_with_any_bit() -> None:
    """Ids, logprobs and the border between two arrays are all covered; nothing to digest gives None."""
    choice = Choice(index=0, token_ids=TokenIds([1]), logprobs=Logprobs([-1.0]))
    digest = token_digest(TokenIds([1, 2]), [choice])
    assert digest == "2e756fe5c4772d2cc9d4466b785ea767686751afb0263190dc07b37c4115c484"
    assert digest != token_digest(TokenIds([1]), [Choice(index=0, token_ids=TokenIds([2, 1]), logprobs=Logprobs([-1.0]))])
    assert digest != token_digest(TokenIds([1, 2]), [Choice(index=0, token_ids=TokenIds([1]), logprobs=None)])
    assert token_digest(None, [Choice(index=0, token_ids=None, logprobs=None)]) is None


def test_counts_stand_in_for_usage_that_the_server_did_not_send() -> None:
    """Viewers get token counts, and the rebuilt call still has no usage."""
    call = the_call()
    call.usage = None
    found = call_attributes(call, content=True, tokens=True)
    assert found["gen_ai.usage.input_tokens"] == 4
    assert found["rllm.call.usage_reported"] is False
    assert call_from_attributes(found) == call


def test_a_span_that_is_not_ours_is_no_call() -> None:
    """Another instrumentation's chat span has GenAI names, but none of ours."""
    assert call_from_attributes({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}) is None


def test_a_body_that_is_not_utf8_survives() -> None:
    """The request is kept byte for byte even if it is not the JSON it should be."""
    call = the_call()
    call.request = b"\xff\x00"
    assert call_from_attributes(call_attributes(call, content=True, tokens=True)) == call


def test_lone_surrogates_do_not_break_an_attribute() -> None:
    """A lone surrogate, which UTF-8 cannot spell and which would fail the whole batch, is escaped and comes back."""
    call = the_call()
    call.choices = [Choice(index=0, token_ids=None, logprobs=None, text="half \ud83d")]
    found = call_attributes(call, content=True, tokens=True)
    for value in found.values():
        str(value).encode("utf-8")
    assert call_from_attributes(found) == call


def test_attributes_hold_for_random_calls() -> None:
    """Whatever the fields are, the round trip changes nothing."""
    rng = random.Random(7)

    def maybe(value: object) -> object:
        return value if rng.random() < 0.6 else None

    def word() -> str:
        return "".join(rng.choice(string.printable + "äß漢🙂\x00\ud83d") for _ in range(rng.randrange(12)))

    for _ in range(300):
        choices = [
            Choice(
                index=rng.randrange(9),
                token_ids=TokenIds(rng.randrange(2**31) for _ in range(rng.randrange(5))) if rng.random() < 0.7 else None,
                logprobs=Logprobs(rng.choice([-math.inf, 0.0, -rng.random()]) for _ in range(rng.randrange(5)))
                if rng.random() < 0.7
                else None,
                text=maybe(word()),  # type: ignore[arg-type]
                tool_calls=maybe([{"id": word(), "function": {"name": word(), "arguments": word()}}]),  # type: ignore[arg-type]
                reasoning=maybe(word()),  # type: ignore[arg-type]
                refusal=maybe(word()),  # type: ignore[arg-type]
                finish_reason=maybe("length"),  # type: ignore[arg-type]
                stop_reason=maybe(rng.choice([5, "</code>"])),  # type: ignore[arg-type]
            )
            for _ in range(rng.randrange(4))
        ]
        call = CallData(
            operation=rng.choice(["chat", "text_completion", "responses"]),
            model="m",
            requested_model="n",
            endpoint=rng.choice(["policy", "own"]),
            server=rng.choice(["", "[::1]:80", "host"]),
            request=rng.choice([b"", b"[]", b'{"input":[{"type":"function_call"}],"messages":"x","prompt":[1,2],"tools":[{}]}']),
            requested=maybe({"stop": word()}),  # type: ignore[arg-type]
            choices=choices,
            prompt_token_ids=TokenIds([3]) if rng.random() < 0.5 else None,
            usage=maybe(Usage(prompt_tokens=1, completion_tokens=2)),  # type: ignore[arg-type]
            error=maybe(ErrorInfo(type="E", message="m", status_code=maybe(500))),  # type: ignore[arg-type]
            status=rng.choice(["ok", "error", "cancelled", "abandoned"]),
            exact=rng.random() < 0.5,
            inexact_reason=maybe("why"),  # type: ignore[arg-type]
            complete=rng.random() < 0.5,
            streamed=rng.random() < 0.5,
            multimodal=rng.random() < 0.5,
            version_spans=maybe([(1, 0, 4)]),  # type: ignore[arg-type]
            time_to_first_token=maybe(12),  # type: ignore[arg-type]
        )
        assert call_from_attributes(call_attributes(call, content=True, tokens=True)) == call


def test_keys_of_later_choices_carry_their_position() -> None:
    """The first choice has the plain key, so that a viewer needs to know no more."""
    assert names.response_key("rllm.response.logprobs", 0) == "rllm.response.logprobs"
    assert names.response_key("rllm.response.logprobs", 2) == "rllm.response.2.logprobs"
