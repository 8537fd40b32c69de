"""Parses the string form of a pattern, such as `causal & window(256)`: names, calls, numbers, & | ~ and nothing else.

Python's grammar is used, restricted to these; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from typing import Any

from regard.errors import UserError
from regard.schema import find, make

from .algebra import MAX_INT, Pattern

MAX_DEPTH = 150  # of nested brackets and operators
INSTEAD = {ast.And: ("and", "&"), ast.Or: ("or", "|"), ast.Not: ("not", "~")}


def parse(text: str) -> Pattern:
    """Return the pattern that `text` describes; raise a UserError that says what is wrong with it otherwise."""
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    if not text.strip():
        raise UserError("a pattern is empty: write for example 'causal' or 'causal & window(256)'")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _Reader(text.strip()).pattern(tree)
    except UserError as error:
        raise UserError(f"in pattern '{shown}': {error}") from error.__cause__
    except SyntaxError as error:
        where = f" at column {error.offset}" if error.offset else ""
        raise UserError(
            f"pattern '{shown}' cannot be read{where}: write names, calls, numbers and & | ~, such as "
            "causal & (window(256) | first(4))"
        ) from None
    except (ValueError, RecursionError, MemoryError):  # odd characters; far too many brackets
        raise UserError(f"pattern {shown!r} cannot be read: write names, calls, numbers and & | ~") from None


class _Reader:
    def __init__(self, text: str):
        self.text = text

    def pattern(self, node: ast.expr, depth: int = 0) -> Pattern:
        if depth > MAX_DEPTH:
            raise UserError(f"more than {MAX_DEPTH} operators inside each other")
        match node:
            case ast.BinOp(op=ast.BitAnd()):
                return self.pattern(node.left, depth + 1) & self.pattern(node.right, depth + 1)
            case ast.BinOp(op=ast.BitOr()):
                return self.pattern(node.left, depth + 1) | self.pattern(node.right, depth + 1)
            case ast.UnaryOp(op=ast.Invert()):
                return ~self.pattern(node.operand, depth + 1)
            case ast.BoolOp(op=op) | ast.UnaryOp(op=ast.Not() as op):
                word, sign = INSTEAD[type(op)]
                raise UserError(f"write '{sign}' instead of '{word}'")
            case ast.Name():
                return _call(node.id, [], {})
            case ast.Call(func=ast.Name(id=name)):
                if any(w.arg is None for w in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                    raise UserError(f"stars are not understood in '{self.words(node)}'")
                given = [self.value(argument, depth + 1) for argument in node.args]
                named = {str(word.arg): self.value(word.value, depth + 1) for word in node.keywords}
                return _call(name, given, named)
        hint = "put quotes around a file name" if isinstance(node, ast.Attribute) else "write names, calls and & | ~"
        raise UserError(f"'{self.words(node)}' is not a pattern; {hint}")

    def value(self, node: ast.expr, depth: int) -> Any:
        """An argument: a number, a string, None, a tuple of those, or another pattern."""
        match node:
            case ast.Constant(value=int() | float() | str() | None):
                return _check_size(node.value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -_check_size(number)
            case ast.Tuple() | ast.List() if depth <= MAX_DEPTH:
                return tuple(self.value(item, depth + 1) for item in node.elts)
        return self.pattern(node, depth)

    def words(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or "this"


def _check_size(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise UserError("it holds a number that is too large")
    return value


def _call(name: str, given: list, named: dict[str, Any]) -> Pattern:
    kind = find(Pattern, name)
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UserError(f"the class of pattern '{name}' must be a @dataclass(frozen=True)")
    order = [f.name for f in fields(kind)]
    if kind.variadic:
        if named:
            raise UserError(f"{name} takes patterns without names, not '{next(iter(named))}'")
        return make(kind, {order[0]: tuple(given)}, {}, name)
    if len(given) > len(order):
        takes = f"at most {len(order)} ({', '.join(order)})" if order else "no arguments"
        raise UserError(f"{name} takes {takes}, not {len(given)}")
    for key in order[: len(given)]:
        if key in named:
            raise UserError(f"{name} is given '{key}' twice")
    return make(kind, dict(zip(order, given, strict=False)) | named, {}, name)
