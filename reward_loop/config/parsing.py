"""The base class of all option groups, and `parse`, which checks the options of a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError

__all__ = ["Config", "parse"]

C = TypeVar("C", bound=BaseModel)


class Config(BaseModel):
    """The base class of all groups of options. A group is immutable, and an unknown key is an error."""

    # Deferred: a process builds the validators of the groups that it uses, when it uses them.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


def parse(cls: type[C], options: Mapping[str, Any] | C | None, where: str | Callable[[str], str]) -> C:
    """Return an option group made from a mapping (a dict, or a Hydra config); from ``None``, the defaults.

    Args:
        cls: the group.
        options: its options; an instance is returned as it is, ``None`` gives the defaults.
        where: the group's name in messages, such as ``reward_loop``; or a function that returns an option's name in
            messages from its dotted path in the group.

    Raises:
        ConfigError: an option is unknown, missing or malformed; the message names it.
    """
    if isinstance(options, cls):
        return options
    if options is not None and not isinstance(options, Mapping):
        group = where if isinstance(where, str) else cls.__name__
        raise ConfigError(f"{group}: expected a mapping of options, got {shorten(options)}")
    try:
        return cls.model_validate(_plain(options or {}))
    except ValidationError as error:
        problems = [_problem(cls, detail, where) for detail in error.errors()]
    # Outside of `except`: the message says all, without the traceback of pydantic.
    raise ConfigError("\n".join(problems))


def _plain(value: Any) -> Any:
    """Turn the containers of other libraries into dicts and lists, which pydantic validates."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_plain(item) for item in value]
    return value


def _problem(cls: type[BaseModel], detail: Mapping[str, Any], where: str | Callable[[str], str]) -> str:
    location = [str(part) for part in detail["loc"]]
    option = ".".join([where, *location]) if isinstance(where, str) else where(".".join(location))
    if detail["type"] == "extra_forbidden":
        known = _group(cls, location[:-1]).model_fields
        hint = did_you_mean(location[-1], known) or "."
        return f"{option}: unknown option{hint} Known here: {listing(known)}"
    if detail["type"] == "missing":
        return f"{option}: required, and not given"
    return f"{option}: {detail['msg'].removeprefix('Value error, ')}; got {shorten(detail['input'])}"


def _group(cls: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Follow a path of field names to the option group that it ends in."""
    names = iter(location)
    for name in names:
        field = cls.model_fields.get(name)
        annotation = field.annotation if field else None
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                cls = candidate
                if get_origin(annotation) is dict:
                    next(names, None)  # the user's own name for one of these groups
                break
    return cls
