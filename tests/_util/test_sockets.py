from __future__ import annotations

import socket

from reward_loop._util.sockets import is_loopback, listen, reserve, url_of


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
