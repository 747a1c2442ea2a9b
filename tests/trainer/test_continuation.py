"""A chat's next prompt is the ids that were recorded and the ids of what is new; without that, templates break it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.measures import continuation_measures, continuation_notes
from rllm_trainer.models import resolve_model
from rllm_trainer.serving.continuation import Conversations, Reply, Request
from rllm_trainer.serving.local import LocalServer

STRIPS_THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THOUGHT = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"const": "<think>hm</think>yes"}}}


def printed(messages: Any) -> str:
    """A template that trims what the assistant said."""
    return "".join(f"[{m['role']}]{str(m['content']).strip()}[end]" for m in messages) + "[assistant]"


def asked(*contents: str, reference: str = "e/t", setting: Any = None, room: int = 1000, **last: Any) -> Request:
    """A chat of user and assistant in turns."""
    messages: list[dict[str, Any]] = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    messages[-1] |= last
    return Request(reference=reference, messages=messages, setting=setting, room=room)


def said(
    content: str | None, ids: list[int], *, text: str | None = None, stop: str = "", end: str | None = "[end]", **message: Any
) -> Reply:
    return Reply(ids=ids, message={"role": "assistant", "content": content, **message}, text=text or content or "", stop=stop, end=end)


@pytest.fixture
def chats() -> Conversations:
    """One request of one message, [1, 2], was answered with " yes ", [3, 4, 5], the last one the end of turn."""
    chats = Conversations(encode=lambda text: [ord(c) for c in text])
    chats.record(asked("hi"), [1, 2], said(" yes ", [3, 4, 5]))
    chats.record(asked("hi two"), [1, 2], said("a b", [3, 4, 5]))
    return chats


def test_the_next_turn_begins_with_the_recorded_ids(chats: Conversations) -> None:
    """Prompt, reply and its sampled end are the recorded ids; the template prints what comes after the reply, and no more."""
    for content in (" yes ", "yes"):
        found = chats.prompt(asked("hi", content, "go"), printed)
        assert (found.ids, found.reused, found.cause) == ([1, 2, 3, 4, 5, *map(ord, "[user]go[end][assistant]")], 5, None)


def test_the_same_prompt_again_is_the_same_ids(chats: Conversations) -> None:
    """A retry or a second sample has the prompt that was sent before."""
    assert chats.prompt(asked("hi"), printed).ids == [1, 2]


@pytest.mark.parametrize(
    "request_, cause",
    [
        (asked("hi", "y es", "go"), "reply changed"),
        (asked("hi two", "a  b", "go"), "whitespace changed"),
        (asked("hi", "no", "go"), "reply changed"),
        (asked("hi", " yes ", "go", setting=["tool"]), "tools changed"),
        (asked("other", " yes ", "go"), "not recorded"),
        (asked("hi", " yes ", "go", room=20), "too long"),
        (asked("new"), None),
        (asked("hi", " yes ", "go", reference="another/t"), None),
    ],
)
def test_what_is_not_continued_is_rendered_and_its_cause_counted(chats: Conversations, request_: Request, cause: str | None) -> None:
    """A reply is continued only as the client was given it, under the same tools, in the same episode."""
    found = chats.prompt(request_, printed)
    assert (found.ids, found.reused, found.cause) == (None, 0, cause)
    assert dict(chats.causes) == ({} if cause is None else {cause: 1})


def test_where_a_later_reply_was_changed_the_earlier_one_is_continued(chats: Conversations) -> None:
    """The longest chat that can be continued is; what was changed behind it is rendered, and told."""
    chats.record(asked("hi", " yes ", "go"), [1, 2, 3, 4, 5, 6], said("ok", [7, 5]))
    assert chats.prompt(asked("hi", " yes ", "go", "ok", "on"), printed).reused == 8
    found = chats.prompt(asked("hi", " yes ", "go", "OK", "on"), printed)
    assert (found.reused, found.cause) == (5, "reply changed")
    assert found.ids == [1, 2, 3, 4, 5, *map(ord, "[user]go[end][assistant]OK[end][user]on[end][assistant]")]


def test_a_cut_stop_string_may_be_back(chats: Conversations) -> None:
    """The stop string is in the sampled ids already, so it is not said twice; the end of turn, which was not sampled, is added."""
    chats.record(asked("stop"), [1], said("code", [9, 8], text="code</code>\n", stop="</code>", end=None))
    for content in ("code", "code</code>", "code</code>\n"):
        assert chats.prompt(asked("stop", content, "go"), printed).ids == [1, 9, 8, *map(ord, "[end][user]go[end][assistant]")]


def test_what_was_put_behind_an_unfinished_reply_follows_it(chats: Conversations) -> None:
    """A reply that was cut at its length goes on with the client's own words."""
    chats.record(asked("long"), [1], said(" one tw", [9], end=None))
    for content in (" one two", "one two"):
        assert chats.prompt(asked("long", content, "go"), printed).ids == [1, 9, *map(ord, "o[end][user]go[end][assistant]")]


def test_what_was_put_behind_an_ended_reply_is_a_message_of_its_own(chats: Conversations) -> None:
    """A sampled end of turn stays where it is; what a framework adds is said after it, by the assistant."""
    found = chats.prompt(asked("hi", " yes </code>", "go"), printed)
    assert found.ids == [1, 2, 3, 4, 5, *map(ord, "[assistant]</code>[end][user]go[end][assistant]")]


def test_tool_calls_are_compared_by_value(chats: Conversations) -> None:
    """Arguments that a client has serialised again are the same call; others are not."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}
    chats.record(asked("call"), [1], said(None, [9, 5], text="<call>", tool_calls=[call]))
    again = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{ "a": 1 }'}}
    other = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    for tool_call, reused in ((again, 3), (other, 0)):
        reply = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
        messages = [*asked("call").messages, reply, result]
        assert chats.prompt(Request(reference="e/t", messages=messages, setting=None, room=1000), printed).reused == reused


def test_of_equal_replies_the_own_trajectory_s_is_continued() -> None:
    """Two solvers that said the same in other tokens each continue their own."""
    chats = Conversations(encode=lambda text: [ord(c) for c in text])
    for trajectory, token in (("a", 7), ("b", 8)):
        chats.record(asked("hi", reference=f"e/{trajectory}"), [1], said("yes", [token, 5]))
    for trajectory, token in (("a", 7), ("b", 8)):
        ids = chats.prompt(asked("hi", "yes", "go", reference=f"e/{trajectory}"), printed).ids
        assert ids is not None
        assert ids[:3] == [1, token, 5]


def test_an_end_that_the_template_does_not_print_is_not_continued(chats: Conversations) -> None:
    """A reply that ended with another token than the template's is rendered anew."""
    chats.record(asked("end"), [1], said("yes", [9, 6], end="[other end]"))
    assert chats.prompt(asked("end", "yes", "go"), printed).cause == "end of turn"


def test_a_template_that_hides_the_reply_is_not_continued(chats: Conversations) -> None:
    """Where the template drops or refuses the reply, it is rendered whole."""

    def refuses(messages: Any) -> str:
        raise ValueError("roles must alternate")

    for render in (lambda messages: "nothing of it", refuses):
        assert chats.prompt(asked("hi", " yes ", "go"), render).cause == "template"


def test_what_is_kept_is_bounded() -> None:
    """The episode not used for longest is forgotten first."""
    chats = Conversations(encode=lambda text: [0], most_tokens=8)
    for name in ("a", "b", "c"):
        chats.record(asked("hi", reference=f"{name}/t"), [1, 2], said("yes", [3, 4]))
    assert [chats.prompt(asked("hi", reference=f"{name}/t"), printed).ids for name in "abc"] == [None, [1, 2], [1, 2]]


def test_counts_become_measures_and_one_sentence() -> None:
    """Each step's line has every count, and its notes the causes."""
    counts = {"continued": 7, "reply changed": 2, "too long": 1}
    measures = {"continuation/continued": 7, "continuation/reply_changed": 2, "continuation/too_long": 1}
    assert continuation_measures(counts) == measures
    assert continuation_notes(counts) == ["prompts that do not continue all that was recorded: reply changed 2, too long 1"]
    assert continuation_notes({"continued": 7}) == []


def test_exact_continuation_is_refused_where_no_ids_are_kept() -> None:
    """Before anything is started."""
    with pytest.raises(SettingError, match="needs a server that takes a prompt's ids; serving='sglang' does not"):
        make_settings({"continuation": "exact", "serving": "sglang", "serving_url": "http://127.0.0.1:1/v1"})


@pytest.fixture(scope="module", params=["rendered", "exact"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, bool]]:
    """Whose template strips thinking from what the assistant said; and whether it continues exactly."""
    folder = tmp_path_factory.mktemp(request.param)
    model: Path = resolve_model("tiny-qwen2")
    server = LocalServer.start(
        model, run_dir=folder, name="policy", threads=1, max_model_len=1024, chat_template=STRIPS_THINKING, continuation=request.param
    )
    yield server, request.param == "exact"
    server.close()


@pytest.mark.parametrize("stream", [False, True])
def test_stripped_thinking_breaks_a_row_and_exact_continuation_does_not(server: tuple[LocalServer, bool], stream: bool) -> None:
    """Three turns whose replies have thinking that the template drops: three rows as rendered, one row continued, the same messages."""
    served, exact = server
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")
    seen: list[str] = []

    @rllm.workflow
    def app() -> None:
        messages: list[Any] = []
        for turn in ("one", "two", "three"):
            messages.append({"role": "user", "content": turn})
            reply = client.chat.completions.create(model="m", messages=messages, response_format=THOUGHT, max_tokens=60, stream=stream)  # pyright: ignore[reportCallIssue, reportArgumentType]
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
            else:
                text = reply.choices[0].message.content or ""
            seen.append(text)
            messages.append({"role": "assistant", "content": text})

    before = served.stats()
    route = Route(base_url=served.base_url, api_key=served.api_key, model=served.model, constrained="inexact")
    with rollout(task_id="1", route=route) as handle:
        app()
    (episode,) = handle.wait(10)
    calls = episode.trajectories[0].calls
    assert seen == ['"<think>hm</think>yes"'] * 3
    starts = [
        list(later.prompt_token_ids[: len(earlier.prompt_token_ids) + len(earlier.choices[0].token_ids)])
        == [*earlier.prompt_token_ids, *earlier.choices[0].token_ids]
        for earlier, later in pairwise(calls)
    ]
    assert starts == [exact, exact]
    after = served.stats()
    if exact:
        assert after["continued"] - before["continued"] == 2
        assert after["not_continued"] == {}
