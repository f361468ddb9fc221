from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf

from examples.tiny_models import tiny_tokenizer
from examples.verl_cpu.server import CPURolloutServer

pytestmark = pytest.mark.integration  # imports Ray and torch

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True}


def received(output: Any) -> Any:
    """What a client of the server gets: the output after a trip between processes."""
    return pickle.loads(pickle.dumps(output))


@pytest.fixture
async def server(tiny_generative_model: Path) -> AsyncIterator[CPURolloutServer]:
    server = CPURolloutServer(str(tiny_generative_model), prompt_length=32, response_length=8, max_num_seqs=16, seed=0)
    await server.start()
    yield server
    await server._open.aclose()


def prompt(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


async def test_aborted_requests_say_so_and_later_ones_wait(server: CPURolloutServer) -> None:
    # Weights are being updated, so that the request is certainly in flight when it is aborted.
    await server.update_weights({}, last=False, global_steps=None)
    running = asyncio.ensure_future(server.generate(prompt("1+1="), GREEDY, "r"))
    await asyncio.sleep(0)  # it runs until it waits for the engine
    assert server._in_flight
    await server.abort_all_requests()
    assert received(await running).stop_reason == "aborted"
    later = asyncio.ensure_future(server.generate(prompt("1+1="), GREEDY, "r"))
    await server.update_weights({}, last=True, global_steps=1)
    assert not later.done()
    await server.resume_generation()
    assert received(await later).stop_reason == "completed"
    await server.abort_all_requests(reject_request=True)
    assert received(await server.generate(prompt("1+1="), GREEDY, "r")).stop_reason == "aborted"


async def test_a_transfer_that_does_not_end_says_what_it_waits_for(
    server: CPURolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.verl_cpu.rollout import ServerAdapter

    class Stuck:
        class update_weights:  # as a handle of Ray's actor
            @staticmethod
            async def remote(bucket: Any, **options: Any) -> None:
                await asyncio.Event().wait()

    monkeypatch.setattr("examples.verl_cpu.server.TRANSFER_TIMEOUT_S", 0.01)
    async with server._engine.model_lock:  # a batch that does not end
        with pytest.raises(TimeoutError, match="the server did not end its batch or the transfer before"):
            await server.update_weights({}, last=True, global_steps=1)
    await server.update_weights({}, last=True, global_steps=1)
    adapter = ServerAdapter(OmegaConf.create(), OmegaConf.create(), None, replica_rank=1)
    adapter._server = Stuck()
    with pytest.raises(TimeoutError, match="cpu_rollout_server_1 did not take 1 tensors"):
        await adapter.update_weights([("weight", torch.zeros(1))])
