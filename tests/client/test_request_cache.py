from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import Judge, Number
from reward_loop.errors import ConfigError, RequestError
from reward_loop.records import ActiveSample
from reward_loop.testing import Body, FakeJudge, Status

TEMPLATE = "Rate from 1 to 10: {{answer}}\nEnd with `Score: N`."


def judge(path: Path, **options: object) -> Judge:
    return Judge(TEMPLATE, Number(1, 10), fence={"answer"}, cache=str(path), **options)  # type: ignore[arg-type]


async def test_an_equal_request_is_answered_from_the_file_also_by_another_judge(tmp_path: Path) -> None:
    path = tmp_path / "new" / "replies.sqlite"
    with FakeJudge("Good.\nScore: 7") as server:
        first = await judge(path)(server.address, answer="4")
        again = await judge(path)(server.address, answer="4")
        assert (again.score, again.reply.text, len(server.requests)) == (7.0, "Good.\nScore: 7", 1)
        assert (first.reply.usage.completion_tokens > 0, again.reply.usage.completion_tokens) == (True, 0)
        await judge(path)(server.address, answer="5")
        await judge(path, seed=3)(server.address, answer="4")
        assert len(server.requests) == 3
    assert path.stat().st_mode & 0o077 == 0


async def test_answers_without_a_usable_reply_are_asked_for_again(tmp_path: Path) -> None:
    with FakeJudge("Score: 7") as server:
        server.script(Status(400), Body({"choices": []}))
        with pytest.raises(RequestError, match="status 400"):
            await judge(tmp_path / "c")(server.address, answer="4")
        with pytest.raises(RequestError, match="without a reply"):
            await judge(tmp_path / "c")(server.address, answer="4")
        assert (await judge(tmp_path / "c")(server.address, answer="4")).score == 7.0


@pytest.mark.parametrize("end", [{"finish_reason": None}, {"finish_reason": "stop", "error": {"message": "gone"}}])
async def test_a_reply_that_the_server_did_not_end_is_asked_for_again(tmp_path: Path, end: dict[str, object]) -> None:
    """Otherwise its sample would have no score in all later runs."""
    with FakeJudge("Score: 7") as server:
        server.script(Body({"choices": [{"message": {"content": "Sco"}, **end}]}))
        assert (await judge(tmp_path / "c")(server.address, answer="4")).score is None
        assert (await judge(tmp_path / "c")(server.address, answer="4")).score == 7.0


async def test_a_stored_answer_needs_no_permit_and_is_recorded(tmp_path: Path) -> None:
    options = RewardLoopConfig.model_validate({"limits": {"judge": {"requests_per_minute": 1, "max_wait": 0.01}}})
    asked = judge(tmp_path / "c", limit="judge")

    async def compute_score(solution_str: str, reward_router_address: str) -> float | None:
        return (await asked(reward_router_address, answer=solution_str)).score

    function = ScoringFunction(compute_score, options=options)
    with FakeJudge("Score: 7") as server:
        for _ in range(2):
            sample = RewardSample("4")
            with ActiveSample(sample, "f", is_recorded=True) as active:
                assert (await function(sample, reward_router_address=server.address)).score == 7.0
    (exchange,) = active.exchanges.values()
    assert (exchange["cached"], exchange["reply"], "status" in exchange) == (True, "Score: 7", False)


async def test_many_samples_share_a_file(tmp_path: Path) -> None:
    judges = [judge(tmp_path / "c") for _ in range(4)]
    with FakeJudge("Score: 7") as server:
        asked = [judges[i % 4](server.address, answer=str(i % 8)) for i in range(32)]
        assert [one.score for one in await asyncio.gather(*asked)] == [7.0] * 32
        count = len(server.requests)
        assert (await judge(tmp_path / "c")(server.address, answer="3")).score == 7.0
        assert len(server.requests) == count


async def test_a_file_that_becomes_unusable_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = judge(tmp_path / "c")
    (tmp_path / "c").write_bytes(b"no database" * 100)
    with FakeJudge("Score: 7") as server, caplog.at_level(logging.WARNING):
        assert (await made(server.address, answer="4")).score == 7.0
    assert f"cache='{tmp_path}/c' cannot be used: file is not a database" in caplog.text


def test_what_a_cache_would_make_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache: at temperature=0\.7 each reply is another one"):
        judge(tmp_path / "c", temperature=0.7)
    (tmp_path / "notes.txt").write_text("no database" * 100)
    with pytest.raises(ConfigError, match=r"notes\.txt' cannot be used: file is not a database"):
        judge(tmp_path / "notes.txt")
