"""A headless Chromium, and the viewer's server as a process of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The distribution's browser; ``None`` if there is none."""

OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        try:
            yield running
        finally:
            running.close()


@contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """Run ``reward-loop view`` on a folder, and yield its address."""
    main = "from reward_loop.cli import main; main()"
    command = [sys.executable, "-c", main, "view", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:  # ends when the server ends
                lines.append(line)
                if found := re.search(r"http://\S+", line):
                    yield found[0]
                    break
            else:
                raise RuntimeError(f"the server has ended: {''.join(lines)}")
        finally:
            process.terminate()
