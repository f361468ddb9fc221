"""verl's trainer mode ``separate_async`` on a CPU: rollouts, training and a vLLM judge in different places and all at
once, and a bounded queue between rollouts and judges."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reward_loop.index.index import open_index
from reward_loop.view.timeline import server_of, timeline
from tests.serving.real_engines import IN_THE_ENGINE_PROCESS
from tests.verl import rewards
from tests.verl.checks import check_events, check_reward_metrics, check_scores, expected_advantages
from tests.verl.runs import Run, json_lines, train

pytestmark = pytest.mark.integration

STEPS = (1, 2, 3)
LATER = (4, 5, 6)
"""The steps whose rollouts the served model judges."""
QUEUE = "trainer.v1.separate_async.reward_queue"
CAPACITY, IN_FLIGHT = 24, 16
OFF_POLICY = 2
VLLM = importlib.util.find_spec("vllm") is not None
JUDGE = (
    "reward_model.enable=True",
    "reward_model.enable_resource_pool=True",
    "reward_model.nnodes=1",
    "reward_model.n_gpus_per_node=1",
    "reward.reward_model.rollout.name=vllm",
    "+reward_model.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=32M",
    *(f"+reward_model.server.env.{name}='{value}'" for name, value in IN_THE_ENGINE_PROCESS.items()),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """The first rollouts are judged only after so many have been generated that the queue is full; and some only after
    the first step. After three steps, vLLM is asked for each rollout."""
    directory = tmp_path_factory.mktemp("separate")
    return train(
        directory,
        tiny_generative_model,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"{QUEUE}.capacity={CAPACITY}",
        f"{QUEUE}.in_flight={IN_FLIGHT}",
        f"trainer.v1.sampler.max_off_policy_threshold={OFF_POLICY}",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"trainer.total_training_steps={LATER[-1]}",
        "trainer.val_before_train=False",
        f"reward_loop.log_dir={directory}/records",
        *((*JUDGE, f"reward_model.model.path={tiny_generative_model}") if VLLM else ()),
        function="Held",
    )


def test_generation_continues_during_judging_until_the_queue_is_full(run: Run) -> None:
    assert run.returncode == 0, run.output[-8000:]
    full = json.loads((run.directory / "queue.json").read_text())
    assert full["reward_queue/size"] == CAPACITY
    assert full["reward_queue/in_flight"] == IN_FLIGHT


def test_the_bounds_of_the_queue_hold_and_are_logged(run: Run) -> None:
    figures = [queue_figures(run, step) for step in STEPS]
    for step in figures:
        assert step["capacity"] == CAPACITY
        assert step["size"] <= step["size_max"] <= CAPACITY
        assert step["in_flight"] <= IN_FLIGHT
        assert step["dropped"] == 0
    assert figures[0]["size_max"] == CAPACITY
    assert figures[0]["wait_s"] > 0
    put, got = (sum(step[name] for step in figures) for name in ("produced", "consumed"))
    assert put - got == figures[-1]["size"]
    assert len(STEPS) * 32 <= got <= put <= (len(STEPS) + 1) * 32


def test_every_rollout_is_scored_exactly_once(run: Run) -> None:
    trained = {row["uid"].rsplit("_", 1)[0]: row for step in STEPS for row in run.rollouts(step)}
    assert len(trained) == len(STEPS) * 32
    counts = Counter(record["uid"] for record in records(run))
    assert {counts[uid] for uid in trained} == {1}
    scored = {record["uid"]: record for record in records(run)}
    for uid, row in trained.items():
        number = rewards.number(row["output"])
        expected = {0: "unscored", 1: "failed"}.get(number % 7, "scored")
        assert scored[uid]["outcome"] == expected, scored[uid]["error"]
        assert scored[uid]["score"] == (number % 100 / 100 if expected == "scored" else None)


def test_the_advantage_is_that_of_the_returned_scores(run: Run) -> None:
    for step in STEPS:
        rollouts = run.rollouts(step)
        check_scores(rollouts, compared=False)
        advantages = expected_advantages(rollouts)
        assert run.steps[step]["critic/advantages/max"] == pytest.approx(max(advantages), abs=1e-4)
        assert run.steps[step]["critic/advantages/min"] == pytest.approx(min(advantages), abs=1e-4)
        check_reward_metrics(run.steps[step], rollouts)


def test_no_rollout_is_trained_on_twice(run: Run) -> None:
    for step in LATER:
        check_scores(run.rollouts(step), compared=False)
    uids = [row["uid"] for step in STEPS + LATER for row in run.rollouts(step)]
    assert len(set(uids)) == len(uids) == len(STEPS + LATER) * 32


def test_judges_in_flight_at_a_good_end_print_no_errors(run: Run) -> None:
    assert run.returncode == 0
    assert "Error in _run_prompt" not in run.output


def test_staleness_is_logged_and_bounded(run: Run) -> None:
    staleness = [run.steps[step]["training/off_policy/trajectory_staleness_worst/max"] for step in STEPS]
    assert staleness[0] == 0
    assert max(staleness) < OFF_POLICY
    waiting = queue_figures(run, 1)
    # Generated by the weights before the first update, and not judged after it.
    assert (waiting["size"], waiting["in_flight"]) == (64 - 40 - IN_FLIGHT, IN_FLIGHT)
    assert waiting["staleness_max"] == waiting["staleness_mean"] == 1
    for step in STEPS:
        figures = queue_figures(run, step)
        assert 0 <= figures["staleness_mean"] <= figures["staleness_max"] < OFF_POLICY


def test_events_and_advantages_agree_with_verls_timings_and_rollouts(run: Run) -> None:
    check_events(run, run.directory / "records", {"gen", "old_log_prob", "adv", "update_actor", "update_weights"}, 3)


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed")
def test_a_generative_vllm_judge_answers_for_each_rollout_during_generation_and_training(
    run: Run, tiny_generative_model: Path
) -> None:
    folder = run.directory / "records"
    trained = {row["uid"].rsplit("_", 1)[0] for row in run.rollouts(LATER[-1])}
    rows = [record for record in records(run) if record["uid"] in trained]
    assert {len(row["judges"]) for row in rows} == {1}
    assert {row["completion_tokens"] for row in rows} <= set(range(1, rewards.JUDGE_TOKENS + 1))
    (server,) = {server_of(row["judges"][0]) for row in rows}
    # The rollouts of the last step are generated and judged during earlier ones.
    with open_index(folder) as index:
        lanes = [lane for step in LATER for lane in timeline(index, step)["lanes"]]
    assert {"rollout", "judge", "trainer"} == {lane["kind"] for lane in lanes}
    assert f"judge {server}" in {lane["name"] for lane in lanes if lane["kind"] == "judge"}
    assert rewards.processes_left("vllm", str(tiny_generative_model)) == []


def queue_figures(run: Run, step: int) -> dict[str, float]:
    prefix = "reward_queue/"
    return {name.removeprefix(prefix): v for name, v in run.steps[step].items() if name.startswith(prefix)}


def records(run: Run) -> list[dict[str, Any]]:
    files = (run.directory / "records").glob("*.jsonl")
    return [row for path in files for row in json_lines(path) if row["kind"] == "sample"]
