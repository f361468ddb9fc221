"""An event loop for commands, which Ctrl-C always reaches."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as `asyncio.run` does, in a loop that every signal wakes.

    `asyncio.run` handles Ctrl-C when its loop next wakes up by itself. Where the signal reached another thread, or came
    just before the loop went to sleep, that is when the next sample ends: never, if the function hangs.
    """
    return asyncio.run(_awake(main))


async def _awake(main: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is threading.main_thread():  # elsewhere, Ctrl-C is not ours
        # A loop that handles any signal itself is woken by all of them. This one is of no other use here.
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, lambda: None)
    return await main
