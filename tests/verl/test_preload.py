"""Workers that fork from a process that has imported modules for them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward_loop.verl.cpu.preload import preloaded
from tests.fork_server import output_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's sockets without a file"),
]

WORKER = """
import json, os, random, sys
had = "numpy" in sys.modules
import numpy
said = {
    "arguments": sys.argv,
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "had": had,
    "niceness": os.nice(0),
    "main": __name__,
    "parent": os.getppid(),
    "path": sys.path[0],
    "random": [random.random(), numpy.random.random()],
}
json.dump(said, sys.stdout)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_a_worker_is_like_a_new_process_that_has_imported(worker: Path) -> None:
    with preloaded(["numpy"]) as executable:
        command = ["nice", "-n", "3", *shlex.split(executable), "-u", str(worker), "--option", "two words"]
        said = [
            json.loads(
                subprocess.run(
                    command, cwd=worker.parent, env={"ONLY": "this"}, stdout=subprocess.PIPE, timeout=300, check=True
                ).stdout
            )
            for _ in range(2)
        ]
    for one in said:
        assert one["arguments"] == [str(worker), "--option", "two words"]
        assert one["environment"]["ONLY"] == "this"
        assert "PATH" not in one["environment"]
        assert one["directory"] == one["path"] == str(worker.parent)
        assert one["had"]
        assert one["niceness"] == os.nice(0) + 3
        assert one["main"] == "__main__"
    assert said[0]["parent"] == said[1]["parent"]
    assert said[0]["random"][0] != said[1]["random"][0]
    assert said[0]["random"][1] != said[1]["random"][1]


def test_a_worker_has_the_modules_of_its_own_python_path(worker: Path, tmp_path: Path) -> None:
    worker.write_text("import json, sys; json.dump(sys.path, sys.stdout)")
    mine, others = str(tmp_path / "mine"), str(tmp_path / "others")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(["/both", others]))
        with preloaded([]) as executable:
            command = [*shlex.split(executable), str(worker)]
            environment = {"PYTHONPATH": os.pathsep.join([mine, "/both"])}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=300, check=True)
    path = json.loads(done.stdout)
    assert path[:3] == [str(worker.parent), mine, "/both"]
    assert others not in path
    assert path.count("/both") == 1


def test_a_name_gives_the_same_command_on_every_node() -> None:
    name = f"reward-loop-test-{os.getpid()}"
    commands = []
    for _ in range(2):
        with preloaded([], name=name) as executable:
            commands.append(executable)
    assert commands[0] == commands[1]


def test_the_launcher_stays_as_long_as_the_worker(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, sys\nprint(os.getpid(), flush=True)\nsys.stdin.read()\n")
    with preloaded([]) as executable:
        command = [*shlex.split(executable), str(worker)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asker:
            assert asker.stdout is not None
            pid = int(asker.stdout.readline())
            assert asker.poll() is None
            assert pid != asker.pid
            # Who ends a session ends the worker; who ends a process group, as Ray does, ends no other worker.
            assert os.getsid(pid) == os.getsid(0)
            assert os.getpgid(pid) == pid
            os.kill(pid, signal.SIGKILL)
            asker.wait(60)


def test_without_the_fork_server_a_worker_starts_by_itself(worker: Path) -> None:
    with preloaded([]) as executable:
        pass
    run = subprocess.run([*shlex.split(executable), str(worker)], stdout=subprocess.PIPE, timeout=300, check=True)
    said = json.loads(run.stdout)
    assert said["parent"] == os.getpid()
    assert not said["had"]


def test_a_client_that_is_stopped_does_not_block_the_others(worker: Path) -> None:
    with preloaded([]) as executable, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{shlex.split(executable)[-1]}")
        client.send(b"[")
        command = [*shlex.split(executable), str(worker)]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True)
        assert json.loads(done.stdout)["parent"] != os.getpid()  # the fork server is its parent
        assert client.recv(1) == b""


def test_the_fork_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\n"
        "from reward_loop.verl.cpu.preload import preloaded\n"
        "if __name__ == '__main__':\n"
        "    with preloaded([]) as executable:\n"
        "        print(executable, flush=True)\n"
        "        time.sleep(600)\n"
    )
    worker = tmp_path / "worker.py"
    worker.write_text("import os\nprint(os.getppid())\n")
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        executable = process.stdout.readline()
        asked = subprocess.run([*shlex.split(executable), str(worker)], stdout=subprocess.PIPE, timeout=300, check=True)
        server = int(asked.stdout)
        process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{server}").exists():
        assert time.monotonic() < deadline, "the process is still there"
        time.sleep(0.05)


def test_no_module_imports_ray(tmp_path: Path) -> None:
    """Ray reads a worker's environment while it is imported."""
    code = "import sys; print([name in sys.modules for name in ('torch', 'transformers', 'ray')])"
    assert output_of(code, tmp_path) == "[True, True, False]\n"
