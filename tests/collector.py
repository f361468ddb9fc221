"""A collector of OpenTelemetry on loopback, which receives events by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord


@dataclass
class Collector:
    """What the collector received at ``/v1/logs``."""

    url: str
    requests: list[ExportLogsServiceRequest] = field(default_factory=list)

    @property
    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the resource, of each process and request."""
        return [decoded(logs.resource.attributes) for request in self.requests for logs in request.resource_logs]

    @property
    def events(self) -> list[LogRecord]:
        """The events, in the order of their arrival."""
        resources = [logs for request in self.requests for logs in request.resource_logs]
        return [record for logs in resources for scope in logs.scope_logs for record in scope.log_records]


def decoded(attributes: Any) -> dict[str, Any]:
    """Returns attributes as Python values."""
    items: list[KeyValue] = list(attributes)
    return {item.key: _value(item.value) for item in items}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs a collector while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/logs", "application/x-protobuf")
            received.requests.append(ExportLogsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
