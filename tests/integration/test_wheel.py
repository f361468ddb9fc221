"""The wheel and the source distribution, in an empty environment outside of the clone."""

from __future__ import annotations

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


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=uv_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_scores_the_files_of_the_readme(tmp_path: Path) -> None:
    run(*UV, "build", "--quiet", "--out-dir", tmp_path, CLONE, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "reward_loop/py.typed"} <= names
    python = tmp_path / "environment/bin/python"
    run(*UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment", cwd=tmp_path)
    run(*UV, "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    files = shutil.copytree(CLONE / "examples/quickstart", tmp_path / "quickstart")
    command = python.with_name("reward-loop")
    printed = run(command, "score", "reward.py:compute_score", "rollouts.jsonl", "-o", "records", cwd=files)
    assert "12 " in printed
    assert "samples" in run(command, "report", "records", cwd=files)
    installed = Path(run(python, "-c", "import reward_loop; print(reward_loop.__file__)", cwd=files).strip())
    for path in subprocess.run(
        ["git", "ls-files", "reward_loop"], cwd=CLONE, capture_output=True, text=True, check=True
    ).stdout.split():
        assert (installed.parent / Path(path).relative_to("reward_loop")).exists(), f"{path} is not in the wheel"
