from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from reward_loop.serving.embedded.batching import RowSampler, SamplingParams  # noqa: E402

pytestmark = pytest.mark.integration  # imports torch

TOKENS = [[4, 4, 2, 2, 3], [5, 0, 1, 4, 1]]
LOGITS = torch.tensor([[0.1, 0.5, -0.3, 0.2, 0.9, 0.0], [1.0, -1.0, 0.4, 0.3, -0.2, 0.6]])


def test_the_repetition_penalty_applies_to_the_tokens_of_prompt_and_response() -> None:
    changed = LOGITS.clone()
    changed[0, [2, 3, 4]] = torch.tensor([-0.3 * 2, 0.2 / 2, 0.9 / 2])  # positive logits shrink, negative ones grow
    changed[1, [0, 5]] /= 2.0
    changed[1, [1, 4]] *= 2.0
    options = SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0)
    sampler = RowSampler([options, options], torch.Generator())
    sampler(torch.tensor(TOKENS), LOGITS)
    torch.testing.assert_close(sampler.logprobs, torch.log_softmax(changed, dim=-1))


def test_requests_share_a_batch_if_all_but_length_and_seed_is_equal() -> None:
    base = SamplingParams(max_tokens=4, seed=1)
    assert base.distribution == SamplingParams(max_tokens=9, seed=2).distribution
    for other in ({"repetition_penalty": 1.5}, {"top_p": 0.5}, {"stop_token_ids": (3,)}):
        assert base.distribution != SamplingParams(max_tokens=4, **other).distribution
