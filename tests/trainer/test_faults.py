"""Whose fault a rollout's end was."""

import asyncio
import errno

import msgspec
import openai
import pytest

from rllm_trace._spans import error_info
from rllm_trace.exceptions import CallRefusedError
from rllm_trace.types import Choice, Episode, ErrorInfo, Logprobs, ModelCall, TokenIds, Trajectory
from rllm_trainer.rollout.faults import Verdict, describe, judge, judge_recorded, leaves_gradient


def call(*, exact=True, complete=True, error=None, endpoint="policy", started=1):
    return ModelCall(
        span_id=f"s{started}",
        parent_id=None,
        model="policy",
        requested_model="gpt",
        endpoint=endpoint,
        messages=[],
        sampling={},
        choices=[Choice(index=0, token_ids=TokenIds([1]), logprobs=Logprobs([-1.0]))] if complete else [],
        prompt_token_ids=TokenIds([5]),
        error=error,
        exact=exact,
        complete=complete,
        trainable=exact and complete,
        started=started,
        ended=started + 1,
    )


def episode(*calls):
    return Episode(
        id="e",
        trace_id="0" * 32,
        span_id="w",
        workflow="app",
        termination="completed",
        trajectories=[Trajectory(id="w", name="app", calls=list(calls), tools=[], rewards=[], reward=None, started=0, ended=9)],
        rewards=[],
        reward=None,
        started=0,
        ended=9,
        metadata={},
    )


def api_error(kind, status=None, message="no"):
    import httpx

    request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")
    if status is None:
        return kind(request=request)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.status_code = status
    return error


def test_a_good_end_is_no_fault():
    """An app that returned after its calls were answered is nobody's fault."""
    assert judge(error=None, deadline=None, episode=episode(call())) == Verdict()


def test_our_deadline_is_infrastructure():
    """What our deadline ended leaves the gradient and is not tried again."""
    assert judge(error=None, deadline="it ran past rollout_timeout=5", episode=episode(call())) == Verdict(
        fault="infrastructure", reason="it ran past rollout_timeout=5"
    )


@pytest.mark.parametrize(
    "error",
    [
        api_error(openai.APIConnectionError),
        api_error(openai.APITimeoutError),
        api_error(openai.InternalServerError, 500),
        api_error(openai.APIStatusError, 503),
        api_error(openai.RateLimitError, 429),
        ConnectionResetError("gone"),
    ],
)
def test_connections_and_5xx_are_infrastructure(error):
    """A broken connection or a failing server is worth a new attempt, before and after the first exact call."""
    for recorded in (None, episode(call())):
        verdict = judge(error=error, deadline=None, episode=recorded)
        assert (verdict.fault, verdict.retry) == ("infrastructure", True)


def test_a_wrapped_connection_error_is_found():
    """Frameworks wrap errors; the cause counts, and so does one of a group."""
    outer = RuntimeError("model failed")
    outer.__cause__ = ConnectionResetError("gone")
    assert judge(error=outer, deadline=None, episode=episode(call())).fault == "infrastructure"
    group = ExceptionGroup("tools", [ValueError("x"), ConnectionResetError("gone")])
    assert judge(error=group, deadline=None, episode=episode(call())).fault == "infrastructure"


def test_an_app_that_fails_before_its_first_exact_call():
    """Without an exact call nothing shows what the policy did: the app's own fault."""
    verdict = judge(error=KeyError("question"), deadline=None, episode=episode(call(exact=False)))
    assert verdict == Verdict(fault="app", reason="the app raised KeyError: 'question' before its first exact call")
    assert judge(error=KeyError("x"), deadline=None, episode=None).fault == "app"


def test_an_app_that_fails_after_an_exact_call():
    """After an exact call a failure is what the policy led to."""
    verdict = judge(error=ValueError("cannot parse: <x"), deadline=None, episode=episode(call()))
    assert verdict == Verdict(fault="policy", reason="the app raised ValueError: cannot parse: <x")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_an_interrupt_is_not_the_policys(error):
    """Whoever interrupts or cancels an app, the policy does not: live as on record, also after an exact call."""
    name = type(error).__name__
    live = judge(error=error, deadline=None, episode=episode(call()))
    assert live == Verdict(fault="infrastructure", reason=f"the app was interrupted by {name}")
    ended = msgspec.structs.replace(episode(call()), termination="cancelled", error=error_info(error))
    assert judge_recorded(ended).fault == "infrastructure"
    assert judge(error=SystemExit(1), deadline=None, episode=episode(call())).fault == "policy"


def test_context_overflow_is_the_policys():
    """A 400 after an exact call (the context ran over) is the policy's."""
    assert judge(error=api_error(openai.BadRequestError, 400), deadline=None, episode=episode(call())).fault == "policy"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_machine_out_of_something_is_infrastructure(error):
    """Memory, files, disk and threads are the machine's, after exact calls too, live and on record; another OSError is the policy's."""
    live = judge(error=error, deadline=None, episode=episode(call()))
    assert (live.fault, live.retry) == ("infrastructure", True)
    failed = msgspec.structs.replace(episode(call()), termination="failed", error=error_info(error))
    assert judge_recorded(failed).fault == "infrastructure"
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert judge(error=missing, deadline=None, episode=episode(call())).fault == "policy"
    assert judge_recorded(msgspec.structs.replace(failed, error=error_info(missing))).fault == "policy"


def test_what_an_app_says_was_not_the_cause_is_none():
    """Raised while a broken connection was being handled, an error is the connection's; raised ``from None``, it is the policy's."""
    found = {}
    for suppressed in (False, True):
        try:
            try:
                raise ConnectionResetError("reset")
            except ConnectionResetError:
                if suppressed:
                    raise ValueError("no action in the reply") from None
                raise ValueError("no action in the reply")  # noqa: B904 - the context is what is tested
        except ValueError as error:
            found[suppressed] = judge(error=error, deadline=None, episode=episode(call())).fault
    assert found == {False: "infrastructure", True: "policy"}


def test_refused_keys_are_the_apps():
    """A 401 or 404 is a fault of the app's set-up, whenever it comes."""
    assert judge(error=api_error(openai.AuthenticationError, 401), deadline=None, episode=episode(call())).fault == "app"


def test_calls_that_cannot_be_redirected_are_the_apps():
    """A call that the SDK refused to send to the policy is a matter of the app's set-up."""
    assert judge(error=CallRefusedError("responses is not served"), deadline=None, episode=episode(call())).fault == "app"


def test_an_app_that_swallows_a_failed_call():
    """An app that went on without the last reply of the policy is not scored for it."""
    broken = call(
        exact=False, complete=False, error=ErrorInfo(type="openai.InternalServerError", message="boom", status_code=500), started=3
    )
    assert judge(error=None, deadline=None, episode=episode(call(), broken)).fault == "infrastructure"
    assert judge(error=None, deadline=None, episode=episode(broken, call(started=5))) == Verdict()
    timeout = call(exact=False, complete=False, error=ErrorInfo(type="openai.APITimeoutError", message="Request timed out."), started=3)
    assert judge(error=None, deadline=None, episode=episode(timeout)).fault == "infrastructure"


def test_what_leaves_the_gradient():
    """Only a good end and the policy's own failures are trained."""
    assert [leaves_gradient(fault) for fault in (None, "policy", "infrastructure", "app", "reward")] == [False, False, True, True, True]


def test_descriptions_are_one_line():
    """An error is told in one line of bounded length."""
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1000))) == len("ValueError: ") + 300


def test_an_error_without_a_readable_message_is_told_by_its_name():
    """An exception whose text cannot be made is still the app's, not the runner's."""

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert describe(Mute()) == "Mute: <its message cannot be read>"
