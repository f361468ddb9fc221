"""Inspect a reward function's signature once, and make the arguments of its calls."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import UserDict, UserList, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import FunctionLoadError
from reward_loop.processes.child import callable_of
from reward_loop.scoring.load import without_partial
from reward_loop.types import RewardSample, missing

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_reward_loop_isolated"

_CONTEXT = ("reward_router_address", "reward_model_tokenizer")

PROVIDED = ("data_source", "solution_str", "ground_truth", "extra_info", *_CONTEXT)
"""The names of the arguments that the reward loop can pass to every function: ``**kwargs`` gets them, too."""

BY_NAME = (
    "prompt",
    "response_ids",
    "response_length",
    "is_truncated",
    "global_steps",
    "training_progress",
    "uid",
    "validate",
)
"""The arguments that a function receives only if it declares them: not every place has them."""

_ATTEMPT = "attempt"
"""The argument with the number of the call, 1 for the first. A function receives it only if it declares it."""

_LISTS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
    "prompts": "prompt",
    "response_lengths": "response_length",
    "uids": "uid",
    **{name: name for name in BY_NAME if name not in ("prompt", "response_length", "uid")},
}
"""The arguments of functions that score several samples -> the argument for one sample that each list contains."""

_MESSAGE = '[{"role": "assistant", "content": solution_str}]'
_INPUT = '{"response": solution_str, "ground_truth": ground_truth}'

_OF_TRAINERS = (
    ({"completions", "completion_ids"}, "TRL", f"(completions=[{_MESSAGE}], solution=[ground_truth])", "[0]"),
    ({"queries"}, "OpenRLHF", "([prompt + solution_str], [prompt], [ground_truth])", '["rewards"][0]'),
    ({"reward_inputs"}, "EasyR1", f"([{_INPUT}])", '[0]["overall"]'),
    ({"reward_input"}, "EasyR1", f"({_INPUT})", '["overall"]'),
    ({"task_info", "action"}, "rllm", '({"ground_truth": ground_truth}, solution_str)', ".reward"),
    ({"completion"}, "verifiers", f"(completion={_MESSAGE}, answer=ground_truth)", ""),
)
"""Forms of other trainers: parameters that only they have; the trainer; the arguments of the call in a wrapper; what
gets the score from what the function returns."""


@dataclass(frozen=True, slots=True)
class Target:
    """A callable with its inspected signature."""

    origin: Any
    """The function, object or class."""
    constructor: Mapping[str, Any]
    """The configured arguments of the class."""
    name: str
    """For messages: ``compute_score (reward.py)``."""
    is_async: bool
    passes: frozenset[str]
    """The provided arguments that reach the callable, by their names for one sample."""
    from_sample: tuple[str, ...]
    """Those of ``passes`` that come from a sample."""
    from_context: tuple[str, ...]
    """Those of ``passes`` that do not."""
    requires: frozenset[str]
    """The subset of ``passes`` that the signature declares without a default."""
    needs: tuple[str, ...]
    """The subset of ``requires`` that a sample may lack."""
    reward_kwargs: Mapping[str, Any]
    """The configured arguments that are passed to the callable."""
    takes_any: bool = False
    """Whether it has ``**kwargs``."""
    lists: Mapping[str, str] | None = None
    """For a function of lists: each list that is passed -> the argument that its items are."""

    @property
    def is_isolated(self) -> bool:
        """Whether the function, its class or its object is marked with `isolated`."""
        function = without_partial(self.origin)
        return any(
            hasattr(one, _MARK) for one in (function, getattr(function, "__self__", None), callable_of(function))
        )

    @property
    def has_post_process(self) -> bool:
        """Whether the function is of a class with ``post_process_scores``."""
        return callable(getattr(self.origin, "post_process_scores", None))

    def make(self) -> Any:
        """Return the function or object; of a class, a new object.

        Raises:
            FunctionLoadError: the constructor raised an exception.
        """
        if not inspect.isclass(self.origin):
            return self.origin
        try:
            return self.origin(**self.constructor)
        except (Exception, SystemExit) as error:  # the class may call `sys.exit`
            what = f"class {_name(self.origin)} cannot be instantiated"
            raise FunctionLoadError(f"{what}: {type(error).__name__}: {error}") from error

    def problem(self, sample: RewardSample) -> str | None:
        """Return why a function cannot be called for a sample; ``None`` if it can."""
        if sample.error is not None:
            return sample.error or "its row is invalid"
        for name in self.needs:
            if missing(getattr(sample, name)):
                return (
                    f"it has no `{name}`, which {self.name} requires. See the table of arguments in "
                    "docs/reward-functions.md for where it is known, or give the parameter a default"
                )
        return None

    def arguments(self, samples: Sequence[RewardSample], context: Mapping[str, Any], attempt: int) -> dict[str, Any]:
        """Return the arguments of one call: copies, which the function may change.

        Args:
            samples: the sample, or those that a function of lists scores.
            context: the values of ``reward_router_address`` and ``reward_model_tokenizer``.
            attempt: the number of the call.
        """
        given = own_copy(dict(self.reward_kwargs), objects=False) if self.reward_kwargs else {}
        if self.lists is None:
            if self.takes_any and samples[0].kwargs:
                given = own_copy(dict(samples[0].kwargs), objects=False) | given
            given |= self._row(samples[0])
        else:
            rows = [self._row(sample) for sample in samples]
            for plural, name in self.lists.items():
                if any(name in row for row in rows):
                    given[plural] = [row.get(name) for row in rows]
        for name in self.from_context:
            given[name] = attempt if name == _ATTEMPT else context[name]
        return given

    def _row(self, sample: RewardSample) -> dict[str, Any]:
        """Return the arguments that come from a sample, without those that it lacks."""
        row: dict[str, Any] = {}
        for name in self.from_sample:
            value = getattr(sample, name)
            if type(value) is str:
                row[name] = value
                continue
            if name == "extra_info":
                value = value if type(value) is dict else dict(value)
            elif missing(value):
                if name in _BY_NAME:
                    continue
                value = None
            elif name in _BY_NAME and hasattr(value, "tolist"):
                value = value.tolist()
            row[name] = value if type(value) in _SHARED else own_copy(value)
        return row


_BY_NAME = frozenset(BY_NAME)


def isolated(function: F) -> F:
    """Mark a sync reward function or class to run in worker processes, which are killed at the deadline.

    The mark overrides ``isolation`` in the configuration.

    Example::

        @isolated
        def compute_score(solution_str, ground_truth): ...
    """
    setattr(function, _MARK, True)
    return function


def resolve(function: Any, reward_kwargs: Mapping[str, Any] | None = None, *, of_lists: bool = False) -> Target:
    """Inspect a function, a callable object, or a class or instance with ``compute_score``.

    Of a class, the object is made by `Target.make`, with the ``reward_kwargs`` that its ``__init__`` declares.

    Args:
        function: the function, object or class.
        reward_kwargs: configured arguments of the function, or of its class.
        of_lists: whether it is called with lists for several samples.

    Returns:
        The callable, and the arguments that it receives.

    Raises:
        FunctionLoadError: the function requires an argument that is not provided, does not accept one of
            ``reward_kwargs``, or its signature cannot be read.
    """
    origin, kwargs = _unwrap_verl(function, dict(reward_kwargs or {}))
    constructor: dict[str, Any] = {}
    if inspect.isclass(origin):
        name = _name(origin)
        parameters, takes_any = _parameters(origin, name)
        constructor = {key: value for key, value in kwargs.items() if takes_any or key in parameters}
        needs = {key for key, default in parameters.items() if default is inspect.Parameter.empty}
        if missing := needs - constructor.keys():
            raise FunctionLoadError(
                f"class {name} requires {listing(missing)} to be instantiated: give a default, or a value in "
                "reward_kwargs"
            )
    function = callable_of(origin)
    name = _name(origin if function is origin else function)
    if inspect.isclass(origin):
        # Its object is made later. `None` stands for `self`: only the signature is read.
        if function is origin:
            function = None
        elif inspect.isfunction(inspect.getattr_static(origin, "compute_score")):
            function = functools.partial(function, None)
    if not callable(function):
        raise FunctionLoadError(
            f"{name} cannot be called: a reward function is a function, a callable object, or a class or instance "
            "with a `compute_score` method"
        )
    parameters, takes_any = _parameters(function, name)
    unknown = [key for key in kwargs if not takes_any and key not in parameters and key not in constructor]
    if unknown:
        raise FunctionLoadError(
            f"{name} does not take the configured reward_kwargs {listing(unknown)}"
            f"{did_you_mean(unknown[0], parameters) or ';'} its parameters are {listing(parameters)}"
        )
    call_kwargs = {
        key: value for key, value in kwargs.items() if key in parameters or (takes_any and key not in constructor)
    }
    # Arguments that are bound by the user's `functools.partial` are not passed again.
    bound = {*call_kwargs, *(function.keywords if isinstance(function, functools.partial) else ())}
    # A judge's own prompt: `def compute_score(solution_str, prompt="Is this right?")`.
    bound |= {key for key in ("prompt", "prompts") if isinstance(parameters.get(key), str) and parameters[key]}
    open_to = {key: default for key, default in parameters.items() if key not in bound}
    required = {key for key, default in open_to.items() if default is inspect.Parameter.empty}
    provided = dict(_LISTS) if of_lists else {key: key for key in (*PROVIDED, *BY_NAME)}
    provided |= {key: key for key in (*_CONTEXT, _ATTEMPT)}
    if missing := required - provided.keys():
        hint = _fit(missing, _is_async(function), name, of_lists) or did_you_mean(min(missing), provided) or "."
        raise FunctionLoadError(
            f"{name} requires {listing(missing)}, which the reward loop does not provide{hint} The reward loop "
            f"provides {', '.join(provided)}; give others a default, or a value in reward_kwargs"
        )
    everything = {key for key, one in provided.items() if one in PROVIDED}
    given = {key for key in provided if key in open_to or (takes_any and key in everything and key not in bound)}
    passes = frozenset(provided[key] for key in given)
    requires = frozenset(provided[key] for key in required)
    return Target(
        origin=origin,
        constructor=constructor,
        name=name,
        is_async=_is_async(function),
        passes=passes,
        from_sample=tuple(key for key in (*PROVIDED, *BY_NAME) if key in passes and key not in _CONTEXT),
        from_context=tuple(key for key in (*_CONTEXT, _ATTEMPT) if key in passes),
        requires=requires,
        needs=tuple(key for key in ("ground_truth", *BY_NAME) if key in requires),
        reward_kwargs=call_kwargs,
        takes_any=takes_any,
        lists={key: _LISTS[key] for key in _LISTS if key in given} if of_lists else None,
    )


def _fit(missing: set[str], is_async: bool, name: str, of_lists: bool) -> str:
    """Return what fits a function in a form that another manager or trainer calls; empty if the form is unknown."""
    if of_lists and missing & {*PROVIDED, *BY_NAME}:
        return ": this manager passes lists. Choose one that calls the function for each sample, such as `naive`."
    if missing & {"data_sources", "solution_strs", "extra_infos"}:
        return (
            ": they are lists, and this manager passes one sample at a time. Choose the manager `batch`, or `group` if "
            "the function compares the samples of a prompt."
        )
    for names, trainer, arguments, score in _OF_TRAINERS:
        if missing & names and "prompt_ids" not in missing:  # AReaL's `completions` is the text of one sample
            await_, async_ = ("await ", "async ") if is_async else ("", "")
            prompt = "prompt, " if "prompt" in arguments else ""
            return (
                f": this is the form of {trainer}. Wrap it, with the arguments that it takes:\n\n"
                f"{async_}def compute_score(solution_str, {prompt}ground_truth):\n"
                f"    returned = {await_}{name.partition(' ')[0]}{arguments}\n    return returned{score}\n\n"
            )
    return ""


def _unwrap_verl(function: Any, reward_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the user's function and arguments from the `functools.partial` in which verl wraps them.

    The wrapper accepts any arguments, so its signature is of no use. Other functions are returned unchanged.
    """
    if getattr(getattr(function, "func", None), "__module__", "") == "verl.trainer.ppo.reward":
        raw, bound = function.args
        return raw, {**bound, **reward_kwargs}
    return function, reward_kwargs


def _parameters(function: Any, name: str) -> tuple[dict[str, Any], bool]:
    """Return the parameters (name -> default, or `inspect.Parameter.empty`), and whether there are ``**kwargs``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FunctionLoadError(f"the signature of {name} cannot be read ({error}): wrap it in a function") from error
    parameters = signature.parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise FunctionLoadError(
                f"{name} takes {parameter.name} by position only, and reward functions are called by keyword"
            )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter.default for parameter in parameters if parameter.kind in by_name}
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_async(function: Any) -> bool:
    # A sync wrapper around an async function counts as sync: it may run the coroutine itself, which would block the
    # event loop. It is called in a thread, and if it returns an awaitable, that is awaited on the event loop.
    function = without_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name(function: Any) -> str:
    function = without_partial(function)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    file = getattr(inspect.getmodule(function), "__file__", None)
    where = Path(file).name if file else function.__module__
    return f"{function.__qualname__} ({where})"


_SHARED = frozenset((type(None), bool, int, float, str, bytes))
_CONTAINERS = (dict, list, deque, UserDict, UserList)
"""Containers whose items are copied one by one. Not all mappings: `os.environ` and the files of `shelve` are some."""


def own_copy(value: Any, *, objects: bool = True) -> Any:
    """Return a value that shares nothing mutable with the given one.

    Containers are copied item by item. Shared are numbers, texts, tuples of them, the members of sets, which cannot
    change, and objects that cannot be copied, such as a lock.

    Args:
        value: the value.
        objects: whether other objects than containers are copied, too.

    Raises:
        RecursionError: the value is nested too deeply, or contains itself.
    """
    kind = type(value)
    if kind in _SHARED or kind is frozenset:
        return value
    # By hand, because `copy.deepcopy` takes several times as long, for each sample, and would copy objects, too.
    if kind is dict:
        if not value:
            return {}
        return {key: item if type(item) in _SHARED else own_copy(item, objects=objects) for key, item in value.items()}
    if kind is list:
        shared = _SHARED.issuperset(map(type, value))
        return value.copy() if shared else [own_copy(item, objects=objects) for item in value]
    try:
        if isinstance(value, tuple):
            items = [own_copy(item, objects=objects) for item in value]
            same = all(one is other for one, other in zip(items, value, strict=True))
            return value if same else tuple.__new__(kind, items)  # a named tuple takes its items as arguments
        if isinstance(value, _CONTAINERS):
            copied = copy.copy(value)
            for key, item in value.items() if isinstance(value, dict | UserDict) else enumerate(value):
                copied[key] = own_copy(item, objects=objects)
            return copied
        if isinstance(value, set | bytearray):
            return copy.copy(value)
        return copy.deepcopy(value) if objects or kind.__module__ == "numpy" else value
    except RecursionError:
        raise
    except Exception:
        return value
