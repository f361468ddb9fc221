"""The trainings of `benchmarks.trl`, with TRL."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from examples.tiny_models import build_tiny_model
from reward_loop.adapters.trl import OverlappedGRPOTrainer, TRLReward, reward_function

COMPLETIONS, GENERATIONS, TOKENS = 64, 8, 16
"""Completions of a step, completions of a prompt, tokens of a completion."""
CONCURRENCY = 16
"""Calls of the judge at a time."""
WARM_UP = 2
"""Steps of a run that are not counted."""


@dataclass
class Run:
    """The figures of one training."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """Seconds of each counted step."""
    waiting: float = 0.0
    """Seconds for which the counted steps waited for the judge."""
    rewards: list[float] = field(default_factory=list)
    """The mean reward of each step."""
    scored: Counter[tuple[int, ...]] = field(default_factory=Counter)
    trained: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def step(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def waiting_share(self) -> float:
        return self.waiting / sum(self.seconds)

    @property
    def final_reward(self) -> float:
        """The mean reward of the last quarter of the steps."""
        return statistics.fmean(self.rewards[-max(1, len(self.rewards) // 4) :])


class Watched:
    """The reward function, which notes what it scores and how long it takes."""

    def __init__(self, reward: TRLReward, run: Run) -> None:
        self.__name__ = "judge"
        self.seconds: list[float] = []
        self._reward = reward
        self._run = run

    async def __call__(self, completion_ids: Any, **call: Any) -> list[float | None]:
        began = time.perf_counter()
        rewards = await self._reward(completion_ids=completion_ids, **call)
        self.seconds.append(time.perf_counter() - began)
        self._run.scored.update(tuple(ids) for ids in completion_ids)
        return rewards


class Steps(TrainerCallback):
    """Measures the steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > WARM_UP:
            self._run.seconds.append(time.perf_counter() - self._began)


def watched(kind: type[GRPOTrainer], run: Run) -> type[GRPOTrainer]:
    """Return a subclass of a trainer that notes the completions that it trains on."""

    class Noted(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
            run.trained.update(tuple(ids[mask.bool()].tolist()) for ids, mask in rows)
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Noted


def train(kind: type[GRPOTrainer], model: Path, steps: int, latency: float, seed: int) -> Run:
    """Train and return the figures.

    Args:
        kind: the class of the trainer.
        model: the folder of the policy.
        steps: the number of steps.
        latency: seconds of a call of the judge.
        seed: of the sampling and the order of the prompts.
    """
    from datasets import Dataset

    async def share_of_digits(solution_str: str) -> float:
        await asyncio.sleep(latency)
        return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))

    run = Run(kind.__name__)
    with tempfile.TemporaryDirectory() as output, reward_function(share_of_digits, concurrency=CONCURRENCY) as reward:
        judge = Watched(reward, run)
        trainer = watched(kind, run)(
            AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=judge,
            args=GRPOConfig(
                output,
                max_steps=steps,
                per_device_train_batch_size=COMPLETIONS,
                num_generations=GENERATIONS,
                max_completion_length=TOKENS,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                seed=seed,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list([{"prompt": f"Write digits, {index:03}: "} for index in range(512)]),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Steps(run)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    run.rewards = [entry["reward"] for entry in logged]
    waits = [entry.get("overlap/waiting_seconds") for entry in logged]
    run.waiting = sum(judge.seconds[WARM_UP:] if waits[0] is None else waits[WARM_UP:])
    return run


def train_both(console: Console, seeds: int, steps: int, judging: float) -> tuple[list[Run], list[Run]]:
    """Run both trainers in turn, and return the runs of `GRPOTrainer` and of `OverlappedGRPOTrainer`."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    plain: list[Run] = []
    overlapped: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        model = build_tiny_model(Path(folder), "generative", hidden_size=192, layers=3)
        train(GRPOTrainer, model, WARM_UP + 1, 0.0, 0)  # the first run of a process is slower
        alone = train(GRPOTrainer, model, WARM_UP + 4, 0.0, 0).step
        latency = judging * alone / (COMPLETIONS / CONCURRENCY)
        console.print(f"Generation and training {alone:.2f} s, judging {judging * alone:.2f} s", highlight=False)
        for seed in range(seeds):
            for kind, runs in ((GRPOTrainer, plain), (OverlappedGRPOTrainer, overlapped)):
                run = train(kind, model, steps, latency, seed)
                runs.append(run)
                console.print(
                    f"{run.name}, seed {seed}: {run.step:.2f} s a step, {run.waiting_share:.0%} of it waiting, reward "
                    f"{run.final_reward:.3f}",
                    highlight=False,
                )
    return plain, overlapped
