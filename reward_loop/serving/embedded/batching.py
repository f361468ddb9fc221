"""Runs requests to one transformers model in micro-batches.

Requests arrive one at a time on the event loop, wait a few milliseconds for further requests, and run as one batch in
the engine's thread. Decoding is transformers' own ``generate``. The engine adds the batching, and delivers each
sequence as soon as it ends, while the rest of its batch is still running.

Sampling uses the Gumbel-max trick: noise from the request's own random stream is added to the processed
log-probabilities, and ``generate`` takes the arg-max. The result has exactly the distribution of multinomial sampling,
and a seeded request draws the same random numbers in every batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reward_loop.serving.embedded.dialect import SamplingOptions


class SamplingParams(SamplingOptions):
    """The sampling parameters of one generation."""

    max_tokens: int = Field(ge=1)
    """The maximum number of new tokens, including the end token."""

    @property
    def distribution(self) -> str:
        """The parameters that all requests of a batch share: all except length and seed."""
        return self.model_dump_json(exclude={"max_tokens", "seed"})


@dataclass(slots=True)
class GeneratedTokens:
    """The generated tokens of one request."""

    token_ids: list[int]
    """The new tokens, up to and including the end token if there is one."""
    logprobs: list[float]
    """The log-probability of each token under the distribution it was drawn from: after repetition penalty,
    temperature, top-k and top-p. For greedy decoding, the model's own (after the repetition penalty, if any)."""
    finish_reason: Literal["stop", "length"]


class RowSampler(LogitsProcessor):
    """Converts logits to perturbed log-probabilities, whose arg-max is a sample.

    Args:
        params: the parameters of each row. Their ``distribution`` must be the same.
        shared: the random stream for rows without a seed.
    """

    def __init__(self, params: Sequence[SamplingParams], shared: torch.Generator) -> None:
        first = params[0]
        self._greedy = first.temperature == 0
        self._processors = LogitsProcessorList(_processors(first))
        self._shared = shared
        self._seeded = {
            row: torch.Generator(shared.device).manual_seed(p.seed)
            for row, p in enumerate(params)
            if p.seed is not None
        }
        self.logprobs: torch.Tensor
        """The log-probabilities of the latest step, shape (rows, vocabulary)."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logprobs = torch.log_softmax(self._processors(input_ids, scores), dim=-1)
        if self._greedy:
            return self.logprobs
        noise = torch.empty_like(self.logprobs).exponential_(generator=self._shared)
        for row, stream in self._seeded.items():
            noise[row].exponential_(generator=stream)
        # Noise of exactly 0 would select a token of probability 0.
        noise.clamp_min_(torch.finfo(noise.dtype).tiny)
        return self.logprobs - noise.log_()


def _processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the logits processors in vLLM's order."""
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    # 0 stands for greedy decoding, and nothing can be divided by it.
    if params.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.temperature and params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.temperature and params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    return processors


class RowEndings(StoppingCriteria):
    """Ends each row at an end token, at its maximum length, or when its request was cancelled.

    Args:
        params: the parameters of each row.
        sampler: provides the log-probabilities of each step.
        end_token_ids: tokens that end a row, in addition to ``stop_token_ids`` of the parameters.
        abandoned: returns whether the request of a row, given by its number, was cancelled.
        deliver: called with the row number and its generation as soon as the row has ended.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        sampler: RowSampler,
        end_token_ids: Sequence[int],
        *,
        abandoned: Callable[[int], bool],
        deliver: Callable[[int, GeneratedTokens], object],
    ) -> None:
        self._params = params
        self._sampler = sampler
        self._end_token_ids = frozenset(end_token_ids) | frozenset(params[0].stop_token_ids)
        self._abandoned = abandoned
        self._deliver = deliver
        self._alive = dict(enumerate(GeneratedTokens([], [], "length") for _ in params))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        chosen = input_ids[:, -1:]
        tokens = chosen[:, 0].tolist()
        logprobs = self._sampler.logprobs.gather(1, chosen)[:, 0].tolist()
        for row, generation in list(self._alive.items()):
            generation.token_ids.append(tokens[row])
            generation.logprobs.append(logprobs[row])
            if tokens[row] in self._end_token_ids:
                generation.finish_reason = "stop"
            elif len(generation.token_ids) < self._params[row].max_tokens and not self._abandoned(row):
                continue
            del self._alive[row]
            self._deliver(row, generation)
        ended = [row not in self._alive for row in range(len(tokens))]
        return torch.tensor(ended, device=input_ids.device)


@dataclass(slots=True, eq=False)
class _Request:
    token_ids: list[int]
    params: SamplingParams | None
    """``None`` for a classification."""
    arrived: float
    result: asyncio.Future[Any]

    @property
    def new_tokens(self) -> int:
        return self.params.max_tokens if self.params else 0


class BatchingEngine:
    """Runs ``generate`` and ``classify`` requests on one model, in micro-batches.

    An async context manager: a worker task and one thread live between entry and exit. At exit, waiting requests are
    cancelled and a running batch is stopped at its next token.

    Requests with the same sampling parameters, except length and seed, share a batch. The group with the oldest request
    runs first. The engine owns the model: it replaces the model's ``generation_config`` by a neutral one, so that only
    the sampling parameters of a request apply. Weights may be changed in place under `model_lock`.

    Args:
        model: a transformers ``*ForCausalLM`` or ``*ForSequenceClassification`` in eval mode. A decoder with a
            classification head needs ``config.pad_token_id == pad_token_id``, because transformers uses it to find the
            last token.
        pad_token_id: the token that pads shorter rows.
        eos_token_ids: tokens that end a response.
        max_batch_size: the maximum number of sequences in a batch.
        max_wait_s: the maximum number of seconds that a request waits for other requests while the model is idle.
        quiet_s: a batch runs before ``max_wait_s`` is over if no request has arrived for this number of seconds;
            ``None`` disables this.
        max_batch_tokens: the maximum of rows times length (input and new tokens) of a batch. A single request that
            exceeds it runs alone.
        seed: seeds the random stream of requests without a seed; by default, every process draws its own seed.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        max_batch_size: int = 64,
        max_wait_s: float = 0.003,
        quiet_s: float | None = None,
        max_batch_tokens: int = 32_768,
        seed: int | None = None,
    ) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._quiet_s = max_wait_s if quiet_s is None else quiet_s
        self._max_batch_tokens = max_batch_tokens
        text_config = model.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        """The model's context length in tokens, for input and new tokens together; ``None`` if unknown."""
        self._random = torch.Generator(model.device)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        if model.can_generate():
            model.generation_config = GenerationConfig(pad_token_id=pad_token_id)
        self._groups: dict[str | None, deque[_Request]] = {}
        self._running: list[_Request] = []
        self._arrival = asyncio.Event()
        self.model_lock = asyncio.Lock()
        """Held by the running batch. While a caller holds it, the model is idle, and its weights may be changed."""
        self._thread: ThreadPoolExecutor | None = None
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._worker = asyncio.create_task(self._work(), name="batching-engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        worker, self._worker = self._worker, None
        thread, self._thread = self._thread, None
        assert worker is not None
        assert thread is not None
        worker.cancel()
        for request in [*self._running, *(r for group in self._groups.values() for r in group)]:
            # The thread cannot be cancelled: `RowEndings` ends the rows of cancelled requests at the next token.
            request.result.cancel()
        self._groups.clear()
        await asyncio.wait([worker])
        # In another thread, because it waits for the batch.
        await asyncio.to_thread(thread.shutdown)

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> GeneratedTokens:
        """Generate a continuation of ``prompt_ids``.

        Cancelling the call withdraws the request: a waiting request never runs, and a running request no longer delays
        the end of its batch. If the model raises an exception, every request of the batch raises it.

        Raises:
            ValueError: the prompt is empty, contains an unknown token, or exceeds the model's context length together
                with ``params.max_tokens``.
        """
        return await self._submit(prompt_ids, params)

    async def classify(self, input_ids: list[int]) -> list[float]:
        """Return the raw logits of a sequence classification model for ``input_ids``, one for each label.

        Raises:
            ValueError: the input is empty, contains an unknown token, or exceeds the model's context length.
        """
        return await self._submit(input_ids, None)

    async def _submit(self, token_ids: list[int], params: SamplingParams | None) -> Any:
        if self._worker is None:
            raise RuntimeError("the engine is not running: use it inside `async with BatchingEngine(...)`")
        loop = asyncio.get_running_loop()
        request = _Request(token_ids, params, loop.time(), loop.create_future())
        # Before it is queued: an invalid request must not fail the batch of others.
        self._check(request)
        group = params.distribution if params else None
        self._groups.setdefault(group, deque()).append(request)
        self._arrival.set()
        return await request.result

    def _check(self, request: _Request) -> None:
        ids, new = request.token_ids, request.new_tokens
        if not ids:
            raise ValueError("the input has no tokens")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"token ids must be at least 0 and less than {self._vocab_size}")
        if self.max_length is not None and len(ids) + new > self.max_length:
            wanted = f"{len(ids)} input tokens" + (f" and {new} new tokens" if new else "")
            raise ValueError(f"this model's maximum context length is {self.max_length} tokens, not {wanted}")

    async def _work(self) -> None:
        while True:
            group = await self._next_group()
            async with self.model_lock:
                self._running = self._take_batch(group)
                if self._running:
                    await self._run(self._running)
                self._running = []

    async def _next_group(self) -> deque[_Request]:
        """Return the group with the oldest request, once it has a full batch or its waiting time is over."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrival.clear()
            self._drop_cancelled()
            deadline = None
            if self._groups:
                group = min(self._groups.values(), key=lambda waiting: waiting[0].arrived)
                deadline = min(group[0].arrived + self._max_wait_s, group[-1].arrived + self._quiet_s)
                if len(group) >= self._max_batch_size or loop.time() >= deadline:
                    return group
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._arrival.wait()

    def _drop_cancelled(self) -> None:
        for key, group in list(self._groups.items()):
            while group and group[0].result.done():
                group.popleft()
            if not group:
                del self._groups[key]

    def _take_batch(self, group: deque[_Request]) -> list[_Request]:
        batch: list[_Request] = []
        input_tokens = new_tokens = 0
        while group and len(batch) < self._max_batch_size:
            request = group[0]
            if not request.result.done():
                input_tokens = max(input_tokens, len(request.token_ids))
                new_tokens = max(new_tokens, request.new_tokens)
                if batch and (len(batch) + 1) * (input_tokens + new_tokens) > self._max_batch_tokens:
                    break
                batch.append(request)
            group.popleft()
        return batch

    async def _run(self, batch: list[_Request]) -> None:
        loop = asyncio.get_running_loop()
        run = self._classify if batch[0].params is None else self._generate
        try:
            await loop.run_in_executor(self._thread, run, batch, loop)
        except Exception as error:
            for request in batch:
                if not request.result.done():
                    request.result.set_exception(error)

    def _classify(self, batch: list[_Request], loop: asyncio.AbstractEventLoop) -> None:
        with torch.no_grad():
            # On the right: a forward pass numbers positions from the first column, so padding there would shift them.
            logits = self._model(**self._inputs(batch, padding_side="right")).logits.tolist()
        for request, row in zip(batch, logits, strict=True):
            loop.call_soon_threadsafe(_deliver, request.result, row)

    def _generate(self, batch: list[_Request], loop: asyncio.AbstractEventLoop) -> None:
        params = [request.params for request in batch if request.params]
        sampler = RowSampler(params, self._random)
        endings = RowEndings(
            params,
            sampler,
            self._eos_token_ids,
            abandoned=lambda row: batch[row].result.done(),
            deliver=lambda row, generation: loop.call_soon_threadsafe(_deliver, batch[row].result, generation),
        )
        self._model.generate(
            **self._inputs(batch, padding_side="left"),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([endings]),
            max_new_tokens=max(p.max_tokens for p in params),
            # `RowSampler` has drawn: the largest of its scores is the sample.
            do_sample=False,
        )

    def _inputs(self, batch: list[_Request], *, padding_side: str) -> dict[str, Any]:
        width = max(len(request.token_ids) for request in batch)
        rows, mask = [], []
        for request in batch:
            ids, missing = request.token_ids, width - len(request.token_ids)
            if padding_side == "left":
                # Pad with a token of the prompt: the repetition penalty also counts masked tokens.
                rows.append([ids[0]] * missing + ids)
                mask.append([0] * missing + [1] * len(ids))
            else:
                rows.append(ids + [self._pad_token_id] * missing)
                mask.append([1] * len(ids) + [0] * missing)
        device = self._model.device
        return {
            "input_ids": torch.tensor(rows, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }


def _deliver(result: asyncio.Future[Any], value: Any) -> None:
    if not result.done():
        result.set_result(value)
