from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reward_loop.serving.embedded.sampling import RowSampler, SamplingParams  # noqa: E402

pytestmark = pytest.mark.integration  # imports torch

PROMPT = [[4, 4], [5, 0]]
RESPONSE = [[2, 2, 3], [1, 4, 1]]
LOGITS = torch.tensor([[0.1, 0.5, -0.3, 0.2, 0.9, 0.0], [1.0, -1.0, 0.4, 0.3, -0.2, 0.6]])


def logits_of(**params: Any) -> Any:
    """The log-probabilities after a response of three tokens."""
    options = SamplingParams(max_tokens=9, temperature=0, **params)
    sampler = RowSampler([options, options], torch.Generator())
    sampler(torch.tensor(PROMPT), LOGITS)
    return sampler(torch.tensor([p + r for p, r in zip(PROMPT, RESPONSE, strict=True)]), LOGITS)


def test_penalties_subtract_presence_once_and_frequency_for_each_time_in_the_response() -> None:
    changed = LOGITS.clone()
    changed[0, 2] -= 0.5 + 2 * 0.25
    changed[0, 3] -= 0.5 + 0.25
    changed[1, 1] -= 0.5 + 2 * 0.25
    changed[1, 4] -= 0.5 + 0.25
    expected = torch.log_softmax(changed, dim=-1)
    torch.testing.assert_close(logits_of(presence_penalty=0.5, frequency_penalty=0.25), expected)


def test_a_bias_is_added_before_the_repetition_penalty() -> None:
    changed = LOGITS.clone()
    changed[:, 2] += 3
    changed[0, [2, 3, 4]] /= 2.0  # positive logits of tokens that occurred
    changed[1, [0, 5]] /= 2.0
    changed[1, [1, 4]] *= 2.0  # negative ones
    expected = torch.log_softmax(changed, dim=-1)
    torch.testing.assert_close(logits_of(logit_bias={2: 3.0}, repetition_penalty=2.0), expected)


def test_min_p_excludes_tokens_below_a_fraction_of_the_most_probable() -> None:
    options = SamplingParams(max_tokens=1, min_p=0.5)
    sampler = RowSampler([options, options], torch.Generator())
    sampler(torch.tensor(PROMPT), LOGITS)
    probable = LOGITS.softmax(dim=-1) >= 0.5 * LOGITS.softmax(dim=-1).amax(dim=-1, keepdim=True)
    assert torch.equal(sampler.logprobs.isfinite(), probable)


def test_requests_share_a_batch_if_all_but_length_and_seed_is_equal() -> None:
    base = SamplingParams(max_tokens=4, seed=1)
    assert base.distribution == SamplingParams(max_tokens=9, seed=2).distribution
    for other in (
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"min_p": 0.1},
        {"logit_bias": {1: 1.0}},
        {"stop_token_ids": (3,)},
    ):
        assert base.distribution != SamplingParams(max_tokens=4, **other).distribution
        assert hash(SamplingParams(max_tokens=4, **other).distribution)
