"""A module of ours in, a process that we own out: started with a config, spoken to by calls, gone when we are gone.

Config, calls and replies are length-prefixed msgpack frames on an inherited socket pair, so nothing is on a command line, in a port or
in a file. The child has its own process group, a copied environment and a log file; the parent's environment, signal handlers and
threads stay as they were. It dies with the parent, crash included: the kernel kills it (Linux), and the end of the socket does elsewhere.

Parent::

    child = Child.start("rllm_trainer.engine.worker", {"lr": 1e-5}, name="engine", log_path=run / "engine.log", start_timeout=120)
    reply = child.call("update", {"rows": array}, timeout=600)

Child module::

    def main() -> None:
        config = child_config()
        serve({"update": lambda payload: {"loss": 0.0}}, ready={"pid": 1})
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from rllm_trainer._starts import GivenUp, starting
from rllm_trainer.exceptions import TrainerError

__all__ = ["Child", "ChildDied", "ChildError", "child_config", "serve", "to_array"]

Handler = Callable[[dict[str, Any]], Mapping[str, Any] | None]

_HEADER = struct.Struct("<Q")
_MAX_FRAME = 1 << 34
_TAIL_LINES = 30
_TAIL_BYTES = 16_384
_FD_FLAG = "--rllm-child-fd="
_PR_SET_PDEATHSIG = 1
_MAX_WAITING_CALLS = 64
_GIVEN_UP = 2.0
"""Seconds from TERM to KILL for a child that nobody waits for any more."""


class ChildDied(TrainerError, RuntimeError):
    """A process of ours has ended (or was never up); the message carries its exit code and last log lines."""


class ChildError(TrainerError, RuntimeError):
    """A call raised inside the child, which goes on; the message is the exception's, ``remote_type`` its class name."""

    def __init__(self, message: str, remote_type: str = "Exception", remote_traceback: str = "") -> None:
        super().__init__(message, remote_type, remote_traceback)
        self.message = message
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.remote_type}: {self.message}"


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[Any]", value)
        return {"dtype": array.dtype.str, "shape": array.shape, "data": array.tobytes()}
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"got {type(value).__name__} in a call to a child process; expected msgpack types, numpy arrays, Structs or paths")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder = msgspec.msgpack.Decoder()


def to_array(packed: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The array that travelled as ``{"dtype", "shape", "data"}``: a writable copy."""
    return np.frombuffer(packed["data"], dtype=np.dtype(packed["dtype"])).reshape(packed["shape"]).copy()


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    body = _encoder.encode(message)
    sock.sendall(_HEADER.pack(len(body)))
    sock.sendall(body)


class _Inbox:
    """Frames of a socket, read with a deadline; a frame that a deadline cut is finished by the next read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._header = bytearray()
        self._body: bytearray | None = None
        self._filled = 0

    def read(self, deadline: float) -> dict[str, Any]:
        """Raises ``TimeoutError`` at the deadline (``time.monotonic``) and ``EOFError`` when the other side is gone."""
        while len(self._header) < _HEADER.size:
            self._header += self._receive(_HEADER.size - len(self._header), deadline)
        if self._body is None:
            (size,) = _HEADER.unpack(self._header)
            if size > _MAX_FRAME:
                raise EOFError(f"got a frame of {size} bytes; expected at most {_MAX_FRAME}")
            self._body, self._filled = bytearray(size), 0
        view = memoryview(self._body)
        while self._filled < len(view):
            self._wait_until(deadline)
            got = self._sock.recv_into(view[self._filled :])
            if not got:
                raise EOFError
            self._filled += got
        view.release()
        body, self._body = self._body, None
        self._header.clear()
        return _decoder.decode(body)

    def _receive(self, size: int, deadline: float) -> bytes:
        self._wait_until(deadline)
        data = self._sock.recv(size)
        if not data:
            raise EOFError
        return data

    def _wait_until(self, deadline: float) -> None:
        self._sock.settimeout(None if math.isinf(deadline) else max(deadline - time.monotonic(), 1e-3))


class Child:
    """The parent's side of one child process. Calls may come from any thread; the child answers one at a time."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.ready: dict[str, Any] = {}
        """What the child said when it was up."""
        self._ended = threading.Event()
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._sock, self._far = socket.socketpair()
        self._inbox = _Inbox(self._sock)
        self._last_id = 0
        self._closed = False

    @classmethod
    def start(
        cls,
        module: str,
        config: Mapping[str, Any],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str | None] | None = None,
        start_timeout: float = 120.0,
    ) -> Child:
        """Run ``python -m module`` and wait until it serves.

        Args:
            module: its ``main`` reads ``child_config()`` and ends in ``serve(...)``.
            config: handed over the socket; never seen in a process list.
            name: for messages, such as ``"engine"``.
            log_path: gets the child's stdout and stderr; its folder is made.
            env: changes to the copied environment; None removes a variable.
            start_timeout: seconds until it must be serving.

        Raises:
            ChildDied: it ended, did not serve in time, or was given up (it is then gone); the message has its last log lines.
        """
        child = cls(name, Path(log_path))
        command = [sys.executable, "-P", "-m", module, f"{_FD_FLAG}{child._far.fileno()}"]
        # The kernel's parent-death signal follows the thread that forked, so that thread must live as long as the child does.
        threading.Thread(target=child._own, args=(command, _child_env(env)), name=f"rllm-{name}", daemon=True).start()
        child._started.wait()
        if child._start_error is not None:
            child._sock.close()
            raise ChildDied(f"{name} could not be started: {child._start_error}") from child._start_error
        deadline = time.monotonic() + start_timeout
        starts = starting.get()
        try:
            with contextlib.nullcontext() if starts is None else starts.held(lambda: child.close(timeout=_GIVEN_UP)):
                child._sock.settimeout(start_timeout)
                _send(child._sock, {"config": config})
                child.ready = child._inbox.read(deadline)["ready"]
        except GivenUp:
            child.close(timeout=_GIVEN_UP)
            raise ChildDied(f"{name} was given up while it started") from None
        except TimeoutError:
            child.close(timeout=2.0)
            raise ChildDied(child._obituary(f"{name} was not ready within {start_timeout:g} s and was ended")) from None
        except (EOFError, OSError):
            death = child._death()
            child.close(timeout=0.0)
            raise death from None
        except BaseException:
            child.close(timeout=2.0)
            raise
        return child

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def call(self, method: str, payload: Mapping[str, Any] | None = None, timeout: float = 60.0) -> dict[str, Any]:
        """Run one handler of the child and return its reply; numpy arrays inside come back packed, see ``to_array``.

        Raises:
            ChildError: the handler raised; the child goes on.
            ChildDied: the child has ended.
            TimeoutError: no reply in ``timeout`` seconds; the child goes on, and a late reply is dropped.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError(f"{self.name} was busy with another call for {timeout:g} s; {method!r} was not sent")
        try:
            return self._call(method, payload or {}, deadline, timeout)
        finally:
            self._lock.release()

    def _call(self, method: str, payload: Mapping[str, Any], deadline: float, timeout: float) -> dict[str, Any]:
        if self._closed:
            raise ChildDied(f"{self.name} was closed; {method!r} was not sent")
        self._last_id += 1
        call_id = self._last_id
        self._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            _send(self._sock, {"id": call_id, "method": method, "payload": payload})
        except TimeoutError:
            self._kill()
            raise self._death() from None
        except OSError:
            raise self._death() from None
        while True:
            try:
                reply = self._inbox.read(deadline)
            except TimeoutError:
                raise TimeoutError(f"{self.name} did not answer {method!r} within {timeout:g} s") from None
            except (EOFError, OSError):
                raise self._death() from None
            if reply["id"] == call_id:
                break
        error = reply.get("error")
        if error is not None:
            raise ChildError(error["message"], error["type"], error["traceback"])
        return reply["result"]

    def close(self, timeout: float = 5.0) -> None:
        """End the process group: asked (TERM), then, after ``timeout`` seconds, forced (KILL). Safe to call twice."""
        self._closed = True
        if self._process is not None and not self._ended.is_set():
            self._signal(signal.SIGTERM)
            self._ended.wait(timeout)
        self._kill()
        self._sock.close()

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the child's log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _own(self, command: list[str], env: dict[str, str]) -> None:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=[self._far.fileno()],
                    start_new_session=True,
                )
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in start()
            self._start_error = error
            return
        finally:
            self._far.close()
            self._started.set()
        self._process.wait()
        self._ended.set()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._ended.wait(5.0)

    def _death(self) -> ChildDied:
        self._ended.wait(2.0)
        self._kill()
        code = None if self._process is None else self._process.returncode
        return ChildDied(self._obituary(f"{self.name} ended ({_exit_words(code)})"))

    def _obituary(self, sentence: str) -> str:
        tail = self.log_tail()
        return f"{sentence}; last lines of {self.log_path}:\n{tail}" if tail else f"{sentence}; its log {self.log_path} is empty"


def _exit_words(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _child_env(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    for key, value in (changes or {}).items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONUNBUFFERED"] = "1"
    return env


_channel: tuple[socket.socket, _Inbox] | None = None


def child_config() -> dict[str, Any]:
    """In the child, first thing: bind its life to the parent's and return the config that ``Child.start`` was given."""
    global _channel
    fd = next((int(arg.removeprefix(_FD_FLAG)) for arg in sys.argv[1:] if arg.startswith(_FD_FLAG)), None)
    if fd is None:
        raise SystemExit("this module is a child process of rllm_trainer; it is started by Child.start, not by hand")
    _die_with_parent()
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    inbox = _Inbox(sock)
    _channel = sock, inbox
    try:
        return inbox.read(math.inf)["config"]
    except EOFError:
        raise SystemExit("the parent was gone before it sent the config") from None


def serve(handlers: Mapping[str, Handler], *, ready: Mapping[str, Any] | None = None) -> None:
    """In the child: say that it is up, then answer calls one at a time in this thread, for ever.

    A handler takes the payload (a dict) and returns a dict or None; what it raises goes back to the caller as ``ChildError``.
    When the parent is gone the whole process group is killed.
    """
    assert _channel is not None, "child_config() comes first"
    sock, inbox = _channel
    calls: queue.Queue[dict[str, Any]] = queue.Queue(_MAX_WAITING_CALLS)
    threading.Thread(target=_read_calls, args=(inbox, calls), name="rllm-calls", daemon=True).start()
    _reply(sock, {"ready": ready or {}})
    while True:
        call = calls.get()
        _reply(sock, _answer(handlers, call))


def _answer(handlers: Mapping[str, Handler], call: dict[str, Any]) -> dict[str, Any]:
    method = call["method"]
    try:
        if method not in handlers:
            raise ValueError(f"got method {method!r}; expected one of {sorted(handlers)}")
        return {"id": call["id"], "result": handlers[method](call["payload"]) or {}}
    except Exception as error:  # noqa: BLE001 - it is the caller's to see
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)  # noqa: T201 - stderr is the child's log
        return {"id": call["id"], "error": {"type": type(error).__name__, "message": str(error), "traceback": trace}}


def _reply(sock: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        _send(sock, message)
    except TypeError as error:
        _send(sock, {"id": message.get("id"), "error": {"type": "TypeError", "message": str(error), "traceback": ""}})
    except OSError:
        _end_group()


def _read_calls(inbox: _Inbox, calls: queue.Queue[dict[str, Any]]) -> None:
    while True:
        try:
            call = inbox.read(math.inf)
        except (EOFError, OSError):
            _end_group()
        else:
            calls.put(call)


def _end_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
