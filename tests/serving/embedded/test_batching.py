from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.

from reward_loop.serving.embedded.batching import (  # noqa: E402
    BatchingEngine,
    GeneratedTokens,
    SamplingParams,
)

pytestmark = pytest.mark.integration  # imports torch

PROMPTS = [list(range(3, 3 + length)) for length in (1, 20, 7, 13, 40)]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def generative(tiny_generative_model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_generative_model).eval()


@pytest.fixture(scope="module")
def discriminative(tiny_discriminative_model: Path) -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(tiny_discriminative_model).eval()


def engine_for(model: Any, **options: Any) -> BatchingEngine:
    options = {"pad_token_id": model.config.pad_token_id, "eos_token_ids": [model.config.eos_token_id]} | options
    return BatchingEngine(model, **options)


class Batches:
    """Records the size of every forward pass, and can hold the model back or break it."""

    def __init__(self, model: Any) -> None:
        self.sizes: list[int] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.held_from, self.release = sys.maxsize, threading.Event()
        """From which pass on the model waits for `release`."""
        self.error: Exception | None = None
        self.handle = model.register_forward_pre_hook(self.hook, with_kwargs=True)

    def hook(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.sizes.append(len(kwargs["input_ids"]))
        self.entered.set()
        assert self.gate.wait(60)
        assert len(self.sizes) < self.held_from or self.release.wait(60)
        if self.error:
            raise self.error


@contextmanager
def recorded(model: Any) -> Iterator[Batches]:
    recorder = Batches(model)
    yield recorder
    recorder.gate.set()
    recorder.release.set()
    recorder.handle.remove()


@pytest.fixture
def batches(discriminative: Any) -> Iterator[Batches]:
    with recorded(discriminative) as recorder:
        yield recorder


@pytest.fixture
def steps(generative: Any) -> Iterator[Batches]:
    with recorded(generative) as recorder:
        yield recorder


def teacher_forced(model: Any, prompt: list[int], generation: GeneratedTokens, temperature: float = 1.0) -> list[float]:
    ids = torch.tensor([prompt + generation.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].tolist()


async def test_batched_logits_equal_unbatched_ones(discriminative: Any, batches: Batches) -> None:
    # The batch runs when no more requests come, long before `max_wait_s`.
    async with engine_for(discriminative, max_wait_s=3600, quiet_s=0.01) as engine:
        batched = await asyncio.wait_for(asyncio.gather(*map(engine.classify, PROMPTS)), 60)
    assert batches.sizes == [len(PROMPTS)]
    with torch.no_grad():
        alone = [discriminative(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in PROMPTS]
    assert batched == [pytest.approx(logits, abs=1e-4) for logits in alone]


async def test_greedy_batches_equal_unbatched_generate_token_for_token(generative: Any) -> None:
    async with engine_for(generative) as engine:
        batched = await asyncio.gather(*(engine.generate(ids, GREEDY) for ids in PROMPTS))
    for prompt, generation in zip(PROMPTS, batched, strict=True):
        ids = torch.tensor([prompt])
        eos = generative.config.eos_token_id
        alone = generative.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=eos
        )
        assert generation.token_ids == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0, 1.0, 0.7])
async def test_logprobs_equal_a_teacher_forced_pass(generative: Any, temperature: float) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature)
    async with engine_for(generative) as engine:
        generations = await asyncio.gather(*(engine.generate(ids, params) for ids in PROMPTS))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = teacher_forced(generative, prompt, generation, temperature or 1.0)
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_samples_follow_the_distribution_of_the_model(generative: Any) -> None:
    prompt, draws = PROMPTS[1], 4000
    params = SamplingParams(max_tokens=1, temperature=0.3, top_k=4)
    async with engine_for(generative, max_batch_size=draws, seed=1) as engine:
        generations = await asyncio.gather(*(engine.generate(prompt, params) for _ in range(draws)))
    with torch.no_grad():
        top = torch.topk(generative(torch.tensor([prompt])).logits[0, -1] / 0.3, 4)
    expected = dict(zip(top.indices.tolist(), torch.softmax(top.values, -1).tolist(), strict=True))
    drawn = [generation.token_ids[0] for generation in generations]
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        assert drawn.count(token) / draws == pytest.approx(probability, abs=0.04)
    for generation in generations:
        assert generation.logprobs[0] == pytest.approx(math.log(expected[generation.token_ids[0]]), abs=1e-4)


async def test_a_seed_draws_the_same_tokens_in_any_batch(generative: Any) -> None:
    seeded = SamplingParams(max_tokens=10, seed=7)
    async with engine_for(generative) as engine:
        alone = await engine.generate(PROMPTS[1], seeded)
        others = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=4, seed=8)]
        _, together, _ = await asyncio.gather(
            engine.generate(PROMPTS[4], others[0]),
            engine.generate(PROMPTS[1], seeded),
            engine.generate(PROMPTS[0], others[1]),
        )
    assert together.token_ids == alone.token_ids


async def test_requests_with_other_parameters_run_in_their_own_batch(generative: Any, steps: Batches) -> None:
    params = [SamplingParams(max_tokens=1, temperature=t) for t in (0, 0, 1, 1, 1)]
    async with engine_for(generative) as engine:
        generations = await asyncio.gather(*map(engine.generate, PROMPTS, params))
    assert steps.sizes == [2, 3]
    assert [len(g.token_ids) for g in generations] == [1] * 5


async def test_each_row_ends_at_its_own_length_or_end_token(generative: Any) -> None:
    async with engine_for(generative) as engine:
        free = await engine.generate(PROMPTS[1], GREEDY)
        stop = free.token_ids[2]
        ended, short = await asyncio.gather(
            engine.generate(PROMPTS[1], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))),
            engine.generate(PROMPTS[1], SamplingParams(max_tokens=2, temperature=0)),
        )
    assert (ended.finish_reason, ended.token_ids) == ("stop", free.token_ids[: free.token_ids.index(stop) + 1])
    assert len(ended.logprobs) == len(ended.token_ids)
    assert (short.finish_reason, short.token_ids) == ("length", free.token_ids[:2])


async def test_a_short_sequence_is_delivered_before_its_batch_is_done(generative: Any, steps: Batches) -> None:
    steps.held_from = 2
    async with engine_for(generative) as engine:
        long = asyncio.create_task(engine.generate(PROMPTS[1], SamplingParams(max_tokens=400)))
        await engine.generate(PROMPTS[1], SamplingParams(max_tokens=1))
        assert steps.sizes[0] == 2
        assert not long.done()
        long.cancel()
        steps.release.set()


async def test_the_repetition_penalty_ignores_padding(generative: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.5)
    async with engine_for(generative, pad_token_id=PROMPTS[1][5]) as engine:
        alone = await engine.generate(PROMPTS[0], params)
        together, _ = await asyncio.gather(engine.generate(PROMPTS[0], params), engine.generate(PROMPTS[4], params))
    assert together.token_ids == alone.token_ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


async def test_a_batch_is_bounded(discriminative: Any, batches: Batches) -> None:
    async with engine_for(discriminative, max_batch_size=3) as engine:
        await asyncio.gather(*(engine.classify([5]) for _ in range(7)))
    assert batches.sizes == [3, 3, 1]


async def test_a_running_generation_that_is_cancelled_stops(generative: Any, steps: Batches) -> None:
    steps.gate.clear()
    async with engine_for(generative) as engine:
        task = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(max_tokens=500)))
        await asyncio.to_thread(steps.entered.wait)
        task.cancel()
        await asyncio.wait([task])
        steps.gate.set()
        async with engine.model_lock:
            assert len(steps.sizes) <= 2


async def test_invalid_prompts_of_a_batch_fail_alone(generative: Any, discriminative: Any) -> None:
    prompts = [PROMPTS[0], [3] * 510, [3, 10**6], []]
    async with engine_for(generative) as engine:
        good, *bad = await asyncio.gather(
            *(engine.generate(prompt, GREEDY) for prompt in prompts), return_exceptions=True
        )
    assert isinstance(good, GeneratedTokens)
    assert [type(error) for error in bad] == [ValueError] * 3
    assert "maximum context length is 512 tokens" in str(bad[0])
    async with engine_for(discriminative) as engine:
        await engine.classify([3] * 512)
        with pytest.raises(ValueError, match="maximum context length"):
            await engine.classify([3] * 513)


async def test_a_model_error_fails_its_batch_and_the_engine_continues(discriminative: Any, batches: Batches) -> None:
    async with engine_for(discriminative) as engine:
        batches.error = RuntimeError("out of luck")
        results = await asyncio.gather(engine.classify([5]), engine.classify([6]), return_exceptions=True)
        assert [str(result) for result in results] == ["out of luck"] * 2
        batches.error = None
        assert len(await engine.classify([5])) == 1


async def test_the_model_lock_keeps_the_model_idle(discriminative: Any, batches: Batches) -> None:
    async with engine_for(discriminative, max_wait_s=0) as engine:
        batches.gate.clear()
        running = asyncio.create_task(engine.classify([5]))
        await asyncio.to_thread(batches.entered.wait)
        inside = asyncio.create_task(engine.model_lock.acquire())
        done, _ = await asyncio.wait([inside], timeout=0.05)
        assert not done
        batches.gate.set()
        await inside
        assert running.done()
        held = asyncio.create_task(engine.classify([6]))
        done, _ = await asyncio.wait([held], timeout=0.05)
        assert not done
        assert batches.sizes == [1]
        engine.model_lock.release()
        await held
    assert batches.sizes == [1, 1]


async def test_leaving_cancels_what_waits_and_what_runs(generative: Any, steps: Batches) -> None:
    async with engine_for(generative) as engine:
        running = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(max_tokens=500)))
        await asyncio.to_thread(steps.entered.wait)
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY))
        await asyncio.sleep(0)
    results = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    with pytest.raises(RuntimeError, match="not running"):
        await engine.generate(PROMPTS[0], GREEDY)
