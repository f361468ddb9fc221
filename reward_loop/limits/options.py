"""The options of limits, budget and failures, which all workers of a job share."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from reward_loop.config import Config

MAX_COUNT = 2**53
"""The largest number in a limit: larger integers are neither exact as floats nor, above 64 bits, valid in messages."""


class LimitConfig(Config):
    """The limits of one service, for all workers of a job together."""

    max_concurrent: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of calls in flight."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of calls that start in any 60 seconds."""

    tokens_per_minute: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of tokens of the calls that start in any 60 seconds; one call larger than a burst may start
    in addition. A call counts with its estimate, and at its end with the tokens that it used."""

    burst_seconds: float = Field(default=1.0, gt=0, le=30)
    """Pacing: the calls and tokens of this many seconds of the limits above may start at once, but always at least one
    call. The rest of a minute is spread evenly, so a burst lowers the steady rate by its share: ``30`` halves it."""

    estimated_tokens_per_request: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Tokens of a call that gives no estimate of its own."""

    adaptive: bool = False
    """Adapt the concurrency to the service: increase it up to `max_concurrent` while the service answers calls, and
    reduce it by a fifth on HTTP 429, and on 503 from a full server or with ``Retry-After``. Timeouts and other errors
    do not change it."""

    share: float = Field(default=1.0, gt=0, le=1)
    """This run's share of the numbers above, if several runs have one quota: ``0.5`` for each of two runs."""

    max_wait: float | None = Field(default=3600.0, gt=0)
    """Seconds that a call may wait for a permit before it fails; ``None`` for no limit."""

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        for name in ("max_concurrent", "requests_per_minute", "tokens_per_minute"):
            if (number := getattr(self, name)) is not None and self.shared(number) == 0:
                raise ValueError(
                    f"{name}={number} with a share of {self.share:g} allows no call: raise one of them, or use fewer "
                    "processes"
                )
        return self

    def shared(self, number: int | None) -> int | None:
        """Return this run's share of a limit."""
        return None if number is None else int(number * self.share + 1e-9)  # 49 / 49 may be below 1


class ModelConfig(Config):
    """The requests of `reward_loop.client` that name a model, or that name none if only one has options."""

    max_concurrent: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The largest number of requests in flight. Requests with another limit, as of ``Judge(limit=...)``, do not
    count."""

    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds until the answer is received, for requests without a ``timeout`` of their own. By default 300."""


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
    """Seconds of the first pause. It doubles with each attempt; the actual pause is random, between a half and all of
    it."""

    max_wait: float = Field(default=60.0, ge=0)
    """The longest pause in seconds. A ``Retry-After`` of the service is added to it."""


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


class JobOptions(Config):
    """What holds for all calls of a job: limits, budget, retries, outages and the bound on failures."""

    limits: dict[str, LimitConfig] = Field(default_factory=dict)
    """Limits by the name of a service. ``default`` applies to every call of the function, other names to the calls
    inside ``async with reward_loop.limit(name)``."""

    models: dict[str, ModelConfig] = Field(default_factory=dict)
    """Limit and deadline of requests to models at a ``host:port``, by the name of the model. A verl run has them from
    ``reward_model.server``."""

    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When a failed call is made again."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """The budget of the run."""

    outage_timeout_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """Seconds for which calls wait for a judge, or a service of the run, that cannot be reached, before their samples
    fail, see docs/outcomes.md. ``0``: an unreachable judge is a transient failure, for `retry`."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the latest samples failed; 1 disables the check."""

    min_samples_for_failed_share: int = Field(default=64, ge=1)
    """The number of samples that must have ended before `max_failed_share` applies."""

    failed_share_window: int = Field(default=1024, ge=1)
    """The number of latest samples that `max_failed_share` refers to, so that the late failure of a judge also stops
    the run."""
