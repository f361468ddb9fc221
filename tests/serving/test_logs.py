"""Logs of servers: a server starts even if its log cannot be written."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from reward_loop._util.web_server import listen
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.process import ServerLog, ServerProcess, log_folder
from tests.support.servers import STUB_COMMAND, refusing

pytestmark = pytest.mark.integration  # starts servers


def test_opening_a_log_appends_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    log = ServerLog("server 1", tmp_path / "new" / "server.log")
    for line in (b"one\n", b"two\n"):
        with log.open() as file:
            file.write(line)
    assert log.path is not None
    assert log.path.read_bytes() == b"one\ntwo\n"
    assert log.end() == f"The end of its log {log.path}:\n    one\n    two"


def test_without_a_path_the_log_is_in_a_new_temporary_folder() -> None:
    log = ServerLog("server 1", None)
    log.open().close()
    assert log.path is not None
    shutil.rmtree(log.path.parent)
    assert log.end() == f"Its log {log.path} is empty."


@pytest.mark.parametrize("has_path", [True, False])
def test_a_log_that_cannot_be_written_is_the_null_device_and_a_warning(
    has_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "server.log").symlink_to("/dev/full")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    log = ServerLog("server 1", tmp_path / "server.log" if has_path else None)
    with caplog.at_level(logging.WARNING), log.open() as file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(os.devnull))
    problem = f"{log.path} cannot be written: No space left on device" if has_path else "a temporary folder cannot be"
    for message in (caplog.messages[0], log.end()):
        assert "without a log" in message
        assert problem in message
        assert "log_dir" in message
    assert log.lines() == []


async def test_a_server_starts_again_although_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with listen("127.0.0.1") as listener:
        for run in range(2):
            async with ServerProcess("the stub", STUB_COMMAND, bound=listener, log_path=path) as process:
                if run == 0:
                    path.unlink()
                    path.symlink_to("/dev/full")
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                died = str(await process.wait())
        assert "was killed by SIGKILL.\nIt ran without a log" in died
        failing = ServerProcess("the stub", STUB_COMMAND, bound=listener, log_path=path, env={"STUB_EXIT": "3"})
        with pytest.raises(ServerStartError, match=r"exited with status 3 .*\n.*No space left on device"):
            await failing.__aenter__()


async def test_a_missing_folder_for_logs_is_named_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RewardModelConfig(engine="external", urls=(refusing(),), log_dir="/dev/full/logs")
    with pytest.raises(ConfigError, match=r"log_dir='/dev/full/logs': .* cannot be created"):
        await RewardModelManager(config).__aenter__()
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    with pytest.raises(ConfigError, match=r"/dev/full.*Set log_dir, .* TMPDIR"):
        log_folder(None)
