"""What a failed judgement costs: the rollouts that are wasted, and the error of the advantages.

    python -m benchmarks.waste [--quick] [--groups N]

Each group has 8 rollouts with the rewards 0 and 1; the share of right answers of a prompt is drawn evenly from 0 to 1.
A judge fails for 1, 5 and 10 % of the rollouts. verl's own GRPO computes the advantages, and the advantages of the same
rewards without failures are the truth. Four ways to treat a failure:

- ``0``: the failed rollout has the reward 0, as in verl's `rate_limited` manager.
- ``drop``: a group with a failed rollout is not trained on.
- ``again``: a group with a failed rollout is generated again, until no judgement fails.
- ``mask``: the failed rollout leaves its group, as this library does by default. The failures go through its manager.

- `wasted`: the share of the generated rollouts that are not trained on.
- `error`: the root mean square of the differences to the true advantages, of the rollouts that are trained on, as a
  share of the root mean square of the true advantages.
- `wrong_sign`: the share of the rollouts trained on whose advantage has the opposite sign of the true one.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample

if TYPE_CHECKING:
    import numpy as np

SIZE = 8
SHARES = (0.01, 0.05, 0.1)
WAYS = ("0", "drop", "again", "mask")
SEED = 7


def advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return verl's GRPO advantage of each rollout."""
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    mask = torch.ones(len(rewards), 1)
    found, _ = compute_grpo_outcome_advantage(torch.tensor(rewards[:, None], dtype=torch.float32), mask, groups)
    return found[:, 0].numpy()


async def judged(rewards: np.ndarray, fails: np.ndarray) -> np.ndarray:
    """Return the rewards of the library's manager, NaN for masked rollouts; the judge fails where ``fails`` is true."""
    import numpy as np

    async def judge(extra_info: dict[str, Any]) -> float:
        if fails[extra_info["row"]]:
            raise ConnectionError("the judge failed")
        return float(rewards[extra_info["row"]])

    options = RewardLoopConfig(max_failed_share=1.0, retry={"max_attempts": 1})  # type: ignore[arg-type]
    manager = NaiveRewardLoopManager(options, compute_score=judge)
    found = np.empty(len(rewards))
    for first in range(0, len(rewards), 1024):
        rows = range(first, min(first + 1024, len(rewards)))
        results = await asyncio.gather(*(manager.run_single(RewardSample("", extra_info={"row": row})) for row in rows))
        for row, result in zip(rows, results, strict=True):
            masked = result["reward_extra_info"]["reward_masked"]
            found[row] = np.nan if masked else result["reward_score"]
    return found


def measured(way: str, share: float, groups: int) -> dict[str, float]:
    """Return the figures of a way to treat failures."""
    import numpy as np

    from reward_loop.verl.trainer.reward_metrics import without_baseline

    generator = np.random.default_rng(SEED)
    rewards = (generator.random((groups, SIZE)) < generator.random((groups, 1))).astype(float).ravel()
    index = np.arange(groups).repeat(SIZE)
    truth = advantages(rewards, index)
    fails = generator.random(len(rewards)) < share
    whole = np.bincount(index, fails, groups)[index] == 0
    generated = len(rewards)
    if way == "0":
        trained, given = np.ones(len(rewards), bool), np.where(fails, 0.0, rewards)
    elif way == "drop":
        trained, given = whole, rewards
    elif way == "again":
        # A group that is generated again has other answers of the same kind; only their number matters here.
        left = int((~whole).sum()) // SIZE
        while left:
            generated += left * SIZE
            left = int((generator.random((left, SIZE)) < share).any(axis=1).sum())
        trained, given = np.ones(len(rewards), bool), rewards
    else:
        given = asyncio.run(judged(rewards, fails))
        keys = [f"{group}_{row % SIZE}_0" for row, group in enumerate(index)]
        masked = {key for key, reward in zip(keys, given, strict=True) if np.isnan(reward)}
        masked |= without_baseline(keys, masked)
        trained = np.array([key not in masked for key in keys])
    error = advantages(given[trained], index[trained]) - truth[trained]
    wrong = np.sign(error + truth[trained]) * np.sign(truth[trained]) < 0
    return {
        "wasted": 1 - trained.sum() / generated,
        "error": float(np.sqrt((error**2).mean() / (truth**2).mean())),
        "wrong_sign": float(wrong.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waste", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer groups")
    parser.add_argument("--groups", type=int, help="the number of groups (default: 4096; 1024 with --quick)")
    args = parser.parse_args()
    groups = args.groups or (1024 if args.quick else 4096)
    table = Table("failures", "a failed rollout", "wasted", "error", "wrong sign", box=None, header_style="bold")
    figures: dict[str, Any] = {"groups": groups}
    for share in SHARES:
        for way in WAYS:
            found = measured(way, share, groups)
            table.add_row(f"{share:.0%}", way, *(f"{found[name]:.1%}" for name in ("wasted", "error", "wrong_sign")))
            figures[f"{way}_{share:g}"] = {name: round(value, 4) for name, value in found.items()}
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
