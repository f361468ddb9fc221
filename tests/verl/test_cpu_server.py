from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
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


async def test_tokens_in_tokens_out(server: CPURolloutServer) -> None:
    from verl.workers.rollout.replica import TokenOutput

    output = received(await server.generate(prompt("1+1="), GREEDY, "r"))
    assert isinstance(output, TokenOutput)
    assert 1 <= len(output.token_ids) <= 8
    assert len(output.log_probs) == len(output.token_ids)
    assert all(value <= 0 for value in output.log_probs)
    assert output.stop_reason == "completed"


async def test_the_response_is_bounded_by_request_and_context(server: CPURolloutServer) -> None:
    short = received(await server.generate(prompt("1+1="), GREEDY | {"max_tokens": 2}, "r"))
    assert len(short.token_ids) <= 2
    with pytest.raises(ValueError, match="leaves no room"):
        await server.generate(prompt("x" * 40), GREEDY, "r")
    with pytest.raises(ValueError, match="image_data"):
        await server.generate(prompt("1"), GREEDY, "r", image_data=[object()])


async def test_new_weights_change_the_answer_and_the_step(server: CPURolloutServer) -> None:
    before = received(await server.generate(prompt("1+1="), GREEDY, "r"))
    state = server._model.state_dict()
    name = "model.embed_tokens.weight"
    generator = torch.Generator().manual_seed(1)
    await server.update_weights(
        {name: torch.randn(state[name].shape, generator=generator)}, last=False, global_steps=None
    )
    waiting = asyncio.ensure_future(server.generate(prompt("1+1="), GREEDY, "r"))
    await server.update_weights({"model.norm.weight": state["model.norm.weight"].clone()}, last=True, global_steps=7)
    after = received(await waiting)
    assert after.extra_fields["global_steps"] == 7
    assert (after.token_ids, after.log_probs) != (before.token_ids, before.log_probs)
    with pytest.raises(KeyError, match="nonesuch"):
        await server.update_weights({"nonesuch": torch.zeros(1)}, last=True, global_steps=8)


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
