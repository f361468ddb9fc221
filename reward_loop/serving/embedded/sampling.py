"""Samples a batch of token sequences: hooks for transformers' ``generate``.

Sampling uses the Gumbel-max trick: noise from the request's own random stream is added to the processed
log-probabilities, and ``generate`` takes the arg-max. The result has exactly the distribution of multinomial sampling,
and a seeded request draws the same random numbers in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reward_loop.serving.embedded.dialect import SamplingOptions

__all__ = ["GeneratedTokens", "RowEndings", "RowSampler", "SamplingParams"]


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
