"""The benchmark of one GPU: its commands for a GPU, and its stages on the CPU, also those that fail."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks import gpu
from benchmarks.report import Report

training = pytest.importorskip("benchmarks.training", reason="verl's packages are not installed")
gpu_runs = pytest.importorskip("benchmarks.gpu_runs")

MUCH_S = 1000.0


@pytest.fixture
def report() -> Report:
    console = Console(file=io.StringIO(), width=200)
    return Report(console, Progress(console=console, disable=True))


def test_stages_that_fail_are_named_with_cause_and_log_and_the_next_ones_run(report: Report, tmp_path: Path) -> None:
    given: dict[str, float] = {}

    def verl(within_s: float) -> None:
        (tmp_path / "sync").mkdir()
        log = tmp_path / "sync" / "log"
        log.write_text("Starting\nTraceback:\n  torch.OutOfMemoryError: CUDA out of memory.\nThe runner has ended.\n")
        raise training.TrainingFailedError(log, "ended with status 1 after 2 of 4 steps")

    def servers(within_s: float) -> None:
        given["servers"] = within_s
        raise ExceptionGroup("several", [TimeoutError()])

    def learning(within_s: float) -> None:
        given["learning"] = within_s

    stages = {"sync": verl, "servers": servers, "learning": learning}
    gpu.run(report, stages, tmp_path, time.monotonic() + MUCH_S)
    assert given == {"servers": gpu.DEADLINES["servers"], "learning": gpu.DEADLINES["learning"]}
    assert report.figures["failed"] == {
        "sync": "ended with status 1 after 2 of 4 steps: torch.OutOfMemoryError: CUDA out of memory. "
        f"(log: {tmp_path}/sync/log)",
        "servers": f"did not end in time (log: {tmp_path}/servers)",
    }
    assert report.figures["left_out"] == []
    assert report.figures["stage_s"].keys() == stages.keys()


def test_the_modes_are_compared_by_the_steps_that_have_the_latency(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(seconds: float, **more: float) -> dict[str, float]:
        return {"timing_s/step": seconds, "timing_s/gen": 4.0, "timing_s/update_actor": 6.0, **more}

    ours = {"reward_pipeline/generation_s": 4.0, "reward_pipeline/hidden_share": 0.95}
    size = gpu_runs.GPU
    uncounted = [step(90.0)] * size.first
    logged = {
        "sync": [*uncounted, step(10.0), step(15.0), *[step(20.0)] * size.counted],
        "reward_pipeline": [*uncounted, *[step(9.0, **ours)] * size.counted, step(1.0)],
        "verl": [*uncounted, *[step(25.0)] * size.counted],
    }

    def run(command: list[str], output: Path, steps: int, look: Any, within_s: float) -> list[dict[str, float]]:
        rows = logged[output.name]
        assert steps == len(rows)
        for made in range(steps + 1):
            look(rows[:made])
        return rows

    monkeypatch.setattr(training, "run", run)
    runs = gpu_runs.GpuRuns(report, tmp_path, tmp_path, cpu=False, more=())
    for mode in gpu_runs.MODES:
        runs.compared(mode, MUCH_S)
    figures = report.figures
    assert {mode: figures[mode]["step_s"] for mode in gpu_runs.MODES} == {"sync": 20, "reward_pipeline": 9, "verl": 25}
    assert figures["judging_s"] == 10
    assert figures["reward_pipeline"] == {"step_s": 9, "steps": size.counted, "hidden_share": 0.95, "judging_share": 1}
    # A step counts as long as its judging.
    assert (figures["reduction_sync"], figures["reduction_verl"]) == (0.5, 0.6)


@pytest.mark.integration
@pytest.mark.parametrize("stage", ["colocated", *gpu_runs.MODES, "learning"])
def test_the_commands_for_a_gpu_pass_our_checks_and_verls(
    stage: str,
    report: Report,
    tmp_path: Path,
    tiny_generative_model: Path,
    tiny_discriminative_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hydra import compose, initialize_config_dir
    from verl.utils.config import validate_config

    from reward_loop.verl.installed import verl_config_dir
    from reward_loop.verl.main_ppo import check_function
    from tests.verl.configs import resolved

    class CommandRead(Exception):
        pass

    def read(command: list[str], *_: Any) -> None:
        commands.append(command)
        raise CommandRead

    commands: list[list[str]] = []
    for name, model in (("judge", tiny_generative_model), ("reward_model", tiny_discriminative_model)):
        (tmp_path / name).symlink_to(model)
    monkeypatch.setattr(training, "run", read)
    monkeypatch.setattr(gpu_runs, "make_models", lambda *_: SimpleNamespace(directory=tmp_path))
    runs = gpu_runs.GpuRuns(report, tmp_path, tmp_path, cpu=False, more=("trainer.total_epochs=7",))
    run = getattr(runs, stage) if stage in ("colocated", "learning") else lambda s: runs.compared(stage, s)
    with pytest.raises(CommandRead):
        run(MUCH_S)
    (command,) = commands
    for variable in command[1 : command.index(sys.executable)]:
        monkeypatch.setenv(*variable.split("=", 1))
    module, *overrides = command[command.index("-m") + 1 :]
    assert module == "verl.trainer.main_ppo"
    assert all("=" in override for override in overrides), "no configuration of the CPU"
    if stage == "verl":
        with initialize_config_dir(str(verl_config_dir()), version_base=None):
            config = compose("ppo_trainer", overrides)
    else:
        settings = resolved(*overrides)
        check_function(settings)
        config = settings.config
        assert settings.mode.name == ("reward_pipeline" if stage in ("reward_pipeline", "learning") else "sync")
        placement = {"colocated": "colocated", "learning": "local"}.get(stage)
        assert (settings.model.placement if settings.model else None) == placement
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert config.trainer.total_epochs == 7
    assert config.actor_rollout_ref.rollout.name == "vllm"
    batch = config.data.train_batch_size
    assert batch % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= config.actor_rollout_ref.rollout.max_model_len


@pytest.mark.integration
def test_stages_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Each of the others is a run of verl, so they are rehearsed by hand: see CONTRIBUTING.md.
    stages = ("probe", "servers")
    # In this process, which has imported torch already. The next test starts the command.
    output = tmp_path / "output"
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--output", str(output), "--only", *stages])
    for name, value in gpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        status = gpu.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr().out
    assert status == 0, printed
    figures = json.loads(printed.splitlines()[-1])
    assert (figures["failed"], figures["left_out"]) == ({}, [])
    assert "MISSED" not in printed, printed
    assert figures["device"] == "cpu"
    assert all(figures["probe"].values())
    assert figures["servers"]["killed"]["failed"] == 0 < figures["servers"]["killed"]["in_flight"]
    for model in ("judge", "scorer"):
        assert figures["servers"][model]["router_per_s"] > 0 < figures["servers"][model]["direct_per_s"]
