"""TRL's `GRPOTrainer` with judging hidden behind training: one-step off-policy.

While the judges score batch k, the trainer generates batch k+1 with the weights that batch k has not changed yet. Then
it waits for the rewards of k and trains on it. Order of a step, for batch k:

    1. generate k+1, and start its judges      (the judges of k are still running)
    2. wait for the rewards of k               (the only wait)
    3. update the weights with k               (the judges of k+1 are running)

Invariants:

- Every completion is scored once and trained on as often as in TRL. A batch that is generated is trained on, except
  when the training stops early.
- Whether a batch is generated depends only on counts of steps. So all processes call collectives in the same order.
- Losses use the log-probabilities of the policy that generated (``old_per_token_logps``).
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from reward_loop.adapters.trl.generation import Generation, GenerationBatch, Judging, Lookahead, pausing
from reward_loop.errors import ConfigError

__all__ = ["OverlappedGRPOTrainer", "check_names", "name_problems", "with_defaults"]

EPSILON_HIGH = 0.4
"""The default of ``epsilon_high``. Between two updates, 3 to 5 % of the ratios exceed TRL's clip range of 0.2, and the
policy learns more slowly."""

_NOT_CLIPPED = ("cispo", "sapo", "vespo")
"""Values of ``loss_type`` without the clip range of GRPO."""


class OverlappedGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` that generates the next batch while judges score the current one.

    The arguments are those of `GRPOTrainer`. At least one reward function must be async; see `reward_function`.
    ``epsilon_high`` is 0.4 unless it is set, because samples are one step old.

    TRL's metrics get ``overlap/waiting_seconds``, ``overlap/judging_seconds`` and ``overlap/hidden_share`` of each
    batch.

    Raises:
        ConfigError: an option cannot work, no reward function is async, or this release of TRL is not supported.
    """

    reward_funcs: list[Any]
    num_iterations: int

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *others: Any, **named: Any
    ) -> None:
        """Create the trainer; see `GRPOTrainer` for the arguments."""
        check_names()
        from trl.trainer.utils import is_async_callable

        super().__init__(model, reward_funcs, with_defaults(args, model), *others, **named)
        self.reward_funcs, self._async_funcs = pausing(self.reward_funcs, is_async_callable)
        self._check_options()
        self._pending: Generation | None = None
        self._lookahead: Lookahead | None = None

    def _check_options(self) -> None:
        if not self._async_funcs:
            raise ConfigError(
                "OverlappedGRPOTrainer hides the time of async reward functions, and reward_funcs has none: wrap a "
                "function with reward_loop.adapters.trl.reward_function, or use GRPOTrainer"
            )
        if self.environment_factories is not None:
            raise ConfigError(
                "OverlappedGRPOTrainer does not support environment_factory: TRL resets the environments for the next "
                "generation before the rewards of this one are computed. Use GRPOTrainer"
            )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Read the batches of one optimizer step, and those of the next generation."""
        if self._lookahead is None or self._lookahead.source is not epoch_iterator:
            self._lookahead = Lookahead(epoch_iterator)
        batches = self._lookahead.take(
            num_batches,
            self.args.steps_per_generation * self.num_iterations,
            step=self.state.global_step,
            last_step=self.state.max_steps,
            accumulation=self.args.gradient_accumulation_steps,
        )
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.model.training:
            generation = self._generation(inputs)
            generation.start()
            return generation.finish()
        pending = self._take_pending(inputs)
        generation = self._started(inputs) if pending is None else pending
        try:
            if inputs.following is not None:
                self._pending = self._started(inputs.following)
            return generation.finish()
        finally:
            generation.drop()

    def _take_pending(self, inputs: GenerationBatch) -> Generation | None:
        """Return the generation of a batch that was started one step ago, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.inputs is not inputs:  # the training was restarted with another batch size
            pending.drop()
            return None
        return pending

    def _started(self, inputs: GenerationBatch) -> Generation:
        generation = self._generation(inputs)
        iterations = self.num_iterations
        # By default, TRL assumes that it trains with the weights that generated. With more iterations than gradient
        # accumulation steps, it computes the log-probabilities of the policy that generates.
        self.num_iterations = self.args.gradient_accumulation_steps + 1
        try:
            generation.start()
        finally:
            self.num_iterations = iterations
        return generation

    def _generation(self, inputs: Any) -> Generation:
        step = getattr(inputs, "step", self.state.global_step)
        run = super()._generate_and_score_completions
        return Generation(run, inputs, lambda call: self._judging(call, step))

    def _judging(self, call: Mapping[str, Any], step: int) -> Judging:
        # TRL changes its state while judges run, so they get a copy, with the step in which the batch is trained on.
        state = copy.copy(call["trainer_state"])
        state.global_step = step
        return Judging(self._async_funcs, {**call, "trainer_state": state}, self.async_loop)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `GRPOTrainer` does. A batch that is not needed after an early stop is dropped."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._pending is not None:
                self._pending.drop()
            self._pending = self._lookahead = None


def with_defaults(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """Return the options of the trainer with ``epsilon_high`` set, unless the loss has no clip range.

    Args:
        args: the user's options, which are not changed; ``None`` for those of TRL.
        model: the model or its name, which names TRL's output folder.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = GRPOConfig(f"{Path(name).name}-GRPO")
    if args.epsilon_high is not None or args.loss_type in _NOT_CLIPPED:
        return args
    args = copy.copy(args)
    args.epsilon_high = EPSILON_HIGH
    return args


# --- The names in use, most of which TRL does not document

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


def check_names() -> None:
    """Check that the installed TRL has all names.

    Raises:
        ConfigError: a name is missing, or a function has other parameters.
    """
    if found := list(name_problems(NAMES)):
        version = importlib.metadata.version("trl")
        raise ConfigError(
            f"OverlappedGRPOTrainer does not work with trl {version}: {'; '.join(found)}. Install trl 1.16, or use "
            "GRPOTrainer"
        )


def name_problems(table: Names) -> Iterator[str]:
    """Yield what differs between a table of names and the installed packages."""
    for owner, names in table.items():
        module, _, attribute = owner.partition(":")
        found: Any = importlib.import_module(module)
        if attribute:
            found = getattr(found, attribute, None)
        for name, use in names.items():
            if difference := _difference(found, name):
                yield f"{owner}: {difference} ({use})"


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
