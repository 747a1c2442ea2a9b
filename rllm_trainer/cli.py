"""A command line in, a call of ``fit``, ``evaluate``, ``replay`` or ``sft`` out.

    rllm train app.py:answer --data rows.jsonl --eval held_out.jsonl --reward app.py:right --set lr=2e-5 --set steps=20
    rllm evaluate app:answer --data held_out.jsonl --model runs/answer/model
    rllm replay runs/store --model Qwen/Qwen3-0.6B --reward app.py:right --set lr=2e-5
    rllm sft runs/store --model Qwen/Qwen3-0.6B --min-reward 1 --eval held_out_chats.jsonl
    rllm settings
    rllm gateway --upstream http://127.0.0.1:8000/v1 --store runs/store

An app or reward is ``file.py:name`` or ``package.module:name``. ``python -m rllm_trainer`` is the same command under a name that no
other package has.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rllm_trace.gateway import command as gateway_command
from rllm_trainer._extra import require_extra
from rllm_trainer.exceptions import SettingError, TrainerError

if TYPE_CHECKING:
    from rllm_trainer.report import Report

__all__ = ["main"]

_DISTRIBUTION = "rllm-trace"
_FOREIGN = "rllm"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code: 0, 2 for what was refused, 130 after Ctrl-C."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.run is gateway_command.run:  # needs nothing of the trainer, so not what a report needs either
        return gateway_command.run(asked)
    try:
        require_extra()
    except ImportError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201 - what prints nicely is not installed
        return 2
    from rllm_trainer.report import Report

    report = Report()
    _mention_foreign(report)
    try:
        asked.run(asked)
    except TrainerError as error:
        report.failed(f"{type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rllm", description="Train or evaluate the model that an app calls.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, what in (
        ("train", _train, "train the model that the app calls"),
        ("evaluate", _evaluate, "score the app; train nothing"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(run=run)
        command.add_argument("app", help="file.py:name or package.module:name")
        command.add_argument("--data", required=True, help="rows: .jsonl, .json or .parquet, or file.py:name of a list or iterable")
        command.add_argument("--model", help="a Hugging Face folder or name")
        command.add_argument("--reward", action="append", help="file.py:name; may be given more than once")
        _add_run(command, resumes=name == "train")
        if name == "train":
            command.add_argument("--eval", help="held-out rows, as --data")
        else:
            command.add_argument("--n", type=int, default=1, help="sampled rollouts of each row")
    what = "train on stored episodes; no app runs"
    replaying = commands.add_parser("replay", help=what, description=what)
    replaying.set_defaults(run=_replay)
    replaying.add_argument("store", help="a store's folder, the run folder of a training, or a .jsonl file of episodes")
    replaying.add_argument("--model", required=True, help="a Hugging Face folder or name; best the one that made the episodes")
    replaying.add_argument("--data", help="the rows that the episodes were recorded on, for rewards that need their columns")
    replaying.add_argument("--reward", action="append", help="file.py:name, to score anew; may be given more than once")
    _add_run(replaying)
    what = "fine-tune on stored episodes or on chats"
    tuning = commands.add_parser("sft", help=what, description=what)
    tuning.set_defaults(run=_sft)
    tuning.add_argument(
        "data", help="a store's folder, the run folder of a training, a .jsonl file of episodes, or chats: .jsonl or .parquet"
    )
    tuning.add_argument("--model", required=True, help="a Hugging Face folder or name")
    tuning.add_argument("--min-reward", type=float, help="of stored episodes, those that earned at least so much")
    tuning.add_argument("--eval", help="held-out episodes or chats, as data")
    _add_run(tuning)
    what = "list every setting with its default and what it does"
    settings = commands.add_parser("settings", help=what, description=what)
    settings.add_argument("names", nargs="*", metavar="NAME", help="only these")
    settings.set_defaults(run=_settings)
    what = "record the calls of apps in any language: an OpenAI-compatible and Anthropic-Messages reverse proxy"
    gateway = commands.add_parser("gateway", help=what, description=what + "; also python -m rllm_trace.gateway")
    gateway_command.add_arguments(gateway)
    gateway.set_defaults(run=gateway_command.run)
    return parser


def _add_run(command: argparse.ArgumentParser, *, resumes: bool = True) -> None:
    """What every command that makes a run folder takes."""
    command.add_argument("--output", help="the run folder")
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; the value is JSON or text")
    if resumes:
        command.add_argument("--resume", action="store_true", help="continue the run in --output")


def _train(asked: argparse.Namespace) -> None:
    from rllm_trainer import fit

    resume: dict[str, Any] = {"resume": True} if asked.resume else {}
    fit(
        _object(asked.app),
        _data(asked.data),
        model=asked.model,
        reward=_rewards(asked.reward),
        eval_dataset=None if asked.eval is None else _data(asked.eval),
        output_dir=asked.output,
        **cast("Any", _values(asked.set) | resume),
    )


def _evaluate(asked: argparse.Namespace) -> None:
    from rllm_trainer import evaluate

    evaluate(
        _object(asked.app),
        _data(asked.data),
        model=asked.model,
        reward=_rewards(asked.reward),
        n=asked.n,
        output_dir=asked.output,
        **cast("Any", _values(asked.set)),
    )


def _replay(asked: argparse.Namespace) -> None:
    from rllm_trainer import replay

    resume: dict[str, Any] = {"resume": True} if asked.resume else {}
    replay(
        asked.store,
        asked.model,
        reward=_rewards(asked.reward),
        dataset=None if asked.data is None else _data(asked.data),
        output_dir=asked.output,
        **cast("Any", _values(asked.set) | resume),
    )


def _sft(asked: argparse.Namespace) -> None:
    from rllm_trainer import sft

    resume: dict[str, Any] = {"resume": True} if asked.resume else {}
    sft(
        _data(asked.data),
        asked.model,
        min_reward=asked.min_reward,
        eval_dataset=None if asked.eval is None else _data(asked.eval),
        output_dir=asked.output,
        **cast("Any", _values(asked.set) | resume),
    )


def _settings(asked: argparse.Namespace) -> None:
    from rllm_trainer.config import make_settings, table
    from rllm_trainer.report import Report
    from rllm_trainer.setting_docs import setting_docs

    docs = setting_docs()
    make_settings(dict.fromkeys(name for name in asked.names if name not in docs))
    Report().explained([row for row in table(make_settings({}), ()) if not asked.names or row.name in asked.names], docs)


def _object(spec: str) -> Any:
    """What ``file.py:name`` or ``package.module:name`` names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise SettingError(f"got {spec!r}; expected file.py:name or package.module:name")
    try:
        value: Any = _module(place)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, OSError, AttributeError) as error:
        raise SettingError(f"{spec!r} cannot be found: {error}") from error
    return value


def _module(place: str) -> Any:
    """A module by file or by name; a file's own folder can be imported from, as when Python runs it."""
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place).resolve()
    if str(path) in _loaded:
        return _loaded[str(path)]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    _loaded[str(path)] = module
    return module


_loaded: dict[str, Any] = {}


def _data(spec: str) -> Any:
    place, _, name = spec.rpartition(":")
    return _object(spec) if place and name.isidentifier() and not Path(spec).exists() else spec


def _rewards(specs: Sequence[str] | None) -> Any:
    return None if specs is None else [_object(spec) for spec in specs]


def _values(pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise SettingError(f"got --set {pair!r}; expected --set name=value")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def _mention_foreign(report: Report) -> None:
    """Says that another package is called as this command is."""
    try:
        foreign = importlib.metadata.distribution(_FOREIGN)
    except importlib.metadata.PackageNotFoundError:
        return
    report.warn(
        f"the package {_FOREIGN} {foreign.version} is installed too, and has a command of the same name; this is {_version()}, "
        "and python -m rllm_trainer always is"
    )


def _version() -> str:
    try:
        return f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{_DISTRIBUTION}, from a checkout"
