"""verl's trainer on two nodes of this machine, each with its own address, processes and shared memory.

In the first of two steps, the model server of the second node is killed, and then its reward worker. In a run of its
own, the second node has only workers and a model server, and is lost as a whole in the second of three steps.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from reward_loop.verl.main_ppo import CPU_ENVIRONMENT
from tests.local_ray import REPOSITORY, module_environment
from tests.nodes import INTERFACE, Node, two_nodes, why_no_nodes
from tests.verl import node_rewards
from tests.verl.checks import texts
from tests.verl.runs import TIMEOUT_S, Run, json_lines, train

pytestmark = pytest.mark.integration

STEPS = (1, 2)
SAMPLES = 8 * 4
"""Of a step."""

FORK_SERVER = "reward-loop-test-of-two-nodes"

RAY_START = (
    *(sys.executable, "-m", "ray.scripts.scripts", "start"),
    *("--num-cpus=16", "--num-gpus=1", f"--object-store-memory={2**27}", "--disable-usage-stats"),
)

PER_NODE = ("WorkerDict", "CPURolloutServer", "AgentLoopWorker", "RewardWorker", "_Host")
"""Ray actors that each node has, by a part of their class names. `_Host` runs a reward model server."""

MODES = {"sync": (), "reward_pipeline": ("actor_rollout_ref.actor.ppo_mini_batch_size=4",)}
"""By trainer mode: more options."""


MOVABLE = ("AgentLoopWorker", "RewardWorker", "_Host")
"""Ray actors that may be lost with their node."""

OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray itself."""

STEPS_OF_LOSS = (1, 2, 3)

DETECTION = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "10",
}
"""A node that does not answer is dead for Ray after 25 s. By default, it takes 65 s."""

HOLD_GPU = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
group = ray.util.placement_group([{"GPU": 1, "CPU": 12, f"node:{sys.argv[2]}": 0.01}], lifetime="detached")
ray.get(group.ready(), timeout=60)
"""
"""Reserves the GPU and most CPUs of a node: Ray then places the trainer and other actors on the other node."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node, str]]:
    """Two nodes with a Ray cluster. Yields the nodes, and Ray's ``py_executable`` for both."""
    if reason := why_no_nodes():
        pytest.skip(reason)
    ray = {"GLOO_SOCKET_IFNAME": INTERFACE, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/tmp", **DETECTION}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in (CPU_ENVIRONMENT | module_environment() | ray).items():
            patch.setenv(name, value)
        first, second = stack.enter_context(two_nodes(tmp_path_factory.mktemp("nodes")))
        (python,) = {stack.enter_context(_fork_server(node)) for node in (first, second)}
        head = ("--head", "--port=6390", "--include-dashboard=false")
        for node, role in ((first, head), (second, (f"--address={first.address}:6390",))):
            node.run(*RAY_START, f"--node-ip-address={node.address}", *role, directory=REPOSITORY)
        yield first, second, python


@contextmanager
def _fork_server(node: Node) -> Iterator[str]:
    command = node.command(sys.executable, "-m", "tests.verl.fork_server", FORK_SERVER, directory=REPOSITORY)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@pytest.fixture(scope="module", params=MODES)
def run(
    request: pytest.FixtureRequest,
    nodes: tuple[Node, Node, str],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_generative_model: Path,
    tiny_discriminative_model: Path,
) -> Run:
    first, second, python = nodes
    mode = request.param
    return train(
        tmp_path_factory.mktemp(mode),
        tiny_generative_model,
        f"trainer.v1.trainer_mode={mode}",
        "trainer.nnodes=2",
        f"trainer.total_training_steps={max(STEPS)}",
        *_on_two_nodes(second, tiny_discriminative_model),
        *MODES[mode],
        function="Divided",
        node=first,
        python=python,
    )


def _on_two_nodes(doomed: Node, reward_model: Path) -> tuple[str, ...]:
    """Returns options of runs that have workers and a reward model server on both nodes."""
    return (
        "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "reward.num_workers=2",
        "reward_model.enable=True",
        "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=2",
        f"reward_model.model.path={reward_model}",
        f"custom_reward_function.path={Path(node_rewards.__file__)}",
        f"+custom_reward_function.reward_kwargs.doomed={doomed.address}",
    )


def test_two_nodes_train_on_every_sample(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    for step in STEPS:
        assert run.steps[step]["reward_loop/scored"] == SAMPLES
        assert run.steps[step]["reward_loop/failed"] == 0
        assert run.steps[step]["actor/grad_norm"] > 0
        assert run.steps[step]["training/rollout_probs_diff_max"] < 1e-4


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


# The second node does not come back, so this test is the last one.
def test_two_nodes_lose_and_repeat_nothing_when_a_whole_node_is_lost(
    nodes: tuple[Node, Node, str],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_generative_model: Path,
    tiny_discriminative_model: Path,
) -> None:
    first, second, python = nodes
    folder = tmp_path_factory.mktemp("lost")
    first.run(sys.executable, "-c", HOLD_GPU, f"{first.address}:6390", second.address, directory=REPOSITORY)
    with _lost_while_all_wait(second, folder):
        run = train(
            folder,
            tiny_generative_model,
            "trainer.v1.trainer_mode=sync",
            "trainer.nnodes=1",
            f"trainer.total_training_steps={max(STEPS_OF_LOSS)}",
            "+transfer_queue.backend.SimpleStorage.required_node_resource=node:__internal_head__",
            *_on_two_nodes(second, tiny_discriminative_model),
            function="Waiting",
            node=first,
            python=python,
        )
    rows = json_lines(folder / "processes.jsonl")
    (lost,) = (row["commands"] for row in rows if row["node"] == second.address)
    actors = [command for command in lost if command.startswith("ray::") and not command.startswith(OF_RAY)]
    assert len(actors) == len(MOVABLE), actors
    assert all(any(name in actor for actor in actors) for name in MOVABLE), actors
    for step in STEPS_OF_LOSS:
        assert run.steps[step]["reward_loop/scored"] == SAMPLES
        assert run.steps[step]["reward_loop/failed"] == 0
        assert run.steps[step]["actor/grad_norm"] > 0
    replaced = {step: run.steps[step]["reward_loop/agent_loop_workers_replaced"] for step in STEPS_OF_LOSS}
    assert replaced == {1: 0, 2: 1, 3: 0}
    seen = {step: run.rollouts(step) for step in STEPS_OF_LOSS}
    assert {step: len({row["uid"] for row in rows}) for step, rows in seen.items()} == dict.fromkeys(seen, SAMPLES)
    trained = [row for rows in seen.values() for row in rows]
    scores = {(call["output"], call["gts"]): call["score"] for call in run.calls}
    expected = pytest.approx([row["score"] for row in trained], abs=1e-4)
    assert [scores[row["output"], row["gts"]] for row in trained] == expected
    assert not texts(trained) - texts(run.calls)
    # The lost agent loop worker had half of the samples that the other node scored. They are generated again.
    assert len(run.calls) <= len(trained) + node_rewards.SAMPLES // 2


@contextmanager
def _lost_while_all_wait(node: Node, folder: Path) -> Iterator[None]:
    """Loses the node when all of its samples wait."""
    ended = threading.Event()

    def lose() -> None:
        for _ in range(10 * TIMEOUT_S):
            if ended.wait(0.1):
                return
            if (folder / node_rewards.WAITING).exists():
                node.lose()
                return

    thread = threading.Thread(target=lose, name="loss of a node")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
