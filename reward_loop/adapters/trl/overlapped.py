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
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from trl import GRPOTrainer

from reward_loop.adapters.trl.generation import Generation, GenerationBatch, Judging, Lookahead, pausing
from reward_loop.errors import ConfigError

RELEASE = "1.16"
"""The release of TRL whose undocumented methods and attributes this trainer uses."""

EPSILON_HIGH = 0.4
"""The default of ``epsilon_high``. Between two updates, 3 to 5 % of the ratios exceed TRL's clip range of 0.2, and the
policy learns more slowly."""

_NOT_CLIPPED = ("cispo", "sapo", "vespo")
"""Values of ``loss_type`` without the clip range of GRPO."""


class OverlappedGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` that generates the next batch while judges score the current one.

    The arguments are those of `GRPOTrainer`. At least one reward function must be async; see `reward_function`.
    ``epsilon_high`` is 0.4 unless it is set, because samples are one generation old.

    TRL's metrics get ``overlap/waiting_seconds``, ``overlap/judging_seconds`` and ``overlap/hidden_share`` of each
    batch.

    Raises:
        ConfigError: an option cannot work, no reward function is async, or this release of TRL is not supported.
    """

    reward_funcs: list[Any]
    num_iterations: int

    def __init__(self, *args: Any, **named: Any) -> None:
        """Create the trainer; see `GRPOTrainer` for the arguments."""
        check_version()
        # After the check: another release may not have this undocumented name.
        from trl.trainer.utils import is_async_callable

        super().__init__(*args, **named)
        if self.args.epsilon_high is None and self.loss_type not in _NOT_CLIPPED:
            self.epsilon_high = EPSILON_HIGH
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
        # Each epoch has another iterator.
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
            # No effect if it has finished. After an error, nothing else ends it: a paused greenlet is never collected.
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


def check_version() -> None:
    """Check the release of TRL.

    Raises:
        ConfigError: it is another one.
    """
    version = importlib.metadata.version("trl")
    if not version.startswith(f"{RELEASE}."):
        raise ConfigError(
            f"OverlappedGRPOTrainer uses undocumented names of trl {RELEASE}, and trl {version} is installed: install "
            f"trl {RELEASE}, or use GRPOTrainer"
        )
