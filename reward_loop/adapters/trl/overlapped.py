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
from collections.abc import Iterator, Mapping
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from reward_loop.adapters.trl import compat
from reward_loop.adapters.trl.generation import Generation, pausing
from reward_loop.adapters.trl.judging import Judging
from reward_loop.adapters.trl.lookahead import GenerationBatch, Lookahead
from reward_loop.adapters.trl.off_policy import check_trainer, with_defaults

__all__ = ["OverlappedGRPOTrainer"]


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
        compat.check()
        super().__init__(model, reward_funcs, with_defaults(args, model), *others, **named)
        self.reward_funcs, self._async_funcs = pausing(self.reward_funcs, compat.is_async)
        check_trainer(self, self._async_funcs)
        self._pending: Generation | None = None
        self._lookahead: Lookahead | None = None

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
