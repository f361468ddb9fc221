"""The recovery from the death of an agent loop worker.

The worker had some of the prompts, and the death lost what it had in memory. What is in TransferQueue is kept:

=========================== ======================== ==================================================================
The prompt is               Its status               Recovery
=========================== ======================== ==================================================================
complete                    ``finished``, `failure`` none
generated: its trajectories ``running``, and a       the rewards that are missing are computed again, from the
are in TransferQueue, some  trajectory has the tag   trajectories in TransferQueue
rewards are missing         ``generated``
not generated               ``pending``, ``running`` its trajectories are deleted, and it is generated again, under the
                                                     same uid
=========================== ======================== ==================================================================

The tags are read after the replacement has started. Writes that the dead worker had sent have arrived by then, so none
of them can follow the deletion.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from reward_loop.verl.agent_loop_manager import RewardAgentLoopManager
from reward_loop.verl.compat import uses
from reward_loop.verl.tq_rows import (
    field_names,
    read_sessions,
    read_trajectories,
    select,
    unfinished_prompts,
    write_rewards,
)
from reward_loop.verl.trajectory_keys import GENERATED, session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

__all__ = ["Recovery"]

uses(__name__, "transfer_queue", "kv_clear(keys, partition_id)")

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces agent loop workers that have died, and repeats what is lost.

    Args:
        manager: starts the replacements; has the prompts of each worker.
        reward_workers: compute the rewards that are missing.
        rollouts: for each partition, the number of rollouts of a prompt without a column ``__rollout_n__``.
        judges: whether agent loop workers have rollouts judged.
    """

    def __init__(
        self,
        manager: RewardAgentLoopManager,
        reward_workers: RewardWorkers,
        *,
        rollouts: Mapping[str, int],
        judges: bool,
    ) -> None:
        self._manager = manager
        self._reward_workers = reward_workers
        self._rollouts = rollouts
        self._judges = judges
        self._counts: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        names = ("agent_loop_workers_replaced", "prompts_generated_again", "prompts_judged_again")
        return {f"reward_loop/{name}": float(counts[name]) for name in names}

    def poll(self, step: int) -> None:
        """Call `recover` for the deaths since the last call, if there are any."""
        if dead := self._manager.dead_workers():
            self.recover(dead, step)

    def recover(self, dead: Collection[int], step: int) -> None:
        """Replace the dead workers with these numbers, and have their unfinished prompts judged or generated again.

        Raises:
            RewardLoopError: a replacement did not start; too many workers died while they had the same prompt; or the
                run must stop because of a reward.
        """
        logger.warning("agent loop worker %s died: it is being replaced", ", ".join(map(str, dead)))
        received = self._manager.prompts_of(dead)
        self._reward_workers.abandon(received)
        self._manager.replace(dead, self._reward_workers.client.options.worker_start_timeout_s)
        # Calls of the dead worker may have arrived after the first request to abandon them.
        self._reward_workers.abandon(received)
        again: set[str] = set()
        judged: set[str] = set()
        for partition, uids in unfinished_prompts().items():
            lost = read_trajectories(received & uids, partition)
            generated = {uid_of(key) for key, tag in zip(lost.keys, lost.tags, strict=True) if tag.get(GENERATED)}
            self._judge(lost, generated)
            self._reset(lost, (received & uids) - generated, step)
            judged |= generated
            again |= (received & uids) - generated
        self._manager.send_again(again, step)
        self._counts["agent_loop_workers_replaced"] += len(dead)
        self._counts["prompts_generated_again"] += len(again)
        self._counts["prompts_judged_again"] += len(judged)
        logger.warning(
            "agent loop worker %s was replaced: %d of its prompts are generated again, and %d were judged again",
            *(", ".join(map(str, dead)), len(again), len(judged)),
        )

    def _reset(self, trajectories: KVBatchMeta, uids: Collection[str], step: int) -> None:
        """Delete the trajectories of these prompts, and reset their tags."""
        if not uids:
            return
        partition = trajectories.partition_id
        if stale := [key for key in trajectories.keys if uid_of(key) in uids]:
            tq.kv_clear(keys=stale, partition_id=partition)
        tag = {"is_prompt": True, "status": "pending", "global_steps": step}
        tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=[dict(tag) for _ in uids])

    def _judge(self, trajectories: KVBatchMeta, uids: Collection[str]) -> None:
        """Compute the missing rewards of these prompts, and mark the prompts as finished."""
        if not uids:
            return
        partition = trajectories.partition_id
        rows = [i for i, key in enumerate(trajectories.keys) if uid_of(key) in uids]
        trajectories = select(trajectories, rows)
        if self._judges:
            self._judge_missing(trajectories)
        sessions: dict[str, set[str]] = defaultdict(set)
        for key in trajectories.keys:
            sessions[uid_of(key)].add(session_of(key)[0])
        tags = [
            {"status": "finished" if len(sessions[uid]) == self._count(uid, partition) else "failure"} for uid in uids
        ]
        tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)

    def _count(self, uid: str, partition: str) -> int:
        row = self._manager.prompt(uid)
        return int(row["__rollout_n__"][0]) if "__rollout_n__" in row else self._rollouts[partition]

    def _judge_missing(self, trajectories: KVBatchMeta) -> None:
        """Compute the rewards of those trajectories that have none in TransferQueue."""
        tagged = zip(trajectories.keys, trajectories.tags, strict=True)
        partition = trajectories.partition_id
        missing = [i for i, row in enumerate(tagged) if "rm_scores" not in field_names(*row, partition)]
        if missing:
            batch = select(trajectories, missing)
            keys, rows = read_sessions(batch)
            write_rewards(batch, keys, self._reward_workers.finish_batch(self._reward_workers.start_batch(rows)))
