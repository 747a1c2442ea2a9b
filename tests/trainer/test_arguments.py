"""Rows fill an app's parameters by name."""

import functools
from collections.abc import Mapping
from typing import Any, TypedDict

import pytest

from rllm_trainer.exceptions import AppArgumentsError
from rllm_trainer.rollout.arguments import Arguments, Binder, app_name

ROW = {"question": "2+2", "answer": 4}


def bound(app, row):
    return Binder(app).bind(row)


def test_columns_fill_parameters_of_their_name():
    """A parameter gets the column of its name; other columns stay out."""

    def app(question): ...

    assert bound(app, ROW) == Arguments(kwargs={"question": "2+2"})
    assert Binder(app).unused(ROW) == ["answer"]


def test_defaults_stay():
    """A parameter with a default and no column keeps it; with a column it is filled."""

    def app(question, style="short", answer=0): ...

    assert bound(app, ROW) == Arguments(kwargs={"question": "2+2", "answer": 4})


def test_var_keywords_take_the_remaining_columns():
    """``**kwargs`` gets what no parameter took."""

    def app(question, **rest): ...

    assert bound(app, ROW) == Arguments(kwargs={"question": "2+2", "answer": 4})
    assert Binder(app).unused(ROW) == []


def test_positional_only_parameters():
    """Positional-only parameters are filled by name and passed by position."""

    def app(question, /, answer): ...

    assert bound(app, ROW) == Arguments(args=("2+2",), kwargs={"answer": 4})


def test_whole_row_into_a_parameter_named_row():
    """A single required parameter named ``row`` gets the whole row."""

    def app(row, verbose=False): ...

    assert bound(app, ROW) == Arguments(kwargs={"row": ROW})
    assert Binder(app).unused(ROW) == []


def test_a_column_named_row_wins_over_the_whole_row():
    """By name comes first, for ``row`` too."""

    def app(row): ...

    assert bound(app, {"row": 1, "x": 2}) == Arguments(kwargs={"row": 1})


class Sum(TypedDict):
    question: str
    answer: int


def _dict(task: dict): ...
def _generic(task: dict[str, Any]): ...
def _mapping(task: Mapping[str, Any]): ...
def _typed(task: Sum): ...
def _text(task: "dict[str, Unknown]"): ...  # noqa: F821


@pytest.mark.parametrize("app", [_dict, _generic, _mapping, _typed, _text])
def test_whole_row_into_a_parameter_annotated_as_a_mapping(app):
    """A single required parameter annotated as a mapping gets the whole row."""
    assert bound(app, ROW) == Arguments(kwargs={"task": ROW})


def test_the_whole_row_never_goes_into_another_parameter():
    """A single parameter of another name and type without its column is an error that lists both sides."""

    def app(prompt): ...

    with pytest.raises(AppArgumentsError, match="needs the parameter 'prompt', and the row has no such column") as caught:
        bound(app, ROW)
    assert "its required parameters are prompt; the row's columns are question, answer" in str(caught.value)


def test_rows_that_are_not_mappings_fill_the_one_parameter():
    """A string goes into the single required parameter, or the first one that has a default."""

    def app(prompt, style="short"): ...
    def optional(prompt="x"): ...
    def star(*parts): ...

    assert bound(app, "hi") == Arguments(kwargs={"prompt": "hi"})
    assert bound(optional, "hi") == Arguments(kwargs={"prompt": "hi"})
    assert bound(star, "hi") == Arguments(args=("hi",))


def test_a_string_cannot_fill_two_parameters():
    """A row of one value and an app with two required parameters do not go together."""

    def app(question, answer): ...

    with pytest.raises(AppArgumentsError, match=r"has 2 required parameters \(question, answer\), and a row is one str"):
        bound(app, "hi")


def test_methods_partials_and_callable_objects():
    """Whatever can be called is bound by what is left of its signature."""

    class App:
        def run(self, question): ...
        def __call__(self, answer): ...

    def app(question, answer): ...

    assert bound(App().run, ROW) == Arguments(kwargs={"question": "2+2"})
    assert bound(App(), ROW) == Arguments(kwargs={"answer": 4})
    assert bound(functools.partial(app, answer=1), {"question": "a"}) == Arguments(kwargs={"question": "a"})
    assert app_name(functools.partial(app)).endswith("<locals>.app")


def test_an_app_without_parameters_is_called_without():
    """An app that takes nothing is called with nothing."""
    assert bound(lambda: None, ROW) == Arguments()


def test_what_is_not_callable_is_refused():
    """A value is no app."""
    with pytest.raises(AppArgumentsError, match="the app is a int; expected a function"):
        Binder(3)
