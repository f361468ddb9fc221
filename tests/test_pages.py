"""A reader follows the pages in the order of the site, in one clone: each command as printed, each output as shown.

`Block` says what a reader does with a block. A page builds on the files of the pages before it, so run the whole file
rather than a single page of it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer

from reward_loop.cli import app
from reward_loop.testing import FakeJudge
from tests.support.fork_server import forking_python
from tests.support.gsm8k import ROOT
from tests.support.pages import PAGES, Block, blocks
from tests.support.trl_folder import FOLDER as TRL

NOT_RUN = {
    "pip install ": "installs packages",
    "make ": "installs packages, and takes minutes",
    "python -m pytest ": "is among these tests",
    "PIP_EXTRA_INDEX_URL=": "installs packages, and takes minutes",
    "python -m verl.trainer.main_ppo ": "trains; test_docs.py composes its configuration",
    "python -m examples.verl_cpu ": "the same",
    "python -m examples.arithmetic.demo ": "trains for minutes; tests/integration/test_demo.py is shorter",
    "bash examples/": "trains on GPUs",
    "ray start ": "needs several machines",
    "ssh ": "needs another machine",
    "python examples/gsm8k/prepare.py": "downloads a data set",
    "python -m examples.trl_grpo": "trains for minutes; tests/examples/test_trl_grpo.py is shorter",
    "python -m benchmarks.": "measures for minutes; test_docs.py checks its options",
}
"""The commands that do not run here, by their beginning, with the reason."""

COMMANDS = [(page, command) for page in PAGES for block in blocks(page) for command, _ in block.commands]

TIMEOUT_S = 250
"""Seconds for one command or block. A page has `PAGE_TIMEOUT_S`."""

PAGE_TIMEOUT_S = 600

DURATION = r"\d[\d.]*(?= m?s\b)"
"""The numbers that differ between runs of a command."""


def reason_not_to_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


def verdict(body: Mapping[str, Any]) -> str:
    """Return a verdict in the form that the prompt asks for."""
    prompt = body["messages"][-1]["content"]
    forms = {
        "in place of N:": '{"correct": 10, "clear": 5.5}',
        "<verdict>N": "<verdict>7</verdict>",
        "Score: N": "Score: 7",
        "Verdict: correct": "Verdict: correct",
    }
    return next((reply for form, reply in forms.items() if form in prompt), "<verdict>same</verdict>")


def needs_trl(block: Block) -> bool:
    return block.language == "python" and ("from trl import" in block.text or "OverlappedGRPOTrainer" in block.text)


def pattern(shown: list[str]) -> str:
    """Return the regular expression of an output that a page shows; ``...`` stands for any text."""
    text = "\n".join(line.rstrip() for line in shown).strip("\n")
    fixed, *rest = re.split(rf"(\.\.\.|{DURATION})", text)
    varying = [r"[\s\S]*" if part == "..." else r"[\d.]+" for part in rest[::2]]
    return re.escape(fixed) + "".join(vary + re.escape(part) for vary, part in zip(varying, rest[1::2], strict=True))


def assert_shown(command: str, shown: list[str], printed: str) -> None:
    text = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
    if not re.fullmatch(pattern(shown), text):
        pytest.fail("\n".join([command, text, "--- the page shows:", *shown]))


class Reader:
    """Follows pages in one folder. A stub takes the place of each judge and model server that the pages ask."""

    def __init__(self, folder: Path, judge: str) -> None:
        self._folder = folder
        self._stand_ins = {
            "HOST:PORT": judge,
            "checkpoints/rewards": "rewards",  # records that a tutorial makes, for those of a training run
            "--host 0.0.0.0": "--host 127.0.0.1",
        }
        self._exports: list[str] = []
        programs = folder.parent / "programs"
        programs.mkdir()
        # Programs start in processes of the fork server: most would import for longer than they run.
        self._python = forking_python(programs)
        command = programs / "reward-loop"
        command.write_text('#!/bin/bash\nexec python -m reward_loop "$@"\n')
        command.chmod(0o755)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(folder),
            "PYTHONUNBUFFERED": "1",
            "XDG_CACHE_HOME": str(folder.parent / "cache"),
            "BROWSER": "true",  # the program that `view --open` starts
        }
        self._forking = self._environment | {"PATH": os.pathsep.join([str(programs), path])}

    def follow(self, page: str) -> None:
        """Save the files of a page, and run its code and commands, in order; end its servers."""
        self._exports.clear()
        with ExitStack() as servers:
            for block in blocks(page):
                if block.file:
                    (self._folder / block.file).parent.mkdir(exist_ok=True)
                    (self._folder / block.file).write_text(block.text)
                if block.language == "python" and not needs_trl(block):
                    self._run_python(block.file or "block.py", block.text)
                for command, shown in block.commands:
                    self._type(command, shown, servers)
        # At once: the import takes long. verl cannot be used where TRL can be imported, so no other block has TRL.
        if with_trl := [block.text for block in blocks(page) if needs_trl(block)]:
            if not TRL.exists():
                pytest.skip("there is no .venv/trl: run make trl")
            path = f"{TRL}{os.pathsep}{self._folder}"
            self._run_python("block.py", "\n".join(with_trl), self._environment | {"PYTHONPATH": path})

    def _run_python(self, file: str, code: str, environment: Mapping[str, str] | None = None) -> None:
        (self._folder / file).write_text(code)
        self._run([str(self._python), file], environment or self._environment)

    def _type(self, command: str, shown: list[str], servers: ExitStack) -> None:
        if reason_not_to_run(command):
            return
        if command.startswith("export "):
            self._exports.append(command)
            return
        for text, instead in self._stand_ins.items():
            command = command.replace(text, instead)
            shown = [line.replace(text, instead) for line in shown]
        typed = "; ".join([*self._exports, command])
        server = re.match(r"(?:\w+=\S+ )*reward-loop (serve|view) ", command)
        if server:
            self._start(server[1], typed, shown, servers)
            return
        printed = self._run(["bash", "-c", typed], self._forking)
        if shown:
            assert_shown(command, shown, printed)
        if "reward-loop score " in command:
            assert " failed" not in printed, printed

    def _run(self, command: list[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,  # a program that runs until Ctrl-D ends
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, "\n".join([*command, done.stdout, done.stderr])
        return done.stdout

    def _start(self, name: str, command: str, shown: list[str], servers: ExitStack) -> None:
        """Start a server on a free port in place of its default, which later commands of the pages name."""
        servers.close()  # the server before, which has the same port on the page
        process = subprocess.Popen(
            ["bash", "-c", f"{command} --port 0"],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        servers.callback(interrupt, process)
        assert process.stdout
        printed = "".join(process.stdout.readline() for _ in shown or [""])
        found = re.search(r"http://(127\.0\.0\.1:\d+)", printed)
        assert found, f"{command} printed {printed!r}"
        options = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
        (port,) = [option.default for option in options if option.name == "port"]
        self._stand_ins[f"127.0.0.1:{port}"] = found[1]
        if shown:
            assert_shown(command, [line.replace(f"127.0.0.1:{port}", found[1]) for line in shown], printed)


def interrupt(server: subprocess.Popen[str]) -> None:
    """End a server with Ctrl-C."""
    with server:
        os.killpg(server.pid, signal.SIGINT)
        try:
            assert server.wait(60) in (0, 130)
        finally:
            server.kill()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Return a reader in a copy of the repository, with the changes that are not committed."""
    folder = tmp_path_factory.mktemp("reader") / "reward_loop"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    with FakeJudge(verdict) as judge:
        yield Reader(folder, judge.address)


@pytest.mark.integration
@pytest.mark.timeout(PAGE_TIMEOUT_S)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_a_reader_can_follow_the_page(page: str, reader: Reader) -> None:
    reader.follow(page)


@pytest.mark.parametrize("start", NOT_RUN)
def test_commands_that_do_not_run_are_on_the_pages(start: str) -> None:
    assert any(command.startswith(start) for _, command in COMMANDS)


def test_commands_are_in_blocks_that_run() -> None:
    program = re.compile(r"^(?:\$ |(?:\w+=\S+ )*(?:reward-loop|python|pip|make|bash|ray|curl) )", re.MULTILINE)
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("", "text") and page != "docs/commands.md":  # the help of the commands
                assert not program.search(block.text), f"{page}: use `bash` or `console`:\n{block.text}"
