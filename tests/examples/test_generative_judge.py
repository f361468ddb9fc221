"""The example of docs/verl-reward-model.md with a generative judge on a CPU: its commands, as a reader copies them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reward_loop.records.reader import RecordsReader
from tests.support.fork_server import forking_python
from tests.support.gsm8k import ROOT
from tests.support.local_ray import options_of_local_ray
from tests.support.pages import blocks

pytestmark = pytest.mark.integration


def test_a_reader_gets_a_judged_run(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    page = blocks("docs/verl-reward-model.md")
    (function,) = [block for block in page if block.file == "rating.py"]
    commands = page[page.index(function) + 1].commands
    (tmp_path / "rating.py").write_text(function.text)
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "bin").mkdir()
    # An import of verl takes long, and so do the starts of a fork server and of Ray.
    programs = [forking_python(tmp_path / "bin").parent, Path(sys.executable).parent]
    environment = os.environ | {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["trainer.logger=[console,file]", *options_of_local_ray(tmp_path, VERL_FILE_LOGGER_PATH=metrics)]
    printed = ""
    for command, _ in commands:
        more = f" {shlex.join(options)}" if "verl_cpu" in command else ""
        done = subprocess.run(
            ["bash", "-c", command + more], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        printed = done.stdout
    steps = {line["step"]: line["data"] for line in map(json.loads, metrics.read_text().splitlines())}
    assert [steps[step]["reward_loop/scored"] for step in (1, 2)] == [8 * 4] * 2
    # The policy and the judge have random weights, so the verdicts differ, and the policy learns from them.
    assert steps[2]["critic/score/max"] > steps[2]["critic/score/min"]
    assert steps[2]["actor/grad_norm"] > 0
    records = RecordsReader(tmp_path / "checkpoints" / "rewards")
    replies = [exchange["reply"] for row in records.rows() for exchange in records.exchanges(row)]
    assert len(replies) >= 2 * 8 * 4
    assert len(set(replies)) > 1
    assert "scored" in printed
