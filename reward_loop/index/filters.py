"""Converts the parameters of a request to the filter and the order of samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError

NUMBERS = (
    "step",
    "time",
    "score",
    "reward",
    "response_length",
    "total_s",
    "judge_s",
    "judges",
    "attempts",
    "prompt_tokens",
    "completion_tokens",
)
TEXTS = ("id", "uid", "group", "outcome", "error", "data_source", "function")
FLAGS = ("validate", "masked")

MAX_WHOLE = 2**53
"""Up to this number, floats are exact for whole numbers."""

_COMPONENT = "components."

_EQUAL = ("step", "validate", "group", "outcome", "data_source")
"""The parameters that compare a field with a value."""

_BOUNDS = {"min": ">=", "max": "<="}


def component(name: str) -> str:
    """Return SQL for the JSON value of a component."""
    # A JSON pointer, not a path: names of components contain dots and slashes.
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")
    return f"json_extract(components, {_quote(pointer)})"


def number_of(value: str) -> str:
    """Return SQL for the number that a JSON value is; null for values of other types. True counts 1."""
    text = f"{value}::VARCHAR"
    return f"CASE {text} WHEN 'true' THEN 1.0 WHEN 'false' THEN 0.0 ELSE try_cast({text} AS DOUBLE) END"


def value_of(name: str) -> str:
    """Return SQL for the value of a field; of a component, for its text.

    Raises:
        ConfigError: the field is unknown.
    """
    return f'"{name}"' if (json := _json_of(name)) is None else f"{json}->>'$'"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _json_of(name: str, known: Collection[str] = (*NUMBERS, *TEXTS, *FLAGS)) -> str | None:
    """Return SQL for the JSON value of a field that is a component; ``None`` for another one of the known fields."""
    if name in known:
        return None
    if name.startswith(_COMPONENT) and len(name) > len(_COMPONENT):
        return component(name.removeprefix(_COMPONENT))
    raise ConfigError(
        f"Unknown field {name!r}{did_you_mean(name, known) or '.'} Fields: {listing(known)}, components.NAME"
    )


@dataclass(frozen=True)
class SampleFilter:
    """Conditions on samples, as SQL with parameters."""

    conditions: Sequence[str] = ()
    parameters: Sequence[Any] = ()

    @property
    def where(self) -> str:
        """The conditions as one expression."""
        return " AND ".join(f"({condition})" for condition in self.conditions) or "true"

    def also(self, condition: str, *parameters: Any) -> SampleFilter:
        """Return a filter with one more condition."""
        return SampleFilter((*self.conditions, condition), (*self.parameters, *parameters))

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> SampleFilter:
        """Return the filter that the parameters of a request describe; `text` is not among its conditions.

        Raises:
            ConfigError: a value does not fit its field, or the field is unknown.
        """
        found = cls()
        for name, value in query.items():
            if name.startswith("where."):
                found = found._equal(name.removeprefix("where."), value)
            elif value and name in _EQUAL:
                found = found._equal(name, value)
            elif value and name in ("min_reward", "max_reward"):
                found = found._bounded(name, "reward", value)
            elif value and name.startswith(("min.", "max.")):
                found = found._bounded(name, name[4:], value)
        return found

    def _bounded(self, parameter: str, name: str, value: str) -> SampleFilter:
        json = _json_of(name, NUMBERS)
        compared = f'"{name}"' if json is None else number_of(json)
        return self.also(f"{compared} {_BOUNDS[parameter[:3]]} ?", _number(parameter, value))

    def _equal(self, name: str, value: str) -> SampleFilter:
        if (json := _json_of(name)) is not None:
            number = _try_number(value)
            if number is None:
                return self.also(f"{json}->>'$' = ?", value)
            return self.also(f"coalesce({number_of(json)} = ?, false) OR {json}->>'$' = ?", number, value)
        if value == "null" and name not in TEXTS:
            return self.also(f'"{name}" IS NULL')
        if name in FLAGS:
            if value not in ("true", "false", "1", "0"):
                raise ConfigError(f"{name} must be true or false, not {value!r}")
            return self.also(f'"{name}" = ?', value in ("true", "1"))
        return self.also(f'"{name}" = ?', _number(name, value) if name in NUMBERS else value)


def _try_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _number(name: str, value: str) -> float:
    number = _try_number(value)
    if number is None:
        raise ConfigError(f"{name} must be a number, not {value!r}")
    # Compared with a whole number, a column of whole numbers is not converted, so DuckDB skips row groups.
    return int(number) if number.is_integer() and abs(number) <= MAX_WHOLE else number


@dataclass(frozen=True)
class SortOrder:
    """A total order of samples: by a field if one is given, then by step, validation, group, time and ID.

    Samples without a value of the field are last.
    """

    keys: Sequence[tuple[str, bool]] = field(default_factory=tuple)
    """SQL of each key, and whether it descends. No key is null."""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> SortOrder:
        """Return the order that the parameters ``sort`` and ``order`` of a request describe.

        Raises:
            ConfigError: the field is unknown, or `order` is neither ``asc`` nor ``desc``.
        """
        name, order = query.get("sort") or "", query.get("order") or "asc"
        if order not in ("asc", "desc"):
            raise ConfigError(f"order must be asc or desc, not {order!r}")
        descends = order == "desc"
        keys: list[tuple[str, bool]] = []
        if name:
            if (json := _json_of(name)) is not None:
                number, text = number_of(json), f"{json}->>'$'"
                keys += [(f"{text} IS NULL", False), (f"{number} IS NULL", descends)]
                keys += [(f"coalesce({number}, 0)", descends), (f"coalesce({text}, '')", descends)]
            else:
                default = "''" if name in TEXTS else "0" if name in NUMBERS else "false"
                # Without nulls: in SQL, no comparison with null is true, and `beyond` compares the keys.
                keys += [(f'"{name}" IS NULL', False), (f'coalesce("{name}", {default})', descends)]
        keys += [
            # The largest BIGINT: samples without a step come last.
            ("coalesce(step, 9223372036854775807)", False),
            ("validate", False),
            ("coalesce(\"group\", '')", False),
        ]
        keys += [("time", False), ("coalesce(id, '')", False)]
        return cls(keys)

    def sql(self, reverse: bool = False) -> str:
        """Return the keys for ``ORDER BY``."""
        return ", ".join(f"{key} {'DESC' if descends != reverse else 'ASC'}" for key, descends in self.keys)

    def values(self) -> str:
        """Return the keys for ``SELECT``."""
        return ", ".join(key for key, _ in self.keys)

    def beyond(self, values: Sequence[Any], reverse: bool = False) -> SampleFilter:
        """Return the filter for the samples after one with these values of the keys; before it with `reverse`."""
        condition, parameters = "false", list[Any]()
        for (key, descends), value in reversed(list(zip(self.keys, values, strict=True))):
            condition = f"{key} {'<' if descends != reverse else '>'} ? OR ({key} = ? AND ({condition}))"
            parameters = [value, value, *parameters]
        return SampleFilter((condition,), parameters)
