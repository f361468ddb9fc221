"""The release of verl: only one is accepted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from reward_loop.verl.installed import SUPPORTED, VerlVersionError, check_version
from tests.support.gsm8k import ROOT

pytestmark = pytest.mark.integration  # starts the command


def install(folder: Path, version: str) -> None:
    """Makes a package verl of a version, which must not be imported."""
    (folder / "verl" / "version").mkdir(parents=True)
    (folder / "verl" / "version" / "version").write_text(f"{version}\n")
    (folder / "verl" / "__init__.py").write_text("raise ImportError('verl was imported')\n")


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.2", "1.0", "an unusual version"])
def test_another_release_is_refused_unless_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    check_version(untested=False)
    install(tmp_path, version)
    spec = ModuleSpec("verl", None, origin=str(tmp_path / "verl" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    message = f"verl {version} is installed.* pip install verl=={SUPPORTED}, .*reward_loop.untested_verl=True"
    with pytest.raises(VerlVersionError, match=message):
        check_version(untested=False)
    check_version(untested=True)


def test_another_release_stops_the_command_before_verl_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "0.8.0")
    done = subprocess.run(
        [sys.executable, "-m", "reward_loop.verl.main_ppo", "trainer.nnodes=1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "VerlVersionError: verl 0.8.0 is installed" in done.stderr
    assert "Traceback" not in done.stderr
