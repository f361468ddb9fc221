"""Scores as OpenTelemetry events: their attributes, the exporters, and collectors that do not answer."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Number
from reward_loop.records import hide
from reward_loop.testing import FakeJudge

pytest.importorskip("opentelemetry.sdk._logs")

from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    InMemoryLogRecordExporter,
    LogRecordExporter,
    LogRecordExportResult,
    SimpleLogRecordProcessor,
)
from opentelemetry.sdk.trace import TracerProvider

from reward_loop.records.evaluation_events import EVENT, MAX_COMPONENTS, EvaluationEvents, evaluation_events
from tests.collector import collector, decoded

KEY = "planted-key-0123456789"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def events_to(exporter: LogRecordExporter, **batch: Any) -> EvaluationEvents:
    provider = LoggerProvider(shutdown_on_exit=False)
    processor = BatchLogRecordProcessor(exporter, **batch) if batch else SimpleLogRecordProcessor(exporter)
    provider.add_log_record_processor(processor)
    return EvaluationEvents(provider.get_logger("reward_loop"))


def manager_with(events: EvaluationEvents, function: Any, **options: Any) -> NaiveRewardLoopManager:
    manager = NaiveRewardLoopManager(RewardLoopConfig(**options), compute_score=function)
    manager.evaluation_events = events
    return manager


async def sent(function: Any, sample: RewardSample | None = None, **options: Any) -> dict[str, Mapping[str, Any]]:
    """Score a sample; return the attributes of its events by the name of the evaluation."""
    exporter = InMemoryLogRecordExporter()
    await manager_with(events_to(exporter), function, **options).run_single(sample or RewardSample("x"))
    found = [item.log_record for item in exporter.get_finished_logs()]
    assert {record.event_name for record in found} == {EVENT}
    attributes = [dict(record.attributes or {}) for record in found]
    by_name = {str(item["gen_ai.evaluation.name"]): item for item in attributes}
    assert len(by_name) == len(found)
    return by_name


async def test_the_score_and_each_component_is_an_event_with_the_sample() -> None:
    def compute_score(solution_str: str) -> dict[str, Any]:
        return {"score": 0.5, "format": 1, "correct": False, "pred": "42"}

    sample = RewardSample("x", "math", uid="q_0", group="q", step=7, extra_info={"response_id": "resp-1"})
    events = await sent(compute_score, sample)
    assert {name: event["gen_ai.evaluation.score.value"] for name, event in events.items()} == {
        "score": 0.5,
        "format": 1.0,
        "correct": 0.0,
    }
    for event in events.values():
        assert event["reward_loop.function"].endswith("compute_score (test_evaluation_events.py)")
        assert {name: value for name, value in event.items() if not name.startswith("gen_ai.evaluation")} == {
            "gen_ai.response.id": "resp-1",
            "reward_loop.sample.uid": "q_0",
            "reward_loop.sample.group": "q",
            "reward_loop.sample.step": 7,
            "reward_loop.sample.validate": False,
            "reward_loop.sample.data_source": "math",
            "reward_loop.function": event["reward_loop.function"],
            "reward_loop.outcome": "scored",
        }


async def test_an_unscored_sample_has_a_label_and_no_value() -> None:
    events = await sent(lambda solution_str: None)
    assert events["score"]["gen_ai.evaluation.score.label"] == events["score"]["reward_loop.outcome"] == "unscored"
    assert not {"gen_ai.evaluation.score.value", "error.type"} & events["score"].keys()


async def test_a_failed_sample_has_the_type_of_the_exception_of_the_function() -> None:
    def fails(solution_str: str) -> float:
        raise ZeroDivisionError("secret text")

    events = await sent(fails)
    assert events.keys() == {"score"}
    assert events["score"]["gen_ai.evaluation.score.label"] == events["score"]["reward_loop.outcome"] == "failed"
    assert events["score"]["error.type"] == "ZeroDivisionError"
    assert "secret text" not in str(events)


async def test_a_sample_past_its_deadline_has_the_error_type_of_the_reward_loop() -> None:
    async def waits(solution_str: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert (await sent(waits, timeout=0.01))["score"]["error.type"] == "RewardTimeoutError"


async def test_the_score_has_the_explanation_of_the_function_cut_and_without_api_keys() -> None:
    hide(KEY)
    events = await sent(lambda solution_str: (1.0, "the prompt", f"{KEY} is \ud800 " + "long " * 1000))
    explanation = events["score"]["gen_ai.evaluation.explanation"]
    assert explanation.startswith("[API key] is \\ud800 long")
    assert len(explanation) <= 1050


async def test_the_score_has_the_ids_of_the_answers_of_judges_without_records() -> None:
    judge = Judge("Rate {{answer}}", Number(0, 10))
    async with FakeJudge("Score: 7") as server:

        async def compute_score(solution_str: str) -> Any:
            return (await judge(server.address, answer=solution_str)).reward()

        events = await sent(compute_score, log_dir=None)
    assert events["score"]["reward_loop.judge.response_ids"] == ("fake-1",)


async def test_values_that_are_not_finite_numbers_have_no_event_and_the_number_of_components_is_bounded() -> None:
    many = {f"part{i}": i for i in range(200)}
    returned = {"score": 1.0, "nan": math.nan, "huge": 10**400, "list": [1], 3: 4.0, **many}
    events = await sent(lambda solution_str: returned)
    assert list(events) == ["score", *(f"part{i}" for i in range(MAX_COMPONENTS))]


async def test_an_event_belongs_to_the_span_in_which_the_sample_is_scored() -> None:
    exporter = InMemoryLogRecordExporter()
    manager = manager_with(events_to(exporter), lambda solution_str: 1.0)
    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("step") as span:
        await manager.run_single(RewardSample("x"))
    context = span.get_span_context()
    for item in exporter.get_finished_logs():
        assert (item.log_record.trace_id, item.log_record.span_id) == (context.trace_id, context.span_id)


async def test_an_error_of_opentelemetry_costs_no_sample_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def emit(self, **fields: Any) -> None:
            raise RuntimeError("planted")

    manager = manager_with(EvaluationEvents(Broken()), lambda solution_str: 1.0)  # type: ignore[arg-type]
    rewards = [await manager.run_single(RewardSample("x")) for _ in range(3)]
    assert [reward["reward_score"] for reward in rewards] == [1.0] * 3
    assert len([record for record in caplog.records if "reward_loop.otel" in record.message]) == 1


class Stuck(LogRecordExporter):
    """An exporter whose collector does not answer until the event is set."""

    def __init__(self) -> None:
        self.called, self.answers = threading.Event(), threading.Event()
        self.exported = 0

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        self.called.set()
        assert self.answers.wait(60)
        self.exported += len(batch)
        return LogRecordExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


async def test_scoring_continues_while_a_collector_hangs_and_the_queue_is_bounded() -> None:
    exporter = Stuck()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, max_queue_size=100, max_export_batch_size=10))
    events = EvaluationEvents(provider.get_logger("reward_loop"))
    manager = manager_with(events, lambda solution_str: {"score": 1.0})
    await asyncio.gather(*(manager.run_single(RewardSample("x")) for _ in range(20)))
    assert await asyncio.to_thread(exporter.called.wait, 60)
    rewards = await asyncio.gather(*(manager.run_single(RewardSample("x")) for _ in range(500)))
    assert [reward["reward_score"] for reward in rewards] == [1.0] * 500
    exporter.answers.set()
    await asyncio.to_thread(provider.shutdown)
    assert 100 <= exporter.exported <= 120  # the queue, and the batch that was on its way


SCORE = """
import asyncio, sys
from reward_loop import NaiveRewardLoopManager, RewardSample

async def main():
    manager = NaiveRewardLoopManager({"otel": True}, compute_score=lambda solution_str: {"score": 0.5, "format": 1.0})
    rewards = [await manager.run_single(RewardSample("x", uid=f"q_{i}", step=3)) for i in range(10)]
    print(sum(reward["reward_score"] for reward in rewards))

asyncio.run(main())
"""


def run_score(code: str = SCORE, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.integration
def test_events_arrive_at_a_collector_by_the_end_of_the_process() -> None:
    with collector() as received:
        done = run_score(OTEL_EXPORTER_OTLP_ENDPOINT=received.url, OTEL_SERVICE_NAME="my-run")
    assert done.stdout.strip() == "5.0", done.stderr
    assert {resource["service.name"] for resource in received.resources} == {"my-run"}
    assert [event.event_name for event in received.events] == [EVENT] * 20
    attributes = [decoded(event.attributes) for event in received.events]
    assert {
        (item["reward_loop.sample.uid"], item["gen_ai.evaluation.name"]): item["gen_ai.evaluation.score.value"]
        for item in attributes
    } == {(f"q_{i}", name): value for i in range(10) for name, value in (("score", 0.5), ("format", 1.0))}


@pytest.mark.integration
@pytest.mark.parametrize("accepts", [True, False], ids=["hangs", "refuses"])
def test_a_collector_that_is_down_costs_no_sample_and_does_not_keep_the_process(accepts: bool) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if accepts:
            server.listen()  # connections are accepted by the kernel, and never answered
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = run_score(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5.0", done.stderr
    assert "export" in done.stderr.lower()


@pytest.mark.integration
def test_the_option_without_the_package_names_it() -> None:
    done = run_score("import sys\nsys.modules['opentelemetry'] = None\n" + SCORE)
    assert "ConfigError: reward_loop.otel=true needs the SDK of OpenTelemetry: pip install opentelemetry-sdk" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_LOGS_EXPORTER": "nonesuch"}, "the exporter 'nonesuch' of OTEL_LOGS_EXPORTER is not installed"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier"}, "invalid OTLP protocol 'carrier'"),
        ({"OTEL_BLRP_MAX_QUEUE_SIZE": "10"}, "max_export_batch_size"),
        ({"OTEL_BLRP_MAX_QUEUE_SIZE": "many"}, "OTEL_BLRP_.* are invalid: .*'many'"),
    ],
)
def test_wrong_variables_are_errors_that_name_the_option(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"reward_loop.otel: .*{message}"):
        evaluation_events.__wrapped__()


def test_the_exporter_none_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    assert evaluation_events.__wrapped__() is None
