"""Cancels the work for a request when its client disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

__all__ = ["stop_on_disconnect"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def stop_on_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Run ``work``, and cancel it if the client disconnects first; return whether it finished.

    ``receive`` is that of ASGI, for a request whose body has been read. Errors of ``work`` are raised.
    """
    done = False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            scope = tasks.cancel_scope
            tasks.start_soon(watch)
            await work()
            done = True
            scope.cancel()
    except BaseExceptionGroup as group:
        # The group contains only the exception of `work`: `watch` does not fail.
        raise group.exceptions[0] from None
    return done
