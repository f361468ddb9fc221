"""verl's own scorers, without the ways in which one answer changes the scores of others.

- ``prime_math`` passes the model's answer to `eval`, directly and through sympy's parser
  (https://github.com/verl-project/verl/issues/7603). Here, an arithmetic expression is computed from its syntax tree,
  and sympy gets only expressions of numbers, symbols and sympy's own functions, without very large numbers. Another
  answer cannot be parsed: it is wrong unless its text is the right one.
- ``math_verify`` returns 0 for each call after a process of its pool has died
  (https://github.com/verl-project/verl/issues/8011). In an isolated call, it runs without a pool.

`guard` changes the modules as they are imported, so that it holds however a function reaches them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import operator
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from types import ModuleType, SimpleNamespace
from typing import Any

from reward_loop.processes import in_isolated_call

_GRADER = "verl.utils.reward_score.prime_math.grader"
_PRIME_MATH = "verl.utils.reward_score.prime_math"
_MATH_VERIFY = "verl.utils.reward_score.math_verify"

_MAX_BITS = 4096
"""The largest size of an integer that `_arithmetic` computes."""
_MAX_SYMPY_BITS = 2**14
"""The same for sympy, which computes powers such as 2**10000 in answers of olympiads."""
_MAX_ARGUMENT = 10_000
"""The largest number that sympy's functions get, but for those of `_FAST`: ``factorial`` of a larger one takes long."""
_FAST = frozenset(
    (*("Abs", "Max", "Min", "acos", "asin", "atan", "cbrt", "cos", "exp"), *("ln", "log", "root", "sin", "sqrt", "tan"))
)
_MAX_CHARACTERS = 2000

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_NODES = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List,
          ast.Compare, ast.keyword, ast.operator, ast.unaryop, ast.cmpop)  # fmt: skip
"""The parts of an expression that sympy may evaluate. Attributes, subscripts and comprehensions are missing."""
_NAMED = ("Symbol", "Function", "Integer", "Float", "Rational")
"""The functions to which sympy's parser passes a text. Every other function would parse it, and so evaluate it."""


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
    grader.eval = _arithmetic  # a name of the module comes before the builtin
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


_CHANGES: dict[str, Callable[[Any], None]] = {
    _GRADER: _guard_grader,
    _PRIME_MATH: _guard_prime_math,
    _MATH_VERIFY: _guard_math_verify,
}


def _arithmetic(text: Any) -> Any:
    """Return the value of an arithmetic expression, or a tuple or list of them, as `eval` does.

    Raises:
        ValueError: the text contains anything else, or its value would be very large.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise ValueError("not an arithmetic expression")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(operand))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            first, second = _number(left), _number(right)
            power = abs(second) if isinstance(op, ast.Pow) else 1
            if isinstance(first, int) and first.bit_length() * power > _MAX_BITS:
                raise ValueError("the number is too large")
            return _OPERATORS[type(op)](first, second)
    raise ValueError(f"not an arithmetic expression: {type(node).__name__}")


def _number(node: ast.AST) -> int | float:
    value = _value(node)
    if isinstance(value, int | float):
        return value
    raise ValueError("not a number")


def _parsed(expression: Any) -> Any:
    """Return an expression of sympy, from a text by `_parse`: sympy's functions would evaluate it."""
    return _parse(expression) if isinstance(expression, str) else expression


def _parse(text: str, *, transformations: Any = None) -> Any:
    """Return what sympy's `parse_expr` returns for an expression of numbers, symbols and functions of sympy.

    Raises:
        ValueError: the text contains anything else, or a number in it would be very large.
    """
    parser = importlib.import_module("sympy.parsing.sympy_parser")

    # Quotes and `__` are the ways from an expression to Python's objects.
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS or any(mark in text for mark in ("'", '"', "__")):
        raise ValueError("not an expression of numbers and symbols")
    names = _sympy_names()
    code = parser.stringify_expr(text, {}, names, transformations or parser.standard_transformations)
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
    _size(tree.body)
    return parser.eval_expr(code, {}, names)


def _size(node: ast.AST) -> float | None:
    """Return an upper bound of the bits of numerator and denominator of a number; ``None`` if there are symbols in it.

    Raises:
        ValueError: sympy would compute a very large number, or for a long time.
    """
    match node:
        case ast.Constant(value=value):
            return _bits(value)
        case ast.UnaryOp(operand=operand):
            return _size(operand)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            base, exponent = _size(left), _size(right)
            if exponent is None:
                return None
            times = 2.0 ** min(exponent, 64)
            if round(times) > _MAX_ARGUMENT or (base or 0.0) * times > _MAX_SYMPY_BITS:
                raise ValueError("a power is too large")
            return None if base is None else base * times
        case ast.BinOp(left=left, right=right):
            first, second = _size(left), _size(right)
            return None if first is None or second is None else first + second + 1
        case ast.Call(func=ast.Name(id=name), args=arguments):
            sizes = [_size(argument) for argument in arguments]
            known = [size for size in sizes if size is not None]
            if name in _NAMED:
                return None if name in ("Symbol", "Function") or len(known) < len(sizes) else sum(known)
            most = max(known, default=0.0)
            if most > (_MAX_SYMPY_BITS if name in _FAST else math.log2(_MAX_ARGUMENT)):
                raise ValueError(f"an argument of {name} is too large")
            if len(known) < len(sizes):
                return None
            # As for n! with its n log2(n) bits.
            return most if name in _FAST else most * 2.0**most
    for child in ast.iter_child_nodes(node):
        _size(child)
    return None


def _bits(value: Any) -> float | None:
    try:
        number = Decimal(str(value))
    except InvalidOperation:  # the name of a symbol
        return None
    if not number.is_finite() or not number:
        return 0.0
    # The power of ten of its first digit: sympy also computes that of 1e-1000000000.
    if abs(number.adjusted()) * _BITS_OF_DIGIT > _MAX_SYMPY_BITS:
        raise ValueError("a number is too large")
    return max(0.0, float(number.log10()) * _BITS_OF_DIGIT)


_BITS_OF_DIGIT = math.log2(10)


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
