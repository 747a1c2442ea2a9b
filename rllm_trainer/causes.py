"""A prompt and the recorded lineage that it leaves; out, the one cause.

Tokens say where the two part, messages say why. A cause is named only where something shows it; what nothing shows is ``unknown``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import msgspec

from rllm_trainer.messages import Message, common_length, drift, reply_message, split_system, text_of, thinks, view, without_space
from rllm_trainer.placing import PlacedCall, PlacedReply

__all__ = ["Cause", "Decode", "Finding", "Parting", "Turn", "explain"]

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens shown."""

Cause = Literal[
    "thinking stripped",
    "retokenised",
    "whitespace",
    '""/None',
    "tool arguments re-serialised",
    "compaction",
    "tools changed",
    "system changed",
    "stop string trimmed",
    "end of turn not sampled",
    "other agent",
    "unknown",
]
"""Why a prompt does not continue a recorded sequence."""

_COMPARED_TOKENS = 32
_THINK_TAG = "think>"
_TAG_SLACK = 8
"""Characters that a template may put before the tag."""
_QUOTED_REPLY = 12
"""A reply of so many characters that stands word for word in a new message was put there."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The recorded reply in which, or in whose header, a prompt leaves its lineage."""

    call: PlacedCall
    reply: PlacedReply
    offset: int
    """First differing token, counted from the reply's first; negative in the header before it."""

    @property
    def message(self) -> int:
        """Where a request that carries the turn has it."""
        return len(self.call.call.messages)

    @property
    def stops(self) -> list[str]:
        """Stop strings of the call, the one that was hit first."""
        given, hit = self.call.call.sampling.get("stop"), self.reply.choice.stop_reason
        stops = [given] if isinstance(given, str) else list(cast("Sequence[str]", given or ()))
        return [hit, *stops] if isinstance(hit, str) else stops


class Parting(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt, the lineage that it leaves, and where."""

    sent: PlacedCall
    recorded: PlacedCall
    reply: PlacedReply
    """The lineage's last reply, one of ``recorded``."""
    position: int
    """First token of the prompt that differs."""
    turn: Turn | None
    """None: they part in a prompt's own messages."""
    extends: bool
    """The prompt starts with some other recorded sequence, or with an earlier part of this lineage."""
    frame_shared: bool
    """A whole turn of the lineage is shared, so what stands before the first message is too."""

    @property
    def inside_reply(self) -> bool:
        return self.turn is not None and self.turn.offset >= 0

    @property
    def may_be_fork(self) -> bool:
        """Nothing in the tokens says that the prompt meant to carry on this lineage."""
        return self.extends and not self.inside_reply

    def recorded_ids(self, count: int = _COMPARED_TOKENS) -> list[int]:
        """What the lineage has from ``position`` on."""
        prompt = self.recorded.prompt[self.position : self.position + count]
        begun = max(0, self.position - len(self.recorded.prompt))
        return [*prompt.tolist(), *self.reply.token_ids[begun : begun + count - len(prompt)].tolist()]

    def sent_ids(self, count: int = _COMPARED_TOKENS) -> list[int]:
        """What the prompt has from ``position`` on."""
        return self.sent.prompt[self.position : self.position + count].tolist()

    def conversation(self) -> list[Message]:
        """The lineage as messages, its last reply included."""
        return [*self.recorded.call.messages, reply_message(self.reply.choice)]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What explains a parting."""

    cause: Cause | None
    """None: a fork, which loses nothing."""
    message: int | None = None
    """First message of the request that accounts for it."""


def explain(parting: Parting, decode: Decode | None) -> Finding:
    """The one cause of a prompt's leaving its nearest lineage.

    Args:
        decode: without it, equal messages that came back as other ids are told apart by what the record says of the reply alone.
    """
    if "text_completion" in (parting.sent.call.operation, parting.recorded.call.operation):
        return Finding(cause=_of_completion(parting, decode))
    if _is_other_agent(parting):
        return Finding(cause="other agent", message=0)
    recorded, sent = parting.conversation(), parting.sent.call.messages
    system, sent_system = split_system(recorded), split_system(sent)
    common = common_length(recorded[system:], sent[sent_system:])
    if common and not parting.frame_shared and not parting.inside_reply and (changed := _changed_frame(parting)) is not None:
        return Finding(cause=changed, message=0)
    if parting.turn is not None and (cause := _of_echo(parting, parting.turn, decode)) is not None:
        return Finding(cause=cause, message=parting.turn.message)
    at = sent_system + common
    if system + common == len(recorded) or at == len(sent):
        told = at > 0 or decode is not None
        return Finding(cause=(_of_equal_messages(parting, decode) if told else None) or "unknown")
    cause = drift(recorded[system + common], sent[at]) or _compaction(parting, recorded[system + common :], sent[at:], common)
    if cause is None and common and parting.recorded.call.tools != parting.sent.call.tools:
        cause = "tools changed"
    if cause is None and not parting.may_be_fork:
        cause = "unknown" if common else "other agent"
    return Finding(cause=cause, message=at)


def _is_other_agent(parting: Parting) -> bool:
    """Another trajectory's lineage is carried on only where the same role brings its turns along."""
    if parting.recorded.trajectory_id == parting.sent.trajectory_id:
        return False
    return parting.recorded.role != parting.sent.role or not any(
        message.get("role") == "assistant" for message in parting.sent.call.messages
    )


def _changed_frame(parting: Parting) -> Cause | None:
    """The conversation is the same, and what stands before it is not."""
    recorded, sent = parting.recorded.call, parting.sent.call
    before, after = recorded.messages[: split_system(recorded.messages)], sent.messages[: split_system(sent.messages)]
    if len(before) != len(after) or common_length(before, after) < len(before):
        return "system changed"
    return "tools changed" if recorded.tools != sent.tools else None


def _of_echo(parting: Parting, turn: Turn, decode: Decode | None) -> Cause | None:
    """How the reply came back in the request; None where it did not come back as this message."""
    messages = parting.sent.call.messages
    if turn.message >= len(messages) or messages[turn.message].get("role") != "assistant":
        return None
    sent, reply = messages[turn.message], reply_message(turn.reply.choice)
    if _thinking_left(parting, turn, reply, sent, decode):
        return "thinking stripped"
    if turn.offset < 0:
        return None
    earlier = parting.recorded.call.messages
    echoed = earlier[turn.message] if turn.message < len(earlier) else reply
    drifted = drift(echoed, sent, stops=turn.stops) or drift(reply, sent, stops=turn.stops)
    if drifted is not None:
        return drifted
    if view(sent) not in (view(reply), view(echoed)):
        return None
    if _stop_left(turn, decode):
        return "stop string trimmed"
    if _end_left(parting, turn, decode):
        return "end of turn not sampled"
    if turn.reply.choice.tool_calls:
        return "tool arguments re-serialised"
    return _of_equal_messages(parting, decode) or "unknown"


def _thinking_left(parting: Parting, turn: Turn, reply: Message, sent: Message, decode: Decode | None) -> bool:
    """Whether reasoning that was sampled, or opened for the reply, is no longer in the prompt."""
    if decode is not None:
        sampled = decode(parting.recorded_ids(min(_COMPARED_TOKENS, len(turn.reply.token_ids) - turn.offset)))
        _, tag, after = sampled.partition(_THINK_TAG)
        if tag and _THINK_TAG not in decode(parting.sent_ids())[: len(sampled) - len(after) + _TAG_SLACK]:
            return True
    if not thinks(reply):
        return False
    return not thinks(sent) or (decode is None and turn.offset <= 1)


def _stop_left(turn: Turn, decode: Decode | None) -> bool:
    """Whether only a stop string is gone, which the reply's ids have and its text has not."""
    choice = turn.reply.choice
    stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    if stop is None and decode is not None and turn.stops:
        sampled = decode(turn.reply.token_ids.tolist()).rstrip()
        stop = next((stop for stop in turn.stops if sampled.endswith(stop.rstrip())), None)
    if not stop or (choice.text or "").rstrip().endswith(stop):
        return False
    return len(turn.reply.token_ids) - turn.offset <= len(stop.encode()) + 1


def _end_left(parting: Parting, turn: Turn, decode: Decode | None) -> bool:
    """Whether only the reply's last token is gone: the prompt closes the turn with something that was not sampled there."""
    length, choice = len(turn.reply.token_ids), turn.reply.choice
    if turn.offset != length - 1 or (length == 1 and choice.text and choice.finish_reason != "length"):
        return False
    if decode is None or choice.finish_reason == "length" or isinstance(choice.stop_reason, str):
        return True
    last = decode(turn.reply.token_ids[-1:].tolist())
    return not last or not decode(parting.sent_ids()).startswith(last)


def _of_equal_messages(parting: Parting, decode: Decode | None) -> Cause | None:
    """The same text as other ids, or text that differs in whitespace; None: other text."""
    if decode is None:
        return "whitespace" if parting.turn is not None and _trimmed_at(parting.turn) else "retokenised"
    before, after = decode(parting.recorded_ids()), decode(parting.sent_ids())
    if before.startswith(after) or after.startswith(before):
        return "retokenised"
    before, after = without_space(before), without_space(after)
    return "whitespace" if before.startswith(after) or after.startswith(before) else None


def _trimmed_at(turn: Turn) -> bool:
    """Whether the reply has outer whitespace, and the difference lies where a template would trim it."""
    text = turn.reply.choice.text or ""
    if turn.offset < 0 or text == text.strip():
        return False
    return turn.offset <= 1 or turn.offset >= len(turn.reply.token_ids) - 2


def _compaction(parting: Parting, dropped: Sequence[Message], kept: Sequence[Message], common: int) -> Cause | None:
    """Whether recorded turns were dropped or rewritten, and what is left shows it.

    Args:
        dropped: the lineage's messages from the first differing one on.
        kept: the request's.
        common: how many messages before them are the same.
    """
    carried = [message for message in kept if message.get("role") == "assistant"] if parting.may_be_fork else kept
    later = {view(message) for message in dropped[1:] if text_of(message) or message.get("tool_calls")}
    if any(view(message) in later for message in carried):
        return "compaction"
    if common and not parting.may_be_fork and (len(kept) < len(dropped) or dropped[0].get("role") != kept[0].get("role")):
        return "compaction"
    replies = [(text_of(message) or "").strip() for message in dropped if message.get("role") == "assistant"]
    texts = [text_of(message) or "" for message in kept if message.get("role") != "assistant"]
    quoted = any(reply in text for reply in replies if len(reply) >= _QUOTED_REPLY for text in texts)
    return "compaction" if quoted and parting.recorded.trajectory_id == parting.sent.trajectory_id else None


def _of_completion(parting: Parting, decode: Decode | None) -> Cause | None:
    """For completions, whose request is one string: what follows the turn's own prompt, against the turn's reply."""
    if parting.turn is None or parting.turn.offset < 0 or (sent := _after_prompt(parting.turn, parting.sent)) is None:
        return None if parting.may_be_fork else "unknown" if parting.inside_reply else "other agent"
    choice = parting.turn.reply.choice
    text = choice.text or ""
    if thinks(reply_message(choice)) and not thinks({"content": sent}):
        return "thinking stripped"
    if sent.startswith(text):
        if _stop_left(parting.turn, decode):
            return "stop string trimmed"
        if _end_left(parting, parting.turn, decode):
            return "end of turn not sampled"
        return _of_equal_messages(parting, decode) or "unknown"
    return "whitespace" if without_space(sent).startswith(without_space(text)) else "unknown"


def _after_prompt(turn: Turn, sent: PlacedCall) -> str | None:
    """The text that a completion's prompt has after the prompt of an earlier turn; None: it does not begin with it."""
    before, after = (call.call.messages[0].get("content") if call.call.messages else None for call in (turn.call, sent))
    if not isinstance(before, str) or not isinstance(after, str) or not after.startswith(before):
        return None
    return after[len(before) :]
