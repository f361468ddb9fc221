"""A digest of a function's code and state, to recognise the same function in a later run."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import orjson

from reward_loop.scoring.load import source_hash

__all__ = ["IdentityError", "identity_of"]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(...)})


class IdentityError(Exception):
    """The state of an object cannot be serialised, for instance because it contains a lock. The message says where."""


def identity_of(function: Any) -> bytes:
    """Return a digest of a function that is stable across runs and changes with the function's code or state.

    The digest covers the source file and the bytecode of the function, the arguments of a `functools.partial`, and the
    attributes of the object for a bound method. For a function that cannot be found by name in its module, it also
    covers captured variables and defaults. Objects are decomposed as by `pickle`; an object with a ``name_or_path``,
    such as a tokenizer, is represented by that name. Module globals are not covered.

    Raises:
        IdentityError: some part of the function's state cannot be serialised.
    """
    try:
        return _Writer().write(function, "it").encode()
    except RecursionError as error:
        raise IdentityError(f"what it holds is nested too deeply ({error})") from error


class _Writer:
    """Converts an object to a string: the ``repr`` of a plain value, otherwise a digest of the object's parts."""

    def __init__(self) -> None:
        self._open: list[int] = []
        """The ids of the objects being written, outermost first: detects recursive functions and reference cycles."""
        self._written: dict[int, tuple[Any, str]] = {}
        """id -> (object, its string). Holding the object prevents reuse of its id."""

    def write(self, value: Any, where: str) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        key = id(value)
        if key in self._written:
            return self._written[key][1]
        if key in self._open:
            return f"above {self._open.index(key)}"
        self._open.append(key)
        parts = orjson.dumps([type(value).__qualname__, *self._parts(value, where)])
        self._open.pop()
        written = f"#{hashlib.sha256(parts).hexdigest()}"
        self._written[key] = value, written
        return written

    def _parts(self, value: Any, where: str) -> list[Any]:
        kind = type(value)
        if kind in (list, tuple):
            return [self.write(item, where) for item in value]
        if kind in (set, frozenset):
            return sorted(self.write(item, where) for item in value)
        if kind is dict:
            return sorted(
                [self.write(key, where), self.write(item, f"{where}[{key!r}]")] for key, item in value.items()
            )
        if kind is ModuleType:
            return [value.__name__]
        if kind is functools.partial:
            bound = {**dict(enumerate(value.args)), **value.keywords}
            return [self.write(value.func, where), self.write(bound, f"partial of {where}")]
        if kind is MethodType:
            return [self.write(value.__func__, where), self.write(value.__self__, "its object")]
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            known = [value.__module__, value.__qualname__, source_hash(value), *self._code(value)]
            if _is_found(value):
                return known
            if isinstance(value, FunctionType):
                return known + self._held(value)
            if isinstance(value, type):
                raise IdentityError(f"{where} is the class {value.__qualname__}, which its module does not have")
        if isinstance(name := getattr(value, "name_or_path", None), str):
            return [name]
        return self._reduced(value, where)

    def _code(self, function: Any) -> list[Any]:
        code = getattr(function, "__code__", None)
        return [] if code is None else self._of_code(code)

    def _of_code(self, code: CodeType) -> list[Any]:
        constants = [
            self._of_code(constant) if isinstance(constant, CodeType) else self.write(constant, "a constant")
            for constant in code.co_consts
        ]
        return [code.co_qualname, code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]

    def _held(self, function: FunctionType) -> list[Any]:
        name = function.__qualname__
        held = {f"a default of {name}": (function.__defaults__, function.__kwdefaults__)}
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                held[f"{variable!r} in {name}"] = cell.cell_contents
        return [[where, self.write(value, where)] for where, value in held.items()]

    def _reduced(self, value: Any, where: str) -> list[Any]:
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:
            raise IdentityError(f"{where} is a {kind.__qualname__} ({error})") from error
        if isinstance(reduced, str):  # pickled by name, such as a `functools.lru_cache` wrapper
            wrapped = self.write(getattr(value, "__wrapped__", None), where)
            return [getattr(value, "__module__", None), reduced, source_hash(value), wrapped]
        make, arguments, state, *items = (*reduced, None, None, None)[:5]
        written: list[Any] = [self.write(make, where), self.write(arguments, where)]
        if isinstance(state, dict):
            written += sorted([key, self.write(item, f"{where}.{key}")] for key, item in state.items())
        else:
            written.append(self.write(state, where))
        return written + [self.write(list(some), where) for some in items if some is not None]


def _is_found(value: Any) -> bool:
    """Whether the module's attribute of this name is the object itself; the module's file then defines it fully."""
    found: Any = sys.modules.get(value.__module__ or "builtins")
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
