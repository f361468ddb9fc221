"""Injects faults during training, and checks that every sample ends exactly once and that no step is lost.

A verl run in the mode ``reward_pipeline`` with both overlaps calls a judge server. Faults, in this order:

1. The reward worker is killed.
2. The judge does not answer some calls.
3. The judge returns status 429 for some calls.
4. The agent loop worker, which has all rollouts in flight, is killed. The run ends, and is resumed from its checkpoint.
5. The trainer process is killed, and the run is resumed from its checkpoint.

In addition, the Ray actor of an agent outside verl is killed in the middle of a batch. `benchmarks.lost_node` loses a
whole node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import training
from examples.training import TrainingProcess
from reward_loop import RewardSample
from reward_loop.testing import FakeJudge, Stall, Status

__all__ = ["STEPS", "Found", "agent_through", "lines", "train_through", "wrong_rollouts"]

HERE = Path(__file__).parent
STEPS = 10
CHECKPOINT = 4
"""The number of steps between two checkpoints. After one step more, a process is killed; the run resumes from there."""
BUSY, HUNG = 40, 2
"""Number of calls that get status 429, and number of calls that get no response."""
DEADLINE_S = 5.0
"""The option ``reward_loop.timeout`` in seconds: a sample whose judge hangs fails after this time."""
SAMPLES, GROUP = 400, 4
"""Number of samples, and group size, of the batch of the agent outside verl."""


def share_of_digits(text: str) -> float:
    """Return the judge's score of a text."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def _reply(body: Mapping[str, Any]) -> str:
    return repr(share_of_digits(body["messages"][0]["content"]))


@dataclass
class Found:
    """The faults that were injected, and the violations that were found."""

    happened: dict[str, str]
    wrong: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    """Faults that this machine does not allow, with the reasons."""


def train_through(folder: Path, look: Callable[[int], None]) -> Found:
    """Train with all faults, and check the result.

    Args:
        folder: contains the policy and the data.
        look: called repeatedly with the number of completed steps.

    Raises:
        TrainingFailedError: the resumed run ended with an error.
    """
    output = folder / "faults"
    output.mkdir()
    with FakeJudge(_reply, latency=(0.02, 0.1)) as judge:
        faults = _Faults(judge, output)
        lost = _train(folder, output, "lost", judge, lambda rows: look(len(rows)), faults, 0)
        again = _train(folder, output, "again", judge, lambda rows: look(CHECKPOINT + len(rows)), faults, CHECKPOINT)
        went_on = _train(folder, output, "resumed", judge, lambda rows: look(2 * CHECKPOINT + len(rows)), None, 0)
        return Found(faults.happened, [*faults.missing(), *_wrong(output, judge, lost, again, went_on)])


def _train(
    folder: Path,
    output: Path,
    name: str,
    judge: FakeJudge,
    look: Callable[[list[dict[str, float]]], None],
    faults: _Faults | None,
    before: int,
) -> list[dict[str, float]]:
    overrides = (
        f"trainer.save_freq={CHECKPOINT}",
        f"trainer.default_local_dir={output}/checkpoints",
        f"trainer.rollout_data_dir={output}/rollouts",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"reward_loop.timeout={DEADLINE_S:g}",
        "reward_loop.retry.max_attempts=100",
        f"reward.custom_reward_function.path={HERE / 'faulty_judge.py'}",
    )
    command = training.command(
        *(training.MODES["both"], folder, output / name, STEPS, *overrides), JUDGE_ADDRESS=judge.address
    )
    if faults is None:
        return training.run(command, output / name, STEPS - 2 * CHECKPOINT, look)
    (output / name).mkdir()
    metrics = output / name / "metrics.jsonl"
    deadline = time.monotonic() + training.LONGEST_RUN_S
    with TrainingProcess(command, output / name / "log", metrics) as run:
        while run.status() is None and time.monotonic() < deadline:
            time.sleep(training.LOOK_S)
            rows = training.rows(metrics)
            look(rows)
            faults.strike(before + len(rows))
    return training.rows(metrics)


class _Faults:
    """Injects each fault after a fixed number of completed steps."""

    def __init__(self, judge: FakeJudge, output: Path) -> None:
        self._judge = judge
        self._output = output
        self._left: dict[int, Callable[[], None]] = {
            1: self._kill_worker,
            # Calls that hang have failed before the checkpoint: they belong to step 3 or 4.
            2: self._hang,
            3: self._refuse,
            CHECKPOINT + 1: self._kill_agent_loop_worker,
            2 * CHECKPOINT + 1: self._kill_trainer,
        }
        self.happened: dict[str, str] = {}
        self.killed = 0

    def strike(self, made: int) -> None:
        """Inject the faults that are due after this number of steps."""
        for step in [step for step in self._left if step <= made]:
            self._left.pop(step)()

    def missing(self) -> list[str]:
        """Return the faults that were not injected because the run ended before."""
        return [f"the run ended before step {step}: {fault.__name__}" for step, fault in self._left.items()]

    def _kill_worker(self) -> None:
        self.killed = self._judge.requests[-1].body["pid"]
        os.kill(self.killed, signal.SIGKILL)
        self.happened["reward worker"] = "killed after step 1"

    def _refuse(self) -> None:
        self._judge.script(*[Status(429, retry_after=0.2)] * BUSY)
        self.happened["judge, 429"] = f"{BUSY} calls after step 3"

    def _hang(self) -> None:
        self._judge.script(*[Stall()] * HUNG)
        self.happened["judge, hanging"] = f"{HUNG} calls after step 2"

    def _kill_agent_loop_worker(self) -> None:
        self._kill_after_checkpoint("agent loop worker", "ray::RewardAgentLoopWorker", CHECKPOINT)

    def _kill_trainer(self) -> None:
        self._kill_after_checkpoint("trainer", "ray::TaskRunner", 2 * CHECKPOINT)

    def _kill_after_checkpoint(self, what: str, title: str, step: int) -> None:
        last = self._output / "rollouts" / f"{step}.jsonl"
        _until(lambda: last.exists() and len(lines(last)) == training.PROMPTS * training.RESPONSES, step)
        if _kill(title):
            self.happened[what] = f"killed after step {step + 1}, resumed after step {step}"


def _kill(title: str) -> bool:
    """Kill the child process whose title starts with ``title``. Return whether there was one."""
    killed = False
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                process.kill()
                killed = True
    return killed


def _wrong(
    output: Path,
    judge: FakeJudge,
    lost: list[dict[str, float]],
    again: list[dict[str, float]],
    went_on: list[dict[str, float]],
) -> Iterator[str]:
    size = training.PROMPTS * training.RESPONSES
    if "agent loop worker 0 died: " not in (output / "lost" / "log").read_text(errors="replace"):
        yield "the run did not end with the death of the agent loop worker"
    rows = [*lost[:CHECKPOINT], *again[:CHECKPOINT], *went_on]
    yield from wrong_rollouts(output / "rollouts", rows, STEPS, size)
    for step, row in enumerate(rows, start=1):
        rollouts = lines(output / "rollouts" / f"{step}.jsonl")
        scored = [rollout for rollout in rollouts if rollout["score"] is not None]
        if otherwise := sum(abs(r["score"] - share_of_digits(r["output"])) > 1e-6 for r in scored):
            yield f"step {step}: {otherwise} have another score than the judge gave"
        if len(rollouts) - len(scored) != row["reward_loop/failed"]:
            yield f"step {step}: {len(rollouts) - len(scored)} have no score, {row['reward_loop/failed']:.0f} failed"
    failed = sum(row["reward_loop/failed"] for row in lost)
    if failed != HUNG:
        yield f"{failed:.0f} samples failed, and the judge hung for {HUNG}"
    workers = {request.body["pid"] for request in judge.requests}
    if len(workers) != 4:  # the killed worker, its replacement, and the workers of the resumed runs
        yield f"{len(workers)} reward workers asked the judge"
    behaved = [request for request in judge.requests if isinstance(request.behaviour, Status | Stall)]
    if len(behaved) != BUSY + HUNG:
        yield f"the judge failed {len(behaved)} times"
    if not all(request.abandoned for request in behaved if isinstance(request.behaviour, Stall)):
        yield "a hanging call was not cancelled"


def wrong_rollouts(folder: Path, rows: list[dict[str, float]], steps: int, size: int) -> Iterator[str]:
    """Yield the steps that are lost, and those in which a sample was lost or trained on twice.

    Args:
        folder: the rollouts of each step.
        rows: the metrics of each step.
        steps: the number of steps.
        size: the number of samples of a step.
    """
    made = [row["training/global_step"] for row in rows]
    if made != list(range(1, steps + 1)):
        yield f"steps {made}"
    names: set[str] = set()
    for step, row in enumerate(rows, start=1):
        ended = [row[f"reward_loop/{outcome}"] for outcome in ("scored", "unscored", "failed")]
        if sum(ended) != size:
            yield f"step {step}: {ended} scored, unscored and failed"
        rollouts = lines(folder / f"{step}.jsonl")
        names |= {rollout["uid"] for rollout in rollouts}
        if len(rollouts) != size or len(names) != step * size:
            yield f"step {step}: {len(rollouts)} rollouts, {len(names)} different ones so far"


def agent_through() -> Found:
    """Kill the Ray actor of an agent in the middle of a batch, and check that no sample is lost or returned twice."""
    import ray

    from reward_loop.agent.ray_agent import RayAsyncRewardAgent

    samples = [RewardSample("1" * (i % 10), uid=f"s{i}") for i in range(SAMPLES)]
    with FakeJudge(_reply, latency=(0.2, 0.6)) as judge:
        variables = {"JUDGE_ADDRESS": judge.address, "PYTHONPATH": str(HERE.parent)}
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        try:

            def start(rest: list[RewardSample]) -> Any:
                agent = RayAsyncRewardAgent.remote(f"{HERE / 'faulty_judge.py'}:compute_score", concurrency=32)
                ray.get(agent.compute_reward_pipeline.remote(rest, group_size=GROUP))
                return agent

            agent = start(samples)
            returned = set(ray.get(agent.get.remote(SAMPLES // 4))[0])
            judged = len(judge.requests)
            rest = [i for i in range(SAMPLES) if i not in returned]
            call = agent.get.remote(len(rest))
            os.kill(judge.requests[-1].body["pid"], signal.SIGKILL)
            wrong = []
            try:
                ray.get(call, timeout=DEADLINE_S * 10)
                wrong.append("a killed agent answered")
            except ray.exceptions.RayActorError:
                again = ray.get(start([samples[i] for i in rest]).get.remote(len(rest)), timeout=DEADLINE_S * 10)[0]
                if [rest[i] for i in again] != rest:
                    wrong.append("the agent lost samples, or returned some twice")
        finally:
            ray.shutdown()
    twice = len(judge.requests) - SAMPLES
    # The samples that the dead agent had not returned are submitted again; no others may be judged twice.
    if twice > SAMPLES - len(returned):
        wrong.append(f"{twice} samples were judged again, and {SAMPLES - len(returned)} had not been returned")
    return Found({"agent": f"killed with {judged} samples sent to the judge; {twice} judged again"}, wrong)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with one JSON object per line."""
    # Not `splitlines`: it also splits at other characters, which a text may contain.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _until(condition: Callable[[], bool], step: int, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the rollouts of step {step} were not written within {seconds:g} s")
        time.sleep(training.LOOK_S)
