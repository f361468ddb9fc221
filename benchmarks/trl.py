"""Compares TRL's `GRPOTrainer` with `OverlappedGRPOTrainer`, on a CPU, with a judge that takes time.

    python -m benchmarks.trl [--quick]

A policy of a million parameters learns to write digits. First, a training without a judge's latency measures generation
and training. The latency of the judge is then chosen so that it takes as long as both, or another multiple of that
(``--judging``). Then, for each seed, both trainers run in turn, so that other load on the machine slows both down. The
first two steps of a run are not counted. Needs the extra `trl`. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from examples.tiny_models import build_tiny_model
from reward_loop.adapters.trl import OverlappedGRPOTrainer, TRLReward, reward_function

COMPLETIONS, GENERATIONS, TOKENS = 64, 8, 16
"""Completions of a step, completions of a prompt, tokens of a completion."""
CONCURRENCY = 16
"""Calls of the judge at a time."""
STEPS = 40
"""Steps of a run. After fewer steps, both trainers are still learning, so their rewards differ."""
WARM_UP = 2
"""Steps of a run that are not counted."""
TARGET = 0.35
"""The reduction of a step that is the goal."""
NOISE = 2.0
"""The noise of a difference between the trainers, in standard errors."""


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


def compare(console: Console, seeds: int, steps: int, judging: float) -> dict[str, Any]:
    """Run both trainers in turn, and return the figures of the JSON line."""
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
    return figures_of(plain, overlapped)


def figures_of(plain: list[Run], overlapped: list[Run]) -> dict[str, Any]:
    """Return the figures of the JSON line; each list has a run for each seed."""
    before = statistics.fmean(run.step for run in plain)
    after = statistics.fmean(run.step for run in overlapped)
    reductions = [1 - ours.step / theirs.step for theirs, ours in zip(plain, overlapped, strict=True)]
    rewards = [[run.final_reward for run in runs] for runs in (plain, overlapped)]
    means, deviations = [statistics.fmean(values) for values in rewards], [spread(values) for values in rewards]
    noise = None if len(plain) < 2 else NOISE * math.sqrt(sum(std**2 for std in deviations if std) / len(plain))
    both = [*plain, *overlapped]
    return {
        "seeds": len(plain),
        "steps": len(plain[0].rewards),
        "step_reduction": round(1 - after / before, 4),
        "step_reduction_std": spread(reductions),
        "step_plain": round(before, 4),
        "step_overlapped": round(after, 4),
        "waiting_share": round(statistics.fmean(run.waiting_share for run in overlapped), 4),
        "waiting_share_plain": round(statistics.fmean(run.waiting_share for run in plain), 4),
        "reward_plain": round(means[0], 4),
        "reward_plain_std": deviations[0],
        "reward_overlapped": round(means[1], 4),
        "reward_overlapped_std": deviations[1],
        "reward_difference": round(means[1] - means[0], 4),
        "reward_noise": None if noise is None else round(noise, 4),
        "scored_twice": sum((run.scored - run.trained).total() for run in both),
        "lost": sum((run.trained - run.scored).total() for run in both),
        "samples": sum(run.trained.total() for run in both),
    }


def spread(values: list[float]) -> float | None:
    """Return the sample standard deviation; `None` for a single value."""
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def table(figures: dict[str, Any], judging: float) -> Table:
    """Return the figures as a table."""

    def mean(name: str, digits: str) -> str:
        std = figures[f"{name}_std"]
        return format(figures[name], digits) + ("" if std is None else f" ± {std:{digits}}")

    shown = Table("", "GRPOTrainer", "OverlappedGRPOTrainer", box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_row("seconds a step", f"{figures['step_plain']:.2f}", f"{figures['step_overlapped']:.2f}")
    shown.add_row("waiting for the judge", f"{figures['waiting_share_plain']:.0%}", f"{figures['waiting_share']:.0%}")
    shown.add_row("reward at the end", mean("reward_plain", ".3f"), mean("reward_overlapped", ".3f"))
    if figures["steps"] < STEPS:
        shown.add_row("", "", f"too few steps to compare rewards: {figures['steps']} of {STEPS}")
    elif figures["reward_noise"] is not None:
        differs = "within" if abs(figures["reward_difference"]) <= figures["reward_noise"] else "OUTSIDE"
        noise = f"{differs} the noise of {figures['seeds']} seeds, {figures['reward_noise']:.3f}"
        shown.add_row("difference", "", f"{figures['reward_difference']:+.3f}, {noise}")
    reached = "reached" if figures["step_reduction"] >= TARGET else "MISSED"
    goal = f"at least {TARGET:.0%}: {reached}" if judging == 1 else ""
    shown.add_row("shorter step", "", f"{mean('step_reduction', '.1%')}  {goal}")
    shown.add_row("scored twice, lost", "", f"{figures['scored_twice']}, {figures['lost']} of {figures['samples']}")
    return shown


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: under 50 s")
    parser.add_argument(
        "--seeds", "--rounds", type=int, metavar="N", help="seeds; each trainer runs once with each (3; quick: 1)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of a run ({STEPS}; quick: 6)")
    parser.add_argument(
        "--judging", type=float, default=1.0, metavar="X", help="judging, as a multiple of generation and training (1)"
    )
    options = parser.parse_args()
    seeds = (1 if options.quick else 3) if options.seeds is None else options.seeds
    steps = (6 if options.quick else STEPS) if options.steps is None else options.steps
    if seeds < 1 or steps <= WARM_UP or options.judging <= 0:
        parser.error(f"minimum: --seeds 1, --steps {WARM_UP + 1}, --judging above 0")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 140)
    started = time.monotonic()
    try:
        figures = compare(console, seeds, steps, options.judging)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(table(figures, options.judging), highlight=False)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
