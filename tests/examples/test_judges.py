"""The commands of the page on judges, with the fake judge."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.records.reader import RecordsReader
from reward_loop.testing import FakeJudge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "judges.md").read_text()
COMMANDS = re.findall(r"```\n(reward-loop score .*?)```", PAGE, flags=re.DOTALL)


def reply(body: Mapping[str, Any]) -> str:
    """Return a verdict in the form that the prompt asks for; the small model of a cascade is unsure."""
    prompt = body["messages"][-1]["content"]
    forms = {"[[A]]": "[[A]]", "in place of N:": '{"correct": 10, "clear": 5.5}', "Score: N": "Score: 7"}
    for form, verdict in forms.items():
        if form in prompt:
            return verdict
    return "Verdict: unsure" if "unsure" in prompt else "Verdict: same"


def test_the_commands_of_the_page_score_all_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one folder, as a reader types them."""
    shutil.copytree(ROOT / "examples" / "judges", tmp_path / "examples" / "judges")
    monkeypatch.chdir(tmp_path)
    scores: dict[str, list[float]] = {}
    for command in COMMANDS:
        with FakeJudge(reply) as server:
            words = shlex.split(command.replace("\\\n", " ").replace("HOST:PORT", server.address))
            done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, done.output
        rows = list(RecordsReader(Path(words[words.index("-o") + 1])).rows())
        assert {row["outcome"] for row in rows} == {"scored"}
        scores[words[2]] = [round(row["score"], 3) for row in rows]
    assert scores == {
        "judge:rubric": [0.85] * 4,  # 0.7 * 1 + 0.3 * 0.5
        "judge:equality": [1.0] * 4,
        "judge:panel": [0.667] * 4,
        "judge:cascade": [1.0] * 4,
        "judge:pairwise": [0.5] * 4,
    }
