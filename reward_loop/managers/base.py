"""What all reward managers share: from a sample or verl's batch row to a reward."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from reward_loop._util.text import shorten
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.limits.client import open_limits
from reward_loop.limits.failures import failure_bound
from reward_loop.limits.permit import DEFAULT, Limits
from reward_loop.managers.decoding import ResponseDecoder
from reward_loop.managers.policy import apply_policy
from reward_loop.records import ActiveSample, record, records, watch
from reward_loop.scoring import ListScoringFunction, ScoringFunction
from reward_loop.scoring.dense_rewards import check_result
from reward_loop.types import Reward, RewardResult, RewardSample

__all__ = ["RewardLoopManagerBase", "last_row", "scoring_function", "uid_of", "verl_options"]

_VERL_GROUPS = frozenset({"actor_rollout_ref", "trainer", "reward", "reward_model"})


class RewardLoopManagerBase:
    """Base class of reward managers: a sample goes through `to_sample`, `score_one` and `to_reward`; override one.

    It is constructed with the keywords that verl uses, so that verl itself can load it.
    """

    function_type: ClassVar[type[ScoringFunction] | type[ListScoringFunction]] = ScoringFunction
    """What calls the user's function: one that takes a sample, or lists of samples."""

    needs_group: ClassVar[bool] = False
    """Whether one manager must see all samples of a prompt."""

    def __init__(
        self,
        config: RewardLoopConfig | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        limits: Limits | None = None,
    ) -> None:
        """Read the options and the function's signature.

        Args:
            config: a `RewardLoopConfig`, a mapping of its options, or verl's whole configuration, of which the group
                ``reward_loop`` counts.
            tokenizer: decodes responses; needed for verl's batches only.
            compute_score: the reward function in any form that `ScoringFunction` takes, or a `function_type`, which
                keeps its own deadline and threads. ``None`` suits only managers that do not call it.
            reward_router_address: ``host:port`` of the router before the reward models, passed to the function.
            reward_model_tokenizer: the reward model's tokenizer, passed to the function.
            limits: limits and budget that this manager shares with others, which the caller closes. By default those of
                ``compute_score``, if it is a `function_type` with the same options, else the manager's own.

        Raises:
            ConfigError: an option is wrong.
            FunctionLoadError: the function cannot be called with what the reward loop provides.
        """
        self.config = config
        self.options = self.read_options(config)
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer
        self._decoder = None if tokenizer is None else ResponseDecoder(tokenizer)
        limits = limits or _limits_of(compute_score, self.options)
        self._owns_limits = limits is None
        self.limits = limits or open_limits(self.options)
        self.function: Any = None
        if compute_score is not None:
            self.function = scoring_function(type(self), compute_score, self.options, limits=self.limits)
        self.records = records(self.options.log_dir) if self.options.log_dir else None
        self.failures = failure_bound(self.options, self.limits)

    @classmethod
    def read_options(cls, config: RewardLoopConfig | Mapping[str, Any] | None) -> RewardLoopConfig:
        """Return the options in what the constructor takes as ``config``.

        Raises:
            ConfigError: one is wrong.
        """
        if isinstance(config, Mapping):
            if "reward_loop" in config:
                config = config["reward_loop"]
            elif _VERL_GROUPS & set(config):
                config = None
        return parse(RewardLoopConfig, config, "reward_loop")

    async def run_single(self, data: Any) -> Reward:
        """Return the reward of one `RewardSample`, or of verl's ``DataProto``, of which the last row counts.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
            TooManyFailuresError: too large a share of the latest samples failed.
        """
        return self.to_reward(await self.score(await self.to_sample(data)))

    @property
    def name(self) -> str:
        """What scores the samples, for messages and logs."""
        return self.function.name if self.function else type(self).__name__

    @property
    def requires(self) -> frozenset[str]:
        """The fields of a sample without which the user's function cannot be called."""
        return self.function.requires if self.function else frozenset()

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in ``data``; a `RewardSample` stays as it is, the last row of a ``DataProto`` is decoded.

        A row without ``data_source`` or ``reward_model.ground_truth`` gives a sample that fails, if the function
        requires that field; one whose ``reward_model`` or ``extra_info`` is no mapping gives one that fails, too.
        """
        if isinstance(data, RewardSample):
            return data
        if self._decoder is None:
            raise ConfigError(f"{type(self).__name__} needs a tokenizer to decode the responses of a DataProto")
        responses = data.batch["responses"]
        row = _last_row(data.non_tensor_batch, responses)
        ids = _response(responses, data.batch, row.get("response_len"))
        solution = await self._decoder.decode(ids)
        broken: list[str] = []
        extra_info = {**_mapping(row, "extra_info", broken), **_mapping(row, "tool_extra_fields", broken)}
        extra_info["num_turns"] = row.get("__num_turns__")
        extra_info["rollout_reward_scores"] = row.get("reward_scores", {})
        reference = _mapping(row, "reward_model", broken)
        error = None
        if broken:
            error = broken[0]
        elif "ground_truth" not in reference and "ground_truth" in self.requires:
            error = 'its row has no non_tensor_batch["reward_model"]["ground_truth"], which the function requires'
        elif "data_source" not in row and "data_source" in self.requires:
            error = 'its row has no non_tensor_batch["data_source"], which the function requires'
        return RewardSample(
            solution_str=solution,
            data_source=str(row.get("data_source", "")),
            ground_truth=reference.get("ground_truth"),
            extra_info=extra_info,
            uid=uid_of(row),
            error=error,
            response_length=len(ids),
            group=row.get("uid"),
            group_size=row.get("group_size"),
            validate=bool(row.get("__validate__", False)),
        )

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample. It is one of the active samples meanwhile; its record is written at the end."""
        watch()
        with ActiveSample(sample, self.name, self.options.watchdog_s) as active:
            result = check_result(sample, await self.score_one(sample))
            if self.records is not None:
                self.records.write(record(active, result))
        return result

    def score_one(self, sample: RewardSample) -> Awaitable[RewardResult]:
        """Call the function for one sample. Errors of the function are *failed* results, not exceptions."""
        return self._call(sample)

    def score_many(self, samples: list[RewardSample]) -> Awaitable[list[RewardResult]]:
        """Call a function of lists once for several samples."""
        return self._call(samples)

    def _call(self, what: Any) -> Awaitable[Any]:
        # No coroutines in between: with thousands of samples in flight each counts.
        if self.function is None:
            raise ConfigError(f"{type(self).__name__} was given no compute_score")
        return self.function(
            what,
            reward_router_address=self.reward_router_address,
            reward_model_tokenizer=self.reward_model_tokenizer,
        )

    def to_reward(self, result: RewardResult) -> Reward:
        """Count the outcome, and apply the policies for unscored and failed samples.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
            TooManyFailuresError: too large a share of the latest samples failed.
        """
        self.failures.count(result)
        return apply_policy(result, self.options)

    def close(self) -> None:
        """End the processes of the user's function, and close the manager's own limits.

        The call waits for the processes: do not make it on the event loop.
        """
        if self.function is not None:
            self.function.close()
        self.close_limits()

    def close_limits(self) -> None:
        """Close the limits, unless they belong to another object."""
        if self._owns_limits:
            self.limits.close()

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """Put each score at the last valid response token of its row; verl calls this on the class."""
        import torch

        responses, mask = data.batch["responses"], data.batch["attention_mask"]
        lengths = mask[:, -responses.shape[-1] :].sum(dim=-1)
        rewards = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        values = torch.tensor(scores, dtype=torch.float32, device=responses.device)
        return rewards.scatter_(1, (lengths - 1).clamp(min=0).unsqueeze(1), values.unsqueeze(1))


def scoring_function(
    manager: type, function: Any, options: RewardLoopConfig, *, limits: Limits | None = None, **more: Any
) -> Any:
    """Return the scoring function of a manager class: for one sample, or for lists of samples.

    Args:
        manager: the class.
        function: the user's function, or a scoring function, which is returned as it is.
        options: the options of the scoring function.
        limits: the limits that the scoring function shares; one that is passed as ``function`` keeps its own.
        more: more arguments of the scoring function: ``reward_kwargs`` and ``limit``.

    Raises:
        FunctionLoadError: it cannot be called with what the reward loop provides.
        ConfigError: ``more`` has no effect, since ``function`` is a scoring function already.
    """
    kind = getattr(manager, "function_type", ScoringFunction)
    if isinstance(function, kind):
        if ignored := sorted(name for name, value in more.items() if value and (name, value) != ("limit", DEFAULT)):
            raise ConfigError(
                f"{ignored[0]}={more[ignored[0]]!r} has no effect: {function.name} is a {kind.__name__} already; give "
                f"it {ignored[0]} when it is made"
            )
        return function
    return kind(function, options=options, limits=limits, **more)


def _limits_of(function: Any, options: RewardLoopConfig) -> Limits | None:
    """Return the limits of a `function_type`, if they are those of the options."""
    limits: Limits | None = getattr(function, "limits", None)
    if not isinstance(limits, Limits):
        return None
    same = all(getattr(limits.options, name) == getattr(options, name) for name in ("limits", "budget", "job"))
    return limits if same else None


def verl_options(config: Any, path: str) -> Any:
    """Return what verl's whole configuration says at a dotted path, or ``None`` where it says nothing."""
    for part in path.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(part)
    return config


def last_row(data: Any) -> dict[str, Any]:
    """Return the fields of the last row; the data of a single item, with 1-d responses, is that row."""
    return _last_row(data.non_tensor_batch, data.batch["responses"])


def _last_row(columns: Mapping[str, Any], responses: Any) -> dict[str, Any]:
    if responses.ndim == 1:
        return dict(columns)
    return {name: column[-1] for name, column in columns.items()}


def _mapping(row: Mapping[str, Any], name: str, broken: list[str]) -> Mapping[str, Any]:
    """Return a field of a row that is a mapping, if it is there; if it is something else, add that to ``broken``."""
    value = row.get(name)
    if isinstance(value, Mapping):
        return value
    if value is not None:
        broken.append(f'in its row, non_tensor_batch["{name}"] must be a mapping; got {shorten(value)}')
    return {}


def _response(responses: Any, batch: Any, length: int | None) -> Any:
    """Return the token ids of the last row's response, as an array: tokenizers take longer to read a tensor.

    Args:
        responses: of shape (rows, response width), or of one row without rows.
        batch: ``attention_mask`` of shape (rows, total width), or likewise.
        length: how many tokens the response has; by default as many as the mask says. Where outputs with prompts of
            different lengths are padded into one batch, as verl's agent loop does, the mask cannot tell.
    """
    width = responses.shape[-1]
    if length is None:
        mask = batch["attention_mask"]
        mask = mask[-1] if mask.ndim == 2 else mask
        length = int(mask[-width:].sum()) if width else 0
    ids = responses.cpu().numpy() if hasattr(responses, "cpu") else responses
    if ids.ndim == 2:
        ids = ids[-1]
    return ids if length == width else ids[: int(length)]


def uid_of(row: Mapping[str, Any]) -> str | None:
    """Return the name of a row of verl's, for messages and logs."""
    name = [row.get("uid", row.get("index")), row.get("session_id")]
    return "_".join(str(part) for part in name if part is not None) or None
