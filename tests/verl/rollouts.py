"""Rollouts as verl's agent loop hands them over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from examples.tiny_models import tiny_tokenizer


def rollout(text: str, **columns: Any) -> DataProto:
    """One rollout with this response to the prompt ``1+1=``; ``columns`` replace or add fields of its row."""
    prompt = torch.tensor([tiny_tokenizer().encode("1+1=")])
    response = torch.tensor([tiny_tokenizer().encode(text)], dtype=torch.int64).reshape(1, -1)
    batch = {
        "prompts": prompt,
        "responses": response,
        "attention_mask": torch.ones(1, prompt.shape[1] + response.shape[1], dtype=torch.int64),
    }
    row = {
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
        "uid": "u",
        **columns,
    }
    arrays = {}
    for name, value in row.items():
        arrays[name] = np.empty(1, dtype=object)
        arrays[name][0] = value
    return DataProto(batch=TensorDict(batch, batch_size=1), non_tensor_batch=arrays)
