"""verl's trainer on two nodes of this machine, each with its own address, processes and shared memory.

In the mode `sync`, the model server of the second node is killed in the first of two steps, and then its reward worker.
In the mode `reward_pipeline`, the second node has only workers and a model server, and is lost as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from benchmarks.lost_node import train_and_lose_node
from examples.nodes import ROOT, RayNodes, why_no_nodes
from tests.support.fork_server import forking_python
from tests.verl import node_rewards
from tests.verl.checks import texts
from tests.verl.runs import Run, json_lines, train

pytestmark = pytest.mark.integration

STEPS = (1, 2)
SAMPLES = 8 * 4
"""Of a step."""

PER_NODE = ("WorkerDict", "CPURolloutServer", "AgentLoopWorker", "RewardWorker", "_Host")
"""Ray actors that each node has, by a part of their class names. `_Host` runs a reward model server."""

FORK_SERVER = """
import sys
from tests.support.preload import preloaded
with preloaded(name="reward-loop-nodes") as executable:
    print(executable, flush=True)
    sys.stdin.read()
"""
"""The program on each node from whose process Ray forks its workers."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    if reason := why_no_nodes():
        pytest.skip(reason)
    with RayNodes(tmp_path_factory.mktemp("nodes"), FORK_SERVER) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def run(
    nodes: RayNodes,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_generative_model: Path,
    tiny_discriminative_model: Path,
) -> Run:
    return train(
        tmp_path_factory.mktemp("two"),
        tiny_generative_model,
        "trainer.nnodes=2",
        f"trainer.total_training_steps={max(STEPS)}",
        "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "reward.num_workers=2",
        "reward_model.enable=True",
        "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=2",
        f"reward_model.model.path={tiny_discriminative_model}",
        f"custom_reward_function.path={Path(node_rewards.__file__)}",
        f"+custom_reward_function.reward_kwargs.doomed={nodes.second.address}",
        function="Divided",
        node=nodes.first,
        python=nodes.said,
    )


def test_two_nodes_train_on_every_sample(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    for step in STEPS:
        assert run.steps[step]["reward_loop/scored"] == SAMPLES
        assert run.steps[step]["reward_loop/failed"] == 0
        assert run.steps[step]["actor/grad_norm"] > 0
        assert run.steps[step]["training/rollout_probs_diff_max"] < 5e-4


def test_two_nodes_share_all_work(run: Run) -> None:
    # The first row of a node is from before anything was killed.
    rows = reversed(json_lines(run.directory / "processes.jsonl"))
    commands = {row["node"]: row["commands"] for row in rows}
    assert len(commands) == 2
    for node, running in commands.items():
        actors = [command for command in running if command.startswith("ray::")]
        for name in PER_NODE:
            assert sum(name in actor for actor in actors) == 1, (node, name, actors)
        assert sum("reward_loop.serving.embedded" in command for command in running) == 1, node
    assert {call["node"] for call in run.calls} == commands.keys()


def test_two_nodes_lose_and_repeat_nothing_when_a_server_and_a_worker_die(run: Run) -> None:
    server, worker = json_lines(run.directory / "killed.jsonl")
    assert (server["what"], worker["what"]) == ("server", "worker")
    assert len(server["pids"]) == 1
    seen = [row for step in STEPS for row in run.rollouts(step)]
    assert len(seen) == len(STEPS) * SAMPLES
    scores = {(call["output"], call["gts"]): call["score"] for call in run.calls}
    # Equal responses can differ in the last digits, as the server batches them differently.
    expected = pytest.approx([row["score"] for row in seen], abs=1e-4)
    assert [scores[row["output"], row["gts"]] for row in seen] == expected
    # Only what the dead worker was scoring is scored again.
    repeated = texts(run.calls) - texts(seen)
    assert repeated <= texts([call for call in run.calls if call["pid"] in worker["pids"]]), repeated
    assert not texts(seen) - texts(run.calls)


def test_two_nodes_lose_and_repeat_nothing_when_a_whole_node_is_lost(
    nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.restore()
    folder = tmp_path_factory.mktemp("lost")
    python_option = f"+ray_kwargs.ray_init.runtime_env.py_executable={nodes.said!r}"
    run, python = training.run, str(forking_python(folder, nodes.said))

    def run_forked(command: list[str], *rest: Any) -> Any:
        words = {sys.executable: python, f"--wdns={ROOT}": f"--wdns={folder}"}
        return run([words.get(word, word) for word in command], *rest)

    monkeypatch.setattr(training, "run", run_forked)
    training.prepare(folder)
    # Until Ray detects the loss, calls fail at once. With a cut network, as in the benchmark, they only wait.
    found = train_and_lose_node(nodes, folder, lambda done: None, python_option, cut=False)
    assert "lost after step 1" in found.happened["node"]
    assert not found.wrong
