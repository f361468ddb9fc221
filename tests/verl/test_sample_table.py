"""Tables of samples in W&B and MLflow."""

from __future__ import annotations

import json
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop.config import RewardLoopConfig
from reward_loop.verl import sample_table
from reward_loop.verl.reward_metrics import StepRewards, TrajectoryReward
from reward_loop.verl.sample_table import COLUMNS, MAX_TEXT, SampleTable, chosen_keys

INFO = {"reward_outcome": "scored", "reward_masked": False, "reward_error": "", "reward_work_s": 0.1}


def step_rewards(**infos: dict[str, Any]) -> StepRewards:
    """Rewards of samples by key; a sample without other fields has the score in the field ``score``."""
    return StepRewards(
        {
            key: TrajectoryReward({**INFO, **info}, reward=2 * info["score"], raw_score=info["score"])
            for key, info in infos.items()
        }
    )


REWARDS = step_rewards(
    a_0_0={"score": 9.0},  # an earlier output of the session
    a_0_1={"score": 0.5, "format": 1, "verdict": "so so"},
    b_0_0={"score": 0.9},
    c_0_0={"score": 0.1},
    d_0_0={"score": 0.0, "reward_outcome": "unscored", "reward_masked": True},
    e_0_0={"score": 0.0, "reward_outcome": "failed", "reward_masked": True, "reward_error": "timed out"},
)


def read(keys: list[str]) -> list[tuple[str, str]]:
    return [("question", f"answer of {key}") for key in keys]


def rows_of(
    monkeypatch: pytest.MonkeyPatch, rewards: StepRewards = REWARDS, read: Any = read
) -> dict[str, dict[str, Any]]:
    """Return the rows of the table of step 7 by uid."""
    written: list[Any] = []
    monkeypatch.setattr(sample_table, "_WRITERS", {"wandb": lambda step, rows: written.append((step, rows))})
    SampleTable(8, 1).log(7, rewards, read, ["console", "wandb"])
    ((step, rows),) = written
    assert step == 7
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return {row["uid"]: row for row in found}


def test_the_samples_are_failed_extreme_and_random_ones_in_turn() -> None:
    chosen = chosen_keys(REWARDS, 4, random.Random(1))
    assert list(chosen.items())[:3] == [("e_0_0", "failed"), ("c_0_0", "lowest"), ("b_0_0", "highest")]
    assert list(chosen.items())[3][1] == "random"
    assert chosen == chosen_keys(REWARDS, 4, random.Random(1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_the_table_has_the_requested_number_of_different_samples(size: int) -> None:
    chosen = chosen_keys(REWARDS, size, random.Random(2))
    assert len(chosen) == min(size, 5)
    assert "a_0_0" not in chosen


def test_a_step_in_which_all_samples_failed_has_a_table() -> None:
    rewards = step_rewards(a_0_0={"score": 0.0, "reward_outcome": "failed"})
    assert chosen_keys(rewards, 4, random.Random(1)) == {"a_0_0": "failed"}


def test_a_row_has_texts_score_reward_and_components(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch)
    assert {uid: (row["score"], row["reward"], row["outcome"], row["error"]) for uid, row in rows.items()} == {
        "a_0": (0.5, 1.0, "scored", ""),
        "b_0": (0.9, pytest.approx(1.8), "scored", ""),
        "c_0": (0.1, pytest.approx(0.2), "scored", ""),
        "d_0": (None, None, "unscored", ""),
        "e_0": (None, None, "failed", "timed out"),
    }
    assert {(row["step"], row["prompt"], row["response"]) for row in rows.values()} == {
        (7, "question", f"answer of {uid}_{1 if uid == 'a_0' else 0}") for uid in rows
    }
    assert json.loads(rows["a_0"]["components"]) == {"format": 1, "verdict": "so so"}


def test_texts_are_bounded_and_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE_API_KEY", "planted-sample-table-key")
    error = "refused planted-sample-table-key \ud800"
    rewards = step_rewards(
        c_0_0={"score": 0.1, "note": "x" * 10_000},
        e_0_0={"score": 0.0, "reward_outcome": "failed", "reward_error": error},
    )
    rows = rows_of(monkeypatch, rewards, read=lambda keys: [("question", f"c{'a' * 9998}d") for _ in keys])
    assert rows["e_0"]["error"] == "refused [API key] \\ud800"
    response = rows["c_0"]["response"]
    assert response.startswith("caa")
    assert response.endswith("aad")
    assert "(6000 characters left out)" in response
    assert max(len(value) for value in rows["c_0"].values() if isinstance(value, str)) < MAX_TEXT + 50


def test_every_k_th_step_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(sample_table, "_WRITERS", {"wandb": lambda step, rows: steps.append(step)})
    table = SampleTable.of(RewardLoopConfig(log_samples=2, log_samples_every=3), ["wandb"])
    assert table is not None
    for step in range(1, 10):
        table.log(step, REWARDS, read, ["wandb"])
    assert steps == [3, 6, 9]


def test_without_the_option_there_is_no_table() -> None:
    assert SampleTable.of(RewardLoopConfig(), ["wandb"]) is None


@pytest.mark.parametrize("loggers", ["console", ["console", "tensorboard"]])
def test_loggers_without_tables_are_named_once_at_the_start(
    loggers: str | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert SampleTable.of(RewardLoopConfig(log_samples=2), loggers) is None
    (message,) = caplog.messages
    assert "reward_loop.log_samples=2 has no effect: trainer.logger=['console'" in message
    assert "add wandb or mlflow" in message


def test_an_error_of_a_logger_is_logged_once_and_the_others_get_the_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: int, rows: Any) -> None:
        raise ConnectionError("planted")

    steps: list[int] = []
    monkeypatch.setattr(sample_table, "_WRITERS", {"mlflow": fail, "wandb": lambda step, rows: steps.append(step)})
    table = SampleTable(2, 1)
    for step in (1, 2):
        table.log(step, REWARDS, read, ["mlflow", "wandb"])
    assert steps == [1, 2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "no table of step 1 in mlflow" in caplog.text


def log_steps() -> None:
    table = SampleTable(4, 1)
    for step in (1, 2, 60):
        table.log(step, REWARDS, read, ["console", "mlflow", "wandb"])


@pytest.mark.integration
def test_wandb_has_a_table_for_each_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_table=lambda data, artifact_file: None))
    with wandb.init(mode="offline", dir=tmp_path, project="project", settings=wandb.Settings(silent=True)) as run:
        log_steps()
        run.log({"critic/score/mean": 0.5}, step=60)  # as verl does afterwards
    assert "reward_loop.log_samples" not in caplog.text
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    assert sorted(table["data"][0][0] for table in tables) == [1, 2, 60]
    for table in tables:
        assert table["columns"] == list(COLUMNS)
        assert [row[1] for row in table["data"]] == ["failed", "lowest", "highest", "random"]


def test_without_a_run_of_wandb_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    SampleTable(2, 1).log(1, REWARDS, read, ["wandb"])
    assert caplog.messages == []


@pytest.mark.integration
def test_mlflow_has_a_table_for_fifty_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        log_steps()
    assert "reward_loop.log_samples" not in caplog.text
    for file, steps in (("000000", [1, 2]), ("000050", [60])):
        table = mlflow.load_table(f"reward_loop/samples_from_step_{file}.json")
        assert list(table.columns) == list(COLUMNS)
        assert list(table["step"]) == [step for step in steps for _ in range(4)]


def test_mlflow_receives_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    # Also where MLflow is not installed: it is not a dependency of verl.
    logged: list[tuple[Any, str]] = []
    stub = SimpleNamespace(log_table=lambda data, artifact_file: logged.append((data, artifact_file)))
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    SampleTable(2, 1).log(60, REWARDS, read, ["mlflow"])
    ((columns, file),) = logged
    assert file == "reward_loop/samples_from_step_000050.json"
    assert list(columns) == list(COLUMNS)
    assert columns["why"] == ["failed", "lowest"]
