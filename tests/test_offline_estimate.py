"""``reward-loop score --dry-run``: what would be asked, without a request."""

import json
import sys

import pytest
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.testing import FakeJudge

JUDGE = """
from reward_loop.client import chat_complete

async def compute_score(solution_str, reward_router_address):
    if solution_str == "x" * 8:
        return 0
    reply = await chat_complete(reward_router_address, solution_str, model="judge", max_tokens=10)
    return float(reply.text)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"solution_str": "x" * (8 if i % 4 == 0 else 40)} for i in range(400)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score(*arguments, code=0):
    done = CliRunner().invoke(cli.app, ["score", *arguments, "--dry-run"], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done


def test_a_dry_run_estimates_tokens_and_cost_and_sends_no_request(folder):
    (folder / "rollouts.jsonl").write_text("".join(json.dumps({"solution_str": "x" * 40}) + "\n" for _ in range(250)))
    with FakeJudge("1") as judge:
        arguments = ("judge.py", "rollouts.jsonl", "--router-address", judge.address, "--price", "2:10")
        shown = " ".join(score(*arguments).stdout.split())
        assert judge.requests == []
    for part in (
        "rows 250; the function was called for 100, and no request was sent",
        "requests about 250, to judge",
        "prompt tokens about 2,500 (4 characters for a token)",
        "reply tokens at most 2,500 (max_tokens)",
        "cost 0.005 to 0.03",
    ):
        assert part in shown
    assert sorted(path.name for path in folder.glob("*.*") if path.suffix != ".py") == ["rollouts.jsonl"]


def test_rows_without_a_request_count_in_the_estimate_as_json(folder):
    # Every fourth row needs no judge.
    found = json.loads(score("judge.py", "rollouts.jsonl", "--router-address", "localhost:1", "--json").stdout)
    assert (found["rows"], found["tried"], found["min_cost"]) == (400, 100, None)
    assert found["requests"] == pytest.approx(300, abs=60)
    assert found["prompt_tokens"] == found["max_reply_tokens"] == found["requests"] * 10


def test_connections_of_other_clients_are_refused_and_reported(folder):
    (folder / "other.py").write_text(
        "import urllib.request\n"
        "def compute_score(solution_str):\n"
        "    return float(urllib.request.urlopen('http://127.0.0.1:9/').read())\n"
    )
    shown = " ".join(score("other.py", "rollouts.jsonl").stdout.split())
    assert "100 connections of other clients than reward_loop.client were refused" in shown
    assert "requests about 0" in shown


def test_a_function_in_processes_is_refused(folder):
    (folder / "isolated.py").write_text(
        "from reward_loop import isolated\n@isolated\ndef compute_score(solution_str): return 1\n"
    )
    assert "--dry-run: the function runs in processes" in score("isolated.py", "rollouts.jsonl", code=2).stderr
    (folder / "sync.py").write_text("def compute_score(solution_str): return 1\n")
    refused = score("sync.py", "rollouts.jsonl", "--isolation", "process", code=2)
    assert "--dry-run: the function runs in processes" in refused.stderr


def test_errors_of_a_manager_are_counted_by_cause(folder):
    (folder / "own.py").write_text(
        "from reward_loop import RewardLoopManagerBase\n"
        "class Own(RewardLoopManagerBase):\n"
        "    async def run_single(self, data): raise KeyError('rubric')\n"
    )
    shown = " ".join(score("judge.py", "rollouts.jsonl", "--manager", "own.py:Own").stdout.split())
    assert "100 of the 100 rows failed before a request, first: line" in shown
    assert "Own.run_single raised KeyError: 'rubric'" in shown


def test_failures_before_a_request_are_counted_by_cause(folder):
    (folder / "broken.py").write_text("def compute_score(solution_str): raise KeyError('rubric')\n")
    shown = " ".join(score("broken.py", "rollouts.jsonl").stdout.split())
    assert "100 of the 100 rows failed before a request, first: sample line" in shown


@pytest.mark.parametrize("price", ["1", "1:2:3", "a:b", "-1:2", "nan:1"])
def test_invalid_prices_are_refused(folder, price):
    done = score("judge.py", "rollouts.jsonl", "--price", price, code=2)
    assert f"--price {price}: expected the prices" in done.stderr


def test_requests_are_sent_again_after_a_dry_run(folder):
    score("judge.py", "rollouts.jsonl", "--router-address", "localhost:1")
    sys.audit("socket.connect", None, ("127.0.0.1", 9))  # the hook of the dry run does nothing any more
    with FakeJudge("1") as judge:
        arguments = ["score", "judge.py", "rollouts.jsonl", "--router-address", judge.address]
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        assert len(judge.requests) == 300
