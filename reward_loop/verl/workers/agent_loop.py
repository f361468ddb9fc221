"""verl's agent loop worker, which publishes a trajectory before its reward arrives, and the manager of these workers.

verl writes a trajectory to TransferQueue only with its reward. Here, the trajectory is written as soon as it is
generated, and its reward later. So the trainer can put the rollout engine to sleep, and compute what needs no reward,
while samples are judged; and a trajectory survives the death of its agent loop worker.

A session has these parts, all within verl's task for the session (`_run_agent_loop`):

1. verl generates the trajectory, and calls `_agent_loop_postprocess`.
2. verl's `_agent_loop_postprocess` calls `_compute_score`, which starts a task that judges the trajectory: verl's own
   `_compute_score`. Then it writes the trajectory, without a reward.
3. Our `_agent_loop_postprocess` waits for the reward, and writes it, with the tag `JUDGED`.

A session ends only when its reward is written, so verl's own prompt statuses keep their meaning. When no session of a
prompt is being generated any more, one of its trajectories gets the tag `GENERATED`.

An agent loop may request the reward itself, see `reward_loop.agent.environment`: part 2 does not judge a trajectory
that has a score.

verl does not notice the death of a worker while it waits for rollouts, and would wait indefinitely:
`RewardAgentLoopManager` ends the run with its cause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from tensordict import TensorDict
from typing_extensions import override
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from reward_loop.agent.environment import CurrentScorer
from reward_loop.errors import ConfigError, RewardLoopError, ScoringError
from reward_loop.managers.base import decide, open_records
from reward_loop.records import Records
from reward_loop.scoring.results import check_result
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample, progress_of
from reward_loop.verl.samples import (
    FAILURE,
    GENERATED,
    JUDGED,
    JUDGING_TIMES,
    TOTAL_STEPS,
    TRAINER_MODE,
    TURNS,
    VALIDATE,
    generated_step_of,
    options_of,
    training_step_of,
)
from reward_loop.verl.tq_rows import add_rows, add_tag, token_rewards, turns_of

T = TypeVar("T")

AGENT_LOOP_MANAGER = "reward_loop.verl.workers.agent_loop.RewardAgentLoopManager"


@dataclass
class _Prompt:
    """A prompt, and what is left to do for its sessions, which are numbered."""

    uid: str
    partition: str
    size: int
    """The number of its sessions. Reward managers that score whole groups need it: the column ``group_size``."""
    generating: set[int]
    """The sessions whose trajectories are not published. A session that fails will not publish one."""
    published: str = ""
    """The key of a published trajectory."""


@dataclass
class _Session:
    """One rollout of a prompt, in verl's task for it."""

    name: str
    """``{uid}_{session}``, the start of the keys of its trajectories."""
    number: int
    prompt: _Prompt
    times: dict[str, float] = field(default_factory=dict)
    """The times of the fields ``end``, ``scoring`` and ``scored`` of the session's event."""
    judging: asyncio.Task[None] | None = None
    is_submitted: bool = False
    """Whether its sample was sent to be scored."""


_prompt: ContextVar[_Prompt] = ContextVar("prompt")
_session: ContextVar[_Session] = ContextVar("session")


if TYPE_CHECKING:
    _AgentLoopWorker = AgentLoopWorkerTQ
else:
    # verl's name is an actor class of Ray, from which no class may inherit: this is the class inside.
    _AgentLoopWorker = AgentLoopWorkerTQ.__ray_actor_class__


class RewardAgentLoopWorker(_AgentLoopWorker):
    """An agent loop worker that publishes a trajectory first, and its reward later. A Ray actor.

    It also records each session, in the folder ``reward_loop.log_dir``.
    """

    _records: Records | None = None
    """``None`` if nothing is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Must be here: otherwise Ray sends verl's method by value, and its `super()` fails in the process of the actor.
        super().__init__(*args, **kwargs)
        self._options = options_of(self.config)
        self._records = open_records(self._options)

    async def until_death(self) -> None:
        """Never returns. A pending call fails when the worker dies."""
        await asyncio.Event().wait()

    @override
    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        partition, n = ("val", rollout.val_kwargs.n) if trajectory["validate"] else ("train", rollout.n)
        # Read here, because verl's method removes it.
        size = int(prompt.get("__rollout_n__", n))
        # The tasks of its sessions inherit it. A prompt that was sent again may still be generated for the first time.
        _prompt.set(_Prompt(prompt["uid"], partition, size, set(range(size))))
        with self._client.prompt(prompt["uid"], size) if self._by_group else nullcontext():
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)

    @override
    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        uid, number, validate = kwargs["uid"], kwargs["session_id"], bool(trajectory["validate"])
        session = _Session(f"{uid}_{number}", number, _prompt.get())
        known: dict[str, Any] = {
            "step": training_step_of(kwargs, OmegaConf.select(self.config, TRAINER_MODE), validate=validate),
            "generated_step": generated_step_of(kwargs),
            "validate": validate,
        }
        token, start, error = _session.set(session), time.time(), None
        try:
            with self._scoring(session, {"group": uid, "prompt": kwargs.get("raw_prompt"), **known}):
                return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except BaseException as raised:
            error = _text(raised)
            # Not of a cancelled session, which did not fail.
            if number in session.prompt.generating and isinstance(raised, Exception):
                tag = {FAILURE: f"{session.name}: {error}"}
                await add_tag(uid, session.prompt.partition, tag)
                if self._client is not None and not session.is_submitted:
                    # verl replaces failed groups indefinitely. Failures of a sample that was sent are counted there.
                    await self._client.count_failure(f"rollout {tag[FAILURE]}", type(raised).__name__)
            raise
        finally:
            if not session.is_submitted and self._by_group:
                self._client.lose(uid, session.name)
            # Also of a failed session: the prompt is generated when its other sessions are.
            await _end_generation(session)
            _session.reset(token)
            if self._records is not None:
                self._records.write_rollout(session.name, uid, **known, start=start, times=session.times, error=error)

    def _total_steps(self) -> int | None:
        """Return the number of training steps of the run, which the trainer adds to the configuration."""
        total: int | None = OmegaConf.select(self.config, "trainer.total_training_steps")
        return total

    def _scoring(self, session: _Session, rollout: dict[str, Any]) -> AbstractContextManager[None]:
        """Make the reward workers the current scorer of the session, unless rewards are computed after the rollout."""
        if self._client is None:
            return nullcontext()
        step = rollout["generated_step"] if rollout["step"] is None else rollout["step"]
        rollout |= {
            "uid": session.name,
            "group_size": session.prompt.size,
            "training_progress": progress_of(step, self._total_steps()),
        }

        async def score(sample: RewardSample) -> Reward:
            return await self._submitted(session, sample.uid, self._client.compute_score.remote(sample))

        return CurrentScorer(score, rollout).in_use()

    @override
    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:  # type: ignore[override]
        session = _session.get()
        if validate:
            kwargs[VALIDATE] = True  # a column of the sample
        if (total := self._total_steps()) is not None:
            kwargs[TOTAL_STEPS] = total
        session.times["end"] = time.time()
        outputs = output if isinstance(output, list) else [output]
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            if outputs:
                # Only now: `GENERATED` is written to a trajectory that is in TransferQueue.
                session.prompt.published = f"{session.name}_0"
            await _end_generation(session)
            if session.judging is not None:
                await _write_reward(session, outputs)
        finally:
            # If verl could not write the trajectory, the task still judges, and nothing else awaits it.
            if session.judging is not None:
                session.judging.cancel()  # no effect after the reward has arrived
                await asyncio.gather(session.judging, return_exceptions=True)

    @override
    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        """Start to judge a session in a task. verl calls this method before it writes the trajectory.

        There is nothing to judge if the agent loop itself has set a score, or if the trainer sends the whole batch to
        the reward workers.

        Args:
            outputs: the outputs of the session.
            kwargs: the prompt's columns, uid and session.
        """
        session = _session.get()
        own = outputs[-1].reward_score
        for output in outputs:
            # verl would place it at a token of a tool, if that is the last one. And published alone, a score would give
            # the outputs different fields, which verl cannot write.
            output.reward_score = None
        # `_agent_loop_postprocess` waits for the task after verl has written the trajectory.
        if own is not None:
            session.judging = asyncio.create_task(self._check(session, outputs[-1], own))
        elif self._client is not None:
            columns = {VALIDATE: False, **kwargs, "group_size": session.prompt.size}
            columns[TURNS] = turns_of(outputs[-1].response_mask)
            session.judging = asyncio.create_task(self._judge(session, outputs, columns))

    async def _judge(self, session: _Session, outputs: list[Any], kwargs: dict) -> None:
        """Set the reward of the last output, and the times of the session.

        The other arguments are those of `_compute_score`.
        """
        session.times["scoring"] = time.time()
        await self._submitted(session, session.name, super()._compute_score(outputs, kwargs))
        session.times["scored"] = time.time()

    async def _check(self, session: _Session, final: Any, score: Any) -> None:
        """Set the reward that the agent loop itself has computed, or that of a failed sample if it is not valid."""
        reward = Reward(reward_score=score, reward_extra_info=final.extra_fields.get("reward_extra_info") or {})
        result = RewardResult.of(reward, session.name)
        if result.score is not None:
            lengths = turns_of(final.response_mask)
            turns = sum(length > 0 for length in lengths[::2])
            sample = RewardSample("", uid=session.name, response_length=sum(lengths), turn_count=turns)
            result = check_result(sample, result)
        if result.score is None and not reward["reward_extra_info"].get("reward_masked"):
            try:
                reward = decide(result, self._options).to_reward()
            except ScoringError as error:
                if self._client is not None:
                    await self._client.stop_run(_text(error))
                raise
        final.reward_score, final.extra_fields["reward_extra_info"] = (
            reward["reward_score"],
            reward["reward_extra_info"],
        )

    @property
    def _client(self) -> Any:
        """The client of the reward workers; ``None`` if the trainer sends the whole batch to them."""
        return (self.reward_loop_worker_handles or [None])[0]

    @property
    def _by_group(self) -> bool:
        """Whether the reward workers score the rollouts of a prompt together."""
        return self._client is not None and self._client.by_group

    async def _submitted(self, session: _Session, name: str | None, sending: Coroutine[Any, Any, T]) -> T:
        """Send the sample of a rollout, with its name, to be scored: then it is a member of its group.

        Raises:
            ConfigError: it was sent before, and the others of its group would be compared with both.
        """
        if session.is_submitted and self._by_group:
            sending.close()
            raise ConfigError(
                f"rollout {session.name} requests a second reward, and the rollouts of its prompt are scored together "
                "(post_process_scores, or the manager `group`): request one in each rollout, and pass it on as the "
                "`reward_score` of the output"
            )
        session.is_submitted = True
        try:
            return await sending
        except BaseException as error:
            if self._by_group:  # it may not have been sent
                self._client.lose(session.prompt.uid, name)
            if isinstance(error, Exception) and not isinstance(error, RewardLoopError):  # then no worker has counted it
                await self._client.count_failure(f"rollout {session.name}: {_text(error)}", type(error).__name__)
            raise


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def _end_generation(session: _Session) -> None:
    """Mark the prompt as generated when the last of its sessions has published its trajectory, or has failed."""
    prompt = session.prompt
    if session.number in prompt.generating:
        prompt.generating.remove(session.number)
        if not prompt.generating and prompt.published:
            await add_tag(prompt.published, prompt.partition, {GENERATED: True})


async def _write_reward(session: _Session, outputs: list[Any]) -> None:
    """Wait for the reward of a session, and write it to all its trajectories.

    If judging raises, the session is masked: its trajectory has been published already, and the other samples of the
    group stay usable.
    """
    assert session.judging is not None
    final, error = outputs[-1], None
    try:
        await session.judging
    except Exception as raised:
        error = raised
        failure = ScoringError(_text(error), cause=type(error).__name__)
        failed = RewardResult(Outcome.FAILED, None, error=str(failure), exception=failure, masked=True).to_reward()
        final.reward_score, final.extra_fields["reward_extra_info"] = 0.0, failed["reward_extra_info"]
    score, info = final.reward_score, final.extra_fields["reward_extra_info"]
    now = time.time()
    times = [session.times.get("scoring", now), session.times.get("scored", now)]
    fields = []
    for output in outputs:
        # With a score, verl's `as_dict` fails for a response without tokens.
        output.reward_score = None
        output.extra_fields |= {"reward_extra_info": info, JUDGING_TIMES: times}
        # The parts are those of the last output.
        rm_scores = token_rewards(score, output.response_mask, info if output is final else {})
        fields.append({"rm_scores": rm_scores, "extra_fields": output.as_dict()["extra_fields"]})
    keys = [f"{session.name}_{index}" for index in range(len(outputs))]
    await add_rows(keys, session.prompt.partition, list_of_dict_to_tensordict(fields), [{JUDGED: True}] * len(outputs))
    if error is not None:
        raise error


class RewardAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager, which raises an error when a worker has died.

    Finished rollouts and their rewards are in TransferQueue, but those of a dead worker that were in flight are lost.
    So the run ends, and resumes from its checkpoint (:mod:`reward_loop.verl.trainer.resume`).
    """

    worker_class: ClassVar[Any] = RewardAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After verl's constructor, which sets its own class.
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self._deaths: list[Any] = []
        """For each worker, a call that fails when the worker dies."""
        self._receipt_timeout_s = OmegaConf.select(self.config, "reward_loop.worker_start_timeout_s", default=300.0)

    @override
    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        self._deaths = [worker.until_death.remote() for worker in self.agent_loop_workers]

    @override
    def generate_sequences(self, prompts: TensorDict) -> None:
        """Send prompts to the workers, in equal parts.

        Raises:
            RewardLoopError: a worker has died, or did not receive its part in time.
        """
        workers = self.agent_loop_workers
        calls = [
            worker.generate_sequences.remote(part)
            for worker, part in zip(workers, prompts.chunk(len(workers)), strict=False)  # fewer prompts than workers
        ]
        for number, call in enumerate(calls):
            try:
                # The first call also waits until the worker has started.
                ray.get(call, timeout=self._receipt_timeout_s)
            except (RayActorError, OutOfMemoryError) as error:
                raise _death(number) from error
            except GetTimeoutError as error:
                raise RewardLoopError(
                    f"agent loop worker {number} did not receive its prompts within {self._receipt_timeout_s:g} s "
                    "(reward_loop.worker_start_timeout_s): see the log of the worker"
                ) from error

    def check_workers(self) -> None:
        """Raise an error that names a worker if it has died, without waiting."""
        dead, _ = ray.wait(self._deaths, num_returns=1, timeout=0)
        if dead:
            raise _death(self._deaths.index(dead[0]))


def _death(worker: int) -> RewardLoopError:
    return RewardLoopError(
        f"agent loop worker {worker} died: does the agent loop or one of its tools crash the interpreter, or run out "
        "of memory? Run the same command again: it resumes from the last checkpoint (trainer.save_freq), and "
        "generates prompts without all scores again"
    )
