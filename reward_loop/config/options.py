"""The options of the reward loop (`RewardLoopConfig`) and of reward models (`RewardModelConfig`)."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from reward_loop.config.parsing import Config
from reward_loop.types import Policy

__all__ = [
    "MAX_COUNT",
    "AuditConfig",
    "BatchConfig",
    "BudgetConfig",
    "CacheConfig",
    "ComponentConfig",
    "GroupConfig",
    "HealthConfig",
    "LimitConfig",
    "PolicyName",
    "ProofConfig",
    "RecordConfig",
    "RetryConfig",
    "RewardLoopConfig",
    "RewardModelConfig",
    "ServedModelConfig",
]

ProbeKind = Literal["master_key", "empty", "other_answer", "cut_off", "question", "again", "frame", "order"]
"""What is asked about an answer again, see docs/health.md. The first five are canaries."""

MASTER_KEYS = (
    *(" ", ".", ",", ":"),
    *("Thought process:", "Let's solve this problem step by step.", "Solution", "解", "かいせつ", "Respuesta"),
)
"""Answers without content that judges have accepted: https://arxiv.org/abs/2507.08794."""

PolicyName = Literal["round_robin", "least_in_flight", "affinity"]
"""The router's load-balancing policies."""

MAX_COUNT = 2**53
"""The largest number in a limit: larger integers are neither exact as floats nor, above 64 bits, valid in messages."""


class LimitConfig(Config):
    """The limits of one service, for all workers of a job together."""

    max_concurrent: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of calls in flight."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of calls that start in any 60 seconds."""

    tokens_per_minute: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of tokens of the calls that start in any 60 seconds. A call counts with its estimate, and at
    its end with the tokens that it used."""

    burst_seconds: float = Field(default=1.0, gt=0, le=60)
    """Pacing: the calls and tokens of this many seconds of the limits above may start at once, but always at least one
    call. ``60`` allows a whole minute's calls at once."""

    estimated_tokens_per_request: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Tokens of a call that gives no estimate of its own."""

    adaptive: bool = False
    """Adapt the concurrency to the service: increase it up to `max_concurrent` while the service answers calls, and
    reduce it on HTTP 429. Timeouts and other errors do not change it."""

    max_wait: float | None = Field(default=3600.0, gt=0)
    """Seconds that a call may wait for a permit before it fails; ``None`` for no limit."""


class RetryConfig(Config):
    """When a failed call is made again."""

    max_attempts: int = Field(default=3, ge=1)
    """The largest number of calls of the function for a sample, and of attempts of a request of `reward_loop.client`.
    Only transient failures are retried: a timeout of the client, HTTP 408, 409, 425, 429 and 5xx. A call that the
    service refused (429, 529), or asked to repeat later (``Retry-After``), does not count, nor does a call in an
    outage. ``1``: calls are repeated only after an outage."""

    max_seconds: float = Field(default=600.0, gt=0)
    """No attempt starts later than this many seconds after the first one. Time spent waiting for limits or in an
    outage does not count."""

    initial_wait: float = Field(default=0.5, ge=0)
    """Seconds of the first pause. It doubles with each attempt; the actual pause is random, between 0 and this
    value."""

    max_wait: float = Field(default=60.0, ge=0)
    """The longest pause in seconds. A ``Retry-After`` of the service is added to it."""


class CacheConfig(Config):
    """Whether equal calls are made only once."""

    enabled: bool = False
    """Merge equal calls in flight into one, also those of different workers of the job. Leave it off for judges that
    answer the same question differently each time."""

    path: str | None = None
    """A file (SQLite) that stores scores for later calls and runs; several processes can share it."""

    version: str = Field(default="", coerce_numbers_to_str=True)
    """Any text, required with ``path``: stored scores are used only with the same version. Change it when the
    function's imports or captured values change, or the judge's model."""


class BudgetConfig(Config):
    """The budget of a run, for all workers together. Requests of `reward_loop.client` count automatically, others
    through ``lease.used``."""

    max_cost: float | None = Field(default=None, gt=0)
    """The largest cost, in the unit in which the function reports its costs."""

    max_tokens: int | None = Field(default=None, ge=1)
    """The largest number of tokens: those of `reward_loop.client`, and those that the function reports."""

    at_cap: Literal["stop", "default", "mask"] = "stop"
    """What happens to samples after the budget is used up. ``stop`` ends the run. With ``default`` and ``mask``, the
    function is no longer called: samples get the default score, or are excluded from training."""


class RecordConfig(Config):
    """What the records in ``log_dir`` contain, and how much disk space they take."""

    full: float = Field(default=1.0, ge=0, le=1)
    """The share of samples, or of whole groups, that are recorded with their texts: prompt, response, and the
    exchanges with judges. Samples without a score always are. All samples have a summary row."""

    max_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """The largest size in bytes of all files in ``log_dir``. Above it, the oldest texts are deleted, first those of
    exchanges with judges. Summary rows are kept."""


class HealthConfig(Config):
    """The monitors of the rewards of each training step. The threshold ``null`` turns a monitor off."""

    enabled: bool = True
    """Whether the monitors run in a verl run."""

    patience: int = Field(default=3, ge=1)
    """A warning begins after this number of steps in a row beyond the limit, and ends after the same number within it.
    `score_jump` and the monitors of probes warn at once."""

    baseline_steps: int = Field(default=5, ge=1)
    """The baseline of a monitor is the median of this number of first values. `score_jump` compares with this number of
    latest steps."""

    reference: str | None = None
    """The name of a number that the function returns and the reward does not depend on, such as `acc`. If the reward
    rises and this number does not, `reference_gap` warns."""

    window: int = Field(default=16, ge=4)
    """The number of latest steps over which `reference_gap` and `phrases` look for a rise, and whose probes are counted
    together."""

    sampled_responses: int = Field(default=256, ge=1)
    """The largest number of responses of a step, in whole groups, that `repetition`, `identical_responses` and
    `phrases` read."""

    sampled_tokens: int = Field(default=2048, ge=16)
    """The largest number of tokens of a response that these monitors read: of a longer one, half from its start and
    half from its end."""

    zero_variance_groups: float | None = Field(default=0.9, ge=0, le=1)
    """The largest share of groups whose rewards are all equal."""

    masked_share: float | None = Field(default=0.2, ge=0, le=1)
    """The largest share of masked samples."""

    component_share: float | None = Field(default=0.95, ge=0, le=1)
    """The largest share of one component in the variance of the score. Only a component with a smaller share in the
    baseline is reported."""

    component_saturation: float | None = Field(default=0.98, ge=0, le=1)
    """The largest share of samples at the top of a component's range. Only a component with a smaller share in the
    baseline is reported."""

    length_correlation: float | None = Field(default=0.45, ge=0, le=1)
    """The largest absolute correlation of the reward with the response length within groups."""

    repetition: float | None = Field(default=0.1, ge=0, le=1)
    """The largest share of responses that repeat more than half of their 4-grams."""

    identical_responses: float | None = Field(default=0.5, ge=0, le=1)
    """The largest share of responses that are equal to another one."""

    unparsable_verdicts: float | None = Field(default=0.05, ge=0, le=1)
    """The largest rise of the share of judgements without a verdict above the baseline."""

    judge_latency: float | None = Field(default=2.0, gt=1)
    """The largest factor between the 95th percentile of judge latencies and the baseline."""

    reference_gap: float | None = Field(default=0.3, ge=0)
    """The largest rise of the reward above that of the reference, in standard deviations of the samples of a step."""

    canaries: float | None = Field(default=0.1, ge=0, le=1)
    """The largest share of answers, wrong by construction, that the judge accepts: by kind, and of all kinds. The lower
    bound of its confidence interval is compared."""

    false_accepts: float | None = Field(default=0.1, ge=0, le=1)
    """The largest share of wrong answers that the judge accepts, of those that a second judge rejects: the strong judge
    of spot checks, or `audit.reference`. The lower bound of its confidence interval is compared."""

    agreement: float | None = Field(default=0.05, ge=0, le=1)
    """The largest fall of the share of scores that agree when the judge is asked again, in the other order or with
    another frame."""

    labelled: float | None = Field(default=0.05, ge=0, le=1)
    """The largest fall of the judge's accuracy on labelled answers since the first time."""

    phrases: float | None = Field(default=0.15, ge=0, le=1)
    """The largest rise over the window of the share of responses with a phrase that goes together with a higher
    reward."""

    score_jump: float | None = Field(default=0.3, ge=0, le=1)
    """The largest Kolmogorov-Smirnov distance between the rewards of a step and those of the steps before."""


class AuditConfig(Config):
    """Probes of the judge during a run. Rewards do not wait for them and do not depend on them."""

    share: float = Field(default=0.0, ge=0, le=1)
    """The share of scored training samples, or of groups with the manager `group`, with a probe. This is also the
    budget of the probes: each costs as much as scoring the sample, or the group."""

    probes: tuple[ProbeKind, ...] = get_args(ProbeKind)
    """The kinds of probes, which take turns. `order` applies only to groups."""

    keys: tuple[str, ...] = Field(default=MASTER_KEYS, min_length=1)
    """The answers without content of the kind `master_key`."""

    accept: float | None = Field(default=None, allow_inf_nan=False)
    """An answer with this score or a higher one is accepted: the smallest score that a right answer may have. By
    default, a score is accepted if it is above the middle of the range of the latest scores."""

    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Two scores agree if they differ by at most this."""

    labelled: str | None = None
    """A file of answers whose labels are known (JSON Lines), which is scored regularly."""

    labelled_every: int = Field(default=10, ge=1)
    """The number of training steps from one scoring of the labelled answers to the next."""

    reference: str | None = None
    """A second judge, preferably a model of another family: a function, such as ``judges.py:other``."""

    reference_share: float = Field(default=0.05, ge=0, le=1)
    """The share of scored training samples that `reference` scores."""

    @property
    def is_on(self) -> bool:
        """Whether there are any probes."""
        return bool(self.share or self.labelled or self.reference)


class BatchConfig(Config):
    """How the manager ``batch`` collects samples."""

    max_batch_size: int = Field(default=64, ge=1)
    """The largest number of samples in one call of the function."""

    max_wait_ms: float = Field(default=10.0, ge=0)
    """The longest time in milliseconds that a sample waits for other samples of its call."""


class GroupConfig(Config):
    """How the manager ``group`` collects the samples of a prompt."""

    size: int | None = Field(default=None, ge=1)
    """The number of samples in a group, for samples without a ``group_size``. By default verl's
    ``actor_rollout_ref.rollout.n``."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds from the first sample of a group to the last. After that, an incomplete group fails. It must be longer
    than the slowest rollout of a prompt."""


class ComponentConfig(Config):
    """One of the rewards of the manager ``composite``."""

    path: str | None = None
    """The function, as in ``custom_reward_function``: a file, ``pkg://module``, or ``reward.py:accuracy``. By default
    the function of the run: ``custom_reward_function``, or verl's function for the data source."""

    name: str | None = None
    """The name of the function, if `path` does not contain it. By default ``compute_score``."""

    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function, or of its class."""

    data_sources: str | tuple[str, ...] | None = None
    """The data sources whose samples it scores: names, or patterns such as ``math*``. ``others`` are those that no
    other component names. By default it scores all samples."""

    phase: Literal["train", "validate"] | None = None
    """``train``: it scores only the samples of training; ``validate``: only those of validations. By default both."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The factor of its score in the sum of the scores."""

    gate: float | None = Field(default=None, allow_inf_nan=False)
    """A threshold: the components after this one are called, and count, only if its score is at least this number."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds from the start of the function to its deadline. By default the value of the run's options, as for the
    policies below."""

    limit: str = "default"
    """The name of the entry of ``reward_loop.limits`` for its calls."""

    on_failed: Policy | None = None
    """For samples for which this function fails: ``raise`` stops the run, ``default`` uses `default_score` as its
    score, ``mask`` excludes the sample from training."""

    on_unscored: Policy | None = None
    """The same choice for samples for which this function returns ``None``."""

    default_score: float | None = Field(default=None, allow_inf_nan=False)
    """Its score under the policy ``default``."""


class ProofConfig(Config):
    """Proofs that a sync function without a judge can still tell a right answer from a wrong one, see
    docs/proofs.md."""

    every: int | None = Field(default=128, ge=1)
    """The largest number of results of a process, for each data source, from one proof to the next; ``null`` for no
    proofs."""

    in_threads: Literal["process", "stop"] = "process"
    """What happens to a function in threads that fails a proof: ``process`` moves it into worker processes, and stops
    the run only if it cannot run there; ``stop`` stops the run."""


class RewardLoopConfig(Config):
    """How samples are scored, and what happens to samples without a score."""

    on_failed: Policy = "mask"
    """For samples whose function raised, timed out or returned an invalid score: ``raise`` stops the run, ``default``
    gives them `default_score`, ``mask`` marks them ``reward_masked``, so that they are excluded from training."""

    on_unscored: Policy = "mask"
    """The same choice for samples whose function returned ``None``."""

    default_score: float = Field(default=0.0, allow_inf_nan=False)
    """The score under the policy ``default``."""

    timeout: float | None = Field(default=300.0, gt=0)
    """Seconds from the start of the function to its deadline; ``None`` for no deadline."""

    skip_special_tokens: bool = True
    """In a verl run: whether `solution_str` is decoded without special tokens, as in verl. ``False`` keeps them."""

    max_threads: int = Field(default=64, ge=1)
    """The largest number of calls of a sync function that run at the same time."""

    isolation: Literal["thread", "process"] = "thread"
    """Where sync functions run: in threads, which cannot be killed, or in processes, which can. A function marked with
    ``isolated`` always runs in processes."""

    max_processes: int | None = Field(default=None, ge=1)
    """The largest number of calls of a sync function that run in processes at the same time. By default the number of
    cores. In a verl run, the reward workers of a node share its cores."""

    max_memory_mb: int | None = Field(default=None, ge=16)
    """The maximum memory of a worker process and of the processes that it started, in megabytes (2^20 bytes). A worker
    process that exceeds it is killed, and its sample fails. By default there is no limit."""

    max_calls_per_process: int | None = Field(default=None, ge=1)
    """The number of calls after which a worker process is replaced, for functions that change their process in a way
    that is not undone, see docs/reward-functions.md. By default processes are kept."""

    proofs: ProofConfig = Field(default_factory=ProofConfig)
    """Proofs that a function still gives right scores, see docs/proofs.md."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the latest samples failed; 1 disables the check."""

    min_samples_for_failed_share: int = Field(default=64, ge=1)
    """The number of samples that must have ended before `max_failed_share` applies."""

    failed_share_window: int = Field(default=1024, ge=1)
    """The number of latest samples that `max_failed_share` refers to, so that the late failure of a judge also stops
    the run."""

    limits: dict[str, LimitConfig] = Field(default_factory=dict)
    """Limits by the name of a service. ``default`` applies to every call of the function, other names to the calls
    inside ``async with reward_loop.limit(name)``."""

    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When a failed call is made again."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    """Whether equal calls are made only once."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """The budget of the run."""

    job: str | None = None
    """The address of the job's limiter service, which holds limits, budget and failures for all workers. Runs with
    several workers set it. Without it, each manager has its own limits."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0)
    """In a verl run: seconds within which every reward worker must load the tokenizer and the function."""

    worker_answer_timeout_s: float = Field(default=120.0, gt=0)
    """In a verl run: seconds within which a reward worker must answer the trainer, and a dead one must be reachable
    again; otherwise its samples fail. It must be longer than the restart of a worker; Ray takes up to 65 seconds to
    detect that a node is lost."""

    watchdog_s: float | None = Field(default=60.0, gt=0)
    """Samples that have been running for longer than this many seconds are logged, repeatedly at this interval;
    ``null`` disables it. Each manager of a process may have its own value."""

    log_dir: str | None = None
    """Directory in which every process records its samples, see docs/records.md; ``null`` for no records. The default
    in a verl run is ``rewards`` in verl's ``trainer.default_local_dir``."""

    record: RecordConfig = Field(default_factory=RecordConfig)
    """What the records contain."""

    log_samples: int = Field(default=0, ge=0)
    """In a verl run: the number of samples of a step that W&B and MLflow get as a table, see docs/records.md."""

    log_samples_every: int = Field(default=1, ge=1)
    """For `log_samples`: the number of steps from one table to the next."""

    health: HealthConfig = Field(default_factory=HealthConfig)
    """In a verl run: the monitors of the rewards of each step, see docs/health.md."""

    audit: AuditConfig = Field(default_factory=AuditConfig)
    """Probes of the judge, see docs/health.md."""

    outage_timeout_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """Seconds for which calls wait for a judge, or a service of the run, that cannot be reached, before their samples
    fail, see docs/outcomes.md. ``0``: an unreachable judge is a transient failure, for `retry`."""

    batch: BatchConfig = Field(default_factory=BatchConfig)
    """For the manager ``batch``."""

    group: GroupConfig = Field(default_factory=GroupConfig)
    """For the manager ``group``."""

    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """For the manager ``composite``: its rewards by name, in the order in which gates apply."""


class ServedModelConfig(Config):
    """A model, and its servers."""

    model_path: str | None = None
    """A model directory in the format of transformers' ``save_pretrained``, or the name of a model of the Hugging Face
    hub, which is downloaded if it is not in the cache. Required by every engine except ``external``."""

    served_model_name: str | None = None
    """The ``model`` in requests. By default `model_path`, as in vLLM."""

    engine: Literal["vllm", "sglang", "transformers", "external"] = "transformers"
    """The program that runs the model. ``transformers`` is the embedded server: on the CPU, in float32, for small
    models. ``external`` starts nothing: `urls` are servers that already run."""

    python: str | None = None
    """For vLLM and SGLang: the Python interpreter that runs the engine, such as ``/envs/sglang/bin/python``, if the
    engine has its own environment. Every node with servers needs it at the same path. By default the interpreter of
    this library."""

    kind: Literal["auto", "generative", "discriminative"] = "auto"
    """Whether the model generates text or returns logits; ``auto`` reads it from the model's ``config.json``."""

    urls: tuple[str, ...] = ()
    """For ``external``: the servers, each as ``http://host:port``."""

    replicas: int = Field(default=1, ge=1)
    """The number of servers, which share the load."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: the number of GPUs over which each copy of the model is split."""

    data_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: the number of copies of the model in each server."""

    trust_remote_code: bool = False
    """For vLLM and SGLang: run the Python code that the model's directory contains."""

    dtype: str = "auto"
    """For vLLM and SGLang: the precision, such as ``bfloat16`` or ``float32``; ``auto`` is the precision of the
    checkpoint."""

    max_model_len: int | None = Field(default=None, ge=1)
    """For vLLM and SGLang: the largest number of tokens of a prompt and its answer. By default the value in the model's
    ``config.json``."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """For vLLM and SGLang: the share of each GPU's memory that a server may use. By default the engine's own value."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine's command line, such as ``max_num_seqs: 64`` for ``--max-num-seqs 64``. ``true``
    stands for a flag without a value, ``false`` or ``null`` omits an option, mappings are passed as JSON."""

    max_batch_size: int = Field(default=64, ge=1)
    """For ``transformers``: the largest number of requests in one batch."""

    max_wait_ms: float = Field(default=3.0, ge=0)
    """For ``transformers``: the longest time in milliseconds that a request waits for other requests of its batch."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of each server that runs on the CPU."""

    start_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds within which a server must be ready, including the download of its model. A server whose process ends
    fails at once."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the servers."""


class RewardModelConfig(ServedModelConfig):
    """Reward models, their servers, and the router in front of them."""

    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """More models behind the same router, by the name that requests use."""

    placement: Literal["local", "ray", "colocated"] = "local"
    """Where servers run. ``local``: as processes of this machine. ``ray``: in Ray actors that reserve their GPUs, on
    any node. ``colocated``, only in a verl run: on the trainer's GPUs, awake only while the rollout sleeps."""

    placement_timeout_s: float = Field(default=300.0, gt=0)
    """For the placement ``ray``: seconds within which Ray must find room for all servers."""

    starts_at_a_time: int = Field(default=2, ge=1)
    """The largest number of servers that start at the same time: each reads the whole model from disk."""

    host: str = "127.0.0.1"
    """The address on which the router listens, and which `reward_router_address` contains. Servers listen on loopback
    only."""

    router_port: int | None = Field(default=None, ge=1, le=65535)
    """The router's port. By default any free port."""

    policy: PolicyName = "affinity"
    """Which of a model's servers gets a request. ``affinity``: the same one for all requests of a generative judge on
    the responses to a prompt, so that the server computes their common beginning once; if it has far more requests in
    flight than the others, another one. ``least_in_flight``, ``round_robin``: regardless of the content."""

    request_timeout_s: float = Field(default=290.0, gt=0)
    """Seconds from the arrival of a request at the router to the end of its answer. Waiting for a server counts. It is
    below the timeout of the clients (300 s in `reward_loop.client`), so that they get the router's explanation. A
    request of `reward_loop.client` with a longer timeout gets more time, at most ten times as much."""

    max_in_flight: int = Field(default=16384, ge=1)
    """The largest number of requests that the router sends to the servers at the same time; further ones wait. Each
    needs two of the router's open files (``ulimit -n``)."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two of the router's health checks of a server in use."""

    health_timeout_s: float = Field(default=4.0, gt=0)
    """Seconds that a health check of a server in use may take."""

    max_failed_checks: int = Field(default=2, ge=1)
    """A server that fails this number of health checks in a row gets no more requests until a check succeeds. A check
    that times out does not count while the server still answers requests."""

    hang_timeout_s: float | None = Field(default=290.0, gt=0)
    """A server that answers health checks, has requests in flight, and sends nothing for half of this time is asked for
    one token. If it sends nothing in the other half either, it is restarted. Keep it above the time of the slowest
    request. ``None``: hung servers are not detected."""

    max_restarts: int = Field(default=3, ge=0)
    """The largest number of restarts of a process within `restart_window_s`; a further restart waits until the oldest
    one is that old. 0: a process that dies is not restarted."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds after which a restart no longer counts for `max_restarts`."""

    log_dir: str | None = None
    """The directory of the logs of servers and router. By default a new temporary directory, which is removed at the
    end unless a server has failed."""

    @field_validator("host")
    @classmethod
    def _is_no_wildcard(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("it must be the address that clients connect to, not a wildcard")
        return host
