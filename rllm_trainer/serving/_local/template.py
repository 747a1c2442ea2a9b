"""Messages and tools in, the prompt's text out: the model's own chat template, in the sandbox and with the names that templates expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

__all__ = ["ChatTemplate", "TemplateError"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The template refuses these messages, or there is no template."""


class ChatTemplate:
    """The template of a model folder, or one given instead; where the folder's has no place for tools, another for requests with tools."""

    def __init__(self, folder: Path, override: str | None = None, *, marks: tuple[str, str] | None = None) -> None:
        """
        Args:
            marks: printed before and after what the template says is the assistant's.
        """
        config_path = folder / "tokenizer_config.json"
        config: dict[str, Any] = msgspec.json.decode(config_path.read_bytes()) if config_path.is_file() else {}
        self._special = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
        named = _named_templates(folder, config)
        text = override if override is not None else named.get("default")
        with_tools = text if override is not None or (text is not None and "tools" in text) else named.get("tool_use", named.get("tools"))
        self.source = with_tools or text or ""
        """The text of the template for requests with tools."""
        environment = _environment(marks)
        self._plain = _Compiled(environment, text) if text is not None else None
        self._with_tools = _Compiled(environment, with_tools) if with_tools is not None else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises ``TemplateError`` with the template's own words."""
        compiled = self._with_tools if tools else self._plain
        if compiled is None:
            raise TemplateError(
                "this model's chat template has no place for tools; put one that has into the model's folder, as chat_template.jinja"
                if tools
                else "this model has no chat template; put one into its folder, as chat_template.jinja, or ask for completions of text"
            )
        values = {**self._special, **(extra or {})}
        given = [_message(m, arguments_as_text=compiled.takes_text_arguments) for m in messages]
        try:
            return compiled.template.render(
                messages=given, tools=tools, add_generation_prompt=add_generation_prompt, documents=None, **values
            )
        except Exception as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


class _Compiled:
    def __init__(self, environment: Any, text: str) -> None:
        self.template: Any = environment.from_string(text)
        self.takes_text_arguments = "is string" in text


def _message(message: Mapping[str, Any], *, arguments_as_text: bool) -> dict[str, Any]:
    """A copy as templates expect it: text parts joined, None content only beside tool calls, arguments as an object where they must be."""
    out = dict(message)
    calls = out.get("tool_calls")
    content = out.get("content")
    if isinstance(content, list):
        out["content"] = "".join(_part_text(part) for part in cast("list[Any]", content))
    elif content is None and not calls:
        out["content"] = ""
    if calls:
        out["tool_calls"] = [_tool_call(call, arguments_as_text) for call in calls]
    elif "tool_calls" in out:
        del out["tool_calls"]
    return out


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    given: dict[str, Any] = cast("dict[str, Any]", part) if isinstance(part, dict) else {"type": type(part).__name__}
    if given.get("type", "text") in ("text", "input_text", "output_text", "refusal"):
        return str(given.get("text", given.get("refusal", "")))
    raise TemplateError(f"got a message part of type {given['type']!r}; this server takes text parts only")


def _tool_call(call: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not arguments_as_text:
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError:
            function["arguments"] = {"arguments": arguments}
    return {**call, "function": function}


def _content(token: Any) -> str:
    return cast("dict[str, str]", token)["content"] if isinstance(token, dict) else str(token)


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named.update({t["name"]: t["template"] for t in cast("list[dict[str, str]]", given)})
    for path in folder.glob("chat_template.*.jinja"):
        named[path.name.split(".")[1]] = path.read_text()
    for path in folder.glob("additional_chat_templates/*.jinja"):
        named[path.stem] = path.read_text()
    default = folder / "chat_template.jinja"
    if default.is_file():
        named["default"] = default.read_text()
    return named


def _environment(marks: tuple[str, str] | None) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` stands around what the assistant wrote: it is printed, between the marks if there are any."""

        tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType, reportUnknownVariableType]

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
            if marks is None:
                return body
            before, after = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in marks)
            return [before, body, after]

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    names: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _now}
    environment.filters["tojson"] = _tojson
    environment.globals.update(names)
    return environment


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ValueError(message)
