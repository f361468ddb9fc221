from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_loop.router.messages import HOP_BY_HOP, end_to_end, find, to_wire

TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-0123456789", min_size=1, max_size=12).map(str.encode)
NAMES = TOKENS | st.sampled_from(sorted(HOP_BY_HOP))
VALUES = st.binary(max_size=20).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b""))
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=12)


@given(HEADERS, st.lists(TOKENS, min_size=1, max_size=4))
def test_headers_named_by_connection_are_removed(headers: list[tuple[bytes, bytes]], named: list[bytes]) -> None:
    option = b" , ".join(name.upper() for name in named)
    kept = end_to_end(headers, [(b"connection", option)])
    assert not {name for name, _ in kept} & (set(named) - {b"host", b"content-length", b"close", b"keep-alive"})
    rest = iter(headers)
    assert all(header in rest for header in kept)


def test_lines_and_look_up() -> None:
    headers = [(b"a", b"1"), (b"host", b"h"), (b"b", b"")]
    assert to_wire(headers, without={b"host"}) == b"a: 1\r\nb: \r\n"
    assert (find(headers, b"host"), find(headers, b"c")) == (b"h", None)
