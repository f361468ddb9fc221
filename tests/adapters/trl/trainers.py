"""Trainers of TRL on a tiny model, and a judge that notes its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS, GENERATIONS, PER_UPDATE, UPDATES = 2, 4, 4, 2
"""Prompts of a generation, completions of a prompt, completions of an update, updates of a generation."""
EVALUATED = "test "
"""The prefix of the prompts of an evaluation."""


def config(output: Path, settings: str = "GRPOConfig", **options: Any) -> Any:
    import trl

    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "per_device_train_batch_size": PER_UPDATE,
        "steps_per_generation": UPDATES,
        "num_generations": GENERATIONS,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return getattr(trl, settings)(**{**defaults, **options})


def dataset(prefix: str = "task ", rows: int = 64) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{prefix}{index:02}", "answer": str(index)} for index in range(rows)])


def trainer(kind: type, model: Path, output: Path, rewards: Any, callbacks: Any = None, **options: Any) -> Any:
    """Return a trainer of a tiny model, with the options of its configuration."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = {"eval_dataset": dataset(EVALUATED, 2)} if "eval_steps" in options else {}
    return kind(
        AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=rewards,
        args=config(output, **options),
        train_dataset=dataset(),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=callbacks,
        **more,
    )


def score(text: str) -> float:
    """Return a score that differs between most texts."""
    return sum(map(ord, text)) % 97 / 97


@dataclass
class Call:
    """One call of the judge, for a batch."""

    prompts: list[str]
    completion_ids: list[list[int]]
    step: int
    cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Judge:
    """An async reward function of TRL.

    Args:
        before: awaited in each call of the training with its index; evaluation is not delayed.
    """

    def __init__(self, before: Callable[[int], Any] | None = None) -> None:
        self.__name__ = "judge"
        self.calls: list[Call] = []
        self.evaluations: list[Call] = []
        self._before = before

    async def __call__(
        self, prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, log_metric: Any, **_: Any
    ) -> list[float]:
        call = Call(list(prompts), [list(ids) for ids in completion_ids], trainer_state.global_step)
        if prompts[0].startswith(EVALUATED):
            self.evaluations.append(call)
        else:
            self.calls.append(call)
            log_metric("judge/number", float(len(self.calls) - 1))
            if self._before is not None:
                try:
                    await self._before(len(self.calls) - 1)
                except asyncio.CancelledError:
                    call.cancelled = True
                    raise
        return [score(text) for text in completions]


class UntilTheNext:
    """Delays each batch until the judge has been called for the next one, so that only overlapped training ends.

    Args:
        batches: the number of batches of the training; the last one is not delayed.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._called = [asyncio.Event() for _ in range(batches)]

    async def __call__(self, index: int) -> None:
        self._called[index].set()
        if index + 1 < self.batches:
            await asyncio.wait_for(self._called[index + 1].wait(), 60)
