"""The command `reward-loop serve`: a real process that serves, cancels and stops; clear errors."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.records.reader import RecordsReader
from tests.support.servers import Watched

MAIN = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"

FUNCTION = '''
import os, time

def compute_score(solution_str, ground_truth):
    """Return 1 for the right answer; ``wait`` waits until the test opens a pipe, ``hang`` hangs."""
    if solution_str in ("wait", "hang"):
        with open("started", "w") as started:
            started.write(f"{os.getpid()} {solution_str}\\n")
        if solution_str == "hang":
            time.sleep(3600)
        open("release").close()
        return 1
    if solution_str == "none":
        return None
    return {"score": solution_str == ground_truth, "length": len(solution_str)}

def ranks(solution_strs):
    return [0.0 for _ in solution_strs]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Service:
    """A running service."""

    process: subprocess.Popen[str]
    address: str

    def send(self, path: str, body: Any, key: str | None = "secret") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=120)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def ask(self, path: str, body: Any, key: str | None = "secret") -> tuple[int, Any]:
        answer = self.send(path, body, key).getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[Service]:
    """A running service."""
    command = [sys.executable, "-c", MAIN, "serve", "--port", "0", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout
        [address] = re.findall(r"is served at (http://[\w.:]+)/score", process.stdout.readline())
        yield Service(process, address)
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.fixture
def started(folder: Path) -> Iterator[IO[str]]:
    """The pipe to which each call that waits or hangs writes its process id and its sample."""
    os.mkfifo(folder / "started")
    os.mkfifo(folder / "release")
    descriptor = os.open(folder / "started", os.O_RDWR)  # also for writing: no end of file between two calls
    with open(descriptor) as lines:
        yield lines


def rollout(response: str) -> dict[str, str]:
    return {"solution_str": response, "ground_truth": "4"}


@pytest.mark.integration
def test_the_service_answers_cancels_at_a_disconnect_and_leaves_no_process(folder: Path, started: IO[str]) -> None:
    isolation = ("--isolation", "process", "-O", "max_processes=4")
    options = ("reward.py:compute_score", "--api-key-env", "KEY", "--log-dir", "records", "--grace", "600")
    with serving(*options, *isolation, KEY="secret") as service, ThreadPoolExecutor() as threads:
        assert service.ask("/score", rollout("4"), key=None)[0] == 401
        assert [service.ask("/score", rollout(text))[1]["score"] for text in ("4", "none")] == [1.0, None]

        leaves = service.send("/score", rollout("hang"))
        worker = Watched([int(started.readline().split()[0])])
        leaves.close()
        assert worker.left_after(60) == 0

        waiting = [threads.submit(service.ask, "/score", rollout(text)) for text in ("wait", "wait", "hang")]
        running = [int(started.readline().split()[0]) for _ in waiting]
        everything = [child.pid for child in psutil.Process(service.process.pid).children(recursive=True)]
        assert set(running) <= set(everything)
        left = Watched([service.process.pid, *everything])
        service.process.send_signal(signal.SIGINT)
        assert service.process.stderr
        assert "stopping: 3 samples in flight" in service.process.stderr.readline()
        status, error = service.ask("/score", rollout("4"))  # on a new connection
        assert (status, error["error"]) == (503, "the service is stopping")
        with open("release", "w"):
            assert [reply.result(timeout=120)[1]["score"] for reply in waiting[:2]] == [1.0] * 2
        time.sleep(1.1)  # further signals count after a second
        service.process.send_signal(signal.SIGINT)
        status, error = waiting[2].result(timeout=120)
        assert (status, error["error"]) == (503, "the service stopped before all samples were scored")
        _, errors = service.process.communicate(timeout=60)
        assert service.process.returncode == 0
        assert "Traceback" not in errors
        assert left.left_after(60) == 0
    outcomes = [row["outcome"] for row in RecordsReader(folder / "records").rows()]
    assert sorted(outcomes) == ["scored", "scored", "scored", "unscored"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:compute_score"], "nowhere.py"),
        (["reward.py:score"], "score"),
        ([], "FUNCTION"),
        (["reward.py:compute_score", "--host", "0.0.0.0"], "--api-key-env"),
        (["reward.py:compute_score", "--api-key-env", "NOT_SET"], "NOT_SET: this environment variable is not set"),
        (["reward.py:compute_score", "-O", "timeouts=3"], "timeouts"),
        (["reward.py:compute_score", "--timeout", "3", "-O", "timeout=4"], "give one of them"),
    ],
)
def test_errors_name_the_cause(folder: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2
    assert message in re.sub(r"\W*\n\W*", " ", done.output)
