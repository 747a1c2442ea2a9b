"""The table of settings in; for each, the sentence that stands under its field, out."""

from __future__ import annotations

import ast
import inspect
import itertools

from rllm_trainer import config

__all__ = ["setting_docs"]


def setting_docs() -> dict[str, str]:
    """Setting -> what it does, in one line, in the order of the table."""
    tree = ast.parse(inspect.getsource(config))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config.Settings.__name__]
    found: dict[str, str] = {}
    for pair in itertools.pairwise(body):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found
