"""What the documentation shows, runs."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.gsm8k import ROOT

PAGE = (ROOT / "docs" / "reward-functions.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
AGENT = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agent.md").read_text(), flags=re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ reward-loop")
]


def run(args, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_there_is_something_to_run():
    assert len(PYTHON) >= 5
    assert len(AGENT) >= 5
    assert len(COMMANDS) == 1


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    done = run(["block.py"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", AGENT, ids=range(len(AGENT)))
def test_python_blocks_of_the_agents_page_run(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    done = run(["block.py"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    (tmp_path / "reward.py").write_text(PYTHON[0])
    (row,) = re.findall(r"^(\{\"output\".*)$", PAGE, flags=re.MULTILINE)
    (tmp_path / "rollouts.jsonl").write_text(row + "\n")
    main = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"
    done = run(["-c", main, *shlex.split(command)[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    (scored,) = (tmp_path / "rollouts.scored.jsonl").read_text().splitlines()
    assert json.loads(scored)["outcome"] == "scored"


def test_the_forms_that_the_page_names_load(tmp_path):
    import asyncio

    from reward_loop import RewardSample, ScoringFunction, load_function

    (tmp_path / "judge.py").write_text(PYTHON[1])
    judge = ScoringFunction(load_function(f"{tmp_path}/judge.py:Judge"), reward_kwargs={"bonus": 0.5})
    assert asyncio.run(judge(RewardSample("4", ground_truth="4"))).score == 1.5
