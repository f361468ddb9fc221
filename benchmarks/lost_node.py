"""Loses a node of Ray during training, and checks that every sample ends exactly once and that no step is lost.

Two nodes of Ray run on this machine. The trainer is on the first one. The second one has only an agent loop worker and
a reward worker, and its raylet is killed after the first step: with it, all of its workers end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import training
from benchmarks.faults import HERE, Found, judge_server, lines, share_of_digits
from examples.training import TrainingProcess
from reward_loop.testing import FakeJudge
from reward_loop.verl.cpu.preload import preloaded
from reward_loop.verl.main_ppo import CPU_ENVIRONMENT
from reward_loop.verl.ray_start import with_ray

__all__ = ["STEPS", "lose_node"]

STEPS = 3
NODE: dict[str, Any] = {"num_cpus": 16, "object_store_memory": 2**27}
RESERVED = {"CPU": 12}
"""What is reserved of the second node, so that Ray places actors that may run on any node on the first one."""
STORAGE_NODE = "node:__internal_head__"
"""The resource of the node that stores TransferQueue's data. What another node stores would be lost with it."""


def lose_node(folder: Path, look: Callable[[int], None]) -> Found:
    """Train, lose the second node, and check the result.

    Args:
        folder: contains the policy and the data.
        look: called repeatedly with the number of completed steps.
    """
    output = folder / "lost-node"
    output.mkdir()
    metrics = output / "metrics.jsonl"
    happened = {}
    with (
        judge_server() as judge,
        # Workers have the environment of their raylet, and modules are preloaded in that of a run.
        _environment(
            CPU_ENVIRONMENT
            | {"JUDGE_ADDRESS": judge.address, "HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(metrics)}
        ),
        preloaded() as executable,
        _two_nodes() as (address, raylet),
    ):
        command = training.command(
            *(training.MODES["both"], folder, output, STEPS),
            f"trainer.rollout_data_dir={output}/rollouts",
            "data.max_response_length=32",
            "reward.num_workers=2",
            f"reward.custom_reward_function.path={HERE / 'faulty_judge.py'}",
            f"+transfer_queue.backend.SimpleStorage.required_node_resource={STORAGE_NODE}",
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            f"+ray_kwargs.ray_init.runtime_env.py_executable={executable!r}",
            RAY_ADDRESS=address,
        )
        deadline = time.monotonic() + training.LONGEST_RUN_S
        with TrainingProcess(command, output / "log", metrics) as run:
            while (status := run.status()) is None and time.monotonic() < deadline:
                time.sleep(training.LOOK_S)
                rows = training.rows(metrics)
                look(len(rows))
                if rows and not happened:
                    os.kill(raylet, signal.SIGKILL)
                    happened["node"] = f"its raylet was killed after step {len(rows)}"
        rows = training.rows(metrics)
    again = {how: sum(row[f"reward_loop/prompts_{how}_again"] for row in rows) for how in ("generated", "judged")}
    if happened:
        happened["node"] += "".join(f"; {count:.0f} prompts {how} again" for how, count in again.items())
    wrong = [] if status == 0 else [f"the run ended with status {status}: {output / 'log'}"]
    return Found(happened, [*wrong, *_wrong(output, judge, rows)])


@contextmanager
def _two_nodes() -> Iterator[tuple[str, int]]:
    """Starts Ray with two nodes. Yields its address, and the id of the process of the second raylet."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = with_ray(
        lambda: Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 1, "include_dashboard": False})
    )
    try:
        node = with_ray(lambda: cluster.add_node(**NODE, resources={"second": 1}))
        ray.init(cluster.address, log_to_driver=False)
        reserved = ray.util.placement_group([{**RESERVED, "second": 1}], lifetime="detached")
        ray.get(reserved.ready())
        ray.shutdown()
        yield cluster.address, node.all_processes["raylet"][0].process.pid
    finally:
        cluster.shutdown()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wrong(output: Path, judge: FakeJudge, rows: list[dict[str, float]]) -> Iterator[str]:
    size = training.PROMPTS * training.RESPONSES
    steps = [row["training/global_step"] for row in rows]
    if steps != list(range(1, STEPS + 1)):
        yield f"lost node: steps {steps}"
    names: set[str] = set()
    for step, row in enumerate(rows, start=1):
        if row["reward_loop/scored"] != size:
            yield f"lost node, step {step}: {row['reward_loop/scored']:.0f} of {size} samples were scored"
        rollouts = lines(output / "rollouts" / f"{step}.jsonl")
        names |= {rollout["uid"] for rollout in rollouts}
        if len(rollouts) != size or len(names) != step * size:
            yield f"lost node, step {step}: {len(rollouts)} rollouts, {len(names)} different ones so far"
        if any(abs(r["score"] - share_of_digits(r["output"])) > 1e-6 for r in rollouts):
            yield f"lost node, step {step}: a sample has another score than the judge gave"
    replaced = sum(row["reward_loop/agent_loop_workers_replaced"] for row in rows)
    if replaced != 1:
        yield f"lost node: {replaced:.0f} agent loop workers were replaced"
    workers = {request.body["pid"] for request in judge.requests}
    if len(workers) != 3:  # two workers, and the replacement of the lost one
        yield f"lost node: {len(workers)} reward workers asked the judge"
