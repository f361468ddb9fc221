"""Every exchange with a model server is recorded: on the event loop, in threads, and from worker processes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample, limit
from reward_loop.client import Judge, Number, chat_complete, classify, score
from reward_loop.records import ActiveSample, current, exchanges_of, records
from reward_loop.testing import Answer, BadJson, Body, FakeJudge, Logits, Stall, Status
from tests.support.clock import advance, until

JUDGE = Judge("Rate {{answer}}", Number(0, 10), max_tokens=9)
KEY = 'planted-"key"-0123456789'


async def judged(solution_str: str, reward_router_address: str) -> Any:
    return (await JUDGE(reward_router_address, answer=solution_str)).reward()


def judged_in_a_thread(solution_str: str, reward_router_address: str) -> Any:
    return asyncio.run(judged(solution_str, reward_router_address))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


async def record(folder: Path, function: Any, server: FakeJudge, *texts: str, **options: Any) -> list[dict[str, Any]]:
    """Score texts one after another, and return the rows of their records, with the lines of their exchanges."""
    config = RewardLoopConfig(log_dir=str(folder), **options)
    manager = NaiveRewardLoopManager(config, compute_score=function, reward_router_address=server.address)
    for text in texts:
        await manager.run_single(RewardSample(text, uid=text))
    assert await asyncio.to_thread(records(folder).flush)
    await asyncio.to_thread(manager.close)
    exchanges = lines(folder / "exchanges") if (folder / "exchanges").exists() else []
    return [{**row, "exchanges": [line for line in exchanges if line["sample"] == row["id"]]} for row in lines(folder)]


@pytest.mark.parametrize("function", [judged, judged_in_a_thread])
async def test_an_exchange_is_recorded_word_for_word(tmp_path: Path, function: Any) -> None:
    async with FakeJudge("So so.\nScore: 7", model="judge-7b") as server:
        (row,) = await record(tmp_path, function, server, "four")
    (exchange,) = row["exchanges"]
    assert exchange["messages"] == [{"role": "user", "content": "Rate four"}]
    assert exchange["request"] == {"temperature": 0.0, "max_tokens": 9}
    assert exchange["response"]["choices"][0]["message"]["content"] == exchange["reply"] == "So so.\nScore: 7"
    assert (exchange["model"], exchange["status"], exchange["attempt"]) == ("judge-7b", 200, 1)
    assert (exchange["verdict"], exchange["score"], exchange["unscored"]) == (7.0, 7.0, None)
    assert exchange["url"] == f"http://{server.address}/v1/chat/completions"
    assert row["prompt_tokens"] == exchange["prompt_tokens"] > 0
    assert row["completion_tokens"] == exchange["completion_tokens"] == 4
    assert row["work_s"] >= exchange["seconds"] > 0
    assert row["time"] >= exchange["time"] > time.time() - 600
    large = {"messages", "request", "response", "reply"}
    own = {"version", "sample", "uid"}
    assert row["judges"] == [{name: value for name, value in exchange.items() if name not in large | own}]
    with (tmp_path / row["exchange_file"]).open("rb") as file:
        file.seek(row["exchange_offset"])
        assert json.loads(file.read(row["exchange_bytes"])) == exchange


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (
            Answer("no idea"),
            {
                "status": 200,
                "reply": "no idea",
                "score": None,
                "unscored": "no 'Score:' was found in the reply: 'no idea'",
            },
        ),
        (Answer("Score: 7", "length"), {"finish_reason": "length", "score": None}),
        (Status(400, message="too long"), {"status": 400, "response": {"error": {"message": "too long"}}}),
        (BadJson(), {"status": 200, "error": "is not JSON"}),
        (Body({"choices": []}), {"status": 200, "error": "without a reply"}),
    ],
)
async def test_an_exchange_without_a_verdict_is_recorded_with_the_reason(
    tmp_path: Path, answer: Any, fields: dict[str, Any]
) -> None:
    async with FakeJudge() as server:
        server.script(answer, "still no idea")
        (row,) = await record(tmp_path, judged, server, "four", retry={"max_attempts": 1})
    exchange, *again = row["exchanges"]
    assert [(one["asked_again"], one["reply"]) for one in again] in ([], [(True, "still no idea")])
    assert row["score"] is None
    for name, value in fields.items():
        if isinstance(value, dict):
            assert exchange[name]["error"]["message"] == value["error"]["message"]
        elif name == "error":
            assert value in exchange["error"]
        else:
            assert exchange[name] == value
    if isinstance(answer, BadJson):
        assert exchange["response"] == '{"choices": ['


async def test_retried_requests_have_the_number_of_their_attempt(tmp_path: Path) -> None:
    async with FakeJudge("Score: 7") as server:
        server.script(Status(500), Status(429, retry_after=0.1))
        (row,) = await record(tmp_path, judged, server, "four", retry={"initial_wait": 0})
    assert [(exchange["attempt"], exchange["status"]) for exchange in row["exchanges"]] == [
        (1, 500),
        (1, 429),
        (2, 200),
    ]
    assert [call["error"] for call in row["calls"]] == ["RequestError", None]
    assert row["attempts"] == 2
    starts = [call["start_s"] for call in row["calls"]]
    assert starts == sorted(starts)
    assert sum(call["work_s"] for call in row["calls"]) == pytest.approx(row["work_s"])


@pytest.mark.parametrize("function", [judged, judged_in_a_thread])
async def test_a_request_without_an_answer_at_the_deadline_is_recorded(tmp_path: Path, function: Any) -> None:
    async with FakeJudge() as server:
        server.script(Stall())
        recording = asyncio.create_task(record(tmp_path, function, server, "four", timeout=60))
        await until(lambda: server.requests)
        await advance(61)
        (row,) = await recording
    (exchange,) = row["exchanges"]
    assert row["outcome"] == "failed"
    assert exchange["messages"] == [{"role": "user", "content": "Rate four"}]
    assert exchange["seconds"] > 0
    assert "cancelled before" in exchange["error"] or "when the sample ended" in exchange["error"]


async def test_logits_and_ranks_are_recorded_as_verdicts(tmp_path: Path) -> None:
    async def compute_score(solution_str: str, reward_router_address: str) -> float:
        await score(reward_router_address, "question", [solution_str, "other"])
        logit = await classify(reward_router_address, solution_str)
        assert isinstance(logit, float)
        return logit

    async with FakeJudge() as server:
        server.script(Logits((0.5, 0.25)), Logits((2.0,)), Body({"data": []}))
        good, bad = await record(tmp_path, compute_score, server, "four", "five", retry={"max_attempts": 1})
    ranked, classified = good["exchanges"]
    assert (ranked["verdict"], ranked["score"]) == ([0.5, 0.25], None)
    assert ranked["request"] == {"query": "question", "documents": ["four", "other"]}
    assert (classified["verdict"], classified["score"], classified["messages"]) == ([2.0], 2.0, None)
    assert "without logits or scores" in bad["exchanges"][0]["error"]


def leaks(solution_str: str, reward_router_address: str) -> Any:
    """Send the planted key, and repeat it wherever a function can."""

    async def ask() -> Any:
        if solution_str == "password":
            return (await chat_complete(f"http://user:planted-password@{reward_router_address}/v1", "?")).text
        reply = await chat_complete(reward_router_address, solution_str, api_key_env="PLANTED_KEY")
        if solution_str == "raise":
            raise RuntimeError(f"the key {KEY} is wrong")
        return {"score": 1.0, "echo": reply.text}

    return asyncio.run(ask())


async def test_a_planted_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_KEY", KEY)
    async with FakeJudge(f"Your key is {KEY}.") as server:
        server.script(Status(401, message=f"wrong key {KEY}"), Answer(f"Your key is {KEY}."))
        rows = await record(tmp_path, leaks, server, "four", "raise", "five", "password")
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        assert server.requests[3].headers["authorization"].startswith("Basic ")
    assert [row["outcome"] for row in rows] == ["failed", "failed", "scored", "failed"]
    assert rows[2]["components"]["echo"] == "Your key is [API key]."
    assert rows[0]["judges"][0]["api_key_env"] == "PLANTED_KEY"
    assert rows[3]["judges"][0]["url"] == f"http://{server.address}/v1/chat/completions"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) > 1000
    for secret in (b"planted-", b"0123456789", b"uthorization", b"Bearer"):
        assert secret not in written, written[written.index(secret) - 300 :][:400]


async def test_without_records_nothing_is_collected() -> None:
    seen: list[ActiveSample | None] = []

    async def compute_score(solution_str: str, reward_router_address: str) -> Any:
        seen.append(current())
        async with limit("judge"):
            return await judged(solution_str, reward_router_address)

    async with FakeJudge("Score: 7") as server:
        manager = NaiveRewardLoopManager(compute_score=compute_score, reward_router_address=server.address)
        await manager.run_single(RewardSample("four"))
    (active,) = seen
    assert active is not None
    assert (dict(active.exchanges), list(active.calls)) == ({}, [])


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    with ActiveSample(RewardSample("x"), "compute_score") as active:
        active.exchange({"id": "a", "time": time.time() + 3600})
    assert exchanges_of(active)[0]["seconds"] == 0.0
