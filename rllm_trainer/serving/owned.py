"""What apps and the loop see of any server behind a child process of ours: an address on loopback, a token, a model's name, a version."""

from __future__ import annotations

from rllm_trainer._child import Child

__all__ = ["PROXY_NAMES", "OwnedServer"]

PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that the child does not get: it is spoken to on loopback."""


class OwnedServer:
    """The part of ``Server`` that no kind of it does differently. The child's ``ready`` names its ``port``."""

    def __init__(self, child: Child, *, api_key: str, model: str, version: int) -> None:
        self._child = child
        self._api_key = api_key
        self._model = model
        self._version = version
        self._port: int = child.ready["port"]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def api_key(self) -> str:
        return self._api_key

    @property
    def model(self) -> str:
        return self._model

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int:
        return self._child.pid
