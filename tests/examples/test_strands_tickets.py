"""The Strands app without a model: a scripted server stands in for it."""

import asyncio
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rllm_trace as rllm
from rllm_trace.testing import Exchange, Reply, ReplyChoice, ScriptedServer

FOLDER = Path(__file__).parents[2] / "examples" / "strands_tickets"


def answer(exchange: Exchange) -> Reply:
    """Delivery where the message is about a parcel, else something that is no queue."""
    asked = str(exchange.body["messages"])
    return Reply(choices=[ReplyChoice(text="Delivery." if "parcel" in asked else "I do not know")])


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, lasting: list[ModuleType]) -> Iterator[ModuleType]:
    """The decorated app, its endpoint a scripted server."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("app", "messages"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with ScriptedServer(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        import app

        lasting.append(app)

        yield app
    for name in ("app", "messages"):
        sys.modules.pop(name, None)


def test_the_decorated_app_differs_by_an_import_and_two_lines() -> None:
    """What an author adds to an app: one import and two decorators, nothing moved or changed."""
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("app_before.py", "app.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert [line for line in changes if line != "+ "] == ["+ import rllm_trace as rllm", "+ @rllm.workflow", "+ @rllm.reward"]


def test_concurrent_streams_are_recorded_each_with_its_own_episode(app: ModuleType) -> None:
    """Eight messages at once: each episode has the one streamed call of its own message, exact, and its own answer."""
    messages = [f"Where is parcel {n}?" if n % 2 else f"Hello {n}" for n in range(8)]

    async def all_at_once() -> list[str | None]:
        return await asyncio.gather(*map(app.route, messages))

    with rllm.collect() as episodes:
        answers = asyncio.run(all_at_once())
    assert answers == [None, "delivery"] * 4
    seen = {
        e.input["message"]: (e.output, [(c.streamed, c.exact, c.messages[-1]["content"][0]["text"]) for c in e.calls]) for e in episodes
    }
    assert seen == {m: (a, [(True, True, m)]) for m, a in zip(messages, answers, strict=True)}


def test_learning_and_measuring_share_no_thing(app: ModuleType) -> None:
    """No held-out message is a training message, and none is about a thing that training names."""
    from messages import HELD_OUT, THINGS, held_out_rows, training_rows

    assert set(THINGS) & set(HELD_OUT) == set()
    assert (len(training_rows(0)), len(held_out_rows())) == (108, 54)
    assert {row["message"] for row in training_rows(0)} & {row["message"] for row in held_out_rows()} == set()
