"""The option `python`: which interpreter runs an engine, and how a wrong one is reported."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving.engine import has_module, version
from reward_loop.serving.engines import ENGINES
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


@pytest.mark.parametrize(
    ("engine", "module"), [("sglang", "sglang.launch_server"), ("vllm", "vllm.entrypoints.cli.main")]
)
def test_the_engine_runs_in_the_interpreter_of_the_option(
    engine: str, module: str, model_dir: str, python: str
) -> None:
    command = ENGINES[engine].command(served(model_dir, engine=engine, python=python), "127.0.0.1", 1)
    assert command[:3] == [python, "-m", module]


def test_the_vllm_of_that_interpreter_decides_whether_it_runs_on_a_cpu(model_dir: str, python: str) -> None:
    model = served(model_dir, engine="vllm", python=python)
    assert ENGINES["vllm"].gpus(model) == 0
    assert "--enforce-eager" in ENGINES["vllm"].command(model, "127.0.0.1", 1)


def test_a_relative_path_becomes_absolute(model_dir: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(python).parent)
    assert served(model_dir, engine="sglang", python="./python").python == python


def test_a_name_is_looked_up_in_path(model_dir: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(python).parent), prepend=":")
    assert served(model_dir, engine="sglang", python="python").python == "python"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_there(engine: str, model_dir: str, tmp_path: Path) -> None:
    bare = script(tmp_path, f'exec {shlex.quote(sys.executable)} -S -I "$@"')
    options = RewardModelConfig(models={"judge": ServedModelConfig(model_path=model_dir, engine=engine, python=bare)})
    with pytest.raises(ConfigError, match=rf"^models\.judge\.engine=.*not installed for python='{bare}'.*set python"):
        served_models(options)


def test_an_interpreter_that_does_not_exist(model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"^python='/no/such/python': .* cannot be started: No such file"):
        served(model_dir, engine="sglang", python="/no/such/python")


def test_a_folder_is_not_an_interpreter(model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^python=.*cannot be started: Permission denied"):
        served(model_dir, engine="vllm", python=str(tmp_path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'bad interpreter' >&2; exit 3", "not a working Python interpreter: exit status 3, 'bad interpreter'"),
        ("echo hello", "not a working Python interpreter: exit status 0, 'hello'"),
        ("exit 0", "not a working Python interpreter: exit status 0, 'no output'"),
    ],
)
def test_a_program_that_is_not_python(body: str, message: str, model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        served(model_dir, engine="sglang", python=script(tmp_path, body))


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


def test_output_of_a_start_up_file_does_not_disturb(tmp_path: Path) -> None:
    noisy = script(tmp_path, f'echo loading; exec {shlex.quote(sys.executable)} -S -I "$@"')
    assert not has_module("sglang", ServedModelConfig(engine="sglang", python=noisy))


def test_the_embedded_engine_has_no_interpreter_of_its_own(model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"^python has no effect with engine='transformers'"):
        served(model_dir, python=sys.executable)
