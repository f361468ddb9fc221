"""The option `python`: which interpreter runs an engine, and how a wrong one is reported."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving.engines import ENGINES, has_module, version
from reward_loop.serving.models import served_models

pytestmark = pytest.mark.integration  # starts processes


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    return str(tmp_path)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Returns the path of an interpreter whose only packages are SGLang and a vLLM for the CPU (empty packages)."""
    packages = tmp_path / "packages"
    for name in ("sglang", "vllm", "vllm-0.31.0+cpu.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    (packages / "vllm-0.31.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.31.0+cpu\n")
    return script(tmp_path, f'PYTHONPATH={shlex.quote(str(packages))} exec {shlex.quote(sys.executable)} -S "$@"')


def script(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def served(model_path: str, **options: Any) -> ServedModelConfig:
    [model] = served_models(RewardModelConfig(model_path=model_path, **options))
    return model


def test_the_engine_runs_in_the_interpreter_of_the_option(model_dir: str, python: str) -> None:
    sglang, vllm = (served(model_dir, engine=engine, python=python) for engine in ("sglang", "vllm"))
    assert ENGINES["sglang"].command(sglang, "127.0.0.1", 1)[:3] == [python, "-m", "sglang.launch_server"]
    command = ENGINES["vllm"].command(vllm, "127.0.0.1", 1)
    assert command[:3] == [python, "-m", "vllm.entrypoints.cli.main"]
    # That vLLM is for the CPU.
    assert ENGINES["vllm"].gpus(vllm) == 0
    assert "--enforce-eager" in command


def test_a_relative_path_becomes_absolute_and_a_name_is_looked_up_in_path(
    model_dir: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(python).parent)
    monkeypatch.chdir(folder)
    assert served(model_dir, engine="sglang", python="./python").python == python
    monkeypatch.setenv("PATH", folder, prepend=":")
    assert served(model_dir, engine="sglang", python="python").python == "python"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_there(engine: str, model_dir: str, tmp_path: Path) -> None:
    # Output of a start-up file does not disturb.
    bare = script(tmp_path, f'echo loading; exec {shlex.quote(sys.executable)} -S -I "$@"')
    options = RewardModelConfig(models={"judge": ServedModelConfig(model_path=model_dir, engine=engine, python=bare)})
    with pytest.raises(ConfigError, match=rf"^models\.judge\.engine=.*not installed for python='{bare}'.*set python"):
        served_models(options)


@pytest.mark.parametrize(
    ("python", "body", "message"),
    [
        ("/no/such/python", None, r"^python='/no/such/python': .* cannot be started: No such file"),
        ("/", None, r"^python='/': .*cannot be started: Permission denied"),
        (None, "echo 'bad interpreter' >&2; exit 3", "not a working Python interpreter: exit status 3, 'bad interp"),
        (None, "echo hello", "not a working Python interpreter: exit status 0, 'hello'"),
        (None, "exit 0", "not a working Python interpreter: exit status 0, 'no output'"),
    ],
)
def test_a_program_that_is_not_python(
    python: str | None, body: str | None, message: str, model_dir: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        served(model_dir, engine="sglang", python=python or script(tmp_path, str(body)))


def test_an_error_is_not_remembered(model_dir: str, tmp_path: Path) -> None:
    broken = script(tmp_path, "exit 3")
    with pytest.raises(ConfigError):
        served(model_dir, engine="sglang", python=broken)
    fixed = script(tmp_path, f'exec {shlex.quote(sys.executable)} "$@"')
    assert fixed == broken
    with pytest.raises(ConfigError, match="SGLang is not installed"):
        served(model_dir, engine="sglang", python=fixed)


def test_the_models_environment_variables_hold_for_the_check(tmp_path: Path, python: str) -> None:
    packages = {"PYTHONPATH": str(tmp_path / "packages")}
    model = ServedModelConfig(engine="sglang", python=sys.executable, env=packages)
    assert has_module("sglang", model)
    assert version("vllm", model) == "0.31.0+cpu"
