"""What reward workers report to RL-Insight: verl's own logger, with a recording module in place of its package."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from verl.utils.tracking import RLInsightLogger

from reward_loop.types import RewardSample
from reward_loop.verl.reward_worker import RewardWorker
from tests.verl.rollouts import rollout

pytestmark = pytest.mark.integration  # imports verl

HALF = "async def compute_score(solution_str): return 1 / len(solution_str)"


class Recorder(ModuleType):
    """Stands where the package ``rl_insight`` is."""

    __version__ = "0.3.0"

    def __init__(self) -> None:
        super().__init__("rl_insight")
        self.inits: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.lanes: list[tuple[str, str]] = []

    def init(self, **given: Any) -> None:
        self.inits.append(given)

    @contextmanager
    def trace_state(self, name: str, *, state_lane_id: str) -> Iterator[None]:
        self.lanes.append((name, state_lane_id))
        yield

    def trace_span(self, **span: Any) -> None:
        self.spans.append(span)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "rl_insight", made)
    monkeypatch.setattr(RLInsightLogger, "_rl_insight_module", None)
    monkeypatch.setattr(RLInsightLogger, "_init_done", False)
    return made


async def test_each_sample_is_a_span_beside_those_of_the_rollout(
    with_function: Callable[..., Any], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RLInsightLogger.ENABLE_ENV, "1")
    overrides = (
        "trainer.project_name=sums",
        "trainer.experiment_name=first",
        "+trainer.rl_insight.server.url=http://x",
    )
    before = time.time_ns()
    worker = RewardWorker(with_function(HALF, *overrides), None, position=3)
    (init,) = recorder.inits
    assert (init["project"], init["experiment_name"]) == ("sums", "first")
    assert init["config"] == {"server": {"url": "http://x"}}
    await worker.compute_score(rollout("four", uid="u", session_id=2, global_steps=5))
    await worker.compute_score(RewardSample("", uid="game"))
    assert recorder.lanes == [("reward", "reward_worker_3")] * 2
    scored, failed = recorder.spans
    assert scored["name"] == failed["name"] == "reward"
    assert before < scored["start_time_ns"] <= scored["end_time_ns"] <= failed["start_time_ns"] < time.time_ns()
    assert scored["attributes"] | {"reward_seconds": 0.0} == {
        "uid": "u_2",
        "global_steps": 5,
        "reward_score": 0.25,
        "reward_outcome": "scored",
        "reward_masked": False,
        "reward_attempts": 1,
        "reward_seconds": 0.0,
        "reward_wait_seconds": 0.0,
        "reward_queue_seconds": 0.0,
        "reward_outage_seconds": 0.0,
    }
    assert 0 < scored["attributes"]["reward_seconds"] < 1
    attributes = failed["attributes"]
    assert (attributes["uid"], attributes["global_steps"], attributes["reward_outcome"]) == ("game", "", "failed")
    # OpenTelemetry drops attributes of other types.
    assert {type(value) for span in recorder.spans for value in span["attributes"].values()} <= {str, bool, int, float}


async def test_without_rl_insight_its_package_is_not_needed(
    with_function: Callable[..., Any], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RLInsightLogger.ENABLE_ENV, "0")  # as verl sets it
    monkeypatch.delitem(sys.modules, "rl_insight")
    worker = RewardWorker(with_function(HALF), None)
    assert (await worker.compute_score(rollout("four")))["reward_score"] == 0.25
    assert not recorder.spans
