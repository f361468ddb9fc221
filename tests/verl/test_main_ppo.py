"""The command: what stops it before anything starts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reward_loop.verl import main_ppo
from tests.support.fork_server import forking_python
from tests.support.pages import blocks
from tests.verl.configs import configuration
from tests.verl.runs import write_data

pytestmark = pytest.mark.integration  # starts the command


def run_main(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python WORDS`` in a folder."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # as container images often set it
    command = [forking_python(folder), *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=400, check=False, env=environment
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Begin a run of verl's command with options, on GPUs, and return the message with which it ends."""

    def message(*overrides: str) -> str:
        with pytest.raises(SystemExit) as end:
            main_ppo.begin(configuration(*overrides), lambda *_: pytest.fail("it trains"))
        assert end.value.code == 1
        return capfd.readouterr().err

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield message
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "function", ["def compute_scor(solution_str): return 1", "def compute_score(answer): return 1"]
)
def test_a_bad_function_stops_the_command_before_anything_starts(
    refused: Callable[..., str], tmp_path: Path, function: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(function)
    error = refused(f"custom_reward_function.path={path}")
    assert "FunctionLoadError" in error
    assert ("compute_scor" if "scor(" in function else "answer") in error


def test_a_generative_model_without_a_function_stops_the_command(
    refused: Callable[..., str], tiny_generative_model: Path
) -> None:
    error = refused(
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_generative_model}",
    )
    assert "is a generative model" in error
    assert "custom_reward_function.path" in error


def test_a_function_may_import_verl_on_a_cpu_and_check_starts_nothing(tmp_path: Path) -> None:
    """The function meets the platform of the run."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"  # its processes would all compile their modules
        "from verl.plugin.platform import get_platform\n"
        "from verl.utils.reward_score import default_compute_score\n"
        "assert get_platform().device_name == 'cpu'\n"
        "def compute_score(solution_str): return 1.0\n"
    )
    done = run_main(
        tmp_path,
        *("-m", "examples.verl_cpu"),
        "trainer.v1.trainer_mode=reward_pipeline",
        f"reward.custom_reward_function.path={path}",
        "algorithm.adv_estimator=grpo",
        "reward_loop.check=True",
        f"hydra.run.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert "The options are valid, and the reward function loads" in done.stdout
    assert "ray" not in done.stdout.lower()


def test_the_command_of_the_readme_passes_its_checks(tmp_path: Path, tiny_generative_model: Path) -> None:
    """All of them, up to the start of Ray, in verl's command: it needs eight GPUs to go on."""
    (judge,) = [block for block in blocks("README.md") if block.file == "judge.py"]
    (command,) = [block for block in blocks("README.md") if block.language == "bash"]
    (tmp_path / "judge.py").write_text(judge.text)
    write_data(tmp_path)
    ((text, _),) = command.commands
    for path in ("path/to/judge", "path/to/model"):
        text = text.replace(path, str(tiny_generative_model))
    words = [*shlex.split(text)[1:], "reward_loop.check=True", "data.train_batch_size=32", "hydra.run.dir=."]
    done = run_main(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "The options are valid, and the reward function loads" in done.stdout
    assert "Started a local Ray instance" not in done.stderr
