"""Replaces the distribution ``sglang-kernel``, which has only builds for CUDA, so that SGLang runs on any CPU.

Without the kernels for AMX, SGLang computes with torch's own operators on a CPU; of its kernels, it calls only the one
below. It imports others, which fail when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    width: int,
) -> None:
    """Writes the cache locations of new tokens into the table of requests.

    Args:
        req_pool_indices: for each request of the batch, its row in the table.
        req_to_token: the table; changed in place.
        start_offset, end_offset: for each request, the columns of its new tokens.
        out_cache_loc: the locations of all new tokens, in the order of the requests.
        width: the number of columns of the table.
    """
    counts = (end_offset - start_offset).tolist()
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), out_cache_loc.split(counts), strict=True)
    for row, start, locations in rows:
        req_to_token[row, start : start + len(locations)] = locations.to(req_to_token.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs the CUDA build of sglang-kernel")

    return missing
