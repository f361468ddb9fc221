"""Sends the scores of samples to OpenTelemetry, as events ``gen_ai.evaluation.result``; docs/opentelemetry.md.

This is the only module that imports OpenTelemetry. It is imported only with ``reward_loop.otel=true``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry._logs import Logger
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BLRP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_LOGS_PROTOCOL,
    OTEL_EXPORTER_OTLP_PROTOCOL,
)

from reward_loop._util.text import cut, listing
from reward_loop.errors import ConfigError, RewardFunctionError
from reward_loop.records.active import ActiveSample
from reward_loop.records.encoding import cleaned
from reward_loop.types import Outcome, RewardResult, returned_numbers

__all__ = ["EVENT", "EvaluationEvents", "evaluation_events"]

logger = logging.getLogger(__name__)

EVENT = "gen_ai.evaluation.result"
"""The name of the event in the semantic conventions of OpenTelemetry for generative AI."""

SCORE = "score"
"""The ``gen_ai.evaluation.name`` of the score. Components have their own names."""

MAX_COMPONENTS = 64
"""The largest number of components of a sample that are sent."""

MAX_TEXT = 1024
"""The largest number of characters of an attribute."""

MAX_QUEUE = 16384
"""The default of OTEL_BLRP_MAX_QUEUE_SIZE, the number of events that may wait for the exporter. The SDK's own default
of 2,048 is less than one large step."""

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""The values of OTEL_EXPORTER_OTLP_PROTOCOL, with the names under which the exporters are registered."""


class EvaluationEvents:
    """Sends the score of each sample, and each number that its function returned, as an event of its own.

    Args:
        target: the OpenTelemetry logger that takes the events. Its processor must not block.
    """

    def __init__(self, target: Logger) -> None:
        self._target = target
        self._has_failed = False

    def send(self, active: ActiveSample, result: RewardResult) -> None:
        """Queue the events of a sample. An error is logged once, and costs only events."""
        try:
            now = time.time_ns()
            for attributes in _evaluations(active, result):
                self._target.emit(timestamp=now, event_name=EVENT, attributes=attributes)
        except Exception:  # observability must not cost a sample
            if not self._has_failed:
                logger.exception("reward_loop.otel: the events of a sample are lost, further ones silently")
            self._has_failed = True


@functools.cache
def evaluation_events() -> EvaluationEvents | None:
    """Return the events of this process; ``None`` if OTEL_LOGS_EXPORTER is ``none``.

    The standard environment variables of OpenTelemetry configure the exporters. A background thread exports, and at
    the end of the process it exports what is left, for at most 30 seconds.

    Raises:
        ConfigError: an environment variable names an exporter or a protocol that is not installed.
    """
    exporters = [_exporter(name) for name in _exporter_names()]
    if not exporters:
        return None
    provider = LoggerProvider()
    for exporter in exporters:
        try:
            size = int(os.environ.get(OTEL_BLRP_MAX_QUEUE_SIZE, MAX_QUEUE))
            processor = BatchLogRecordProcessor(exporter, max_queue_size=size)
        except ValueError as error:
            raise ConfigError(f"reward_loop.otel: the variables OTEL_BLRP_* are invalid: {error}") from error
        provider.add_log_record_processor(processor)
    return EvaluationEvents(provider.get_logger("reward_loop"))


def _exporter_names() -> list[str]:
    names = os.environ.get("OTEL_LOGS_EXPORTER") or "otlp"
    return [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]


def _exporter(name: str) -> LogRecordExporter:
    """Return an exporter by its name in OTEL_LOGS_EXPORTER."""
    registered = {entry.name: entry for entry in entry_points(group="opentelemetry_logs_exporter")}
    entry = registered.get(_otlp_exporter() if name == "otlp" else name)
    if entry is None:
        raise ConfigError(
            f"reward_loop.otel: the exporter {name!r} of OTEL_LOGS_EXPORTER is not installed. Installed: "
            f"{listing(registered)}. OTLP over HTTP: pip install opentelemetry-exporter-otlp-proto-http; over gRPC: "
            "pip install opentelemetry-exporter-otlp-proto-grpc"
        )
    try:
        exporter: LogRecordExporter = entry.load()()
    except Exception as error:  # an exporter may check its environment variables with any exception
        raise ConfigError(f"reward_loop.otel: the exporter {name!r} cannot start: {error}") from error
    return exporter


def _otlp_exporter() -> str:
    variables = (OTEL_EXPORTER_OTLP_LOGS_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL)
    protocol = next((os.environ[name] for name in variables if os.environ.get(name)), "http/protobuf").strip()
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"reward_loop.otel: invalid OTLP protocol {protocol!r}: it must be {listing(_PROTOCOLS)}")
    return _PROTOCOLS[protocol]


def _evaluations(active: ActiveSample, result: RewardResult) -> Iterator[dict[str, Any]]:
    """Yield the attributes of each event of a sample, first those of the score."""
    shared = cleaned(_shared(active, result))
    score: dict[str, Any] = {"gen_ai.evaluation.name": SCORE}
    if result.score is not None:
        score["gen_ai.evaluation.score.value"] = float(result.score)
    else:
        score["gen_ai.evaluation.score.label"] = str(result.outcome)
    if isinstance(explanation := result.extra_info.get("explanation"), str):
        score["gen_ai.evaluation.explanation"] = cut(explanation, MAX_TEXT)
    yield {**shared, **cleaned(score)}
    numbers = ((name, value) for name, value in returned_numbers(result.extra_info).items() if name != "score")
    for name, value in itertools.islice(numbers, MAX_COMPONENTS):
        component = cleaned({"gen_ai.evaluation.name": cut(name, MAX_TEXT)})
        yield {**shared, **component, "gen_ai.evaluation.score.value": value}


def _shared(active: ActiveSample, result: RewardResult) -> dict[str, Any]:
    sample = active.sample
    found = {
        "gen_ai.response.id": sample.extra_info.get("response_id"),
        "reward_loop.sample.uid": sample.uid,
        "reward_loop.sample.group": sample.group,
        "reward_loop.sample.step": sample.step,
        "reward_loop.sample.validate": sample.validate,
        "reward_loop.sample.data_source": sample.data_source,
        "reward_loop.function": active.function,
        "reward_loop.outcome": str(result.outcome),
        "reward_loop.judge.response_ids": _judge_ids(active),
        "error.type": _error_type(result) if result.outcome is Outcome.FAILED else None,
    }
    return {
        name: cut(value, MAX_TEXT) if isinstance(value, str) else value
        for name, value in found.items()
        if isinstance(value, str | int | list) and value not in ("", [])
    }


def _judge_ids(active: ActiveSample) -> list[str]:
    """Return the IDs that model servers gave to their answers for the sample."""
    answers = [exchange.get("response") for exchange in list(active.exchanges.values())]
    ids = [answer.get("id") for answer in answers if isinstance(answer, Mapping)]
    return [cut(found, MAX_TEXT) for found in ids if isinstance(found, str)]


def _error_type(result: RewardResult) -> str:
    error: BaseException | None = result.exception
    if isinstance(error, RewardFunctionError) and error.__cause__ is not None:
        error = error.__cause__  # what the function raised
    return "_OTHER" if error is None else type(error).__name__
