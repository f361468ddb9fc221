from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from reward_loop._util.sockets import listen
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.logs import ServerLog, log_folder
from reward_loop.serving.process import ServerProcess
from tests.servers import CHAT, STUB_COMMAND, model_server, post, refusing, serving

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
    assert log.end() == f"Its log {log.path} is empty."
    shutil.rmtree(log.path.parent)
    assert "is empty" in log.end()  # and no OSError


def test_a_log_on_a_full_disk_is_the_null_device_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "server.log").symlink_to("/dev/full")
    log = ServerLog("server 1", tmp_path / "server.log")
    with caplog.at_level(logging.WARNING), log.open() as file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(os.devnull))
    for message in (caplog.messages[0], log.end()):
        assert "without a log" in message
        assert f"{log.path} cannot be written: No space left on device" in message
        assert "log_dir" in message
    assert log.lines() == []


def test_without_a_temporary_folder_the_log_is_the_null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    log = ServerLog("server 1", None)
    log.open().close()
    assert "a temporary folder" in log.end()


@pytest.mark.parametrize("trouble", ["full disk", "folder deleted and not to be made"])
async def test_a_server_dies_and_starts_again_although_its_log_cannot_be_written(trouble: str, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    with listen("127.0.0.1") as listener:
        for run in range(2):
            process = ServerProcess("the stub", STUB_COMMAND, bound=listener, log_path=path, start_timeout_s=120)
            async with process:
                if run == 0:
                    shutil.rmtree(path.parent)
                    if trouble == "full disk":
                        path.parent.mkdir()
                        path.symlink_to("/dev/full")
                    else:
                        path.parent.write_text("a file")
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                died = str(await process.wait())
        assert "was killed by SIGKILL.\nIt ran without a log" in died


async def test_the_error_of_a_server_that_does_not_start_has_the_reason_for_a_missing_log(tmp_path: Path) -> None:
    (tmp_path / "server.log").symlink_to("/dev/full")
    with listen("127.0.0.1") as listener:
        process = ServerProcess(
            "the stub", STUB_COMMAND, bound=listener, log_path=tmp_path / "server.log", env={"STUB_EXIT": "3"}
        )
        with pytest.raises(ServerStartError, match=r"exited with status 3 .*\n.*No space left on device"):
            await process.__aenter__()


@pytest.mark.parametrize("log_dir", ["/dev/full/logs", "/proc/no-such-folder"])
def test_a_log_dir_that_cannot_be_created_is_named_with_its_option(log_dir: str) -> None:
    with pytest.raises(ConfigError, match=f"log_dir='{log_dir}': .* cannot be created"):
        log_folder(log_dir)


def test_a_missing_temporary_folder_names_the_option_that_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/full")
    with pytest.raises(ConfigError, match=r"/dev/full.*Set log_dir .* TMPDIR"):
        log_folder(None)


async def test_the_manager_refuses_an_unusable_log_dir() -> None:
    models = RewardModelManager(RewardModelConfig(engine="external", urls=[refusing()], log_dir="/dev/full/logs"))
    with pytest.raises(ConfigError, match="log_dir='/dev/full/logs'"):
        await models.__aenter__()


async def test_a_killed_router_comes_back_although_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    async with serving(model_server("judge")) as url:
        config = RewardModelConfig(engine="external", urls=[url], kind="generative", log_dir=str(tmp_path))
        async with RewardModelManager(config) as models:
            (tmp_path / "router.log").unlink()
            (tmp_path / "router.log").symlink_to("/dev/full")
            before = models.pids()["router"]
            os.kill(before, signal.SIGKILL)
            async with asyncio.timeout(120):
                while models.pids().get("router", before) == before:  # noqa: ASYNC110 (pids have no event)
                    await asyncio.sleep(0.05)
            assert await post(f"http://{models.reward_router_address}", CHAT) == (200, b"judge")
