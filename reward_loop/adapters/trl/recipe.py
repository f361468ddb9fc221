"""What a reward manager is made from: it can be pickled, unlike the manager."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_loop import managers
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.managers.scorer import load_scorer
from reward_loop.scoring import load_function

__all__ = ["Recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A reward function, the manager that calls it, and their options."""

    function: Any
    """The function or its name; a reward manager; or ``None``, if each component of a composite has its function."""
    manager: str
    options: RewardLoopConfig
    reward_kwargs: Mapping[str, Any] | None = None
    reward_router_address: str | None = None
    reward_model_tokenizer: Any = None

    @property
    def is_manager(self) -> bool:
        """Whether the function is a reward manager, which the caller has created."""
        return callable(getattr(self.function, "run_single", None)) and not isinstance(self.function, type)

    @property
    def name(self) -> str:
        """The name in metrics: that of the function, or of the manager."""
        if isinstance(self.function, str):
            return self.function.rpartition(":")[2].removesuffix(".py")
        if self.function is None:
            return self.manager
        if self.is_manager:
            return str(getattr(self.function, "name", type(self.function).__name__)).partition(" (")[0]
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def check(self) -> None:
        """Load the function and the class of the manager, to find mistakes early.

        Raises:
            ConfigError: the manager does not exist, its options would have no effect, or several processes would each
                have limits of their own.
            FunctionLoadError: the function cannot be loaded.
        """
        options = self.options
        if self.is_manager:
            if self.manager != "naive" or self.reward_kwargs or options != RewardLoopConfig():
                raise ConfigError(
                    f"manager, options, log_dir and reward_kwargs have no effect: {type(self.function).__name__} is a "
                    "reward manager already; pass them to its constructor"
                )
            options = getattr(self.function, "options", options)
        else:
            managers.get(self.manager)
            if isinstance(self.function, str):
                load_function(self.function)
        processes = int(os.environ.get("WORLD_SIZE") or 1)
        bounded = options.limits or options.budget.max_cost is not None or options.budget.max_tokens is not None
        if processes > 1 and bounded and options.job is None:
            raise ConfigError(
                f"each of the {processes} training processes would have limits and a budget of its own, {processes} "
                "times those of the options: start the job's limiter service with "
                "reward_loop.serve_limits, and set the option job to its address"
            )

    def build(self) -> Any:
        """Return the reward manager."""
        if self.is_manager:
            return self.function
        scorer = load_scorer(
            self.function,
            self.manager,
            self.options,
            reward_kwargs=self.reward_kwargs,
            router_address=self.reward_router_address,
            reward_model_tokenizer=self.reward_model_tokenizer,
        )
        return scorer.manager
