"""Signals ask a run to end, and their handlers come back."""

import os
import signal
import threading

import pytest

from rllm_trainer.interrupts import interruptible


def test_the_first_signal_asks_and_the_second_raises():
    """Ctrl-C once sets the event; twice raises at once; the handler is then Python's own again."""
    said = []
    with interruptible(said.append) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.event.wait(5)
        assert isinstance(stop.error(), KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(said) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_ends_as_it_would_have():
    """SIGTERM sets the event, and the run then ends with SIGTERM's exit code."""
    with interruptible(lambda _: None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.event.wait(5)
        error = stop.error()
    assert isinstance(error, SystemExit)
    assert error.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_users_own_are_left_alone():
    """A handler that the user has set stays in place."""
    heard = []

    def own(number, frame):
        heard.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with interruptible(lambda _: None) as stop:
            assert signal.getsignal(signal.SIGTERM) is own
            os.kill(os.getpid(), signal.SIGTERM)
        assert (heard, stop.event.is_set()) == ([signal.SIGTERM], False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handler_that_ray_sets_is_no_ones_own():
    """A run in a process that has called ``ray.init`` ends at a whole step, too; Ray's handler comes back."""

    def sigterm_handler(number, frame):
        raise SystemExit(number)

    sigterm_handler.__module__ = "ray._private.worker"
    before = signal.signal(signal.SIGTERM, sigterm_handler)
    try:
        with interruptible(lambda _: None) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.event.wait(5)
        assert signal.getsignal(signal.SIGTERM) is sigterm_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_take_no_signals():
    """Outside the main thread no handler is touched."""
    seen = []

    def run():
        with interruptible(lambda _: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert seen == [signal.default_int_handler]
