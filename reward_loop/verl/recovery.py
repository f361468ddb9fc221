"""The recovery from the death of an agent loop worker, and of a whole run that is resumed from its checkpoint.

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

A resumed run finds the prompts in TransferQueue that its checkpoint has saved. The causes of old failures may be gone:

======================================== ==============================================================================
The prompt                               Resume
======================================== ==============================================================================
has all rollouts, or is ``finished``     the rollouts stay. Those with a score keep it; all others are judged again:
                                         failed, unscored, or open when the checkpoint was saved
has all rollouts, but an agent loop has  it is generated again: the reward cannot be computed from the trajectory
set a reward without a score itself
lacks rollouts: not generated, or failed it is generated again
does not exist: the checkpoint has only  the trajectories are deleted: they were trained on
its trajectories
======================================== ==============================================================================

In verl's mode ``sync``, checkpoints contain no prompts: the next step draws them from the data again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from reward_loop.types import Reward
from reward_loop.verl.agent_loop_manager import RewardAgentLoopManager
from reward_loop.verl.compat import uses
from reward_loop.verl.tq_rows import (
    field_names,
    read_rewards,
    read_rows,
    read_sessions,
    read_tags,
    read_trajectories,
    select,
    unfinished_prompts,
    write_rewards,
)
from reward_loop.verl.trajectory_keys import FAILURE, GENERATED, JUDGED, session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

uses(__name__, "transfer_queue", "kv_clear(keys, partition_id)")

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces agent loop workers that have died, and repeats what is lost, also by the end of the run before.

    Args:
        manager: starts the replacements; has the prompts of each worker. ``None`` if workers are not replaced.
        reward_workers: compute the rewards that are missing.
        rollouts: for each partition, the number of rollouts of a prompt without a column ``__rollout_n__``.
        judges: whether agent loop workers have rollouts judged.
    """

    def __init__(
        self,
        manager: RewardAgentLoopManager | None,
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
        if self._manager is not None and (dead := self._manager.dead_workers()):
            self.recover(dead, step)

    def recover(self, dead: Collection[int], step: int) -> None:
        """Replace the dead workers with these numbers, and have their unfinished prompts judged or generated again.

        Raises:
            RewardLoopError: a replacement did not start; too many workers died while they had the same prompt; or the
                run must stop because of a reward.
        """
        manager = self._manager
        assert manager is not None, "workers are not replaced"
        logger.warning("agent loop worker %s died: it is being replaced", ", ".join(map(str, dead)))
        received = manager.prompts_of(dead)
        self._reward_workers.abandon(received)
        manager.replace(dead, self._reward_workers.client.options.worker_start_timeout_s)
        # Calls of the dead worker may have arrived after the first request to abandon them.
        self._reward_workers.abandon(received)
        again: set[str] = set()
        judged: set[str] = set()
        # The tags are read only now, after `replace`: all writes of the dead workers have arrived.
        for partition, uids in unfinished_prompts().items():
            lost = read_trajectories(received & uids, partition)
            generated = {uid_of(key) for key, tag in zip(lost.keys, lost.tags, strict=True) if tag.get(GENERATED)}
            self._complete(lost, generated)
            self._reset(lost, (received & uids) - generated, step)
            judged |= generated
            again |= (received & uids) - generated
        manager.send_again(again, step)
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
        # `None`, because TransferQueue merges tags: an old failure would stay.
        tag = {"is_prompt": True, "status": "pending", "global_steps": step, FAILURE: None}
        tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=[dict(tag) for _ in uids])

    def _complete(self, trajectories: KVBatchMeta, uids: Collection[str]) -> None:
        """Compute the missing rewards of these prompts, and mark the prompts as finished."""
        if not uids:
            return
        partition = trajectories.partition_id
        rows = [i for i, key in enumerate(trajectories.keys) if uid_of(key) in uids]
        trajectories = select(trajectories, rows)
        if self._judges:
            self._judge(trajectories, _without_reward(trajectories))
        counts = _session_counts(trajectories.keys)
        tags = [{"status": "finished" if counts[uid] == self._size(uid, partition) else "failure"} for uid in uids]
        tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)

    def _size(self, uid: str, partition: str) -> int:
        assert self._manager is not None
        row = self._manager.prompt(uid)
        return int(row["__rollout_n__"][0]) if "__rollout_n__" in row else self._rollouts[partition]

    def _judge(self, trajectories: KVBatchMeta, keys: Collection[str]) -> None:
        """Compute the rewards of some of these trajectories.

        If the manager compares the rollouts of a prompt, it gets all of them, except those whose agent loop has set the
        reward. A group that ``post_process_scores`` has changed gets its former scores back: it is changed again, with
        the new ones.
        """
        if not keys:
            return
        prompts, by_group = {uid_of(key) for key in keys}, self._reward_workers.client.by_group
        affected = [i for i, key in enumerate(trajectories.keys) if uid_of(key) in prompts]
        judged = [i for i in affected if trajectories.keys[i] in keys or (by_group and JUDGED in trajectories.tags[i])]
        batch, others = select(trajectories, judged), select(trajectories, sorted(set(affected).difference(judged)))
        began = time.time()
        sessions, samples = read_sessions(batch)
        write_rewards(batch, sessions, self._reward_workers.score_batch(samples))
        # After the rewards: a row with this tag has one.
        tags = [{JUDGED: [began, time.time()]} for _ in batch.keys]
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, tags=tags)
        changed = {key: reward for key, reward in read_rewards(others).items() if reward.post_processed}
        before = [Reward(reward_score=old.raw_score, reward_extra_info=dict(old.info)) for old in changed.values()]
        write_rewards(others, list(changed), before)

    def resume(self) -> None:
        """Complete the prompts that verl has loaded from a checkpoint, except those that must be generated again.

        These become ``pending``. To be called before verl sends such prompts to the agent loop workers.

        Raises:
            RewardLoopError: the run must stop because of a reward.
        """
        prompts, rows = read_tags()
        if stale := [key for key in rows if uid_of(key) not in prompts]:
            # The checkpoint was written before the batch of its step was cleared.
            tq.kv_clear(keys=stale, partition_id="train")
        if not prompts:
            return
        counts, sizes = _session_counts(rows), self._sizes(prompts)
        # A finished prompt may have fewer trajectories: verl accepts an agent loop that returns nothing.
        complete = {uid for uid, tag in prompts.items() if tag["status"] == "finished" or counts[uid] >= sizes[uid]}
        batch, missing = read_trajectories(complete), set[str]()
        if self._judges:
            missing, by_loop = _without_score(batch)
            complete -= {uid_of(key) for key in by_loop}
            missing = {key for key in missing if uid_of(key) in complete}
        logger.warning(
            "the checkpoint has %d prompts: %d are generated again; of the %d rollouts of the others, %d have no score "
            "and are judged again",
            *(len(prompts), len(prompts) - len(complete)),
            *(sum(counts[uid] for uid in complete), _session_counts(missing).total()),
        )
        self._judge(batch, missing)
        self._counts["prompts_generated_again"] += len(prompts) - len(complete)
        self._counts["prompts_judged_again"] += len({uid_of(key) for key in missing})
        tags = [{"status": "finished" if uid in complete else "pending", FAILURE: None} for uid in prompts]
        tq.kv_batch_put(keys=list(prompts), partition_id="train", tags=tags)

    def _sizes(self, prompts: Mapping[str, dict]) -> dict[str, int]:
        """Return the number of rollouts of each prompt of a checkpoint, which contains the data of the prompts."""
        uid, tag = next(iter(prompts.items()))
        # One prompt shows it: all have the columns of the data.
        if "__rollout_n__" not in field_names(uid, tag, "train"):
            return dict.fromkeys(prompts, self._rollouts["train"])
        sizes = read_rows(list(prompts), "train", "__rollout_n__")
        return {uid: int(size) for uid, (size,) in zip(prompts, sizes, strict=True)}


def _session_counts(keys: Iterable[str]) -> Counter[str]:
    """Return the number of rollouts with these trajectories, by prompt."""
    return Counter(uid_of(session) for session in {session_of(key)[0] for key in keys})


def _without_reward(trajectories: KVBatchMeta) -> set[str]:
    """Return the keys of those trajectories that have no reward in TransferQueue."""
    partition = trajectories.partition_id
    return {
        key
        for key, tag in zip(trajectories.keys, trajectories.tags, strict=True)
        # A reward that the agent loop has set itself is published with the trajectory, without the tag.
        if JUDGED not in tag and "rm_scores" not in field_names(key, tag, partition)
    }


def _without_score(trajectories: KVBatchMeta) -> tuple[set[str], set[str]]:
    """Return the keys of those trajectories that have no score.

    Returns:
        Those that reward workers can judge; and those whose reward was set by their agent loop.
    """
    missing = _without_reward(trajectories)
    judged = [i for i, key in enumerate(trajectories.keys) if key not in missing]
    tags = dict(zip(trajectories.keys, trajectories.tags, strict=True))
    unscored = {key for key, reward in read_rewards(select(trajectories, judged)).items() if not reward.is_scored}
    by_loop = {key for key in unscored if JUDGED not in tags[key]}
    return missing | (unscored - by_loop), by_loop
