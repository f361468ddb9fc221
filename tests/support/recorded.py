"""Folders of records, written by the library's own writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from reward_loop.config import RewardLoopConfig
from reward_loop.managers.base import decide
from reward_loop.records import ActiveSample, Records
from reward_loop.types import Outcome, RewardResult, RewardSample

JUDGE = {"url": "http://127.0.0.1:1/v1/chat/completions", "model": "judge-7b", "backend": "http://10.0.0.1:2"}


def exchange(number: int, **more: Any) -> dict[str, Any]:
    """An exchange with a judge, as the client records it."""
    return {
        "id": f"e{number}",
        "time": 1.7e9,
        "attempt": 1,
        **JUDGE,
        "messages": [{"role": "user", "content": "Is it right?"}],
        "status": 200,
        "reply": f"Let me see. Score: {number}",
        "seconds": 0.5,
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "verdict": float(number),
        "score": float(number),
        "unscored": None,
        **more,
    }


def record(
    writer: Records,
    uid: str,
    score: float | None = 1.0,
    *,
    step: int | None = 1,
    group: str | None = None,
    response: str = "an answer",
    components: dict[str, Any] | None = None,
    exchanges: list[dict[str, Any]] | None = None,
    error: str | None = None,
    full: float = 1.0,
    **sample: Any,
) -> None:
    """Record a sample; without a score, it failed."""
    found = RewardSample(response, uid=uid, step=step, group=group, **{"prompt": f"What is {uid}?", **sample})
    outcome = Outcome.SCORED if score is not None else Outcome.FAILED
    problem = error or ("it failed" if score is None else None)
    result = RewardResult(outcome=outcome, score=score, error=problem, extra_info=components or {})
    result = decide(result, RewardLoopConfig())
    active = ActiveSample(found, "compute_score (reward.py)", is_recorded=True)
    for one in exchanges or ():
        active.exchange(one)
    writer.write_sample(active, result, full)


def flushed(writer: Records) -> Records:
    """Wait until the records are in the files."""
    assert writer.flush(60.0)
    return writer


WRITER = """
import sys
from pathlib import Path
from reward_loop.records import Records
from tests.support.recorded import flushed, record

writer = Records(sys.argv[1])
for line in sys.stdin:
    for number in range(int(line)):
        record(writer, f"{sys.argv[2]}-{number}", number / 10)
    flushed(writer)
    print("written", flush=True)
"""


class OtherProcess:
    """A process that writes records on request.

    Args:
        folder: the records folder.
        name: the beginning of the uids.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, count: int) -> None:
        """Write records, and wait until they are in the file."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n"

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
