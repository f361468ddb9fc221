"""The model servers of verl's replicas on a CPU. Do not import verl, which takes seconds in every process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import ray
import torch

from reward_loop.config import RewardModelConfig
from reward_loop.serving.embedded.batching import BatchingEngine, SamplingParams
from reward_loop.serving.manager import RewardModelManager

T = TypeVar("T")

MAX_BATCH_SIZE = 128
"""The largest number of sequences in a batch. More do not increase the throughput of a CPU."""

TRANSFER_TIMEOUT_S = 300.0
"""Seconds in which a server or a rank must take its part in a transfer of weights, and a rank in a collective."""

QUIET_S, MAX_WAIT_S = 0.1, 1.0
"""Seconds without a new request after which a batch starts, and the longest wait. The agent loop starts the sessions of
a batch some milliseconds apart. Without a wait, the first few would form a small batch, which takes almost as long as a
batch of all sessions, and the others would wait for it."""


async def within_the_timeout(work: Awaitable[T], what: str) -> T:
    """Return the result of a part of a transfer of weights.

    Raises:
        TimeoutError: it took longer than `TRANSFER_TIMEOUT_S`; the message says what it waited for.
    """
    try:
        async with asyncio.timeout(TRANSFER_TIMEOUT_S):
            return await work
    except TimeoutError:
        raise TimeoutError(f"transfer of weights: {what} within {TRANSFER_TIMEOUT_S:g} s") from None


class _Sleeping:
    """What verl calls to release and to take device memory. There is none: a server only remembers which it was."""

    _asleep = False

    async def sleep(self) -> None:
        """Mark the server as asleep."""
        self._asleep = True

    async def wake_up(self) -> None:
        """Mark the server as awake."""
        self._asleep = False

    async def is_sleeping(self) -> bool:
        """Return whether the server is marked as asleep."""
        return self._asleep


class CPURolloutServer(_Sleeping):
    """The model server of one replica. A Ray actor with asynchronous methods; verl's clients call :meth:`generate`.

    Args:
        model_path: the local directory of the model.
        prompt_length: the largest number of tokens of a prompt.
        response_length: the default for the largest number of tokens of a response.
        max_num_seqs: the largest number of sequences in a batch; at most `MAX_BATCH_SIZE` take effect.
        seed: the seed for sampling.
    """

    def __init__(self, model_path: str, prompt_length: int, response_length: int, max_num_seqs: int, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        end_ids = {tokenizer.eos_token_id, *_as_list(self._model.generation_config.eos_token_id)} - {None}
        self._engine = BatchingEngine(
            self._model,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            eos_token_ids=sorted(end_ids),
            max_batch_size=min(max_num_seqs, MAX_BATCH_SIZE),
            max_wait_s=MAX_WAIT_S,
            quiet_s=QUIET_S,
            seed=seed,
        )
        self._context_length = prompt_length + response_length
        self._response_length = response_length
        self._global_steps: int | None = None
        self._open = AsyncExitStack()
        self._updating = False
        self._admission = asyncio.Event()
        self._admission.set()
        self._reject = False
        self._in_flight: set[asyncio.Future[Any]] = set()

    async def start(self) -> str:
        """Start the engine; return an address for verl. Clients use the actor handle, not HTTP."""
        await self._open.enter_async_context(self._engine)
        return f"{ray.util.get_node_ip_address()}:{os.getpid()}"

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **unused: Any
    ) -> _TokenOutput:
        """Generate a response to ``prompt_ids``: token ids in, token ids out.

        Raises:
            ValueError: the prompt leaves no room for a response, or the request has images, videos or audio.
        """
        for kind in ("image_data", "video_data", "audio_data"):
            if unused.get(kind):
                raise ValueError(f"the CPU rollout supports only text, and request {request_id} has {kind}")
        if not self._admission.is_set():
            if self._reject:
                return self._aborted()
            await self._admission.wait()
        room = self._context_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt of request {request_id} has {len(prompt_ids)} tokens, which leaves no room for a "
                f"response in {self._context_length} tokens: raise data.max_prompt_length, or filter long prompts"
            )
        wanted = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens", self._response_length))
        params = SamplingParams(
            max_tokens=min(wanted, room),
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            top_k=int(sampling_params.get("top_k", -1)),
            repetition_penalty=float(sampling_params.get("repetition_penalty", 1.0)),
            seed=sampling_params.get("seed"),
        )
        # A task of its own: `abort_all_requests` cancels it, and verl's call still gets an answer.
        request = asyncio.ensure_future(self._engine.generate(list(prompt_ids), params))
        self._in_flight.add(request)
        try:
            generation = await request
        except asyncio.CancelledError:
            if request.cancelled() and not self._admission.is_set():
                return self._aborted()
            request.cancel()
            raise
        finally:
            self._in_flight.discard(request)
        return _TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.logprobs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    def _aborted(self) -> _TokenOutput:
        return _TokenOutput(
            token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps}
        )

    async def update_weights(self, bucket: dict[str, torch.Tensor], *, last: bool, global_steps: int | None) -> None:
        """Copy one bucket of weights into the model. No generation between the first and the last."""
        if not self._updating:
            await within_the_timeout(
                self._engine.model_lock.acquire(), "the server did not end its batch or the transfer before"
            )
            self._updating = True
        target = self._model.state_dict()
        unknown = bucket.keys() - target.keys()
        if unknown:
            raise KeyError(f"the trainer sent weights that the rollout model does not have: {sorted(unknown)[:3]}")
        with torch.no_grad():
            for name, value in bucket.items():
                target[name].copy_(value)
        if last:
            self._asleep = False  # new weights wake the server up
            # verl's validation sends the weights again without a step number.
            if global_steps is not None:
                self._global_steps = global_steps
            self._updating = False
            self._engine.model_lock.release()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort all running requests with ``stop_reason="aborted"``. New requests wait, or are aborted too.

        Args:
            reject_request: whether to abort new requests instead of letting them wait for `resume_generation`.
        """
        # Before the cancellations: by this, `generate` tells an abort from a call that was cancelled.
        self._admission.clear()
        self._reject = reject_request
        for request in list(self._in_flight):
            request.cancel()

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._reject = False
        self._admission.set()

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the training step of the current weights."""
        self._global_steps = global_steps

    async def release_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Stands for verl's other calls that release device memory, and for its profiling calls."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = release_nothing
    start_profile = stop_profile = release_nothing


class CPURewardServer(_Sleeping):
    """The embedded server of a reward model, for one replica of verl. A Ray actor with asynchronous methods.

    Args:
        model_path: the local directory of the model.
        name: its name in requests; by default the directory.
    """

    def __init__(self, model_path: str, name: str | None = None) -> None:
        served = RewardModelConfig(model_path=model_path, served_model_name=name, engine="transformers")
        self._models = RewardModelManager(served)
        self._open = AsyncExitStack()

    async def start(self) -> str:
        """Start the server; return its ``host:port``."""
        await self._open.enter_async_context(self._models)
        return self._models.reward_router_address


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) else [value]


class _TokenOutput:
    """Unpickles as verl's ``TokenOutput``, so that only the receiving process imports verl."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __reduce__(self) -> Any:
        return _token_output, (self._fields,)


def _token_output(fields: dict[str, Any]) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)


class Mailbox:
    """Holds the references to one set of weights in Ray's object store. A Ray actor with asynchronous methods."""

    def __init__(self) -> None:
        self._weights: asyncio.Future[list[tuple[str, Any]]] | None = None

    async def empty(self) -> None:
        """Remove the last weights. `get` then waits for new ones."""
        self._weights = asyncio.get_running_loop().create_future()

    async def put(self, weights: list[tuple[str, Any]]) -> None:
        """Store the names of weights, with references to their tensors."""
        assert self._weights is not None
        self._weights.set_result(weights)

    async def get(self) -> list[tuple[str, Any]]:
        """Wait for the weights, and return the references."""
        assert self._weights is not None
        return await self._weights
