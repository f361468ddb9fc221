"""The command `reward-loop view`: a real process that serves, follows and stops; clear errors."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from reward_loop._util.web_server import listen
from reward_loop.cli import app
from reward_loop.records import Records
from tests.support.recorded import OtherProcess, flushed, record

MAIN = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = Records(tmp_path / "rewards")
    record(writer, "a")
    flushed(writer)
    return tmp_path / "rewards"


@contextmanager
def viewing(folder: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running viewer, and its address."""
    command = [sys.executable, "-c", MAIN, "view", str(folder), "--port", "0", *options]
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"is shown at (http://\S+)", line)
        assert found, line
        yield process, found[1]
    finally:
        process.kill()
        process.communicate(timeout=30)


def connected(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_follows_other_processes_and_stops_with_an_open_stream(folder: Path, number: signal.Signals) -> None:
    writer = OtherProcess(folder, "other")
    try:
        with viewing(folder) as (process, address):
            stream = connected(address)
            stream.request("GET", "/api/changes")
            answer = stream.getresponse()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert json.loads(answer.readline().removeprefix(b"data: "))["samples"] == 1
            assert answer.readline() == b"\n"
            writer.write(3)
            change = json.loads(answer.readline().removeprefix(b"data: "))
            assert (change["samples"], change["last_step"]) == (4, 1)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
    finally:
        writer.kill()


@pytest.mark.integration
def test_an_address_that_others_can_reach_needs_a_key(folder: Path) -> None:
    with viewing(folder, "--host", "0.0.0.0", "--api-key-env", "VIEW_KEY", VIEW_KEY="secret") as (_, address):
        assert address.endswith("/?key=KEY")
        connection = connected(address.replace("0.0.0.0", "127.0.0.1"))
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            connection.request("GET", "/api/run", headers=headers)
            answer = connection.getresponse()
            assert answer.status == status
            answer.read()


def test_an_address_that_others_can_reach_is_refused_without_a_key(folder: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(folder), "--port", "0", "--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert "--api-key-env" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "it does not exist"),
        (["empty"], "contains no records"),
        (["rewards", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE: this environment variable is not set"),
        (["rewards", "--host", "999.1.1.1"], "--host 999.1.1.1"),
    ],
)
def test_errors_name_the_cause(folder: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "empty").mkdir()
    monkeypatch.chdir(folder.parent)
    done = CliRunner().invoke(app, ["view", *options, *(() if "--host" in options else ("--port", "0"))])
    assert done.exit_code == 2
    assert message in done.output


def test_a_port_that_is_in_use_is_an_error(folder: Path) -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        done = CliRunner().invoke(app, ["view", str(folder), "--port", str(port)])
    assert done.exit_code == 2
    assert f"--port {port}" in done.output
