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
import secrets
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, Field
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


class SamplingOptions(BaseModel):
    """The sampling parameters that a request and its generation have in common, as in vLLM."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 decodes greedily."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 or 0 disables top-k sampling."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Applies to the tokens of prompt and response, before the temperature."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to those of the engine."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seeds a random stream for the response: the same seed draws the same random numbers in every batch."""


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


@dataclass(slots=True, eq=False)
class _Request:
    token_ids: list[int]
    params: SamplingParams | None
    """``None`` for a classification."""
    shares: str | None
    """What the requests of a batch have in common."""
    arrived: float
    result: asyncio.Future[Any]


class RowEndings(StoppingCriteria):
    """Ends each row at an end token, at its maximum length, or when its request was cancelled.

    Args:
        batch: the requests, one for each row.
        sampler: provides the log-probabilities of each step.
        end_token_ids: tokens that end a row.
        loop: where each request gets its generation as soon as its row has ended.
    """

    def __init__(
        self,
        batch: Sequence[_Request],
        sampler: RowSampler,
        end_token_ids: Container[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sampler = sampler
        self._end_token_ids = end_token_ids
        self._loop = loop
        self._alive = {row: (request, GeneratedTokens([], [], "length")) for row, request in enumerate(batch)}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        chosen = input_ids[:, -1:]
        tokens = chosen[:, 0].tolist()
        logprobs = self._sampler.logprobs.gather(1, chosen)[:, 0].tolist()
        for row, (request, generation) in list(self._alive.items()):
            assert request.params is not None
            generation.token_ids.append(tokens[row])
            generation.logprobs.append(logprobs[row])
            if tokens[row] in self._end_token_ids:
                generation.finish_reason = "stop"
            elif len(generation.token_ids) < request.params.max_tokens and not request.result.done():
                continue
            del self._alive[row]
            self._loop.call_soon_threadsafe(_deliver, request.result, generation)
        ended = [row not in self._alive for row in range(len(tokens))]
        return torch.tensor(ended, device=input_ids.device)


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
        seed: int | None = None,
    ) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._quiet_s = max_wait_s if quiet_s is None else quiet_s
        text_config = model.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        """The model's context length in tokens, for input and new tokens together; ``None`` if unknown."""
        self._random = torch.Generator(model.device)
        self._random.manual_seed(secrets.randbits(63) if seed is None else seed)
        if model.can_generate():
            model.generation_config = GenerationConfig(pad_token_id=pad_token_id)
        self._waiting: list[_Request] = []
        """In the order of their arrival."""
        self._running: list[_Request] = []
        self._arrival = asyncio.Event()
        self.model_lock = asyncio.Lock()
        """Held by the running batch. While a caller holds it, the model is idle, and its weights may be changed."""
        self._thread: ThreadPoolExecutor
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._worker = asyncio.create_task(self._work(), name="batching-engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.cancel()
        for request in [*self._running, *self._waiting]:
            # The thread cannot be cancelled: `RowEndings` ends the rows of cancelled requests at the next token.
            request.result.cancel()
        await asyncio.wait([worker])
        # In another thread, because it waits for the batch.
        await asyncio.to_thread(self._thread.shutdown)

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
        shares = params.distribution if params else None
        request = _Request(token_ids, params, shares, loop.time(), loop.create_future())
        # Before it is queued: an invalid request must not fail the batch of others.
        self._check(request)
        self._waiting.append(request)
        self._arrival.set()
        return await request.result

    def _check(self, request: _Request) -> None:
        ids, new = request.token_ids, request.params.max_tokens if request.params else 0
        if not ids:
            raise ValueError("the input has no tokens")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"token ids must be at least 0 and less than {self._vocab_size}")
        if self.max_length is not None and len(ids) + new > self.max_length:
            wanted = f"{len(ids)} input tokens" + (f" and {new} new tokens" if new else "")
            raise ValueError(f"this model's maximum context length is {self.max_length} tokens, not {wanted}")

    async def _work(self) -> None:
        while True:
            await self._may_run()
            async with self.model_lock:
                self._running = self._oldest()[: self._max_batch_size]
                self._waiting = [request for request in self._waiting if request not in self._running]
                if self._running:
                    await self._run(self._running)
                self._running = []

    async def _may_run(self) -> None:
        """Wait until the requests that the oldest one shares a batch with are a full batch, or have waited enough."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrival.clear()
            deadline = None
            if group := self._oldest():
                deadline = min(group[0].arrived + self._max_wait_s, group[-1].arrived + self._quiet_s)
                if len(group) >= self._max_batch_size or loop.time() >= deadline:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._arrival.wait()

    def _oldest(self) -> list[_Request]:
        """Drop cancelled requests, and return those that can share a batch with the oldest one."""
        self._waiting = [request for request in self._waiting if not request.result.done()]
        return [request for request in self._waiting if request.shares == self._waiting[0].shares]

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
        ends = self._eos_token_ids.union(params[0].stop_token_ids)
        endings = RowEndings(batch, sampler, ends, loop)
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
