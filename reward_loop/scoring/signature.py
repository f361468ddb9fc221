"""Inspect a reward function's signature once, and make the arguments of its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import FunctionLoadError
from reward_loop.types import RewardSample

__all__ = ["PROVIDED", "Target", "copied", "declared", "resolve"]

PROVIDED = (
    "data_source",
    "solution_str",
    "ground_truth",
    "extra_info",
    "reward_router_address",
    "reward_model_tokenizer",
)
"""The names of the arguments that the reward loop can pass to a function."""

_LISTS = "choose the reward manager `batch` (`group` for all samples of a prompt), and take the lists `solution_strs`"

_OTHER_FORMS = (
    (
        {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
        "they are lists. Choose the reward manager `batch`, or `group` for all samples of a prompt",
    ),
    (
        {"completions", "completion", "prompts", "completion_ids"},
        "this is the form of TRL. Take `solution_str`, the text of one completion, and columns from `extra_info`; or "
        + _LISTS,
    ),
    (
        {"reward_inputs"},
        f"this is the form of EasyR1. For `response` and `ground_truth` of each input, {_LISTS} and `ground_truths`",
    ),
    ({"reward_input"}, "this is the form of EasyR1. Take its `response` as `solution_str`, and `ground_truth`"),
    ({"queries"}, f"this is the form of OpenRLHF. For texts and labels, {_LISTS} and `ground_truths`"),
    (
        {"args", "sample"},
        "this is the form of slime. Take its `response` as `solution_str`, its `label` as `ground_truth`",
    ),
    (
        {"data"},
        "this is the form of a reward manager of verl, not of a function: set reward_model.reward_loop_class_name",
    ),
    (
        {"predict_str", "predict", "response", "response_str", "completion_str", "output", "solution"},
        "the text of the response is `solution_str`",
    ),
)
"""Parameters of functions in another form -> what fits them here."""


@dataclass(frozen=True, slots=True)
class Target:
    """A callable with its inspected signature."""

    call: Callable[..., Any]
    name: str
    """For messages: ``compute_score (reward.py)``."""
    is_async: bool
    passes: frozenset[str]
    """The provided arguments that are passed to the callable."""
    requires: frozenset[str]
    """The subset of ``passes`` that the signature declares without a default."""
    reward_kwargs: Mapping[str, Any]
    """The configured arguments that are passed to the callable."""
    post_process_scores: Callable[[list[float]], list[float]] | None
    origin: Any = None
    """The function or object passed to `resolve`; for a class, a `functools.partial` with its constructor arguments."""

    def arguments(self, sample: RewardSample, router_address: str | None, tokenizer: Any) -> dict[str, Any]:
        """Return the arguments of a call for one sample."""
        arguments = dict(self.reward_kwargs)
        for name in ("data_source", "solution_str", "ground_truth"):
            if name in self.passes:
                arguments[name] = getattr(sample, name)
        if "extra_info" in self.passes:
            arguments["extra_info"] = copied(sample.extra_info)
        if "reward_router_address" in self.passes:
            arguments["reward_router_address"] = router_address
        if "reward_model_tokenizer" in self.passes:
            arguments["reward_model_tokenizer"] = tokenizer
        return arguments


def resolve(
    function: Any, reward_kwargs: Mapping[str, Any] | None = None, provided: Sequence[str] = PROVIDED
) -> Target:
    """Inspect a function, a callable object, or a class or instance with ``compute_score``.

    A class is instantiated once, with the ``reward_kwargs`` that its ``__init__`` declares.

    Args:
        function: the function, object or class.
        reward_kwargs: configured arguments of the function, or of its class.
        provided: the names of the arguments that can be passed.

    Returns:
        The callable, and the arguments that it receives.

    Raises:
        FunctionLoadError: the function requires an argument that is not provided, does not accept one of
            ``reward_kwargs``, or its signature cannot be read.
    """
    function, kwargs = _unwrap_verl(function, dict(reward_kwargs or {}))
    name = _name(function)
    used: set[str] = set()
    origin = function
    if inspect.isclass(function):
        function, used = _instantiate(function, kwargs, name)
        origin = functools.partial(origin, **{key: kwargs[key] for key in used})
    post_process = getattr(function, "post_process_scores", None)
    if callable(getattr(function, "compute_score", None)):
        function = function.compute_score
        name = _name(function)
    if not callable(function):
        raise FunctionLoadError(
            f"{name} cannot be called: a reward function is a function, a callable object, or a class or instance "
            "with a `compute_score` method"
        )
    parameters, takes_any = _parameters(function, name)
    unknown = [key for key in kwargs if not takes_any and key not in parameters and key not in used]
    if unknown:
        raise FunctionLoadError(
            f"{name} does not take the configured reward_kwargs {listing(unknown)}"
            f"{did_you_mean(unknown[0], parameters) or ';'} its parameters are {listing(parameters)}"
        )
    call_kwargs = {key: value for key, value in kwargs.items() if key in parameters or (takes_any and key not in used)}
    required = {key for key, has_default in parameters.items() if not has_default}
    if missing := required - set(provided) - set(call_kwargs):
        raise FunctionLoadError(
            f"{name} requires {listing(missing)}, which the reward loop does not provide"
            f"{_form_of(missing, provided) or did_you_mean(min(missing), provided) or '.'} The reward loop provides "
            f"{', '.join(provided)}; give others a default, or a value in reward_kwargs"
        )
    bound = _bound_names(function) | set(call_kwargs)
    passes = {key for key in provided if (takes_any or key in parameters) and key not in bound}
    return Target(
        call=function,
        name=name,
        is_async=_is_async(function),
        passes=frozenset(passes),
        requires=frozenset(required & passes),
        reward_kwargs=call_kwargs,
        origin=origin,
        post_process_scores=post_process if callable(post_process) else None,
    )


def declared(function: Any) -> frozenset[str]:
    """Return the provided arguments that a function declares without a default, by their names for one sample.

    A class is not instantiated.
    """
    if callable(method := getattr(function, "compute_score", None)):
        static = inspect.isclass(function) and inspect.getattr_static(function, "compute_score")
        is_unbound = inspect.isfunction(static)
        function = functools.partial(method, None) if is_unbound else method
    parameters, _ = _parameters(function, _name(function))
    names = {name for name, has_default in parameters.items() if not has_default}
    return frozenset({name.removesuffix("s") if name.removesuffix("s") in PROVIDED else name for name in names})


def _form_of(missing: set[str], provided: Sequence[str]) -> str:
    """Return what fits a function in a form that another manager or trainer calls; empty if the form is unknown."""
    if missing & set(PROVIDED):
        return ": this manager passes lists. Choose one that calls the function for each sample, such as `naive`."
    for names, fit in _OTHER_FORMS:
        if missing & names:
            return f": {fit}."
    return ""


def _unwrap_verl(function: Any, reward_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the user's function and arguments from the `functools.partial` in which verl wraps them.

    The wrapper accepts any arguments, so its signature is of no use. Other functions are returned unchanged.
    """
    if (
        isinstance(function, functools.partial)
        and getattr(function.func, "__module__", "") == "verl.trainer.ppo.reward"
        and function.func.__name__.startswith("_call_with_kwargs")
        and len(function.args) == 2
    ):
        raw, bound = function.args
        return raw, {**bound, **reward_kwargs}
    return function, reward_kwargs


def _instantiate(cls: type, kwargs: Mapping[str, Any], name: str) -> tuple[Any, set[str]]:
    parameters, takes_any = _parameters(cls, name)
    mine = {key: value for key, value in kwargs.items() if takes_any or key in parameters}
    if missing := {key for key, has_default in parameters.items() if not has_default} - set(mine):
        raise FunctionLoadError(
            f"class {name} requires {listing(missing)} to be instantiated: give a default, or a value in reward_kwargs"
        )
    try:
        return cls(**mine), set(mine)
    except (Exception, SystemExit) as error:
        raise FunctionLoadError(f"class {name} cannot be instantiated: {type(error).__name__}: {error}") from error


def _parameters(function: Any, name: str) -> tuple[dict[str, bool], bool]:
    """Return the parameters (name -> whether it has a default), and whether the function takes ``**kwargs``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FunctionLoadError(f"the signature of {name} cannot be read ({error}): wrap it in a function") from error
    named: dict[str, bool] = {}
    takes_any = False
    for parameter in signature.parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            if not has_default:
                raise FunctionLoadError(
                    f"{name} takes {parameter.name} by position only, and reward functions are called by keyword"
                )
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            named[parameter.name] = has_default
    return named, takes_any


def _bound_names(function: Any) -> set[str]:
    """Return the arguments already bound by the user's `functools.partial`; they are not passed again."""
    return set(function.keywords) if isinstance(function, functools.partial) else set()


def _is_async(function: Any) -> bool:
    # A sync wrapper around an async function counts as sync: it may run the coroutine itself, which would block the
    # event loop. It is called in a thread, and if it returns an awaitable, that is awaited on the event loop.
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    file = getattr(inspect.getmodule(function), "__file__", None)
    where = Path(file).name if file else function.__module__
    return f"{function.__qualname__} ({where})"


def copied(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a sample's extra info, which the function may modify."""
    return {key: _copy(value) for key, value in extra_info.items()}


def _copy(value: Any) -> Any:
    """Copy containers and numpy arrays; share other objects, because `copy.deepcopy` is slow or fails for some."""
    kind = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item) for item in value)
    if kind is set:
        return set(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()
    return value
