"""The options of adapters, and the agent of a process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop import RewardSample
from reward_loop.adapters.process_agent import (
    ENVIRONMENT,
    AdapterConfig,
    AgentOwner,
    close_agent,
    load_config,
    process_agent,
)
from reward_loop.errors import ConfigError, FunctionLoadError, RewardLoopError
from tests.adapters.rewards import FUNCTION
from tests.gsm8k import ROOT


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("options.json", '{"function": "f.py:f", "reward_loop": {"timeout": 5}}'),
        ("options.yaml", "function: f.py:f\nreward_loop: {timeout: 5}\n"),
    ],
)
def test_options_come_from_a_file_or_the_file_in_the_environment(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    monkeypatch.setenv(ENVIRONMENT, str(file))
    for config in (load_config(), load_config(str(file))):
        assert (config.function, config.reward_loop.timeout) == ("f.py:f", 5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "cannot be read"),
        ("utf16.json", "{}".encode("utf-16"), "cannot be read: 'utf-8' codec"),
        ("broken.json", b"{", "not a valid file of options"),
        ("broken.yaml", b"a: [", "not a valid file of options"),
        ("list.yaml", b"- 1", "expected a mapping"),
        ("typo.yaml", b"funktion: f.py", "unknown option; did you mean 'function'?"),
    ],
)
def test_a_wrong_file_of_options_is_an_error_that_names_it(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(str(file))
    assert name in str(raised.value)


def test_without_options_the_error_names_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ConfigError, match="REWARD_LOOP_CONFIG"):
        load_config()


async def test_a_close_while_the_agent_starts_leaves_it_to_the_next_close() -> None:
    started, close_first, closed = threading.Event(), threading.Event(), []
    owner: AgentOwner[Any] = AgentOwner()

    def start() -> Any:
        started.set()
        close_first.wait(30)
        return SimpleNamespace(close=lambda: closed.append(True))

    getting = asyncio.create_task(owner.get(start))
    await asyncio.to_thread(started.wait, 30)
    owner.close()
    close_first.set()
    agent = await getting
    assert await owner.get(start) is agent
    owner.close()
    assert closed == [True]


def test_one_agent_serves_several_event_loops() -> None:
    async def score(text: str) -> tuple[int, float | None]:
        agent = await process_agent({"function": FUNCTION})
        [scored] = await agent.score([RewardSample(text, ground_truth="4")])
        return id(agent), scored.score

    (first, right), (second, wrong) = asyncio.run(score("4")), asyncio.run(score("5"))
    assert first == second
    assert (right, wrong) == (1.0, 0.0)


async def test_concurrent_first_calls_start_one_agent() -> None:
    agents = await asyncio.gather(*(process_agent({"function": FUNCTION}) for _ in range(20)))
    assert len(set(map(id, agents))) == 1


async def test_a_failed_start_may_be_repeated_but_a_running_agent_keeps_its_options() -> None:
    with pytest.raises(FunctionLoadError, match="nothing_here"):
        await process_agent({"function": FUNCTION.replace("compute_score", "nothing_here")})
    await process_agent({"function": FUNCTION})
    with pytest.raises(ConfigError, match="one agent"):
        await process_agent({"function": FUNCTION, "concurrency": 3})


async def test_a_cancelled_caller_cancels_its_samples() -> None:
    agent = await process_agent({"function": FUNCTION, "concurrency": 1})
    hanging = asyncio.create_task(agent.score([RewardSample("hang", ground_truth="4")]))
    [running] = await asyncio.gather(asyncio.wait([hanging], timeout=0.1))
    assert not running[0]
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    # The only permit is free again.
    async with asyncio.timeout(60):
        [scored] = await agent.score([RewardSample("4", ground_truth="4")])
    assert scored.score == 1.0


async def test_a_closed_agent_raises_an_error() -> None:
    agent = await process_agent({"function": FUNCTION})
    await asyncio.to_thread(close_agent)
    with pytest.raises(RewardLoopError, match="closed"):
        await agent.score([RewardSample("4")])


def run(program: str) -> str:
    """Run a program, which must print nothing to standard error; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_program_that_exits_closes_the_agent_and_its_worker_processes(tmp_path: Path) -> None:
    output = run(f"""
        import asyncio, multiprocessing
        from reward_loop import RewardSample
        from reward_loop.adapters.process_agent import process_agent

        options = {{
            "function": {FUNCTION.replace("compute_score", "exits")!r},
            "reward_loop": {{"isolation": "process", "log_dir": {str(tmp_path)!r}}},
        }}

        async def main():
            agent = await process_agent(options)
            return [str(scored.outcome) for scored in await agent.score([RewardSample("crash"), RewardSample("fine")])]

        print(asyncio.run(main()))
    """)
    assert output == "['failed', 'scored']\n"


def test_a_forked_process_starts_an_agent_of_its_own() -> None:
    run(f"""
        import asyncio, os
        from reward_loop import RewardSample
        from reward_loop.adapters.process_agent import process_agent

        async def score(answer):
            agent = await process_agent({{"function": {FUNCTION!r}}})
            [scored] = await agent.score([RewardSample(answer, ground_truth="4")])
            return scored.score, agent

        first, parents = asyncio.run(score("4"))
        child = os.fork()
        second, agent = asyncio.run(asyncio.wait_for(score("5"), 60))
        assert (first, second) == (1.0, 0.0)
        assert (agent is parents) == bool(child)
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """)


def test_the_options_on_the_page_are_those_of_the_code() -> None:
    section = (ROOT / "docs" / "trainers.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(AdapterConfig.model_fields)
