"""Loses a node during training, and checks that every sample ends exactly once and that no step is lost.

A verl run in the mode ``reward_pipeline`` with both overlaps has two nodes: namespaces of this machine, see
`examples.nodes`. The second node has a reward worker and a reward model server. In the second of three steps, when all
samples of its reward worker wait for their scores, it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import node_rewards, training
from benchmarks.faults import Found, lines, wrong_rollouts
from examples.nodes import RayNodes, why_no_nodes
from examples.tiny_models import build_tiny_model

__all__ = ["STEPS", "lose_node", "train_and_lose_node"]

STEPS = 3
PROMPTS = 8
SIZE = PROMPTS * training.RESPONSES
"""The number of samples of a step."""
OF_NODE = STEPS * SIZE // 2
"""The number of samples that each of the two reward workers gets. In the second step, all have arrived: the third one
is generated while the second one is judged."""
NO_SCORE = float("inf")

MOVABLE = ("RewardWorker", "_Host")
"""The Ray actors on the node that is lost, by a part of their class names. `_Host` runs a reward model server."""
OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray itself."""

_RESERVE = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
group = ray.util.placement_group([{"GPU": 1, "CPU": 12, f"node:{sys.argv[2]}": 0.01}])
ray.get(group.ready(), timeout=60)
print("ready", flush=True)
sys.stdin.read()
"""
"""Reserves the GPU and most CPUs of a node: Ray then places the trainer and other actors on the other node."""


def lose_node(folder: Path, look: Callable[[int], None]) -> Found:
    """Train on two nodes, cut the network of the second one, kill its processes, and check the result.

    Args:
        folder: contains the policy and the data.
        look: called repeatedly with the number of completed steps.

    Returns:
        What was found. The node is left out if this machine cannot have two nodes.

    Raises:
        TrainingFailedError: the run ended with an error.
    """
    if reason := why_no_nodes():
        return Found({}, [], {"node": reason})
    with RayNodes(folder / "nodes") as nodes:
        return train_and_lose_node(nodes, folder, look, cut=True)


def train_and_lose_node(nodes: RayNodes, folder: Path, look: Callable[[int], None], *options: str, cut: bool) -> Found:
    """Do the same on nodes that are already running. The second one stays lost.

    Args:
        nodes: the nodes.
        folder, look: as for `lose_node`.
        *options: more options of the training.
        cut: whether the network is cut. Otherwise, connections to the lost node are refused.

    Raises:
        TrainingFailedError: the run ended with an error.
    """
    output = folder / "lost-node"
    build_tiny_model(folder / "reward-model", "discriminative")
    happened = "not lost"

    def look_and_lose(rows: list[dict[str, float]]) -> None:
        nonlocal happened
        look(len(rows))
        if (output / node_rewards.WAITING).exists() and not nodes.second.lost:
            nodes.second.lose(cut=cut)
            happened = f"lost after step {len(rows)}"

    command = nodes.first.command(*_command(folder, output, nodes, options))
    with nodes.first.running(_RESERVE, nodes.ray_address, nodes.second.address):
        rows = training.run(command, output, STEPS, look_and_lose)
    return Found({"node": happened}, [f"lost node: {what}" for what in _wrong(output, rows, nodes.second.address)])


def _command(folder: Path, output: Path, nodes: RayNodes, options: Sequence[str]) -> list[str]:
    function, variables = "reward.custom_reward_function", "ray_kwargs.ray_init.runtime_env.env_vars"
    return training.command(
        *(training.MODES["both"], folder, output, STEPS),
        "data.shuffle=False",  # so that the index of a prompt determines its step
        f"data.train_batch_size={PROMPTS}",
        "data.max_response_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.rollout_data_dir={output}/rollouts",
        # On the first node: the death of an agent loop worker ends the run.
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=benchmarks.node_rewards.OnOneNode",
        "reward.num_workers=2",
        "reward_model.enable=True",
        "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=2",
        f"reward_model.model.path={folder}/reward-model",
        f"{function}.path={node_rewards.__file__}",
        f"{function}.name=Waiting",
        f"+{function}.reward_kwargs.doomed={nodes.second.address}",
        f"+{function}.reward_kwargs.first_prompts={PROMPTS}",
        f"+{function}.reward_kwargs.samples={OF_NODE}",
        # What the second node stores would be lost with it.
        "+transfer_queue.backend.SimpleStorage.required_node_resource=node:__internal_head__",
        *("ray_kwargs.ray_init.address=auto", "ray_kwargs.ray_init.object_store_memory=null"),
        *("ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null"),
        *options,
        # A running Ray does not have the environment of the command.
        f"+{variables}.VERL_FILE_LOGGER_PATH='{output}/metrics.jsonl'",
        f"+{variables}.REWARD_LOG='{output}/calls.jsonl'",
    )


def _wrong(output: Path, rows: list[dict[str, float]], doomed: str) -> Iterator[str]:
    yield from wrong_rollouts(output / "rollouts", rows, STEPS, SIZE)
    if any(row["reward_loop/scored"] != SIZE for row in rows):
        yield f"{[row['reward_loop/scored'] for row in rows]} samples were scored in the steps, and not {SIZE} in each"
    calls = lines(output / "calls.jsonl")
    trained = [rollout for step in range(1, len(rows) + 1) for rollout in lines(output / "rollouts" / f"{step}.jsonl")]
    # Equal responses can differ in the last digits, as the server batches them differently.
    scores = {(call["output"], call["gts"]): call["score"] for call in calls}
    otherwise = [
        row
        for row in trained
        if row["score"] is None or abs(scores.get((row["output"], row["gts"]), NO_SCORE) - row["score"]) > 1e-4
    ]
    if otherwise:
        yield f"{len(otherwise)} samples have another score than the function returned"
    if len(calls) != len(trained):
        yield f"{len(calls)} calls of the function returned a score, for {len(trained)} samples"
    commands = [row["commands"] for row in lines(output / "processes.jsonl") if row["node"] == doomed]
    lost = [command for command in commands[0] if command.startswith("ray::") and not command.startswith(OF_RAY)]
    if len(lost) != len(MOVABLE) or not all(any(name in actor for actor in lost) for name in MOVABLE):
        yield f"the lost node had the actors {lost}"
