"""One process of an overlapped training with two: ``one_of_two.py MODEL OUTPUT``. Prints a digest of the weights."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path

from reward_loop.adapters.trl import OverlappedGRPOTrainer
from tests.adapters.trl.trainers import Judge, UntilTheNext, trainer

BATCHES, UPDATES = 3, 2


until_the_next = UntilTheNext(BATCHES)


async def uneven(index: int) -> None:
    """Delay a batch until the next one; in one of the two processes, it takes longer."""
    await until_the_next(index)
    if os.environ["RANK"] == "1":
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    judge = Judge(uneven)
    made = trainer(
        OverlappedGRPOTrainer,
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        judge,
        max_steps=BATCHES * UPDATES,
        ddp_backend="gloo",
    )
    made.train()
    assert made.state.global_step == BATCHES * UPDATES
    digest = hashlib.sha256()
    for value in made.accelerator.unwrap_model(made.model).state_dict().values():
        digest.update(value.numpy().tobytes())
    print("digest", digest.hexdigest(), len(judge.calls), made.accelerator.num_processes)
