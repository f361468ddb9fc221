"""Ray is started again if its start timed out."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from reward_loop.verl.main_ppo import START_TIMED_OUT as TIMED_OUT
from reward_loop.verl.main_ppo import STARTS, with_ray

ray = pytest.importorskip("ray")


def failing(calls: list[int], errors: list[Exception]) -> str:
    calls.append(len(calls))
    if len(calls) <= len(errors):
        raise errors[len(calls) - 1]
    return "trained"


@pytest.mark.parametrize("failures", [0, 1, STARTS - 1])
def test_ray_is_started_again_if_its_start_timed_out(failures: int, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    assert with_ray(lambda: failing(calls, [Exception(TIMED_OUT)] * failures)) == "trained"
    assert len(calls) == failures + 1
    assert capfd.readouterr().out.count("Starting it again") == failures


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_of_a_start_that_timed_out_are_killed() -> None:
    command = ["sleep", "600"]
    nodes: list[subprocess.Popen[bytes]] = []

    def start() -> str:
        nodes.append(subprocess.Popen(command))
        return failing([0] * (len(nodes) - 1), [Exception(TIMED_OUT)])

    with subprocess.Popen(command) as other:
        try:
            assert with_ray(start) == "trained"
            assert nodes[0].wait(30) == -signal.SIGKILL
            assert [process.poll() for process in (other, nodes[1])] == [None, None]
        finally:
            for process in (other, *nodes):
                process.kill()
                process.wait()


def test_the_last_timeout_is_raised() -> None:
    calls: list[int] = []
    with pytest.raises(Exception, match=TIMED_OUT):
        with_ray(lambda: failing(calls, [Exception(TIMED_OUT)] * STARTS))
    assert len(calls) == STARTS


def test_other_errors_are_raised_at_once() -> None:
    calls: list[int] = []
    with pytest.raises(ValueError, match="no GPU"):
        with_ray(lambda: failing(calls, [ValueError("no GPU")]))
    assert len(calls) == 1


def test_an_error_of_the_training_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of the run may fail with the same words."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    calls: list[int] = []
    with pytest.raises(Exception, match=TIMED_OUT):
        with_ray(lambda: failing(calls, [Exception(TIMED_OUT)]))
    assert len(calls) == 1
