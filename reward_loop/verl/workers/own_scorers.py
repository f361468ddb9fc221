"""verl's own scorers, without the ways in which one answer changes the scores of others.

- ``prime_math`` passes the model's answer to `eval`, directly and through sympy's parser
  (https://github.com/verl-project/verl/issues/7603). Here, sympy gets only expressions of numbers, symbols and sympy's
  own functions, without very large numbers, and computes what `eval` would, of numbers alone. Another answer cannot be
  parsed: it is wrong unless its text is the right one.
- ``math_verify`` returns 0 for each call after a process of its pool has died
  (https://github.com/verl-project/verl/issues/8011). In an isolated call, it runs without a pool.
- ``gsm8k`` and ``math_dapo`` read the last 300 characters of a response
  (https://github.com/verl-project/verl/issues/7274, 7440): a right answer with more text behind it is wrong. Here, they
  read the whole response.

`guard` changes the modules as they are imported, so that it holds however a function reaches them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from reward_loop.processes import in_isolated_call

_SCORERS = "verl.utils.reward_score"
_PRIME_MATH = f"{_SCORERS}.prime_math"
_GRADER = f"{_PRIME_MATH}.grader"
_MATH_VERIFY = f"{_SCORERS}.math_verify"

_MAX_DIGITS, _MAX_BASE, _MAX_EXPONENT, _MAX_ARGUMENT = 1000, 20, 5, 4
"""The most digits of a number that sympy gets: anywhere, in the base and exponent of a power, and in the argument of
a function but those of `_FAST`."""
_FAST = frozenset(
    (*("Abs", "Max", "Min", "acos", "asin", "atan", "cbrt", "cos", "exp"), *("ln", "log", "root", "sin", "sqrt", "tan"))
)
_MAX_CHARACTERS = 2000

_NODES = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List,
          ast.Compare, ast.keyword, ast.operator, ast.unaryop, ast.cmpop)  # fmt: skip
"""The parts of an expression that sympy may evaluate. Attributes, subscripts and comprehensions are missing."""
_NAMED = ("Symbol", "Function", "Integer", "Float", "Rational")
"""The functions to which sympy's parser passes a text. Every other function would parse it, and so evaluate it."""
_NUMBERS = ("Integer", "Float", "Rational")
"""The functions of an expression of numbers alone."""


def guard() -> None:
    """Guard verl's scorers in this process: those that are imported now, and the others when they are imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # First, because the next finder would load the modules unchanged.
    sys.meta_path.insert(0, _Finder())
    for name, change in _CHANGES.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds verl's scorers, and changes each after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                _CHANGES[fullname](module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _guard_grader(grader: Any) -> None:
    simplify, number = grader.simplify, grader.N
    grader.eval = partial(_parse, names=_NUMBERS)  # a name of the module comes before the builtin
    grader.parse_expr = _parse
    grader.simplify = lambda expression, *args, **options: simplify(_parsed(expression), *args, **options)
    grader.N = lambda expression, *args, **options: number(_parsed(expression), *args, **options)


def _guard_prime_math(prime_math: Any) -> None:
    parser = prime_math.sympy_parser
    prime_math.sympy_parser = SimpleNamespace(**{**vars(parser), "parse_expr": _parse})


def _guard_math_verify(math_verify: Any) -> None:
    in_pool = math_verify.compute_score

    def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
        if not in_isolated_call():
            score: float = in_pool(model_output, ground_truth, timeout_score, timeout)
            return score
        try:
            # In this main thread, where its alarms work, and no process of a pool can have died.
            score = math_verify._verify_in_subprocess("\\boxed{" + ground_truth + "}", model_output)
        except math_verify.TimeoutException:
            return timeout_score
        return score

    math_verify.compute_score = compute_score


def _unclip_gsm8k(gsm8k: Any) -> None:
    gsm8k._SOLUTION_CLIP_CHARS = sys.maxsize


_WINDOW = 300
"""The last characters of a response, which verl's `math_dapo` reads."""


def _unclip_math_dapo(math_dapo: Any) -> None:
    def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Any = None) -> tuple[int, str | None]:
        boxed = math_dapo.last_boxed_only_string(pred)
        answer = None if boxed is None else math_dapo.remove_boxed(boxed)
        return 1 if answer == gt else -1, answer

    def compute_score(
        solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
    ) -> dict[str, Any]:
        text = solution_str
        if not strict_box_verify and (boxed := text.rfind("\\boxed{")) >= 0:
            # verl prefers an `Answer:` to a box that stands behind it, which is right only for a near one: a reasoning
            # says `Answer:` anywhere. Not before the line of the box, which may be `Answer: \boxed{5}`.
            text = text[max(0, min(text.rfind("\n", 0, boxed) + 1, len(text) - _WINDOW)) :]
        correct, pred = math_dapo.verify(text, ground_truth, strict_box_verify, pause_tokens_index)
        return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}

    math_dapo.is_correct_strict_box = is_correct_strict_box
    math_dapo.compute_score = compute_score


_CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_SCORERS}.gsm8k": _unclip_gsm8k,
    f"{_SCORERS}.math_dapo": _unclip_math_dapo,
    _GRADER: _guard_grader,
    _PRIME_MATH: _guard_prime_math,
    _MATH_VERIFY: _guard_math_verify,
}


def _parsed(expression: Any) -> Any:
    """Return an expression of sympy, from a text by `_parse`: sympy's functions would evaluate it."""
    return _parse(expression) if isinstance(expression, str) else expression


def _parse(text: str, *, transformations: Any = None, names: Collection[str] | None = None) -> Any:
    """Return what sympy's `parse_expr` returns for an expression of numbers, symbols and functions of sympy.

    ``names`` are those that it may contain, by default all.

    Raises:
        ValueError: the text contains anything else, or a number in it would be very large.
    """
    parser = importlib.import_module("sympy.parsing.sympy_parser")

    # Quotes and `__` are the ways from an expression to Python's objects.
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS or any(mark in text for mark in ("'", '"', "__")):
        raise ValueError("not an expression of numbers and symbols")
    values = _sympy_names()
    names = values if names is None else names
    code = parser.stringify_expr(text.strip(), {}, values, transformations or parser.standard_transformations)
    tree = ast.parse(code, mode="eval")
    texts = 0
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Name) and node.id not in names):
            raise ValueError(f"not an expression of numbers and symbols: {type(node).__name__}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMED:
            # A text is allowed here. The walk also counts it as a node, so that only texts elsewhere are left.
            texts -= sum(_is_text(argument) for argument in node.args)
        texts += _is_text(node)
    if texts:
        raise ValueError("not an expression of numbers and symbols: it contains a text")
    # sympy computes powers of numbers at once, and Python holds its global lock meanwhile: no deadline could end that.
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                _check_small(right, _MAX_EXPONENT)
                if not any(isinstance(part, ast.Name) and part.id == "Symbol" for part in ast.walk(left)):
                    _check_small(left, _MAX_BASE)
            case ast.Call(args=arguments) if _is_slow(node):
                for argument in arguments:
                    _check_small(argument, _MAX_ARGUMENT)
            case ast.Constant(value=value) if _digits(value) > _MAX_DIGITS:
                raise ValueError("a number is too large")
    return parser.eval_expr(code, {}, values)


def _check_small(node: ast.AST, digits: int) -> None:
    """Raise `ValueError` if there is a larger number in an expression, or a power or function that may become one."""
    for part in ast.walk(node):
        is_power = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow)
        if is_power or _is_slow(part) or (isinstance(part, ast.Constant) and _digits(part.value) > digits):
            raise ValueError("a number is too large, or may become so")


def _is_slow(node: ast.AST) -> bool:
    """Return whether an expression is the call of a function such as ``factorial``."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) not in (*_NAMED, *_FAST)


def _digits(value: Any) -> int:
    """Return the digits of a number before or behind its point; 0 for the name of a symbol."""
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return 0
    return abs(number.adjusted()) + 1 if number.is_finite() and number else 0


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _sympy_names() -> dict[str, Any]:
    """Return sympy's classes of expressions, its constants and its mathematical functions, by name."""
    sympy = importlib.import_module("sympy")

    def is_mathematical(value: Any) -> bool:
        return isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))

    names = {name: value for name, value in vars(sympy).items() if is_mathematical(value)}
    functions = ("sqrt", "root", "cbrt", "real_root", "Matrix")
    # An empty `__builtins__`: `eval`, which sympy calls with these names, would add Python's.
    return {**names, **{name: getattr(sympy, name) for name in functions}, "__builtins__": {}}
