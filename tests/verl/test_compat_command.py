"""``python -m reward_loop.verl.compat``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reward_loop.verl.compat import CPU, TRAINING, installed_version, main, registered, verl_folder
from tests.fork_server import run_forked
from tests.gsm8k import ROOT

pytestmark = pytest.mark.integration  # imports verl


def run_command(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command, with a folder first on the path of modules."""
    return subprocess.run(
        [sys.executable, "-m", "reward_loop.verl.compat", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_every_name_is_listed_below_its_owner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"verl {installed_version()} in {verl_folder()};")
    assert lines[1].startswith("TransferQueue 0.")
    for modules in (TRAINING, CPU):
        for use in registered(modules):
            owner = lines.index(f"  {use.owner}")
            assert lines.index(f"    ok  {use.name}  {use.why}", owner) > owner
    assert lines[-1].endswith("names fit.")


def rename(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source
    file.write_text(source.replace(old, new))


def test_what_another_verl_lacks_is_named_and_the_status_is_1(tmp_path: Path) -> None:
    verl = tmp_path / "verl"
    shutil.copytree(verl_folder(), verl)
    rename(verl / "trainer" / "ppo" / "v1" / "trainer_base.py", "_compute_advantage(", "_advantage(")
    # `colocated` cannot be imported then. The names of all other modules are compared nevertheless.
    rename(
        verl / "experimental" / "reward_loop" / "__init__.py", "import RewardModelManager", "import RewardModelConfig"
    )
    environment, log = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "log"
    status = run_forked(["reward_loop.verl.compat", "--against", str(tmp_path)], environment, tmp_path, log)
    printed = log.read_text()
    assert status == 1, printed
    assert f"in {tmp_path}/verl" in printed
    assert "    NO  _compute_advantage(batch, metrics)  overridden in reward_loop.verl.trainer" in printed
    assert "    ok  _compute_values(batch, metrics)  used in reward_loop.verl.pipeline" in printed
    missing, problem = printed[printed.index("reward_loop does not work with verl") :].splitlines()[1:]
    assert "trainer_base:PPOTrainer._compute_advantage is missing (overridden in reward_loop.verl.trainer)" in problem
    assert "reward_loop.verl.colocated cannot be imported (cannot import name 'RewardModelManager'" in missing
    assert "Traceback" not in printed


def test_help_names_what_is_imported_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise ImportError('verl was imported')\n")
    done = run_command("--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("Exit status: 0", "imports verl's trainer", "starts neither Ray", "--against DIR"):
        assert words in " ".join(done.stdout.split())


def test_a_folder_without_verl_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--against", str(tmp_path)])
    assert caught.value.code == 2
    assert f"argument --against: {tmp_path} has no package verl" in capsys.readouterr().err


def test_a_process_that_has_imported_verl_compares_no_other_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import verl

    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as caught:
        main(["--against", str(tmp_path)])
    assert caught.value.code == 2
    assert f"verl is imported from {Path(verl.__file__).parent}, not from {tmp_path}" in capsys.readouterr().err


def test_an_unknown_option_is_refused() -> None:
    done = run_command("--nonesuch")
    assert done.returncode == 2
    assert "--nonesuch" in done.stderr
