"""How the embedded engine is started for a reward model."""

from __future__ import annotations

import sys

from reward_loop.config import RewardModelConfig

__all__ = ["command", "environment"]


def command(config: RewardModelConfig) -> list[str]:
    """The command line, without where to listen."""
    return [
        sys.executable,
        *("-m", "reward_loop.router.servers.embedded"),
        *("--model", config.model_path),
        *("--served-model-name", config.served_model_name or config.model_path),
        *("--kind", config.kind),
        *("--max-batch-size", str(config.max_batch_size)),
        *("--max-wait-ms", str(config.max_wait_ms)),
    ]


def environment(config: RewardModelConfig) -> dict[str, str]:
    """Environment variables, those of the user last."""
    threads = str(config.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    } | config.env
