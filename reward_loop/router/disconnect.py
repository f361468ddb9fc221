"""Work that is given up when the client that asked for it goes away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

__all__ = ["stop_on_disconnect"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def stop_on_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Runs ``work`` and cancels it if the client disconnects first.

    Args:
        receive: the ASGI channel of a request whose body has been read.
        work: what to do for the client.

    Returns:
        whether ``work`` was done to the end.
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
        # The group can hold nothing but what `work` raised: `watch` does not fail.
        raise group.exceptions[0] from None
    return done
