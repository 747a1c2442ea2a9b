"""Settings in, the policy's server out: which file starts which kind, and how many of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from rllm_trainer.config import Settings
from rllm_trainer.exceptions import ServerError, SettingError
from rllm_trainer.serving.base import Server
from rllm_trainer.serving.remote import DoorServer, read_key
from rllm_trainer.serving_settings import LocalSettings, VllmSettings, in_flight_of, key_name, urls_of

__all__ = ["start_serving"]


class _Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a run."""

    settings: Settings
    model: Path | str | None
    """The folder, for a server of ours; for one that is there, its model's name where that was given."""
    logs: Path
    url: str | None
    swaps: bool

    @property
    def folder(self) -> Path:
        assert isinstance(self.model, Path), "a server of ours serves a folder"
        return self.model

    @property
    def known_folder(self) -> Path | None:
        return self.model if isinstance(self.model, Path) else None

    @property
    def key(self) -> str | None:
        return read_key(key_name(self.settings))


def start_serving(settings: Settings, model: Path | str | None, run_dir: Path, *, swaps: bool = True) -> Server:
    """Start or find the server, or several of them.

    Args:
        model: the model's folder, or the name that a server which is there knows it by.
        run_dir: logs go into its ``logs``.
        swaps: it is to be given weights.

    Raises:
        SettingError: a setting that this kind of server has no use for.
        ServerError: it cannot be started, found, or used for this.
    """
    urls = urls_of(settings)
    count = max(len(urls), settings.replicas)
    start = _STARTS[settings.serving]
    logs = run_dir / "logs"
    if count == 1:
        return start(_Ask(settings=settings, model=model, logs=logs, url=urls[0] if urls else None, swaps=swaps))
    from rllm_trainer.serving.replicas import Replicas

    asks = [
        _Ask(settings=settings, model=model, logs=logs / f"replica-{i}", url=urls[i] if urls else None, swaps=swaps) for i in range(count)
    ]
    return Replicas.start([partial(start, ask) for ask in asks], base=model if isinstance(model, Path) else None)


def _local(ask: _Ask) -> Server:
    from rllm_trainer.serving.local import LocalServer

    settings = ask.settings
    how = settings.local or LocalSettings()
    return LocalServer.start(
        ask.folder,
        run_dir=ask.logs,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        port=settings.port,
        continuation=settings.continuation,
        in_flight=in_flight_of(settings),
        swaps=ask.swaps,
        tool_format=how.tool_format,
        reasoning=how.reasoning,
    )


def _vllm(ask: _Ask) -> Server:
    from rllm_trainer.serving.vllm import attach_vllm, start_vllm

    settings, lora = ask.settings, ask.settings.lora
    if ask.url is not None:
        if settings.continuation == "exact" and ask.known_folder is None:
            raise SettingError("continuation='exact' needs the model's folder, for its tokenizer and chat template; give it as model=")
        server = attach_vllm(
            ask.url,
            run_dir=ask.logs,
            key=ask.key,
            lora=lora is not None,
            swaps=ask.swaps,
            port=settings.port,
            in_flight=in_flight_of(settings),
            continues=ask.known_folder if settings.continuation == "exact" else None,
        )
        return _of_that_name(server, ask.model)
    how = settings.vllm or VllmSettings()
    return start_vllm(
        ask.folder,
        run_dir=ask.logs,
        python=how.python,
        args=how.args,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        port=settings.port,
        lora_rank=None if lora is None else lora.r,
        in_flight=in_flight_of(settings),
        continues=settings.continuation == "exact",
        start_timeout=how.start_timeout,
    )


def _sglang(ask: _Ask) -> Server:
    from rllm_trainer.serving.sglang import attach_sglang

    assert ask.url is not None
    settings = ask.settings
    server = attach_sglang(
        ask.url,
        run_dir=ask.logs,
        model_folder=ask.known_folder,
        key=ask.key,
        swaps=ask.swaps,
        port=settings.port,
        in_flight=in_flight_of(settings),
    )
    return _of_that_name(server, ask.model)


def _fireworks(ask: _Ask) -> Server:
    from rllm_trainer.serving.fireworks import attach_fireworks

    assert ask.settings.fireworks is not None
    key = ask.key
    assert key is not None
    return attach_fireworks(ask.settings.fireworks, run_dir=ask.logs, key=key, model_folder=ask.known_folder, port=ask.settings.port)


def _openai_compatible(ask: _Ask) -> Server:
    from rllm_trainer.serving.openai_compatible import attach_openai_compatible

    assert ask.url is not None
    if isinstance(ask.model, Path):
        raise SettingError(f"model={str(ask.model)!r} is a folder; expected the name that the server knows the model by")
    return attach_openai_compatible(ask.url, run_dir=ask.logs, model=ask.model, key=ask.key, port=ask.settings.port)


def _of_that_name(server: DoorServer, model: Path | str | None) -> DoorServer:
    """Raises ``ServerError`` where the server serves another model than was asked for."""
    if isinstance(model, str) and server.model != model:
        found = server.model
        server.close()
        raise ServerError(f"got model={model!r}; the server serves {found!r}")
    return server


_STARTS: dict[str, Callable[[_Ask], Server]] = {
    "auto": _local,
    "local": _local,
    "vllm": _vllm,
    "sglang": _sglang,
    "fireworks": _fireworks,
    "openai-compatible": _openai_compatible,
}
