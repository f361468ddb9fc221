"""The parts of `benchmarks.gpu` that run verl's trainer: on one GPU, or on the CPU to rehearse them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import training
from benchmarks.report import Report
from examples.arithmetic.demo import CACHE, Settings, training_options
from examples.arithmetic.models import Recipe, make_models
from examples.arithmetic.report import read_report
from examples.tiny_models import build_tiny_model
from examples.training import write_dataset
from reward_loop.verl.options import PIPELINE_MODE

__all__ = ["MODES", "GpuRuns", "make_inputs"]

HERE = Path(__file__).parent
NAMES = {"sync": "sync", PIPELINE_MODE: PIPELINE_MODE, "verl": "verl's own command"}
MODES = tuple(NAMES)
"""The runs that are compared: verl's mode in our command, ours, and verl's own command."""

ON_THE_GPU = (
    # Without flash-attn.
    "actor_rollout_ref.model.use_remove_padding=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
    # Compilations would take minutes of a short run.
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    *(
        f"actor_rollout_ref.{part}strategy=fsdp2"
        for part in ("actor.", "actor.fsdp_config.", "ref.", "ref.fsdp_config.")
    ),
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.max_model_len=512",
    "actor_rollout_ref.rollout.max_num_seqs=256",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    # One process that scores: judge.py limits the calls of its process.
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_cpus=32",
    "++ray_kwargs.ray_init.include_dashboard=False",
    "++ray_kwargs.ray_init.object_store_memory=2000000000",
)
"""Options for one GPU. They passed with verl 0.9.1 and vLLM 0.24.0."""

JUDGE_ON_THE_GPU = (
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.tensor_model_parallel_size=1",
    "reward.reward_model.rollout.gpu_memory_utilization=0.35",
    "reward.reward_model.rollout.max_model_len=2048",
    "reward.reward_model.rollout.max_num_seqs=256",
    "reward.reward_model.rollout.dtype=bfloat16",
)
JUDGE_ON_THE_CPU = ("+reward_model.server.placement=colocated",)


@dataclass(frozen=True)
class Size:
    """The sizes of models and runs."""

    model: dict[str, Any]
    """The arguments of `build_tiny_model` for policy, judge and scorer."""
    prompts: int
    responses: int
    mini_batch: int
    """Prompts of a mini-batch."""
    tokens: int
    """The longest response."""
    judged_at_a_time: int
    learning: Settings
    first: int = 1
    """Number of steps at the start of a run that are not counted, because they load and allocate."""
    counted: int = 1
    """Number of counted steps of each mode."""
    colocated: int = 1
    """Number of steps with a judge on the trainer's GPU."""

    @property
    def samples(self) -> int:
        """Number of rollouts of a step."""
        return self.prompts * self.responses


# The policy has the layers of Qwen2.5-0.5B, half as many.
GPU = Size(
    model={"hidden_size": 896, "layers": 12, "heads": (14, 2), "intermediate_size": 4864, "dtype": "bfloat16"},
    prompts=16,
    responses=8,
    mini_batch=4,
    tokens=128,
    judged_at_a_time=32,
    first=2,
    counted=3,
    colocated=3,
    learning=Settings(steps=12, test_every=12, judge_latency=0.0),
)
FEW = Recipe(steps=2, forgetting_steps=2, batch_size=32, held_out=32, bound=0.0, rounds=1)
REHEARSAL = replace(GPU.learning, steps=1, test_every=1, prompts=8, answers=2, validate=8, recipe=FEW)
CPU = Size(model={}, prompts=4, responses=2, mini_batch=2, tokens=4, judged_at_a_time=2, learning=REHEARSAL)
MODEL_TOKENS = 2048


def make_inputs(folder: Path, cpu: bool) -> None:
    """Create the policy, the judge and the scorer with random weights, and the prompts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    size = CPU if cpu else GPU
    for name in ("policy", "judge", "scorer"):
        kind = "discriminative" if name == "scorer" else "generative"
        build_tiny_model(folder / name, kind, max_position_embeddings=MODEL_TOKENS, **size.model)
    for split, count in (("train", 64 * size.prompts), ("val", 8)):
        problems = [(f"{i}: write about the number {i}", str(i)) for i in range(count)]
        write_dataset(folder / f"{split}.parquet", "numbers", split, problems)


class GpuRuns:
    """Runs verl's trainer with the models of a folder, in each mode, and adds what was measured to a report.

    Args:
        report: receives rows and figures.
        inputs: the folder that `make_inputs` filled.
        output: the folder of logs and metrics; each run has one of its own in it.
        cpu: rehearse on the CPU.
        more: further options of verl, for all runs.
    """

    def __init__(self, report: Report, inputs: Path, output: Path, *, cpu: bool, more: tuple[str, ...]) -> None:
        self._report = report
        self._inputs = inputs
        self._output = output
        self._cpu = cpu
        self._more = more
        self._size = CPU if cpu else GPU
        self._judge = JudgeLatency(inputs / "scale", self._size)
        self._steps: dict[str, training.Steps] = {}

    def colocated(self, within_s: float) -> None:
        """Train with a generative judge on the trainer's GPU, awake while the rollout sleeps."""
        output, size = self._output / "colocated", self._size
        command = self._command(
            *("sync", output, size.colocated),
            "reward.reward_model.enable=True",
            "reward.reward_model.enable_resource_pool=False",
            f"reward.reward_model.model_path={self._inputs / 'judge'}",
            *(JUDGE_ON_THE_CPU if self._cpu else JUDGE_ON_THE_GPU),
            f"reward.custom_reward_function.path={HERE / 'gpu_judge.py'}",
        )
        rows = self._run("a judge on the trainer's device", command, output, size.colocated, within_s)
        steps = training.Steps(rows)
        wake, sleep = (steps.mean(f"reward_loop/model_{part}_s") for part in ("wake", "sleep"))
        scored = round(sum(row["reward_loop/scored"] for row in rows))
        self._report.add(
            f"A judge on the trainer's device, {len(rows)} steps",
            f"{steps.seconds:.2f} s a step; the judge wakes in {wake:.2f} s, sleeps in {sleep:.2f} s; {scored} scored",
            ("every rollout", scored == len(rows) * size.samples),
        )
        self._report.figures["colocated"] = {
            "step_s": round(steps.seconds, 3),
            "wake_s": round(wake, 3),
            "sleep_s": round(sleep, 3),
            "scored": scored,
        }

    def compared(self, mode: str, within_s: float) -> None:
        """Train in one of `MODES`, with judging that takes as long as generation and training.

        The first of these runs measures generation and training in steps that are not counted.

        Raises:
            RuntimeError: no step had the latency from its beginning.
        """
        size, output = self._size, self._output / mode
        sets_latency = self._judge.seconds is None
        # In the last step of our mode, no next batch is generated.
        last = int(mode == PIPELINE_MODE)
        total = size.first + 2 * sets_latency + size.counted + last
        command = self._command(
            *(mode, output, total),
            # Keeps the policy constant: one that learns would write responses of another length.
            "actor_rollout_ref.actor.optim.lr=1e-9",
        )
        look = self._judge.look if sets_latency else lambda rows: None
        rows = self._run(mode, command, output, total, within_s, look)
        judging, uncounted = self._judge.seconds, self._judge.after + 1 if sets_latency else size.first
        counted = rows[uncounted : total - last]
        if judging is None or not counted:
            raise RuntimeError("the steps were too short to set the judge's latency")
        steps = self._steps[mode] = training.Steps(counted)
        if sets_latency:
            self._report.add("Judging of a step, R = generation and training", f"{judging:.2f} s")
            self._report.figures["judging_s"] = round(judging, 3)
        failed = sum(row.get("reward_loop/failed", 0) for row in steps.rows)
        self._report.add(NAMES[mode], steps.text + (f"; {failed:.0f} FAILED" if failed else ""))
        self._report.figures[mode] = {"step_s": round(steps.seconds, 3), "steps": len(steps.rows)}
        self._compare(mode)

    def _compare(self, mode: str) -> None:
        """Compare a mode that has just been run with those before it."""
        ours, judging = self._steps.get(PIPELINE_MODE), self._judge.seconds
        if ours is None or judging is None:
            return
        if mode == PIPELINE_MODE:
            hidden, share = ours.mean("reward_pipeline/hidden_share"), judging / ours.without_judging
            self._report.add("  share of the judging that is hidden", f"{hidden:.1%}")
            self._report.add("  R in comparison with its generation and training", f"{share:.2f}")
            self._report.figures[mode] |= {"hidden_share": round(hidden, 4), "judging_share": round(share, 3)}
        # Over a few steps, a growing backlog of judging can stay unnoticed. A step therefore counts at least R seconds.
        lasting = max(ours.seconds, judging)
        for other in self._steps if mode == PIPELINE_MODE else (mode,):
            if other != PIPELINE_MODE:
                less = 1 - lasting / self._steps[other].seconds
                self._report.add(f"  {PIPELINE_MODE}, off the step of {NAMES[other]}", f"{less:.1%}")
                self._report.figures[f"reduction_{other}"] = round(less, 4)

    def learning(self, within_s: float) -> None:
        """Train the policy of the demo with its served reward model, and measure its accuracy before and after."""
        settings, output = self._size.learning, self._output / "learning"
        deadline = time.monotonic() + within_s
        models = make_models(CACHE, settings.recipe)
        # The longest sequence of the demo's models.
        on_gpu = () if self._cpu else (*ON_THE_GPU, "actor_rollout_ref.rollout.max_model_len=64")
        command = [
            *self._entry(PIPELINE_MODE),
            *training_options(models, output, settings),
            *(*on_gpu, *self._more),
        ]
        rows = settings.steps + 1  # one of the validation before training
        self._run("learning", command, output, rows, deadline - time.monotonic())
        report = read_report(output / "metrics.jsonl")
        found = report.as_dict()
        before, after = found["accuracy_before"], found["accuracy_after"]
        first, last = report.steps[0].reward, report.steps[-1].reward
        self._report.add(
            f"Learning: right answers to held-out additions, before and after {settings.steps} steps",
            f"{before:.1%}, {after:.1%}; mean reward {first:.3f}, {last:.3f}",
            None if self._cpu else ("more are right", after > before),
        )
        self._report.figures["learning"] = {
            "accuracy": [round(before, 4), round(after, 4)],
            "reward": [round(first, 4), round(last, 4)],
            "rewards": report.outcomes,
        }

    def _run(
        self,
        name: str,
        command: list[str],
        output: Path,
        rows: int,
        within_s: float,
        look: Callable[[list[dict[str, float]]], None] = lambda rows: None,
    ) -> list[dict[str, float]]:
        task = self._report.task(f"verl's trainer, {name}", rows)

        def show(done: list[dict[str, float]]) -> None:
            self._report.progress.update(task, completed=len(done))
            look(done)

        try:
            return training.run(command, output, rows, show, within_s)
        finally:
            self._report.progress.remove_task(task)

    def _command(self, mode: str, output: Path, steps: int, *overrides: str) -> list[str]:
        size = self._size
        return [
            *self._entry(mode),
            *training.options(self._inputs, output, steps),
            f"actor_rollout_ref.rollout.n={size.responses}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={size.mini_batch}",
            f"data.train_batch_size={size.prompts}",
            f"data.max_response_length={size.tokens}",
            *(() if self._cpu else ON_THE_GPU),
            *(*overrides, *self._more),
        ]

    def _entry(self, mode: str) -> list[str]:
        """Return the environment, the module and the mode of a run."""
        environment = {
            "JUDGE_LATENCY": json.dumps(training.LATENCY),
            "JUDGE_CONCURRENCY": self._size.judged_at_a_time,
            "JUDGE_SCALE": self._judge.file,
        }
        command = ("-m", "examples.verl_cpu" if self._cpu else "verl.trainer.main_ppo")
        ours = (f"trainer.v1.trainer_mode={mode}", "reward_model.use_reward_loop=True")
        entry = command if mode == "verl" else (*command, *ours)
        cpus = ("ray_kwargs.ray_init.num_cpus=16", "ray_kwargs.ray_init.num_gpus=1") if self._cpu else ()
        own_ray = ("++ray_kwargs.ray_init.address=local", *cpus)
        return [
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *(sys.executable, *entry, *own_ray),
        ]


class JudgeLatency:
    """Sets the latency of `judge.py` so that judging a step takes as long as generation and training.

    Until they are measured, the judge takes no time.

    Attributes:
        seconds: R, the seconds of judging a step at full concurrency; ``None`` until it is set.
        after: the number of steps after which it was set. The next step has it only in part.
    """

    def __init__(self, file: Path, size: Size) -> None:
        self.file = file
        self.seconds: float | None = None
        self.after = 0
        self._size = size
        training.write_scale(file, 0.0)

    def look(self, rows: list[dict[str, float]]) -> None:
        """Set the latency as soon as a step is complete that is not one of the first."""
        first = self._size.first
        if self.seconds is None and len(rows) > first:
            self.seconds, self.after = training.Steps(rows[first:]).without_judging, len(rows)
            once = training.seconds_of_judging(1.0, self._size.samples, self._size.judged_at_a_time)
            training.write_scale(self.file, self.seconds / once)
