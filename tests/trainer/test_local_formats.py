"""How families of models write tool calls and thinking, read whole and piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local.formats import FORMATS, format_of
from rllm_trainer.serving._local.formats.base import Call, ToolParser
from rllm_trainer.serving._local.formats.reading import Part, ReplyReader
from rllm_trainer.serving._local.formats.thinking import Thinking, Thought
from rllm_trainer.serving.local import LocalServer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "any": {}}}},
    }
]
LOOK = Call(name="look", arguments='{"q":  "a b"}')
HERMES = '<tool_call>\n{"name": "look", "arguments": {"q":  "a b"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=look>\n<parameter=q>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "look", "parameters": {"q":  "a b"}}'
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"q":  "a b"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q":  "a b"}<｜tool▁call▁end｜>'


def section(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def read(reader: ReplyReader, text: str, size: int) -> list[Part]:
    """Fed in pieces of ``size`` characters; neighbouring texts joined."""
    parts: list[Part] = []
    for part in [*(p for i in range(0, len(text), size) for p in reader.feed(text[i : i + size], last=False)), *reader.feed("", last=True)]:
        if parts and isinstance(part, str) and isinstance(parts[-1], str):
            parts[-1] += part
        elif parts and isinstance(part, Thought) and isinstance(parts[-1], Thought):
            parts[-1] = Thought(text=parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts


def parser(form: str, *, several: bool = True) -> ToolParser:
    return ToolParser(FORMATS[form], several=several, tools=TOOLS)


def calls_in(form: str, text: str, size: int) -> Sequence[Part]:
    return read(ReplyReader(tools=parser(form), thinking=None), text, size)


@pytest.mark.parametrize(
    "form, text, expected",
    [
        ("hermes", "plain", ["plain"]),
        ("hermes", "a < b\n<tool", ["a < b\n<tool"]),
        ("hermes", HERMES, [LOOK]),
        ("hermes", "Sure.\n" + HERMES, ["Sure.", LOOK]),
        ("hermes", "Sure.\n\n" + HERMES, ["Sure.\n", LOOK]),
        ("hermes", HERMES + "\n" + HERMES, [LOOK, LOOK]),
        ("hermes", HERMES + "\ndone", [LOOK, "\ndone"]),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), [LOOK]),
        ("hermes", "<tool_call>{oops}</tool_call>", ["<tool_call>{oops}</tool_call>"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>']),
        ("hermes", '<tool_call>{"name": "f"', ['<tool_call>{"name": "f"']),
        ("qwen", "Sure.\n" + QWEN, ["Sure.", Call(name="look", arguments='{"q": "7", "n": 7}')]),
        ("qwen", "<tool_call><function=now></function></tool_call>", [Call(name="now", arguments="{}")]),
        ("qwen", HERMES, [LOOK]),
        ("qwen", "<tool_call><function=look><parameter=q>x</tool_call>", ["<tool_call><function=look><parameter=q>x</tool_call>"]),
        ("llama", LLAMA, [LOOK]),
        ("llama", "\n" + LLAMA + "; " + LLAMA, [LOOK, LOOK]),
        ("llama", "<|python_tag|>" + LLAMA + "<|eom_id|>", [LOOK]),
        ("llama", "It is " + LLAMA, ["It is " + LLAMA]),
        ("llama", '{"answer": 7}', ['{"answer": 7}']),
        ("llama", LLAMA + " done", [LLAMA + " done"]),
        ("llama", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
        ("deepseek", section(V3), [LOOK]),
        ("deepseek", "Sure." + section(V3, V3), ["Sure.", LOOK, LOOK]),
        ("deepseek", section(V31), [LOOK]),
        ("deepseek", section(V31).removesuffix("<｜tool▁calls▁end｜>"), [LOOK]),
        ("deepseek", section("oops"), [section("oops")]),
    ],
)
def test_tool_calls_are_found_whole_and_piecewise(form: str, text: str, expected: list[Part]) -> None:
    """Content and calls are the same however the text is cut; arguments stay as written; a newline that the template prints is not said."""
    assert [calls_in(form, text, size) for size in (1, 2, 7, 1000)] == [expected] * 4


@pytest.mark.parametrize(
    "form, text, reason",
    [
        ("hermes", "<tool_call>{oops}</tool_call>", "JSON is malformed: object keys must be strings (byte 1)"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "Object missing required field `arguments`"),
        ("qwen", "<tool_call>look</tool_call>", "expected <function=name> ... </function>"),
        ("llama", '{"name": "f", "parameters": []}', "parameters is not an object"),
        ("deepseek", section(V31.replace('"a b"', "a b")), "arguments: JSON is malformed: invalid character (byte 7)"),
    ],
)
def test_a_malformed_call_keeps_its_reason(form: str, text: str, reason: str) -> None:
    """What is no call stays text, and why is kept."""
    tools = parser(form)
    assert [*tools.feed(text), *tools.finish()] == [text]
    assert tools.malformed == [reason]


@pytest.mark.parametrize("form, text", [("hermes", HERMES + HERMES), ("llama", f"{LLAMA};{LLAMA}"), ("deepseek", section(V3, V31))])
def test_one_call_where_one_is_asked_for(form: str, text: str) -> None:
    """With parallel_tool_calls off, the first call is the reply's only one."""
    assert read(ReplyReader(tools=parser(form, several=False), thinking=None), text, 3) == [LOOK]


@pytest.mark.parametrize(
    "begun, text, expected",
    [
        (False, "no thought", ["no thought"]),
        (False, "<think>hm</think>yes", [Thought(text="hm"), "yes"]),
        (False, "\n<think>hm", [Thought(text="hm")]),
        (False, "<thin", ["<thin"]),
        (False, "yes <think>not at the beginning", ["yes <think>not at the beginning"]),
        (True, "hm</think>\n\nyes", [Thought(text="hm"), "\n\nyes"]),
        (True, "hm </thi", [Thought(text="hm </thi")]),
        (False, "<think></think>yes", ["yes"]),
        (False, "<think>a call? <tool_call></think>" + HERMES, [Thought(text="a call? <tool_call>"), LOOK]),
    ],
)
def test_thinking_is_told_apart(begun: bool, text: str, expected: list[Part]) -> None:
    """What stands between the tags at the beginning of a reply is thinking, however it is cut, and is searched for no calls."""
    readers = [ReplyReader(tools=parser("hermes"), thinking=Thinking(begun=begun)) for _ in range(4)]
    assert [read(reader, text, size) for reader, size in zip(readers, (1, 2, 7, 1000), strict=True)] == [expected] * 4


@pytest.mark.parametrize(
    "template, form",
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function={{ name }}>", "qwen"),
        ('{"name": "f", "parameters": {}}', "llama"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("no tools", "hermes"),
    ],
)
def test_the_chat_template_shows_the_format(template: str, form: str) -> None:
    """Calls are read as the model's own template prints them."""
    assert format_of(template).name == form


BEGINS_THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
THOUGHT = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"const": "hm</think>yes"}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a server whose template begins the thinking."""
    server = LocalServer.start(
        resolve_model("tiny-qwen2"),
        run_dir=tmp_path_factory.mktemp("thinking"),
        name="policy",
        threads=1,
        max_model_len=512,
        chat_template=BEGINS_THINKING,
        reasoning="think",
    )
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        yield client
    server.close()


def test_thinking_comes_beside_the_content(client: openai.OpenAI) -> None:
    """Whole and streamed, a reply's thinking is reasoning_content, in every chunk and message, and a reasoning item of a response."""
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "response_format": THOUGHT, "max_tokens": 60}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ('"hm', 'yes"')
    deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == '"hm'
    assert "".join(delta.content or "" for delta in deltas) == 'yes"'
    form: Any = {"format": {"type": "json_schema", "name": "t", "schema": {"const": "hm</think>yes"}}}
    thinking, text = client.responses.create(model="policy", input="hi", text=form, max_output_tokens=60).output
    assert thinking.type == "reasoning"
    assert thinking.content is not None
    assert thinking.content[0].text == '"hm'
    assert text.type == "message"
