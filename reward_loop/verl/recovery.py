"""The recovery from the death of an agent loop worker.

The worker had some of the prompts, and the death lost what it had in memory. What is in TransferQueue is kept:

=========================== ======================== ==================================================================
The prompt is               Its status               Recovery
=========================== ======================== ==================================================================
complete                    ``finished``, `failure`` none
published: its trajectories ``running``, and the tag the rewards that are missing are computed again, from the
are in TransferQueue, some  ``generated``            trajectories in TransferQueue
rewards are missing
not published               ``pending``, ``running`` its trajectories are deleted, and it is generated again, under the
                                                     same uid
=========================== ======================== ==================================================================

Only the mode ``reward_pipeline`` has published prompts: the others write a trajectory with its reward.

The tags are read after the replacement has started. Writes that the dead worker had sent have arrived by then, so none
of them can follow the deletion.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from reward_loop.verl.agent_loop_workers import ReplacingAgentLoopManager
from reward_loop.verl.progress import GENERATED
from reward_loop.verl.tq_batches import field_names, read_trajectories, select, unfinished_prompts
from reward_loop.verl.tq_rewards import read_sessions, write_rewards
from reward_loop.verl.trajectory_keys import session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

__all__ = ["Recovery"]

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces agent loop workers that have died, and repeats what is lost.

    Args:
        manager: starts the replacements; has the prompts of each worker.
        reward_workers: compute the rewards that are missing.
        rollouts: the number of rollouts of a prompt, if the prompt has no column ``__rollout_n__``.
        judges: whether agent loop workers have rollouts judged.
    """

    def __init__(
        self, manager: ReplacingAgentLoopManager, reward_workers: RewardWorkers, *, rollouts: int, judges: bool
    ) -> None:
        self._manager = manager
        self._reward_workers = reward_workers
        self._rollouts = rollouts
        self._judges = judges
        self._counts: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        names = ("agent_loop_workers_replaced", "prompts_generated_again", "prompts_judged_again")
        return {f"reward_loop/{name}": float(counts[name]) for name in names}

    def poll(self, step: int) -> None:
        """Calls `recover` for the deaths since the last call, if there are any."""
        if dead := self._manager.dead_workers():
            self.recover(dead, step)

    def recover(self, dead: Collection[int], step: int) -> set[str]:
        """Replaces the dead workers with these numbers, and has their unfinished prompts judged or generated again.

        Returns the prompts that they had received. Their tags in TransferQueue show what is left to do.

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
        unfinished = unfinished_prompts()
        lost = {uid: unfinished[uid] for uid in received & unfinished.keys()}
        published = {uid for uid, (_, tag) in lost.items() if tag.get(GENERATED)}
        again = lost.keys() - published
        self._judge(published)
        self._reset({uid: lost[uid][0] for uid in again}, step)
        self._manager.send_again(again, step)
        self._counts["agent_loop_workers_replaced"] += len(dead)
        self._counts["prompts_generated_again"] += len(again)
        self._counts["prompts_judged_again"] += len(published)
        logger.warning(
            "agent loop worker %s was replaced: %d of its prompts are generated again, and %d were judged again",
            *(", ".join(map(str, dead)), len(again), len(published)),
        )
        return received

    def _reset(self, prompts: dict[str, str], step: int) -> None:
        """Deletes the trajectories of prompts, and resets their tags. ``prompts`` maps each uid to its partition."""
        by_partition: dict[str, list[str]] = defaultdict(list)
        for uid, partition in prompts.items():
            by_partition[partition].append(uid)
        for partition, uids in by_partition.items():
            if stale := read_trajectories(set(uids), partition).keys:
                tq.kv_clear(keys=stale, partition_id=partition)
            tag = {"is_prompt": True, "status": "pending", "global_steps": step, GENERATED: False}
            tq.kv_batch_put(keys=uids, partition_id=partition, tags=[dict(tag) for _ in uids])

    def _judge(self, published: Collection[str]) -> None:
        """Computes the missing rewards of published training prompts, and marks the prompts as finished."""
        if not published:
            return
        trajectories = read_trajectories(published)
        if self._judges:
            self._judge_missing(trajectories)
        sessions: dict[str, set[str]] = defaultdict(set)
        for key in trajectories.keys:
            sessions[uid_of(key)].add(session_of(key)[0])
        tags = [{"status": "finished" if len(sessions[uid]) == self._count(uid) else "failure"} for uid in published]
        tq.kv_batch_put(keys=list(published), partition_id="train", tags=tags)

    def _count(self, uid: str) -> int:
        row = self._manager.prompt(uid)
        return int(row["__rollout_n__"][0]) if "__rollout_n__" in row else self._rollouts

    def _judge_missing(self, trajectories: KVBatchMeta) -> None:
        """Computes the rewards of those trajectories that have none in TransferQueue."""
        tagged = zip(trajectories.keys, trajectories.tags, strict=True)
        missing = [i for i, row in enumerate(tagged) if "rm_scores" not in field_names(*row, "train")]
        if missing:
            batch = select(trajectories, missing)
            keys, rows = read_sessions(batch)
            write_rewards(batch, keys, self._reward_workers.finish_batch(self._reward_workers.start_batch(rows)))
