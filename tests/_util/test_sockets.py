from __future__ import annotations

import asyncio
import socket

from reward_loop._util.sockets import is_loopback, listen, readable, reserve, url_of


def test_addresses() -> None:
    with listen("127.0.0.1") as own, listen("0.0.0.0") as everyones:
        assert is_loopback(own)
        assert not is_loopback(everyones)
        assert url_of(own).startswith("http://127.0.0.1:")
    left, right = socket.socketpair()
    with left, right:
        assert is_loopback(left)


def test_a_reserved_port_can_be_bound_by_who_names_it_again_and_again() -> None:
    with reserve("127.0.0.1") as reservation:
        port = reservation.getsockname()[1]
        for _ in range(2):
            with listen("127.0.0.1", port) as own:
                assert own.getsockname()[1] == port


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
