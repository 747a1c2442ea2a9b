"""What Ray says of a death in a page is told in a line: which process, on which node, by what."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError

from rllm_trainer.cluster.last_words import words_of

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: RankActor
\tactor_id: b5c6c07a4e01c2dc9c6c788101000000
\tpid: 498
\tnamespace: 2aa6e247-bcfd-41e1-9276-2ae97fba175f
\tip: 10.0.0.2
The actor is dead because """
DETAIL = "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
IN_ITS_START = """The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m (pid=1588, ip=10.0.0.2)
           ^^^^^^^^^^^^
  File "/app.py", line 6, in __init__
    import nothing
ImportError: no such thing"""


@pytest.mark.parametrize(
    "reason, how",
    [
        (DETAIL + "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.", "was ended by SIGTERM"),
        (
            DETAIL
            + "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process ...",
            "ended without a word to Ray: it was killed (kill -9, or by the kernel for want of memory), it crashed, or it ended itself",
        ),
        ("it was killed by `ray.kill`.", "is dead because it was killed by `ray.kill`"),
    ],
)
def test_a_death_is_one_line(reason: str, how: str) -> None:
    """As far as Ray knows how."""
    assert words_of(RayActorError(error_msg=DIED + reason)) == f"RayActorError: process 498 on node 10.0.0.2 {how}"


def test_what_failed_as_it_began_is_told_by_its_own_error() -> None:
    """Without the traceback's lines, which Ray's logs have."""
    assert words_of(RayActorError(error_msg=IN_ITS_START)) == "RayActorError: ImportError: no such thing"


def test_an_exceptions_own_lines_are_kept() -> None:
    """Indented ones, too, where they are no traceback."""
    assert words_of(ValueError("two faults:\n  the first\n  the second")) == "ValueError: two faults: | the first | the second"
