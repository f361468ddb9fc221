"""The names of TRL and transformers that `OverlappedGRPOTrainer` uses. TRL documents few of them.

`check` compares them with the installed TRL before a training, so that another release ends with one clear error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from reward_loop.errors import ConfigError

__all__ = ["NAMES", "check", "is_async", "problems"]

Names = Mapping[str, Mapping[str, str]]

NAMES: Names = {
    "trl.trainer.grpo_trainer:GRPOTrainer": {
        "_generate_and_score_completions(inputs)": "overridden: runs one generation ahead",
        "_prepare_inputs(generation_batch)": "passes a batch of the data loader to it, unchanged",
        "_calculate_rewards(inputs, prompts, completions, completion_ids_list)": "calls the functions in reward_funcs",
        "__init__.async_loop": "the event loop of async reward functions",
        "__init__.num_iterations": "with more iterations, TRL computes the log-probabilities of the policy that "
        "generates",
        "__init__.reward_funcs": "replaced by functions that pause",
        "__init__.environment_factories": "must be None",
        "_prepare_inputs._generate_and_score_completions": "calls the override",
        "_generate_and_score_completions._calculate_rewards": "computes the rewards last",
        "_generate_and_score_completions.num_iterations": "decides whether log-probabilities are computed",
        "_calculate_rewards.reward_funcs": "the functions that it calls",
    },
    "transformers.trainer:Trainer": {
        "get_batch_samples(epoch_iterator, num_batches, device)": "overridden: reads batches ahead",
    },
    "trl.trainer.utils": {"is_async_callable(func)": "tells async reward functions from sync ones"},
}
"""By module or class: each function with its parameters, or ``function.name``, a name that the function's code uses;
and what it is used for."""


def check() -> None:
    """Check that the installed TRL has all names.

    Raises:
        ConfigError: a name is missing, or a function has other parameters.
    """
    if found := list(problems(NAMES)):
        version = importlib.metadata.version("trl")
        raise ConfigError(
            f"OverlappedGRPOTrainer does not work with trl {version}: {'; '.join(found)}. Install trl 1.16, or use "
            "GRPOTrainer"
        )


def problems(table: Names) -> Iterator[str]:
    """Yield what differs between a table of names and the installed packages."""
    for owner, names in table.items():
        module, _, attribute = owner.partition(":")
        found: Any = importlib.import_module(module)
        if attribute:
            found = getattr(found, attribute, None)
        for name, use in names.items():
            if difference := _difference(found, name):
                yield f"{owner}: {difference} ({use})"


def is_async(function: Any) -> bool:
    """Whether TRL treats a reward function as async."""
    from trl.trainer.utils import is_async_callable

    return bool(is_async_callable(function))


def _difference(owner: Any, name: str) -> str | None:
    function_name, has_parameters, listed = name.removesuffix(")").partition("(")
    function_name, _, used = function_name.partition(".")
    function = getattr(owner, function_name, None)
    if not callable(function):
        return f"{function_name} is missing"
    function = inspect.unwrap(function)
    if used and used not in function.__code__.co_names:
        return f"{function_name} does not use {used}"
    if has_parameters:
        actual = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        if actual != listed.split(", "):
            return f"{function_name} has the parameters ({', '.join(actual)}) instead of ({listed})"
    return None
