"""The chat template's prefix property, over two and three turns."""

from rllm_trainer.template import template_breaks


def plain(messages):
    return list("".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>")


def test_a_plain_template_keeps_the_prefix():
    """A template that only appends has nothing to report."""
    assert template_breaks(plain) == []


def test_a_template_that_opens_a_thought_it_strips_later():
    """A generation prompt that history does not keep breaks every further turn."""
    found = template_breaks(lambda messages: [*plain(messages), "<think>"])
    assert found == [
        "without a system message, 2 turns do not start with the tokens of 1 (they part at token 34)",
        "without a system message, 3 turns do not start with the tokens of 2 (they part at token 77)",
        "with a system message, 2 turns do not start with the tokens of 1 (they part at token 60)",
        "with a system message, 3 turns do not start with the tokens of 2 (they part at token 103)",
    ]


def test_a_template_that_rewrites_old_turns():
    """A template that only trims the turn before last is found at three turns."""

    def trimmed(messages):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        return plain([m if i >= last - 2 else m | {"content": "..."} for i, m in enumerate(messages)])

    assert template_breaks(trimmed)[0] == "without a system message, 3 turns do not start with the tokens of 2 (they part at token 6)"
