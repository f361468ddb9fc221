"""`combine`: several reward functions as one, whose score is the weighted sum of theirs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from reward_loop._util.bounded_tasks import together
from reward_loop._util.text import listing
from reward_loop.errors import FunctionLoadError, InvalidScoreError
from reward_loop.processes.child import callable_of
from reward_loop.scoring.results import normalise
from reward_loop.scoring.signature import Target, own_copy, resolve
from reward_loop.types import PART_KEYS, RESERVED_KEYS

_RESERVED = RESERVED_KEYS | PART_KEYS | {"score", "explanation"}


def combine(**parts: tuple[Any, float]) -> Any:
    """Return a reward function whose score is the weighted sum of the scores of several functions.

    The score of each part is logged under its name, and other keys that it returned as ``NAME/KEY``. If a part returns
    ``None``, the sample is *unscored*; if it raises, the sample has failed, or all parts are called again.

    Async parts run at the same time, after the sync ones. Each part gets its own copies of the arguments that it
    declares. For a gate, or parts for some data sources only, write a function that calls others.

    Args:
        parts: a reward function and its weight, by name. The function is anything that `ScoringFunction` accepts; set
            arguments of your own by `functools.partial`.

    Raises:
        FunctionLoadError: a part is not a reward function for one sample, is marked with `isolated` (mark the
            combination instead), or has ``post_process_scores``; or a weight or a name is invalid.

    Example::

        reward = combine(form=(has_tags, 0.2), truth=(is_right, 1))
    """
    if not parts or not _RESERVED.isdisjoint(parts):
        raise FunctionLoadError(f"combine: name each part, other than {listing(sorted(_RESERVED))}")
    targets: dict[str, tuple[Target, float]] = {}
    for name, part in parts.items():
        if not isinstance(part, tuple) or len(part) != 2 or not _is_number(part[1]):
            raise FunctionLoadError(f"combine: {name} must be a function and its weight: {name}=(function, 1.0)")
        target = resolve(part[0])
        if target.is_isolated:
            raise FunctionLoadError(
                f"combine: {name} is marked with isolated, which has no effect in it: mark the whole, "
                "isolated(combine(...))"
            )
        if target.has_post_process:
            raise FunctionLoadError(f"combine: post_process_scores of {name} would not be called: remove it")
        targets[name] = target, float(part[1])
    return (_AsyncParts if all(target.is_async for target, _ in targets.values()) else _Parts)(targets)


def _is_number(weight: Any) -> bool:
    return isinstance(weight, int | float) and math.isfinite(weight)


class _Parts:
    """A sync function: it returns the sum, or if there are async parts, an awaitable of it."""

    def __init__(self, parts: Mapping[str, tuple[Target, float]]) -> None:
        self._parts = parts
        self.has_async_parts = any(target.is_async for target, _ in parts.values())
        self._functions = {name: callable_of(target.make()) for name, (target, _) in parts.items()}
        self.__qualname__ = f"combine({', '.join(parts)})"
        self.__module__ = next(iter(self._functions.values())).__module__
        targets = [target for target, _ in parts.values()]
        requires = frozenset().union(*(target.requires for target in targets))
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty if name in requires else None
                )
                for name in sorted(frozenset().union(*(target.passes for target in targets)))
            ]
        )

    def __reduce__(self) -> Any:
        return type(self), (self._parts,)  # a worker process makes objects of its own

    def __call__(self, **given: Any) -> Any:
        returned = {name: self._call(name, given) for name, (target, _) in self._parts.items() if not target.is_async}
        if len(returned) < len(self._parts) or any(map(inspect.isawaitable, returned.values())):
            return self._awaited(returned, given)
        return self._sum(returned)

    def _call(self, name: str, given: Mapping[str, Any]) -> Any:
        target, _ = self._parts[name]
        # Copies of what comes from the sample, which another part may change.
        return self._functions[name](
            **{
                key: own_copy(given[key]) if key in target.from_sample else given[key]
                for key in target.passes & given.keys()
            }
        )

    async def _awaited(self, returned: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        async def value_of(name: str) -> Any:
            value = returned[name] if name in returned else self._call(name, given)
            return await value if inspect.isawaitable(value) else value

        values = await together(value_of(name) for name in self._parts)
        return self._sum(dict(zip(self._parts, values, strict=True)))

    def _sum(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        total: float | None = 0.0
        logged: dict[str, Any] = {}
        for name, (_, weight) in self._parts.items():
            try:
                score, info = normalise(returned[name])
            except InvalidScoreError as error:
                raise InvalidScoreError(f"the part {name} {error}") from error
            if dense := PART_KEYS & info.keys():
                raise InvalidScoreError(f"the part {name} returned {listing(dense)}, which only a whole function may")
            repeated = "score" if isinstance(returned[name], Mapping) else "acc"
            logged |= {name: score} | {f"{name}/{key}": value for key, value in info.items() if key != repeated}
            if score is None:
                why = str(info.get("explanation") or "no score").removeprefix("unscored: ")
                logged.setdefault("explanation", f"unscored: {name}: {why}")
                total = None
            elif total is not None:
                total += weight * score
        return {"score": total, **logged}


class _AsyncParts(_Parts):
    async def __call__(self, **given: Any) -> dict[str, Any]:
        return await self._awaited({}, given)
