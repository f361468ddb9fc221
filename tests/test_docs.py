"""The documentation agrees with the code: options of commands, tables, names, links and messages.

`tests/test_pages.py` runs the commands and the code of the pages.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import shlex
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path

import pytest
import typer

from reward_loop import RewardSample, ScoringFunction, load_function
from reward_loop.cli import app
from reward_loop.config import RewardModelConfig
from tests.support.fork_server import run_forked
from tests.support.gsm8k import ROOT
from tests.support.pages import CHINESE, PAGES, blocks
from tools import reference


def words(command: str) -> list[str]:
    """Split a command, and drop variables that are set before it."""
    parts = shlex.split(command, comments=True)
    return list(dropwhile(lambda part: re.match(r"\w+=", part), parts))


def between(name: str) -> str:
    """Return the text between the marks of a table, which one page has."""
    mark = re.escape(name)
    (text,) = re.findall(rf"<!-- begin {mark} -->\n(.*?)<!-- end {mark} -->", "".join(PAGES.values()), flags=re.DOTALL)
    return text


PYTHON = [(page, block.text) for page in PAGES for block in blocks(page) if block.language == "python"]
COMMANDS = [(page, words(command)) for page in PAGES for block in blocks(page) for command, _ in block.commands]
OURS = [(page, command) for page, command in COMMANDS if command[0] == "reward-loop"]
PYTHON_M, ON_A_CPU = ("python", "-m"), "examples.verl_cpu"
VERL = [
    (page, command)
    for page, command in COMMANDS
    if command[:3] in ([*PYTHON_M, "verl.trainer.main_ppo"], [*PYTHON_M, ON_A_CPU])
]
PIPELINE, SWITCH = "trainer.v1.trainer_mode=reward_pipeline", "reward_model.use_reward_loop=True"
STOCK = [command for _, command in VERL if "reward.reward_manager.source=importlib" in command]
TRAINING = [(page, command) for page, command in VERL if command not in STOCK]
BENCHMARKS = [(page, command) for page, command in COMMANDS if command[2:3] and command[2].startswith("benchmarks.")]
MAKE = [(page, command) for page, command in COMMANDS if command[0] == "make"]
EXAMPLES = [(page, command) for page, command in COMMANDS if command[1:2] and command[1].startswith("examples/")]


def run(args: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def write_named(page: str, folder: Path) -> None:
    """Write the blocks of a page that begin with a file name to that file."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).parent.mkdir(exist_ok=True)
            (folder / block.file).write_text(block.text)


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page; a page without a ``reward.py`` uses the one of the page on reward functions."""
    write_named("docs/reward-functions.md", folder)
    write_named(page, folder)


def test_commands_and_code_are_found() -> None:
    for found in (PYTHON, TRAINING, STOCK, BENCHMARKS, MAKE):
        assert found


@pytest.mark.parametrize(("page", "command"), OURS)
def test_commands_have_valid_options(page: str, command: list[str]) -> None:
    name, arguments = command[1], command[2:]
    typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES)
def test_each_part_between_marks_ends_with_its_own_mark(page: str) -> None:
    begun, ended = (re.findall(rf"<!-- {word} (.+?) -->", PAGES[page]) for word in ("begin", "end"))
    assert begun == ended


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    pages = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(f"docs/{page}" for page in pages) == sorted({*PAGES, *CHINESE} - {"README.md", "README.zh.md"})


def test_the_reference_has_every_public_name() -> None:
    documented = re.findall(r"^<!-- begin api ([\w.]+) -->$", "\n".join(PAGES.values()), flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    public = re.findall(r"^from ([\w.]+) import (\w+)", (ROOT / "reward_loop/__init__.pyi").read_text(), re.MULTILINE)
    assert {f"{module}.{name}" for module, name in public} <= set(documented)
    imported = {
        alias.name
        for _, block in PYTHON
        for statement in ast.walk(ast.parse(block))
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("reward_loop")
        for alias in statement.names
    }
    assert imported <= {name.rsplit(".", 1)[1] for name in documented}


@pytest.mark.integration
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    mkdocs = ROOT / ".venv-docs/bin/mkdocs"
    if not mkdocs.exists():
        pytest.skip("there is no .venv-docs: run make docs")
    done = subprocess.run(
        [mkdocs, "build", "--quiet", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"<(?:script|img|link)\b[^>]* (?:src|href)=\"?(?:https?:)?//", page.read_text()), page
    commands = (tmp_path / "commands.html").read_text()
    assert set(re.findall(r'<h2 id="([\w-]+)"', commands)) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if reference.MARKED.search(text)])
def test_the_reference_is_that_of_the_code(page: str) -> None:
    if reference.needs_verl(PAGES[page]):
        pytest.importorskip("verl")
    assert reference.updated(PAGES[page]) == PAGES[page], "run: make reference"


def test_the_defaults_in_the_yaml_file_are_those_of_the_code() -> None:
    pytest.importorskip("verl")
    text = reference.YAML.read_text()
    assert text.count("# begin options") == 4
    assert reference.updated_yaml(text) == text, "run: make reference"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_more_than_1800_words(page: str) -> None:
    without_tables = re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", PAGES[page], flags=re.DOTALL)
    assert len(without_tables.split()) <= 1800


def test_the_example_files_in_commands_exist() -> None:
    assert EXAMPLES
    for page, command in EXAMPLES:
        assert (ROOT / command[1]).is_file(), f"{page}: {command}"


@pytest.mark.parametrize("row", between("wrong rewards").splitlines()[2:])
def test_the_test_of_each_fault_exists(row: str) -> None:
    assert (ROOT / re.findall(r"`(tests/[\w/.]+)` \|$", row)[0]).is_file()


def test_the_files_where_changes_begin_exist() -> None:
    """The table of CONTRIBUTING.md: to change X, open Y."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"<!-- begin changes -->\n(.*?)<!-- end changes -->", text, flags=re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)` \|$", table, flags=re.MULTILINE)
    assert len(files) == 25
    assert [file for file in files if not (ROOT / file).is_file()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_that_exist() -> None:
    for page in (*PAGES, *CHINESE, "CONTRIBUTING.md"):
        for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
            target = (ROOT / page).parent / link if link else ROOT / page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"


@pytest.mark.parametrize(("chinese", "english"), CHINESE.items())
def test_chinese_pages_have_the_code_and_the_sections_of_the_english_ones(chinese: str, english: str) -> None:
    fenced = re.compile(r"```.*?```", flags=re.DOTALL)
    translated = (ROOT / chinese).read_text()
    assert fenced.findall(translated) == fenced.findall(PAGES[english])
    levels = [re.findall(r"^(#+) ", fenced.sub("", text), re.MULTILINE) for text in (translated, PAGES[english])]
    assert levels[0] == levels[1]


def test_names_of_the_reference_are_imported_from_public_modules() -> None:
    public = re.findall(r"`([\w.]+)`", between("public modules"))
    modules = re.findall(r"^`from ([\w.]+) import \w+`$", "".join(PAGES.values()), flags=re.MULTILINE)
    assert "reward_loop.client" in modules
    assert set(modules) <= {"reward_loop", *public}


def test_python_blocks_import_public_names_only() -> None:
    public = re.findall(r"`([\w.]+)`", between("public modules"))
    for page, block in PYTHON:
        for statement in ast.walk(ast.parse(block)):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("reward_loop"):
                assert statement.module in ("reward_loop", *public), page
                known = importlib.import_module(statement.module).__all__
                assert {alias.name for alias in statement.names} <= set(known), f"{page}: {statement.module}"


@pytest.mark.integration
@pytest.mark.parametrize(("page", "command"), BENCHMARKS)
def test_benchmarks_have_the_options_that_are_shown(page: str, command: list[str], tmp_path: Path) -> None:
    done = run([*command[1:3], "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    for option in command[3:]:
        assert not option.startswith("--") or option in done.stdout


@pytest.mark.parametrize(("page", "command"), MAKE)
def test_make_targets_exist(page: str, command: list[str]) -> None:
    assert re.search(rf"^{command[1]}\s*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "command"), TRAINING)
def test_training_commands_are_accepted(
    page: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from reward_loop.verl.main_ppo import check_function
    from tests.verl.configs import resolved

    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    options, overrides = iter(command[3:]), []
    name, folder = "cpu" if command[2] == ON_A_CPU else "ppo_trainer", None
    for word in options:
        if word == "--config-name":
            name = next(options)
        elif word == "--config-dir":
            folder = tmp_path / next(options)
        else:
            overrides.append(word)
    settings = resolved(*overrides, name=name, folder=folder)
    config = settings.config
    assert folder or {PIPELINE, SWITCH} & set(overrides)
    check_function(settings)
    assert config.reward.custom_reward_function.path
    if any(override.startswith("algorithm.adv_estimator") for override in overrides):  # otherwise, it is an excerpt
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        assert config.actor_rollout_ref.rollout.n > 1  # GRPO compares the answers to a prompt


@pytest.mark.integration
@pytest.mark.parametrize("command", STOCK)
def test_commands_of_verl_load_our_manager(command: list[str]) -> None:
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    from reward_loop.managers import RewardLoopManagerBase
    from reward_loop.verl.installed import verl_config_dir
    from reward_loop.verl.samples import options_of

    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        config = compose("ppo_trainer", command[3:])
    manager = resolve_reward_manager_cls(config)
    assert issubclass(manager, RewardLoopManagerBase)
    assert options_of(config).on_failed == "default"


def test_the_way_back_from_the_command_of_the_readme_is_to_leave_one_option_out() -> None:
    """verl refuses unknown options, and ignores the short forms of its own."""
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_dir

    from reward_loop.verl.installed import verl_config_dir

    (command,) = [command for page, command in TRAINING if page == "README.md"]
    overrides = [word for word in command[3:] if word != PIPELINE]
    assert len(overrides) == len(command[3:]) - 1
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        config = compose("ppo_trainer", overrides)
    assert config.trainer.v1.trainer_mode == "sync"
    assert config.reward.custom_reward_function.path == "judge.py"
    assert config.reward.reward_model.enable
    assert not [word for word in overrides if word.startswith(("reward_model.", "custom_reward_function."))]


def test_the_users_configuration_file_takes_effect(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    write_named("docs/verl.md", tmp_path)
    (command,) = [command for page, command in TRAINING if page == "docs/verl.md" and "--config-dir" in command]
    show = ["--cfg", "job", "--package", "reward_loop"]
    log = tmp_path / "log"
    status = run_forked([command[2], *show, *command[3:]], {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path, log)
    assert status == 0, log.read_text()
    assert "timeout: 60" in log.read_text()


@pytest.mark.parametrize("row", between("migrated options").splitlines()[2:])
def test_migrated_options_are_accepted(row: str, tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from tests.verl.configs import resolved

    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    old, new = row.split(" | ")[:2]
    for given in re.findall(r"`(.+?)`", old + new if "the same" in new else new):
        resolved(*given.replace("PATH", str(tmp_path)).split())


def templates() -> list[str]:
    """Return all texts in the code of the package, with ``...`` in place of their variable parts."""
    texts: list[str] = []
    for path in (ROOT / "reward_loop").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%(\.\d+)?[dfgrs]", "...", node.value))
    return texts


def test_messages_on_the_page_of_outcomes_are_those_of_the_code() -> None:
    messages = re.findall(r"^\| `(.+?)` \|", between("messages"), flags=re.MULTILINE)
    assert messages
    known = templates()
    for message in messages:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), flags=re.DOTALL)
        assert any(pattern.search(text) for text in known), message


def test_a_class_as_reward_function_loads(tmp_path: Path) -> None:
    write_named("docs/reward-functions.md", tmp_path)
    judge = ScoringFunction(load_function(f"{tmp_path}/judge.py:Judge"), reward_kwargs={"bonus": 0.5})
    assert asyncio.run(judge(RewardSample("4", ground_truth="4"))).score == 1.5


@pytest.mark.integration
def test_the_judge_of_the_page_scores_with_a_real_server(tmp_path: Path, tiny_discriminative_model: Path) -> None:
    from reward_loop.serving import serve_reward_model

    write_named("docs/verl-reward-model.md", tmp_path)
    judge = ScoringFunction(load_function(f"{tmp_path}/judge.py"))
    sample = RewardSample("4", extra_info={"question": "2+2="})
    with serve_reward_model(RewardModelConfig(model_path=str(tiny_discriminative_model))) as model:
        result = asyncio.run(judge(sample, reward_router_address=model.reward_router_address))
    assert result.outcome == "scored", result.error
