"""What the documentation shows, runs; and its tables are those of the code."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer

from reward_loop import RewardSample, ScoringFunction, load_function
from reward_loop.cli import app
from reward_loop.config import (
    BatchConfig,
    BudgetConfig,
    CacheConfig,
    ComponentConfig,
    Config,
    GroupConfig,
    LimitConfig,
    RetryConfig,
    RewardLoopConfig,
    RewardModelConfig,
)
from tests.gsm8k import ROOT
from tests.limits.test_command import Jobs, asked

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The commands in a page's shell blocks: whole ``bash`` blocks, and lines with a prompt in ``console`` blocks."""
    shown = [*blocks(page, "bash")]
    for block in blocks(page, "console"):
        lines = block.replace("\\\n", " ").splitlines()
        shown += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [shlex.split(command.replace("\\\n", " "), comments=True) for command in shown]


def between(page: str, name: str) -> str:
    (text,) = re.findall(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", PAGES[page], flags=re.DOTALL)
    return text


PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python")]
COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
TRAINING = [
    (page, command) for page, command in COMMANDS if command[:3] == ["python", "-m", "reward_loop.verl.main_ppo"]
]
SCORING = [(page, command) for page, command in COMMANDS if command[:2] == ["reward-loop", "score"]]
CHECKING = [(page, command) for page, command in COMMANDS if command[:2] == ["reward-loop", "check"]]
LIMITS = [command for _, command in COMMANDS if command[:2] == ["reward-loop", "limits"]]
ROUTING = [(page, command[command.index("route") + 1 :]) for page, command in COMMANDS if "route" in command]
BENCHMARKS = [(page, command) for page, command in COMMANDS if command[1:2] and command[1].startswith("benchmarks/")]
SIMULATING = [(page, command) for page, command in COMMANDS if command[:2] == ["reward-loop", "simulate"]]
MAKE = [(page, command) for page, command in COMMANDS if "make" in command]
OTHERS = {"head", "pip"}
MAIN = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"


def _target(command: list[str]) -> str:
    return command[command.index("make") + 1]


def run(args: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def write_named(page: str, folder: Path) -> None:
    """Writes the blocks of a page that begin with a file name to that file."""
    for language in ("python", "yaml"):
        for block in blocks(page, language):
            if named := re.match(r"# ([\w/]+\.\w+)\n", block):
                (folder / named[1]).parent.mkdir(exist_ok=True)
                (folder / named[1]).write_text(block)


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 8
    assert {page for page, _ in TRAINING} == {"README.md", "docs/verl.md"}
    assert {page for page, _ in SIMULATING} == {"docs/agent.md"}
    assert {page for page, _ in SCORING} == {"README.md", "docs/reward-functions.md"}
    assert {page for page, _ in CHECKING} == {"README.md", "docs/reward-functions.md"}
    assert {_target(command) for _, command in MAKE} == {"demo", "test"}


def test_every_command_is_of_a_kind_that_is_tested_here() -> None:
    kinds = (*TRAINING, *SCORING, *CHECKING, *SIMULATING, *BENCHMARKS, *MAKE)
    tested = [["reward-loop", "stuck"], *LIMITS, *(command for _, command in kinds)]
    others = [command for _, command in COMMANDS if command not in tested and "route" not in command]
    assert {command[0] for command in others} <= OTHERS


def test_links_lead_somewhere() -> None:
    for page, text in PAGES.items():
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


@pytest.mark.integration
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_blocks_run(number: int, tmp_path: Path) -> None:
    page, block = PYTHON[number]
    write_named(page, tmp_path)
    (tmp_path / "block.py").write_text(block)
    done = run(["block.py"], tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"


def test_limits_of_a_running_job_are_shown_and_changed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs = Jobs(tmp_path, stack)
        asked(jobs.start())
        for command in LIMITS:
            jobs.limits(*command[2:])
        asked(jobs.running[0])  # it was given more places


@pytest.mark.parametrize(("page", "command"), SCORING)
def test_scoring_commands_run(page: str, command: list[str], tmp_path: Path) -> None:
    write_named(page, tmp_path)
    (row,) = re.findall(r"^(\{\"output\".*)$", PAGES[page], flags=re.MULTILINE)
    (tmp_path / "rollouts.jsonl").write_text(row + "\n")
    done = run(["-c", MAIN, *command[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    (scored,) = (tmp_path / "rollouts.scored.jsonl").read_text().splitlines()
    assert json.loads(scored)["outcome"] == "scored"


@pytest.mark.integration
@pytest.mark.parametrize(("page", "command"), CHECKING)
def test_checking_commands_run(page: str, command: list[str], tmp_path: Path) -> None:
    write_named("docs/reward-functions.md", tmp_path)
    (row,) = re.findall(r"^(\{\"output\".*)$", PAGES["docs/reward-functions.md"], flags=re.MULTILINE)
    (tmp_path / "rollouts.jsonl").write_text(row + "\n")
    done = run(["-c", MAIN, *command[1:]], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems found" in done.stdout


@pytest.mark.parametrize(("page", "arguments"), ROUTING)
def test_routing_commands_are_understood(page: str, arguments: list[str]) -> None:
    route = typer.main.get_command(app).commands["route"]  # type: ignore[attr-defined]
    context = route.make_context("route", list(arguments))
    workers = sum(argument in ("--worker", "-w") for argument in arguments)
    assert [len(value) for value in context.params.values() if isinstance(value, list | tuple) and value] == [workers]


@pytest.mark.integration
@pytest.mark.parametrize(("page", "command"), BENCHMARKS)
def test_benchmarks_have_the_options_that_are_shown(page: str, command: list[str], tmp_path: Path) -> None:
    done = run([str(ROOT / command[1]), "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    for option in command[2:]:
        assert not option.startswith("--") or option in done.stdout


@pytest.mark.integration
@pytest.mark.parametrize(("page", "command"), SIMULATING)
def test_simulations_print_what_is_shown(page: str, command: list[str], tmp_path: Path) -> None:
    done = run(["-c", MAIN, *command[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [line for block in blocks(page, "console") if "simulate" in block for line in block.splitlines()[2:]]
    assert len(shown) >= 5
    for line in shown:
        assert line in done.stdout


@pytest.mark.parametrize(("page", "command"), MAKE)
def test_make_targets_exist(page: str, command: list[str]) -> None:
    assert re.search(rf"^{_target(command)}\s*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "command"), TRAINING)
def test_training_commands_are_accepted(
    page: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_dir

    from reward_loop.verl.defaults import CONFIG_DIR, verl_config_dir
    from reward_loop.verl.main_ppo import _check_function
    from reward_loop.verl.resolve import settle

    write_named(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    options, overrides = iter(command[3:]), []
    name, primary = "reward_loop_trainer", CONFIG_DIR
    for word in options:
        if word == "--config-name":
            name = next(options)
        elif word == "--config-dir":
            primary = tmp_path / next(options)
        else:
            overrides.append(word)
    searchpath = f"hydra.searchpath=[file://{verl_config_dir()},file://{CONFIG_DIR}]"
    with initialize_config_dir(str(primary), version_base=None):
        config = compose(name, [searchpath, *overrides])
    settle(config)
    _check_function(config)
    assert config.reward.custom_reward_function.path


def test_the_configuration_file_of_ones_own_takes_effect(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    write_named("docs/verl.md", tmp_path)
    (command,) = [command for _, command in TRAINING if "--config-dir" in command]
    show = ["--cfg", "job", "--package", "reward_loop"]
    done = run([*command[1:3], *show, *command[3:]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "timeout: 60" in done.stdout


def table(rows: list[tuple[str, ...]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def options(cls: type[Config], group: str) -> str:
    """The options of a group as a table, each with the docstring beneath it."""
    rows: list[tuple[str, ...]] = [("Option", "Default", "Meaning"), ("---", "---", "---")]
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else f"`{_plain(default)}`"
        meaning = re.sub(r"\s+", " ", (field.description or "").replace("``", "`"))
        rows.append((f"`{group}.{name}`", shown, meaning))
    return table(rows)


def _plain(value: Any) -> str:
    return {None: "null"}.get(value, str(value)) if not isinstance(value, dict) else json.dumps(value)


def test_the_options_are_those_of_the_code() -> None:
    assert between("docs/verl.md", "options reward_loop") == options(RewardLoopConfig, "reward_loop")
    functions = "docs/reward-functions.md"
    assert between(functions, "options reward_loop.batch") == options(BatchConfig, "reward_loop.batch")
    assert between(functions, "options reward_loop.group") == options(GroupConfig, "reward_loop.group")
    component = "reward_loop.components.NAME"
    assert between(functions, f"options {component}") == options(ComponentConfig, component)
    groups = {"limits.NAME": LimitConfig, "retry": RetryConfig, "cache": CacheConfig, "budget": BudgetConfig}
    for name, group in groups.items():
        assert between("docs/limits.md", f"options reward_loop.{name}") == options(group, f"reward_loop.{name}")
    assert between("docs/verl.md", "options reward_model.server") == options(RewardModelConfig, "reward_model.server")
    pytest.importorskip("verl")
    from reward_loop.verl.mode_options import REWARD_QUEUE, PipelineOptions, RewardQueueOptions

    for group, config in {"trainer.v1.reward_pipeline": PipelineOptions, REWARD_QUEUE: RewardQueueOptions}.items():
        assert between("docs/verl.md", f"options {group}") == options(config, group)


def test_the_moved_keys_are_those_of_the_code() -> None:
    pytest.importorskip("verl")
    from reward_loop.verl.resolve import _MOVED, _UNUSED

    rows = [("You write", "It becomes"), ("---", "---"), *((f"`{old}`", f"`{new}`") for old, new in _MOVED.items())]
    assert between("docs/verl.md", "moved keys") == table(rows)
    for key in _UNUSED:
        assert f"`{key}`" in PAGES["docs/verl.md"]


def test_the_environment_of_a_cpu_run_is_that_of_the_code() -> None:
    pytest.importorskip("verl")
    from reward_loop.verl.main_ppo import CPU_ENVIRONMENT

    rows = [("Variable", "Value"), ("---", "---"), *((f"`{k}`", f"`{v}`") for k, v in CPU_ENVIRONMENT.items())]
    assert between("docs/verl.md", "environment") == table(rows)


def test_the_forms_that_the_page_names_load(tmp_path: Path) -> None:
    write_named("docs/reward-functions.md", tmp_path)
    judge = ScoringFunction(load_function(f"{tmp_path}/judge.py:Judge"), reward_kwargs={"bonus": 0.5})
    assert asyncio.run(judge(RewardSample("4", ground_truth="4"))).score == 1.5


@pytest.mark.integration
def test_the_judge_that_the_page_shows_gets_an_answer(tmp_path: Path, tiny_discriminative_model: Path) -> None:
    from reward_loop.serving import serve_reward_model

    write_named("docs/verl.md", tmp_path)
    judge = ScoringFunction(load_function(f"{tmp_path}/judge.py"))
    sample = RewardSample("4", extra_info={"question": "2+2="})
    with serve_reward_model(RewardModelConfig(model_path=str(tiny_discriminative_model))) as model:
        result = asyncio.run(judge(sample, reward_router_address=model.reward_router_address))
    assert result.outcome == "scored", result.error
