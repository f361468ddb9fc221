"""Async context managers for synchronous programs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, TypeVar

__all__ = ["in_background"]

T = TypeVar("T")


@contextmanager
def in_background(new: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> Iterator[T]:
    """Enters an async context manager on an event loop in a thread of its own, and leaves it there.

    It is also left when the interpreter exits before the block has ended.

    Args:
        new: makes the context manager; called in the thread.
        name: the thread's name.

    Yields:
        what entering it gave.

    Raises:
        Exception: whatever entering or leaving it raised.
    """
    background = _Background(new, name)
    # An anyio portal would not do: the interpreter joins its thread at exit, before anything could stop it.
    atexit.register(background.stop)
    try:
        yield background.start()
    finally:
        atexit.unregister(background.stop)
        background.stop()


class _Background(Generic[T]):
    def __init__(self, new: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._new = new
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stopping = asyncio.Event()
        self._entered: Future[T] = Future()
        self._left: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> T:
        self._thread.start()
        return self._entered.result()

    def stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself, and closed the loop
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        if self._left.done():
            self._left.result()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._main())

    async def _main(self) -> None:
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        stopping.cancel()
        await asyncio.wait([serving])

    async def _serve(self) -> None:
        try:
            async with self._new() as value:
                self._entered.set_result(value)
                await asyncio.Event().wait()
        except Exception as error:
            (self._left if self._entered.done() else self._entered).set_exception(error)
