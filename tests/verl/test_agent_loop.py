"""verl's agent loop worker that publishes trajectories first, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict as fields_of_verl

import reward_loop
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.records import records
from reward_loop.records.trainer_events import read_events
from reward_loop.types import Reward, RewardSample
from reward_loop.verl import tq_rows
from reward_loop.verl.samples import TURNS
from reward_loop.verl.workers import agent_loop
from reward_loop.verl.workers.agent_loop import RewardAgentLoopWorker
from reward_loop.verl.workers.reward_workers import RewardClient

pytestmark = pytest.mark.integration  # it imports verl

UID = "q"


def make_output(mask: list[int], score: float | None = None) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[2] * len(mask),
        response_mask=mask,
        reward_score=score,
        metrics=AgentLoopMetrics(),
    )


class Queue:
    """Stands where TransferQueue is: the fields and tags of keys."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self._written: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def write(self, what: str) -> None:
        self._written[what].set()

    async def until(self, what: str) -> None:
        """Wait for a write, such as ``train: q_0_0 is generated``."""
        async with asyncio.timeout(30):
            await self._written[what].wait()

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(key, {}).update(tag)
        self.write(f"{partition_id}: {key} is {next(iter(tag))}")

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: list[dict[str, Any]], tags: list[dict[str, Any]]
    ) -> None:
        for key, field, tag in zip(keys, fields, tags, strict=True):
            self.write(f"{partition_id}: {key} is {next(iter(tag))}")
            self.fields.setdefault(key, {}).update({**field, "rm_scores": float(field["rm_scores"].sum())})
            self.tags.setdefault(key, {}).update(tag)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(tq_rows, "tq", queue)
    monkeypatch.setattr(agent_loop, "list_of_dict_to_tensordict", list)
    return queue


@pytest.fixture
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Any:
    """A worker whose sessions are generated, judged and written by stand-ins of verl's methods.

    `fails` gives the stage that fails, by session; `own_score` is a score that the agent loop sets itself; `outputs`
    is the number of outputs of a session, and `first_score` a score of the first of several. Judges wait for
    `reward`. The parameter of the fixture is whether sessions are recorded.
    """

    def init(self: Any, config: Any, handles: list[Any]) -> None:
        self.config, self.reward_loop_worker_handles = config, handles

    async def run_prompt(self: Any, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool) -> None:
        kwargs = {"uid": prompt["uid"], "global_steps": 3}
        sessions = [
            asyncio.create_task(self._run_agent_loop({}, trajectory, session_id=i, **kwargs)) for i in range(self.n)
        ]
        self.ended = await asyncio.gather(*sessions, return_exceptions=True)

    async def run(self: Any, sampling_params: dict, trajectory: dict, **kwargs: Any) -> None:
        if self.fails.get(kwargs["session_id"]) == "generation":
            raise KeyError("tool")
        if self.loop is not None:
            await self.loop()
        outputs = [make_output(self.mask, self.own_score) for _ in range(self.outputs)]
        outputs[0].reward_score = self.first_score if self.outputs > 1 else self.own_score
        outputs[-1].extra_fields |= {} if self.own_info is None else {"reward_extra_info": self.own_info}
        await self._agent_loop_postprocess(outputs, trajectory["validate"], **kwargs)

    async def write(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        await self._compute_score(output, kwargs=kwargs)
        await asyncio.sleep(0)  # the judge starts
        if self.fails.get(kwargs["session_id"]) == "writing":
            raise OSError("TransferQueue is gone")
        for index, one in enumerate(output):
            key = f"{kwargs['uid']}_{kwargs['session_id']}_{index}"
            queue.fields[key] = {"rm_scores": one.reward_score}
        fields_of_verl([one.as_dict() for one in output])

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict) -> None:
        self.sent.append(kwargs)
        try:
            outputs[-1].reward_score = await asyncio.shield(self.reward)
            if self.fails.get(kwargs["session_id"]) == "judging":
                raise RuntimeError("no judge")
            outputs[-1].extra_fields["reward_extra_info"] = {"reward_outcome": "scored"}
        finally:
            await asyncio.sleep(0)  # as if it closed a connection
            self.judged.append(kwargs["session_id"])

    async def no_count(error: str, cause: str) -> None: ...

    verl = AgentLoopWorkerTQ.__ray_actor_class__
    for name, method in (
        ("__init__", init),
        ("_run_prompt", run_prompt),
        ("_run_agent_loop", run),
        ("_agent_loop_postprocess", write),
        ("_compute_score", compute_score),
    ):
        monkeypatch.setattr(verl, name, method)
    rollout = {"n": 2, "val_kwargs": {"n": 1}}
    recorded = {"log_dir": str(tmp_path) if getattr(request, "param", True) else None}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "reward_loop": recorded})
    made: Any = RewardAgentLoopWorker(config, [SimpleNamespace(by_group=False, count_failure=no_count)])
    made.fails, made.own_score, made.outputs = {}, None, 1
    made.sent, made.judged, made.n, made.loop = [], [], 2, None
    made.mask, made.first_score, made.own_info = [1], None, None
    return made


async def run(worker: Any, validate: bool = False, score: float | None = 0.5) -> None:
    """Run a prompt whose judges return a score, or never return."""
    worker.reward = asyncio.get_running_loop().create_future()
    if score is not None:
        worker.reward.set_result(score)
    worker.n = 1 if validate else 2
    await worker._run_prompt({"uid": UID}, {}, trajectory={"validate": validate})


async def run_with_late_rewards(worker: Any, queue: Queue) -> None:
    """Run a prompt whose judges return a score after its trajectories are published."""
    running = asyncio.create_task(run(worker, score=None))
    published = asyncio.create_task(queue.until("train: q_1_0 is generated"))
    await asyncio.wait([running, published], return_when=asyncio.FIRST_COMPLETED)
    published.cancel()
    worker.reward.set_result(0.5)
    await running


async def events(worker: Any) -> list[dict[str, Any]]:
    folder = Path(worker.config.reward_loop.log_dir)
    assert await asyncio.to_thread(records(folder).flush)
    return list(read_events(folder))


@pytest.mark.parametrize(("validate", "partition"), [(False, "train"), (True, "val")])
async def test_trajectories_are_published_before_their_rewards(
    worker: Any, queue: Queue, validate: bool, partition: str
) -> None:
    worker.outputs = 2
    running = asyncio.create_task(run(worker, validate, score=None))
    last = 0 if validate else 1
    await queue.until(f"{partition}: q_{last}_0 is generated")
    assert {key: row["rm_scores"] for key, row in queue.fields.items()} == {
        f"q_{session}_{index}": None for session in range(last + 1) for index in range(2)
    }
    worker.reward.set_result(0.5)
    await running
    assert {row["rm_scores"] for row in queue.fields.values()} == {0.5}
    for fields in queue.fields.values():
        requested, arrived = fields["extra_fields"]["judging_times"]
        assert requested <= arrived
    assert [tag for tag in queue.tags.values() if tag.get("generated")] == [queue.tags[f"q_{last}_0"]]
    assert len(worker.sent) == last + 1


async def test_the_lengths_of_turns_reach_the_reward_workers(worker: Any) -> None:
    worker.mask = [1, 1, 0, 0, 0, 1]
    await run(worker, validate=True)
    (sent,) = worker.sent
    assert sent[TURNS] == [2, 3, 1]


async def test_a_score_of_an_output_that_is_not_the_last_is_replaced_as_in_verl(worker: Any, queue: Queue) -> None:
    worker.outputs, worker.first_score = 2, 0.25
    await run_with_late_rewards(worker, queue)
    assert worker.ended == [None, None]
    assert {key: row["rm_scores"] for key, row in queue.fields.items()} == {
        f"q_{session}_{index}": 0.5 for session in range(2) for index in range(2)
    }


async def test_a_response_without_tokens_is_judged(worker: Any, queue: Queue) -> None:
    worker.mask = []
    await run_with_late_rewards(worker, queue)
    assert worker.ended == [None, None]
    for session in range(2):
        row = queue.fields[f"q_{session}_0"]
        assert row["extra_fields"]["reward_extra_info"] == {"reward_outcome": "scored"}
        assert row["rm_scores"] == 0.0, "there is no token for the reward"


async def test_a_prompt_is_generated_when_its_last_session_has_published_or_failed(worker: Any, queue: Queue) -> None:
    worker.fails = {1: "generation"}
    await run(worker)
    assert queue.tags[UID] == {"error": "q_1: KeyError: 'tool'"}
    assert queue.tags["q_0_0"]["generated"]
    assert "q_1_0" not in queue.fields


async def test_a_session_whose_judging_fails_is_masked(worker: Any, queue: Queue) -> None:
    worker.fails = {0: "judging"}
    await run(worker)
    assert isinstance(worker.ended[0], RuntimeError)
    row = queue.fields["q_0_0"]
    info = row["extra_fields"]["reward_extra_info"]
    assert (row["rm_scores"], info["reward_outcome"], info["reward_masked"]) == (0.0, "failed", True)
    assert "no judge" in info["reward_error"]
    assert UID not in queue.tags, "the session has a trajectory"
    assert queue.fields["q_1_0"]["rm_scores"] == 0.5


async def test_a_sample_whose_judging_raises_counts_for_the_failure_bound(worker: Any) -> None:
    """No worker has counted it: verl's asynchronous modes would replace such groups indefinitely."""
    counted: list[str] = []

    async def count(error: str, cause: str) -> None:
        counted.append(f"{cause}, {error}")

    async def fails(sample: Any) -> Any:
        raise KeyError("a bug of the manager") if sample.uid == "q_0" else ConfigError("stops the run itself")

    worker.reward_loop_worker_handles[0].count_failure = count
    worker.fails = {1: "judging"}
    await run(worker)
    assert counted == ["RuntimeError, rollout q_1: RuntimeError: no judge"]
    worker.reward_loop_worker_handles[0].compute_score = SimpleNamespace(remote=fails)
    worker.loop = asks
    await run(worker)
    assert counted[1:] == ["KeyError, rollout q_0: KeyError: 'a bug of the manager'"]


async def test_a_judge_has_ended_when_the_trajectory_cannot_be_written(worker: Any, queue: Queue) -> None:
    worker.fails = {0: "writing", 1: "writing"}
    await run(worker, score=None)
    assert [str(error) for error in worker.ended] == ["TransferQueue is gone"] * 2
    assert sorted(worker.judged) == [0, 1]
    assert queue.fields == {}
    assert list(queue.tags) == [UID], "a prompt without a trajectory is never generated"


@pytest.mark.parametrize(("score", "judged"), [(1.0, True), (None, False)])
async def test_a_session_is_not_judged_twice_or_without_reward_workers(
    worker: Any, queue: Queue, score: Any, judged: bool
) -> None:
    """The agent loop has set a score; or the trainer sends the whole batch to the reward workers."""
    worker.own_score = score
    if not judged:
        worker.reward_loop_worker_handles = None
    await run(worker)
    assert worker.sent == []
    assert queue.tags["q_1_0"]["generated"]
    assert [row.get("rm_scores") for row in queue.fields.values()] == [score] * 2
    assert [(event["scoring"], event["scored"]) for event in await events(worker)] == [(None, None)] * 2


@pytest.mark.parametrize("worker", [True, False], indirect=True)
async def test_samples_of_a_validation_are_marked_for_the_reward_workers(worker: Any, tmp_path: Path) -> None:
    await run(worker, validate=True)
    await run(worker)
    assert [kwargs.get("__validate__") for kwargs in worker.sent] == [True, False, False]
    if worker.config.reward_loop.log_dir is None:
        assert not list(tmp_path.iterdir())
    else:
        assert [event["validate"] for event in await events(worker)] == [True, False, False]


@pytest.mark.parametrize(
    ("fails", "error", "known"),
    [
        ("generation", "KeyError: 'tool'", []),
        ("judging", "RuntimeError: no judge", ["scoring"]),
        ("nothing", None, ["scoring", "scored"]),
    ],
)
async def test_a_session_has_its_times_and_its_error(
    worker: Any, fails: str, error: str | None, known: list[str]
) -> None:
    worker.fails = {0: fails}
    await run(worker)
    event = next(event for event in await events(worker) if event["uid"] == "q_0")
    named = [event[name] for name in ("kind", "group", "step", "validate", "error")]
    assert named == ["rollout", "q", 3, False, error]
    times = [event[name] for name in ("start", "end", *known)]
    assert times == sorted(times)
    assert [name for name in ("scoring", "scored") if event[name] is not None] == known
    assert event["end"] >= event["start"]


class Client:
    """The client of the reward workers: gives each sample its number as its reward, and fails the second one."""

    def __init__(self) -> None:
        self.samples: list[RewardSample] = []
        self.stopped: list[str] = []
        self.by_group = False
        self.compute_score = SimpleNamespace(remote=self.score)

    async def stop_run(self, why: str) -> None:
        self.stopped.append(why)

    def prompt(self, uid: str, size: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def score(self, sample: RewardSample) -> Reward:
        self.samples.append(sample)
        number = len(self.samples)
        info = {"reward_outcome": "failed", "reward_masked": True} if number == 2 else {"reward_outcome": "scored"}
        return {"reward_score": float(number), "reward_extra_info": info}


def with_client(worker: Any) -> Client:
    client = Client()
    worker.reward_loop_worker_handles = [client]
    return client


async def asks() -> None:
    await reward_loop.score("answer")


async def test_an_agent_loop_gets_its_reward_from_the_reward_workers(worker: Any, queue: Queue) -> None:
    client = with_client(worker)

    async def loop() -> None:
        worker.own_score = (await reward_loop.score("answer", ground_truth="4"))["reward_score"]

    worker.loop = loop
    await run(worker)
    assert worker.sent == [], "a session with a score is not judged again"
    fields = {"ground_truth": "4", "group": UID, "group_size": 2, "step": 3, "generated_step": 3}
    assert client.samples == [RewardSample("answer", uid=f"q_{number}", **fields) for number in range(2)]


async def test_the_length_of_the_run_reaches_the_reward_workers(worker: Any) -> None:
    worker.config.trainer = {"total_training_steps": 12}
    await run(worker)
    assert [kwargs["__total_training_steps__"] for kwargs in worker.sent] == [12, 12]
    client = with_client(worker)

    worker.loop = asks
    await run(worker)
    assert [sample.training_progress for sample in client.samples] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("score", "info", "problem"),
    [
        (math.nan, {}, "the score nan, which is not a finite number"),
        (1.0, {"turn_level_scores": [1.0]}, "1 turn_level_scores, and the response has 2 turns"),
        (1.0, {"token_level_scores": [0.5] * 4}, "4 token_level_scores, and the response has 5 tokens"),
    ],
)
@pytest.mark.parametrize("policy", ["mask", "default", "raise"])
async def test_an_invalid_reward_of_an_agent_loop_itself_obeys_the_policy(
    worker: Any, queue: Queue, score: float, info: dict[str, Any], problem: str, policy: str
) -> None:
    client = with_client(worker)
    worker._options = RewardLoopConfig(on_failed=policy, default_score=-2.0)  # type: ignore[arg-type]
    worker.own_score, worker.own_info, worker.mask = score, info, [1, 1, 0, 1, 0]
    await run(worker)
    if policy == "raise":
        assert len(client.stopped) == 2
    else:
        assert worker.ended == [None, None]
    row = queue.fields["q_0_0"]
    found = row["extra_fields"]["reward_extra_info"]
    assert problem in found["reward_error"]
    assert (row["rm_scores"], found["reward_masked"]) == ((-2.0, False) if policy == "default" else (0.0, True))


async def test_rollouts_that_are_not_scored_are_reported_where_groups_are_scored_together(
    worker: Any, queue: Queue
) -> None:
    """Otherwise the others of their prompt would wait for them."""
    lost: list[tuple[str, int, list[str]]] = []
    handle = SimpleNamespace(lose=SimpleNamespace(remote=lambda *call: lost.append(call)))
    worker.reward_loop_worker_handles = [RewardClient([handle], RewardLoopConfig(), None)]
    worker.fails = {1: "generation"}
    await run(worker)
    assert lost == []
    worker.reward_loop_worker_handles[0].by_group = True
    await run(worker)
    assert lost == [(UID, 2, ["q_1"])]
    # The agent loop sets a reward without requesting one; the other one fails after it was sent.
    worker.fails, worker.own_score = {1: "writing"}, 1.0
    await run(worker)
    assert sorted(lost[1:]) == [(UID, 2, ["q_0"]), (UID, 2, ["q_1"])]
    # verl cannot make a sample of one.
    worker.fails, worker.own_score = {1: "judging"}, None
    await run(worker)
    assert lost[3:] == [(UID, 2, ["q_1"])]
    assert worker.reward_loop_worker_handles[0]._prompts == {}


async def test_a_second_reward_is_refused_where_groups_are_scored_together(worker: Any) -> None:
    client = with_client(worker)

    async def asks_twice() -> None:
        await asks()
        await asks()

    worker.loop, worker.own_score = asks_twice, 1.0
    await run(worker)
    assert len(client.samples) == 4
    client.by_group = True
    await run(worker)
    assert all("requests a second reward" in str(error) for error in worker.ended)


async def test_there_is_no_scorer_where_rewards_are_computed_after_the_rollout(worker: Any) -> None:
    worker.reward_loop_worker_handles = None
    worker.loop = asks
    await run(worker)
    assert all("no scorer is open here" in str(error) for error in worker.ended)
