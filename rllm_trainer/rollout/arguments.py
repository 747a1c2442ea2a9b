"""A row and the app's signature in, the call's arguments out.

Columns fill parameters of their name; further columns go into ``**kwargs`` if there is one, and are left out otherwise; defaults
stay. The whole row goes in only where the one required parameter is named ``row`` or annotated as a mapping, or where rows are not
mappings. A required parameter without a column is an error that lists both sides.
"""

from __future__ import annotations

import collections.abc
import copy
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from rllm_trainer.exceptions import AppArgumentsError

__all__ = ["Arguments", "Binder", "app_name", "own_row"]

_MAPPINGS = (dict, Mapping, collections.abc.MutableMapping)
_WHOLE_ROW = "row"
_ONE_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What the app is called with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


def app_name(app: Callable[..., Any]) -> str:
    """What messages call it: its qualified name, a partial's function's, or its class's."""
    inner = getattr(app, "func", app)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def own_row(row: Any) -> Any:
    """A copy that an app may change, such as a list of messages that it appends to; the row itself where it cannot be copied."""
    try:
        return copy.deepcopy(row)
    except Exception:  # noqa: BLE001 - whatever a value's own copying raises
        return row


class Binder:
    """The parameters of one app, read once.

    Raises ``AppArgumentsError`` where it has no readable signature.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.name = app_name(app)
        parameters = _parameters(app, self.name)
        self._single = [p for p in parameters if p.kind in _ONE_BY_NAME]
        self._required = [p for p in self._single if p.default is inspect.Parameter.empty]
        self._extra = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)

    def bind(self, row: Any) -> Arguments:
        """The arguments for one row. Raises ``AppArgumentsError`` where it does not fill the required parameters."""
        if not isinstance(row, Mapping):
            return self._one(row)
        columns = {str(key): value for key, value in cast("Mapping[Any, Any]", row).items()}
        whole = self._whole_row_parameter(columns)
        if whole is not None:
            return _as_call({whole.name: dict(columns)}, self._single)
        missing = [p.name for p in self._required if p.name not in columns]
        if missing:
            raise AppArgumentsError(self._refusal(missing, columns))
        taken = {p.name: columns[p.name] for p in self._single if p.name in columns}
        call = _as_call(taken, self._single)
        rest = {name: value for name, value in columns.items() if name not in taken} if self._extra else {}
        return Arguments(args=call.args, kwargs=call.kwargs | rest)

    def unused(self, row: Any) -> list[str]:
        """Columns of this row that the app is not given."""
        if not isinstance(row, Mapping) or self._extra:
            return []
        columns = {str(key): value for key, value in cast("Mapping[Any, Any]", row).items()}
        if self._whole_row_parameter(columns) is not None:
            return []
        names = {p.name for p in self._single}
        return [name for name in columns if name not in names]

    def _whole_row_parameter(self, columns: Mapping[str, Any]) -> inspect.Parameter | None:
        if len(self._required) != 1:
            return None
        (only,) = self._required
        if only.name in columns or not (only.name == _WHOLE_ROW or _is_mapping(only.annotation)):
            return None
        return only

    def _one(self, row: Any) -> Arguments:
        if len(self._required) > 1:
            names = ", ".join(p.name for p in self._required)
            raise AppArgumentsError(
                f"{self.name} has {len(self._required)} required parameters ({names}), and a row is one {type(row).__name__}; "
                "give rows as dicts with these columns"
            )
        if self._single:
            return _as_call({(self._required or self._single)[0].name: row}, self._single)
        return Arguments(args=(row,)) if self._star else Arguments()

    def _refusal(self, missing: list[str], columns: Mapping[str, Any]) -> str:
        required = ", ".join(p.name for p in self._required)
        return (
            f"{self.name} needs {_listed(missing)}, and the row has no such column; its required parameters are {required}; "
            f"the row's columns are {', '.join(columns) or 'none'}; rename one side, give the parameter a default, "
            f"or take the whole row in one parameter named {_WHOLE_ROW}"
        )


def _parameters(app: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    if not callable(app):
        raise AppArgumentsError(f"the app is a {type(cast('object', app)).__name__}; expected a function or another callable")
    try:
        return list(inspect.signature(app, eval_str=True).parameters.values())
    except (NameError, SyntaxError, AttributeError, TypeError):
        pass
    except ValueError as error:
        raise AppArgumentsError(f"the parameters of {name} cannot be read ({error}); wrap it in a function of your own") from None
    return list(inspect.signature(app).parameters.values())


def _is_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.split("[")[0].rpartition(".")[2] in {"dict", "Dict", "Mapping", "MutableMapping"}
    kind = typing.get_origin(annotation) or annotation
    return kind in _MAPPINGS or typing.is_typeddict(kind)


def _as_call(taken: Mapping[str, Any], parameters: list[inspect.Parameter]) -> Arguments:
    args: list[Any] = []
    kwargs = dict(taken)
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY or parameter.name not in kwargs:
            break
        args.append(kwargs.pop(parameter.name))
    return Arguments(args=tuple(args), kwargs=kwargs)


def _listed(names: list[str]) -> str:
    return f"the parameter {names[0]!r}" if len(names) == 1 else "the parameters " + ", ".join(repr(name) for name in names)
