"""Managers that were written for verl, run by a reward worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from reward_loop.config import RewardLoopConfig
from reward_loop.limits.client import open_limits
from reward_loop.managers import base
from reward_loop.records.evaluation_events import EvaluationEvents
from reward_loop.verl.managers import VerlManager

pytestmark = pytest.mark.integration  # imports verl


async def test_scores_of_a_manager_of_verl_are_sent_to_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    class LengthManager:
        async def run_single(self, data: Any) -> dict[str, Any]:
            return {"reward_score": 0.5, "reward_extra_info": {"length": 3}}

    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    events = EvaluationEvents(provider.get_logger("reward_loop"))
    monkeypatch.setattr(base, "open_events", lambda options: events if options.otel else None)
    options = RewardLoopConfig(otel=True)
    limits = open_limits(options)
    row = {"uid": np.array(["q"]), "session_id": np.array([2]), "data_source": np.array(["math"])}
    data = SimpleNamespace(batch={"responses": np.ones((1, 3))}, non_tensor_batch=row)
    reward = await VerlManager(LengthManager(), options, limits).run_single(data)
    limits.close()
    assert reward["reward_score"] == 0.5
    sent = [dict(item.log_record.attributes or {}) for item in exporter.get_finished_logs()]
    assert [
        (item["gen_ai.evaluation.name"], item["gen_ai.evaluation.score.value"], item["reward_loop.sample.uid"])
        for item in sent
    ] == [("score", 0.5, "q_2"), ("length", 3.0, "q_2")]
