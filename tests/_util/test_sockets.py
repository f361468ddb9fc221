from __future__ import annotations

import asyncio
import socket

from reward_loop._util.sockets import readable


async def test_readable_waits_for_data_and_for_the_end_and_reads_nothing() -> None:
    left, right = socket.socketpair()
    with left:
        with right:
            waiting = asyncio.create_task(readable(left))
            await asyncio.sleep(0)
            assert not waiting.done()
            right.send(b"a")
            await waiting
            assert left.recv(2) == b"a"
        await readable(left)
        assert left.recv(1) == b""
