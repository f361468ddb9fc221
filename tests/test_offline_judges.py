"""The judges in the summary of ``reward-loop score``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.testing import FakeJudge, Status

ROWS = 6
JUDGE = """
from reward_loop.client import Judge, Number

judge = Judge("{{answer}}", Number(0, 1), model="judge-7b")

async def compute_score(solution_str, reward_router_address):
    return (await judge(reward_router_address, answer=solution_str)).reward()

def sync(solution_str, reward_router_address):
    import asyncio
    return asyncio.run(compute_score(solution_str, reward_router_address))

async def of_lists(solution_strs, reward_router_address):
    await judge(reward_router_address, answer=solution_strs[0])
    return [1.0] * len(solution_strs)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps({"solution_str": f"{i}"}) + "\n" for i in range(ROWS)))
    monkeypatch.chdir(tmp_path)
    with FakeJudge("Score: 1", model="judge-7b") as judge:
        yield judge


def run(command: str, *arguments: str) -> str:
    done = CliRunner().invoke(cli.app, [command, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def score(server: FakeJudge, function: str, *more: str) -> str:
    return run("score", f"judge.py:{function}", "rollouts.jsonl", "--router-address", server.address, *more)


@pytest.mark.parametrize(
    ("function", "options", "requests"),
    [
        ("compute_score", (), ROWS),
        ("sync", (), ROWS),
        ("of_lists", ("--manager", "batch"), 1),
    ],
)
def test_the_judges_of_a_scoring_are_those_of_the_report_on_its_records(
    server: FakeJudge, function: str, options: tuple[str, ...], requests: int
) -> None:
    server.script(Status(500), "I cannot tell.")
    options = (*options, "-O", "retry.initial_wait=0.001", "--json")
    scored = json.loads(score(server, function, *options))["judges"]
    assert scored == json.loads(run("report", "rollouts.scored", "--json"))["judges"]
    (judge,) = scored
    assert (judge["requests"], judge["errors"], judge["no_verdict"]) == (requests + 2, 1, 1)


def test_a_retried_row_counts_with_its_latest_requests(server: FakeJudge) -> None:
    server.script(*[Status(400)] * 2)
    score(server, "compute_score")
    shown = score(server, "compute_score")
    assert f"(judge.py) {ROWS} 0.0%" in " ".join(shown.split())
