"""At which address a reward worker reaches the router, without Ray and tunnels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop.errors import ServerStartError

pytest.importorskip("ray")

from reward_loop.verl import cluster
from reward_loop.verl.cluster import RouterAddress, address_on_this_node


@pytest.fixture(autouse=True)
def on_node_b(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs on node b, and an entry of a tunnel listens at 127.0.0.1:2."""

    @contextmanager
    def in_background(make: Any, name: str) -> Iterator[str]:
        yield make()

    def tunnel_entry(exit_address: str, key: str, health_path: str) -> str:
        assert (exit_address, key) == ("10.0.0.1:5", "key")
        return "127.0.0.1:2"

    context = SimpleNamespace(get_node_id=lambda: "b")
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(cluster, "in_background", in_background)
    monkeypatch.setattr(cluster, "tunnel_entry", tunnel_entry)


@pytest.mark.parametrize(
    ("router", "address"),
    [
        (None, None),
        (RouterAddress("10.0.0.2:1"), "10.0.0.2:1"),
        (RouterAddress("127.0.0.1:1", "b", "10.0.0.1:5", "key"), "127.0.0.1:1"),
        (RouterAddress("127.0.0.1:1", "a", "10.0.0.1:5", "key"), "127.0.0.1:2"),
    ],
    ids=["no model", "an address that the user has chosen", "the router's node", "another node"],
)
def test_a_worker_gets_the_routers_address_or_that_of_its_tunnel(router: Any, address: str | None) -> None:
    with address_on_this_node(router) as found:
        assert found == address


def test_without_a_tunnel_a_worker_on_another_node_is_an_error() -> None:
    with (
        pytest.raises(ServerStartError, match="Ray has restarted this reward worker on another node"),
        address_on_this_node(RouterAddress("127.0.0.1:1", "a")),
    ):
        pass
