"""An address of a Ray cluster in, whether one answers there out, within seconds: Ray itself would try for many minutes.

What is asked is whether somebody listens and speaks HTTP/2, as Ray's control store does. With TLS only the first half is asked.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from rllm_trainer.cluster.loading import ray_api
from rllm_trainer.exceptions import EngineError

__all__ = ["HERE", "require_cluster_at"]

_ANSWERS = 10.0
"""Seconds that a control store has to say something."""
_TLS = "RAY_USE_TLS"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What an HTTP/2 client begins with: the fixed words, and a SETTINGS frame without settings."""
_FRAME, _KIND, _SETTINGS = 9, 3, 4
"""Bytes of a frame's head, where its kind is, and the kind of the first frame of whoever speaks HTTP/2."""
HERE = "local"
"""Ray's word for a cluster of this process's own."""
_DO = "start one there with `ray start --head`, or give the address that it printed"


def require_cluster_at(asked: Any, *, within: float = _ANSWERS) -> None:
    """Raises ``EngineError`` where no cluster answers at what ``ray.init`` would be asked to attach to; None and ``local`` start one."""
    if asked in (None, "", HERE):
        return
    found = str(asked)
    try:
        found = _resolved(found)
        host, _, port = found.rpartition("://")[2].rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=within) as connection:
            if os.environ.get(_TLS, "0") not in ("1", "true"):
                _require_http2(connection)
    except (OSError, ValueError, RuntimeError) as error:
        where = f"address {asked!r}" + (f", which is {found}" if found != str(asked) else "")
        said = f"nothing came within {within:g} s" if isinstance(error, TimeoutError) else str(error)
        raise EngineError(f"no Ray cluster answers at {where}: {said}; {_DO}") from error


def _resolved(address: str) -> str:
    """``auto`` and names as Ray reads them."""
    resolve = ray_api().canonical_address
    return address if resolve is None or "://" in address else str(resolve(address) or address)


def _require_http2(connection: socket.socket) -> None:
    connection.sendall(_PREFACE)
    head = b""
    while len(head) < _FRAME:
        more = connection.recv(_FRAME - len(head))
        if not more:
            raise ConnectionError("it closed the connection")
        head += more
    if head[_KIND] != _SETTINGS:
        raise ConnectionError("what listens there is another program")
