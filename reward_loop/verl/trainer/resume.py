"""What a checkpoint has of rewards: the usage that counts for the budget, and the prompts of a run that is resumed.

======================================== ==============================================================================
The prompt                               Resume
======================================== ==============================================================================
is ``finished``, and all its rollouts    it is kept, and trained on once
have a score
is anything else: pending, running, or a it is generated again, under the same uid: verl deletes its trajectories. The
rollout failed or has no score           cause of an old failure may be gone
does not exist: the checkpoint has only  the trajectories are deleted: they were trained on
its trajectories
======================================== ==============================================================================

In verl's mode ``sync``, checkpoints contain no prompts: the next step draws them from the data again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from reward_loop.types import Outcome
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.samples import FAILURE, uid_of
from reward_loop.verl.tq_rows import clear, read_rewards, read_tags, read_trajectories, write_tags

logger = logging.getLogger(__name__)

USAGE = "reward_loop_usage.json"
"""The file in the folder of a checkpoint, and in that of all checkpoints."""


def save_usage(folder: str, job: RunningJob) -> None:
    """Write into a folder what the run has used of its budget."""
    cost, tokens = job.usage()
    path = Path(folder, USAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: the process may be killed while it writes.
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"cost": cost, "tokens": tokens}))
    part.replace(path)


def restore_usage(folders: Sequence[str], job: RunningJob) -> None:
    """Count for the budget what the run had used before, according to that of the folders that says the most."""
    found = [json.loads(path.read_text()) for folder in folders if (path := Path(folder, USAGE)).exists()]
    if found:
        job.spend(**{what: max(usage[what] for usage in found) for what in ("cost", "tokens")})


def reset_unscored_prompts(*, judged: bool) -> set[str]:
    """Make those prompts ``pending`` that verl has loaded from a checkpoint and that lack a score; return the others.

    To be called before verl sends pending prompts to the agent loop workers.

    Args:
        judged: whether agent loop workers have rollouts judged. Otherwise, finished prompts have no scores yet.
    """
    prompts, rows = read_tags()
    if stale := [key for key in rows if uid_of(key) not in prompts]:
        # The checkpoint was written before the batch of its step was cleared.
        clear(stale, "train")
    if not prompts:
        return set()
    kept = {uid for uid, tag in prompts.items() if tag["status"] == "finished"}
    if judged:
        rewards = read_rewards(read_trajectories(kept))
        kept -= {uid_of(key) for key, reward in rewards.items() if reward.result.outcome is not Outcome.SCORED}
    logger.warning(
        "the checkpoint has %d prompts: %d have all their scores, and %d are generated again",
        *(len(prompts), len(kept), len(prompts) - len(kept)),
    )
    # `None`, because TransferQueue merges tags: an old failure would stay.
    tags = [{"status": "finished" if uid in kept else "pending", FAILURE: None} for uid in prompts]
    write_tags(list(prompts), "train", tags)
    return kept
