"""The reward for verifiers, with a task and a trace that have the fields of its version 0.4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from reward_loop.adapters.process_agent import ENVIRONMENT
from reward_loop.adapters.verifiers import reward
from reward_loop.errors import ConfigError, ScoringError
from tests.adapters.rewards import FUNCTION


class TaskData(BaseModel):
    idx: int | None = None
    prompt: str | None = "2+2?"
    answer: str = "4"
    level: str = "easy"


class Trace(BaseModel):
    id: str = "ab12"
    last_reply: str = ""
    num_output_tokens: int = 3
    metrics: dict[str, float] = {}

    def record_metrics(self, values: dict[str, float]) -> None:
        self.metrics |= values


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(**values: Any) -> None:
        file = tmp_path / "options.json"
        file.write_text(json.dumps({"function": FUNCTION, **values}))
        monkeypatch.setenv(ENVIRONMENT, str(file))

    write()
    return write


@pytest.mark.usefixtures("options")
async def test_a_trace_gets_its_reward_and_its_components_as_metrics() -> None:
    trace = Trace(last_reply="4")
    assert await reward(TaskData(), trace) == 1.0
    assert trace.metrics == {"score": 1.0, "words": 1.0}
    assert await reward(TaskData(answer="5"), Trace(last_reply="4")) == 0.0


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize(("reply", "message"), [("none", "gave no score"), ("fail", "the judge is broken")])
async def test_a_trace_without_a_score_is_an_error_and_not_a_number(reply: str, message: str) -> None:
    with pytest.raises(ScoringError, match=f"sample ab12: .*{message}"):
        await reward(TaskData(), Trace(last_reply=reply))


@pytest.mark.parametrize(
    ("values", "reply", "score"),
    [
        ({"reward_loop": {"on_failed": "default", "default_score": -1}}, "fail", -1.0),
        ({"ground_truth": "level"}, "easy", 1.0),
    ],
)
async def test_the_options_of_the_file_apply(options: Any, values: dict[str, Any], reply: str, score: float) -> None:
    options(**values)
    assert await reward(TaskData(), Trace(last_reply=reply)) == score


async def test_a_missing_ground_truth_is_an_error_that_names_the_fields(options: Any) -> None:
    options(ground_truth="reference")
    with pytest.raises(ConfigError, match=r"no field 'reference': .*answer, idx, level, prompt"):
        await reward(TaskData(), Trace(last_reply="4"))


async def test_a_manager_of_groups_is_refused(options: Any) -> None:
    options(function=FUNCTION.replace("compute_score", "rank"), manager="group")
    with pytest.raises(ConfigError, match="scores each trace alone"):
        await reward(TaskData(), Trace(last_reply="4"))
