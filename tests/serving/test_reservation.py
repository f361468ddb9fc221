"""The order in which GPUs are reserved, without Ray. On clusters that only Ray believes in: `test_several_nodes`."""

from __future__ import annotations

import pytest

from reward_loop.errors import ConfigError

pytest.importorskip("ray")

from reward_loop.serving import reservation
from reward_loop.serving.reservation import Demand, GpuReservation, Others

ONE = {"CPU": 1.0, "GPU": 1.0}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is reserved and removed, in order, on two idle nodes of 8 GPUs."""
    made: list[str] = []

    class Group:
        def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
            self.name = f"{len(bundles)} x {bundles[0]['GPU']:g} GPU(s), {strategy}"
            made.append(self.name)

        def wait(self, seconds: float) -> bool:
            return True

    nodes = [reservation._Node("a", {"GPU": 8, "CPU": 16}, None)] * 2
    monkeypatch.setattr(reservation.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(reservation, "_nodes", lambda: nodes)
    monkeypatch.setattr(reservation, "placement_group", Group)
    monkeypatch.setattr(reservation, "_remove", lambda group: made.append(f"removed: {group.name}"))
    monkeypatch.setattr(reservation, "_wait_until_removed", lambda groups: None)
    return made


async def test_the_room_of_the_trainer_is_held_while_smaller_servers_are_placed(made: list[str]) -> None:
    trainer = Others("group(s) of the trainer", 1, 8, ONE)
    ((*places,),) = await GpuReservation([trainer]).places([Demand(4, 2, 1)])
    assert len(places) == 4
    assert made == ["8 x 1 GPU(s), STRICT_PACK", "4 x 2 GPU(s), PACK", "removed: 8 x 1 GPU(s), STRICT_PACK"]


async def test_servers_that_are_larger_than_the_groups_of_the_trainer_are_placed_first(made: list[str]) -> None:
    trainer = Others("group(s) of the trainer", 2, 4, ONE)
    await GpuReservation([trainer]).places([Demand(1, 8, 1)])
    assert made[:3] == ["1 x 8 GPU(s), PACK", *["4 x 1 GPU(s), STRICT_PACK"] * 2]


async def test_more_than_all_nodes_have_is_refused_before_anything_is_reserved(made: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"too few GPUs .*: 18 are needed, 8 of them on one node"):
        await GpuReservation([Others("group(s) of the trainer", 1, 8, ONE)]).places([Demand(5, 2, 1)])
    assert made == []
