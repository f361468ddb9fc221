"""The wheel and the source distribution, in an empty environment outside of the clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools.bootstrap import uv_environment

pytestmark = pytest.mark.integration

CLONE = Path(__file__).parents[2]
UV = (sys.executable, "-m", "uv")

OF_EXTRAS = {
    "reward_loop.adapters.trl": "No module named 'trl'",
    "reward_loop.agent.ray_agent": "No module named 'numpy'",  # which Ray brings
    "reward_loop.verl.main_ppo": "verl is not installed",
    "reward_loop.verl.run.services": "verl is not installed",
    "reward_loop.verl.trainer.reward_loop_trainer": "verl is not installed",
}
"""The public modules that need an extra, and what their import says without it."""

NAMES = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        found = importlib.import_module(module)
        for name in found.__all__:
            getattr(found, name)
    except ImportError as error:
        print(module, error)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=uv_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_all_public_names_and_runs_the_quickstart(tmp_path: Path) -> None:
    run(*UV, "build", "--quiet", "--out-dir", tmp_path, CLONE, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "reward_loop/py.typed"} <= names
    python = tmp_path / "environment/bin/python"
    run(*UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment", cwd=tmp_path)
    run(*UV, "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)

    table = (CLONE / "docs/dev/architecture.md").read_text().partition("<!-- begin public modules -->")[2]
    modules = re.findall(r"`(reward_loop[.\w]*)`", table.partition("<!-- end")[0])
    assert len(modules) > 10
    printed = run(python, "-c", NAMES, "reward_loop", *modules, cwd=tmp_path).splitlines()
    assert {line.partition(" ")[0] for line in printed} == OF_EXTRAS.keys()
    assert all(OF_EXTRAS[line.partition(" ")[0]] in line for line in printed), printed

    files = shutil.copytree(CLONE / "examples/quickstart", tmp_path / "quickstart")
    command, function = python.with_name("reward-loop"), "reward.py:compute_score"
    assert "no problems found" in run(command, "check", function, "rollouts.jsonl", cwd=files)
    assert "12 " in run(command, "score", function, "rollouts.jsonl", "-o", "records", cwd=files)
    assert "11 scored, 1 unscored" in run(command, "report", "records", cwd=files)

    installed = Path(run(python, "-c", "import reward_loop; print(reward_loop.__file__)", cwd=files).strip())
    for path in subprocess.run(
        ["git", "ls-files", "reward_loop"], cwd=CLONE, capture_output=True, text=True, check=True
    ).stdout.split():
        assert (installed.parent / Path(path).relative_to("reward_loop")).exists(), f"{path} is not in the wheel"
