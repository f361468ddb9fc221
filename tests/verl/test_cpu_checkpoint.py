"""Weights on their way from a trainer of two ranks to stand-alone rollouts, through Ray's object store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.local_ray import local_ray

pytestmark = pytest.mark.integration

WEIGHTS = {f"layer.{i}": torch.full((4, 8), float(i)) for i in range(5)} | {"scalar": torch.tensor(1.5)}
TWO_LAYERS = 2 * 4 * 8 * 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(logging_level="error"):
        yield


async def test_all_rollouts_receive_what_rank_0_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "examples.verl_cpu.plugin")
    from examples.verl_cpu.checkpoint import RayCheckpointEngine

    trainers = [RayCheckpointEngine(TWO_LAYERS, is_master=rank == 0) for rank in range(2)]
    rollouts = [RayCheckpointEngine(TWO_LAYERS) for _ in range(3)]
    for version in (1.0, 2.0):
        metadata = [engine.prepare() for engine in (*trainers, *rollouts)]
        for engines, arguments in zip(
            (trainers, rollouts), RayCheckpointEngine.build_topology(2, 3, metadata), strict=True
        ):
            for rank, engine in enumerate(engines):
                engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})
        gone_through = []

        def weights(version: float = version, gone_through: list[str] = gone_through) -> Any:
            for name, tensor in WEIGHTS.items():
                gone_through.append(name)
                yield name, tensor * version

        async def receive(engine: RayCheckpointEngine) -> dict[str, torch.Tensor]:
            return {name: tensor async for name, tensor in engine.receive_weights()}

        *received, _, _ = await asyncio.gather(
            *(receive(engine) for engine in rollouts), *(engine.send_weights(weights()) for engine in trainers)
        )
        # Gathering a tensor is a collective: rank 1 must have taken part.
        assert len(gone_through) == 2 * len(WEIGHTS)
        for each in received:
            assert list(each) == list(WEIGHTS)
            assert all(torch.equal(each[name], tensor * version) for name, tensor in WEIGHTS.items())
        for engine in (*trainers, *rollouts):
            engine.finalize()
