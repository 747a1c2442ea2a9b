"""The table of names."""

from __future__ import annotations

import re
from pathlib import Path

from rllm_trace import attributes


def constants() -> dict[str, str]:
    return {name: value for name, value in vars(attributes).items() if name.isupper() and isinstance(value, str)}


def test_the_fixed_names_are_spelled_as_agreed() -> None:
    """Other programs search for these; a change here is a change of the public interface."""
    assert attributes.EPISODE_ID == "rllm.episode.id"
    assert attributes.CONVERSATION_ID == "gen_ai.conversation.id"
    assert attributes.OPERATION_NAME == "gen_ai.operation.name"
    assert attributes.OPENINFERENCE_KIND == "openinference.span.kind"
    assert attributes.HEADER_POLICY_VERSION == "x-rllm-policy-version"
    assert attributes.ENV_DISABLED == "RLLM_DISABLED"
    assert attributes.ENV_CAPTURE_CONTENT == "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def test_no_name_is_spelled_twice() -> None:
    """Two constants with one value would let a reader and a writer drift apart."""
    values = [value for name, value in constants().items() if name != "DEFAULT_SERVICE_NAME"]
    assert sorted(values) == sorted(set(values))


def test_attribute_names_are_dotted_lower_case() -> None:
    """Back ends turn other characters into something else."""
    keys = [value for name, value in constants().items() if value.startswith(("rllm.", "gen_ai.")) and name != "BAGGAGE_PREFIX"]
    assert len(keys) > 60
    assert [key for key in keys if not re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", key)] == []


def test_no_other_file_of_the_package_spells_an_attribute_name() -> None:
    """Every span attribute key, header and variable name is spelled in attributes.py and nowhere else."""
    package = Path(attributes.__file__).parent
    pattern = re.compile(
        r"""["'](gen_ai\.[a-z_.]+|rllm\.(episode|trajectory|call|prompt|response|tokens|policy)\.[a-z_.]+|x-rllm-[a-z-]+|OTEL_[A-Z_]+)["']"""
    )
    found = {
        f"{path.relative_to(package)}: {match.group(1)}"
        for path in package.rglob("*.py")
        if path.name != "attributes.py"
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()
