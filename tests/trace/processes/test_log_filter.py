"""Log records that say which episode they were written in."""

from __future__ import annotations

import asyncio
import io
import logging

import rllm_trace as rllm


def test_every_record_says_its_episode() -> None:
    """Inside and outside workflows, in agents, in concurrent tasks, in what a library logs; a field of the app's own stays."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(rllm.LogFilter())
    handler.setFormatter(logging.Formatter("%(episode_id)s %(agent)s %(message)s"))
    logger = logging.getLogger("tests.rllm.filter")
    logger.addHandler(handler)
    logger.propagate = False

    @rllm.workflow
    async def app(n: int) -> int:
        await asyncio.sleep(0)
        logger.warning("in %d", n)
        with rllm.agent("solver"):
            await asyncio.sleep(0)
            logger.warning("agent %d", n)
        return n

    async def both() -> None:
        await asyncio.gather(app(0), app(1))

    try:
        logger.warning("before")
        with rllm.collect() as episodes:
            asyncio.run(both())
        logger.warning("after", extra={"episode_id": "mine"})
    finally:
        logger.removeHandler(handler)
    ids = {episode.output: episode.id for episode in episodes}
    assert sorted(stream.getvalue().splitlines()) == sorted(
        [
            "- - before",
            f"{ids[0]} app in 0",
            f"{ids[1]} app in 1",
            f"{ids[0]} solver agent 0",
            f"{ids[1]} solver agent 1",
            "mine - after",
        ]
    )
