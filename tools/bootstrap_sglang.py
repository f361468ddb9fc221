"""Creates or updates ``.venv-sglang``, an environment with SGLang on a CPU, for the tests. Run it with ``make sglang``.

    .venv/bin/python tools/bootstrap_sglang.py

It needs an environment of its own, because it needs another transformers than verl. What both need, such as torch, it
shares with ``.venv``: a download of 310 MB instead of 4 GB. It does nothing if ``.venv-sglang`` is up to date: a stamp
file in it contains a hash of its inputs (`fingerprint`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from bootstrap import CHECKOUT, STAMP, fail, run, say, uv_environment

VENV = CHECKOUT / ".venv-sglang"
PYTHON = VENV / "bin" / "python"
SGLANG_STAMP = VENV / "reward-loop.stamp"
REQUIREMENTS = CHECKOUT / "tools" / "sglang-cpu" / "requirements.txt"
"""Beside it is the module that replaces SGLang's CUDA kernels."""
FREE_GIB = 2
IMPORTS = "import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
"""What the processes of a server import."""


def main() -> None:
    """Create or update ``.venv-sglang``."""
    if not STAMP.exists():
        fail("SGLang shares the packages of .venv, which is not complete: run make setup first")
    wanted = fingerprint()
    if SGLANG_STAMP.exists() and SGLANG_STAMP.read_text() == wanted and PYTHON.exists():
        return
    free = shutil.disk_usage(CHECKOUT).free / 2**30
    if not VENV.exists() and free < FREE_GIB:
        fail(
            f"{FREE_GIB} GiB of disk are needed for .venv-sglang, and {free:.1f} GiB are free on the disk of {CHECKOUT}"
        )
    began = time.monotonic()
    say("1/3", "making .venv-sglang")
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", str(VENV))
    say("2/3", "installing SGLang for the CPU with uv")
    uv = (sys.executable, "-m", "uv", "pip", "install", "--python", str(PYTHON), "--no-deps")
    run(*uv, "--requirements", str(REQUIREMENTS), env=uv_environment())
    packages = VENV / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{REQUIREMENTS.parent}\n")
    # Registries have torchvision for CUDA alone. Beside a torch for the CPU its operators are missing, and this module,
    # which describes them, cannot be imported. The file may be a hard link to uv's cache, so it is replaced.
    operators = packages / "torchvision" / "_meta_registrations.py"
    operators.unlink()
    operators.touch()
    # The three processes of a server would compile the same modules at the same time. Most modules are never imported,
    # so compiling all of them takes longer than this import.
    say("3/3", "compiling what a server of SGLang imports")
    run(str(PYTHON), "-W", "ignore", "-c", IMPORTS, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"})
    SGLANG_STAMP.write_text(wanted)
    say("done", f".venv-sglang is ready after {time.monotonic() - began:.0f} s")


def fingerprint() -> str:
    """Return a hash of all inputs of ``.venv-sglang``: requirements, this script, the Python and its folder."""
    made_from = [
        REQUIREMENTS.read_bytes(),
        Path(__file__).read_bytes(),
        sys.version.encode(),
        str(CHECKOUT).encode(),
    ]
    return hashlib.sha256(b"\0".join(made_from)).hexdigest()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run make again to go on.")
