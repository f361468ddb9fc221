"""The base class of reward managers: from a sample, or a row of verl's batch, to a reward."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from reward_loop._util.addresses import checked_address
from reward_loop._util.text import listing, shorten
from reward_loop.config import parse
from reward_loop.errors import ConfigError, ScoringError
from reward_loop.limits.local import LocalLimits
from reward_loop.limits.permit import DEFAULT, Limits
from reward_loop.managers.decoding import ResponseDecoder
from reward_loop.managers.failures import decide
from reward_loop.managers.groups import CALLER, Call, Groups
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import ActiveSample, Records, records, watch, watched_loops
from reward_loop.scoring import ListScoringFunction, ScoringFunction
from reward_loop.scoring.results import check_result, failed_after
from reward_loop.types import Reward, RewardResult, RewardSample

VALIDATE = "__validate__"
"""The column of verl's batch that marks the rows of a validation."""

TURNS = "__turns__"
"""The column with the tokens of each part of a response, by the policy and by the environment in turn."""

TRAINING_STEP = "__training_step__"
"""The column with the training step that trains on the row, in the mode ``reward_pipeline``."""

TOTAL_STEPS = "__total_training_steps__"
"""The column with the number of training steps of the run."""

_SHARED = ("limits", "budget", "max_failed_share", "min_samples_for_failed_share", "failed_share_window")
"""The options that managers must have in common to share limits."""

_VERL_GROUPS = frozenset({"actor_rollout_ref", "trainer", "reward", "reward_model"})


class RewardLoopManagerBase:
    """Base class of reward managers. `run_single` calls `to_sample`, `score_one` and `to_reward`; override any of them.

    The constructor takes the keywords that verl passes, so verl can load a manager by itself.

    Example::

        @register("clipped")
        class ClippedManager(RewardLoopManagerBase):
            async def score_one(self, sample: RewardSample) -> RewardResult:
                result = await super().score_one(sample)
                return result if result.score is None else replace(result, score=min(result.score, 1.0))
    """

    function_type: ClassVar[type[ScoringFunction] | type[ListScoringFunction]] = ScoringFunction
    """The class that calls the user's function: `ScoringFunction`, or `ListScoringFunction` for batched functions."""

    needs_group: bool = False
    """Whether one manager must see all samples of a prompt: also if the function has ``post_process_scores``."""

    def __init__(
        self,
        config: RewardLoopConfig | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        limits: Limits | None = None,
    ) -> None:
        """Read the options, and inspect the function's signature.

        Args:
            config: a `RewardLoopConfig`, a mapping of its options, or verl's whole configuration, of which the group
                ``reward_loop`` is read.
            tokenizer: decodes responses; needed only for verl's batches.
            compute_score: the reward function in any form that `ScoringFunction` accepts, or a `function_type` object,
                which keeps its own deadline and threads. ``None`` is valid only for managers that do not call it.
            reward_router_address: ``host:port`` of the reward model router, passed to the function.
            reward_model_tokenizer: the reward model's tokenizer, passed to the function.
            limits: limits and budget shared with other managers; the caller closes them. By default the limits of
                ``compute_score`` if it is a `function_type` object with the same limit options, otherwise new ones.

        Raises:
            ConfigError: an option or the address is invalid.
            FunctionLoadError: the function requires an argument that the reward loop does not provide.
        """
        self.config = config
        self.options = self.read_options(config)
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address = reward_router_address and checked_address(reward_router_address)
        self.reward_model_tokenizer = reward_model_tokenizer
        self._decoder = None
        if tokenizer is not None:
            self._decoder = ResponseDecoder(tokenizer, skip_special_tokens=self.options.skip_special_tokens)
        limits = limits or _limits_of(compute_score, self.options)
        self._owns_limits = limits is None
        self.limits = limits or LocalLimits(self.options)
        self.function: Any = None
        if compute_score is not None:
            self.function = scoring_function(type(self), compute_score, self.options, limits=self.limits)
        self.groups: Groups | None = None
        """Collects the samples of each prompt; ``None`` if each is scored alone."""
        if self.post_processes:
            self.needs_group = True
            self.groups = self.collect_groups(self.function.post_process_scores, f"post_process_scores of {self.name}")
        self._check_place()
        self.records = open_records(self.options)
        # Read once: OmegaConf needs more time for it than a whole sample takes otherwise.
        self._trainer_mode = verl_options(self.config, TRAINER_MODE)
        self._longest_response = verl_options(self.config, "actor_rollout_ref.rollout.response_length")
        self._total_steps = verl_options(self.config, "trainer.total_training_steps")
        filters = verl_options(self.config, "algorithm.filter_groups") or {}
        self._filter_metric = filters.get("metric") if filters.get("enable") else None
        """The key of the extra info by which verl filters groups; ``None`` also if it filters by the reward itself."""
        # No such key in the extra info: verl's validation appends it to its own column `reward`, and then fails.
        if self._filter_metric == "reward":
            self._filter_metric = None

    def _check_place(self) -> None:
        """Check that nothing needs what verl's own reward loop does not do, if that is what runs.

        Raises:
            ConfigError: a function requires an argument that it does not pass, or an option has no effect there.
        """
        config = self.config
        # A configuration of verl in which this library is off: verl's own reward worker has made this manager.
        if verl_options(config, "actor_rollout_ref") is None or verl_options(config, "reward_model.use_reward_loop"):
            return
        on = "set reward_model.use_reward_loop=True"
        if self.needs_group:
            rollout, workers = verl_options(config, "actor_rollout_ref.rollout") or {}, "reward.num_workers"
            if (number := verl_options(config, workers) or 1) > 1:
                raise ConfigError(
                    f"{workers}={number}: {self.name} scores the rollouts of a prompt together, which verl's own "
                    f"reward loop distributes among its reward workers: set {workers}=1, or {on}"
                )
            if (size := verl_options(rollout, "val_kwargs.n")) not in (None, rollout.get("n")):
                raise ConfigError(
                    f"actor_rollout_ref.rollout.val_kwargs.n={size}: {self.name} scores the rollouts of a prompt "
                    "together, and in verl's own reward loop it is not known whether they belong to a validation: set "
                    f"it to actor_rollout_ref.rollout.n={rollout.get('n')}, or {on}"
                )
        lacking = {"validate"} & self.requires
        if not verl_options(config, "trainer.total_training_steps"):
            lacking |= {"training_progress"} & self.requires
        if lacking:
            fix = "set trainer.total_training_steps, " if "training_progress" in lacking else ""
            raise ConfigError(
                f"{self.name} requires {listing(lacking)}, which verl's own reward loop does not pass: {fix}{on}, or "
                "give the parameter a default"
            )

    @classmethod
    def read_options(cls, config: RewardLoopConfig | Mapping[str, Any] | None) -> RewardLoopConfig:
        """Return the options from ``config`` in any form that the constructor accepts.

        Raises:
            ConfigError: an option is invalid.
        """
        if isinstance(config, Mapping):
            if "reward_loop" in config:
                # Options that verl's command alone reads.
                of_command = ("check", "untested_verl")
                config = {key: value for key, value in (config["reward_loop"] or {}).items() if key not in of_command}
            # A whole configuration of verl, without `reward_loop`: its keys are of verl, and must not be reported.
            elif _VERL_GROUPS & set(config):
                config = None
        return parse(RewardLoopConfig, config, "reward_loop")

    async def run_single(self, data: Any) -> Reward:
        """Return the reward of one sample.

        Args:
            data: a `RewardSample`, or verl's ``DataProto``, of which only the last row is scored.

        Returns:
            ``{"reward_score": float, "reward_extra_info": dict}``, as in verl. The extra info contains what the
            function returned, and the keys that docs/outcomes.md describes.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
            TooManyFailuresError: the share of failed samples among the recent samples is too large.
        """
        sample = await self.to_sample(data)
        # Without an override the text is that of the policy already; it need not be decoded again.
        if self.records is not None and type(self).to_sample is not RewardLoopManagerBase.to_sample:
            sample = await self._with_response(data, sample)
        return self.to_reward(await self.score(sample))

    @property
    def post_processes(self) -> bool:
        """Whether the function is a class with ``post_process_scores``, which the manager calls for each group."""
        return isinstance(self.function, ScoringFunction) and self.function.has_post_process

    def collect_groups(self, call: Call, who: str) -> Groups:
        """Return a collector of groups, with the sizes and the timeout of the options."""
        size = self.options.group.size or verl_options(self.config, "actor_rollout_ref.rollout.n")
        return Groups(call, size, self.options.group.timeout, who)

    async def _with_response(self, data: Any, sample: RewardSample) -> RewardSample:
        """Return a sample with the text of the policy, for its record, if `to_sample` has changed it."""
        if isinstance(data, RewardSample):
            written = data.solution_str if data.response is None else data.response
        elif self._decoder is not None:
            responses = data.batch["responses"]
            row = last_row(data, responses)
            written = await self._decoder.decode(_response(responses, data.batch, row.get("response_len")))
        else:
            return sample
        return sample if written == sample.solution_str else replace(sample, response=written)

    @property
    def name(self) -> str:
        """The name of the function, or of the manager class without one; for messages and logs."""
        return self.function.name if self.function else type(self).__name__

    @property
    def requires(self) -> frozenset[str]:
        """The provided arguments that the user's functions declare without a default."""
        return frozenset().union(*(function.requires for function in self._functions()))

    @functools.cached_property
    def _takes(self) -> frozenset[str]:
        """The arguments that the user's functions receive, if the sample has them."""
        return frozenset().union(*(getattr(function, "takes", ()) for function in self._functions()))

    def _functions(self) -> Collection[Any]:
        """The scoring functions that the manager calls."""
        return () if self.function is None else (self.function,)

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in ``data``: a `RewardSample` unchanged, or the decoded last row of a ``DataProto``.

        The sample's ``error`` is set, so that it fails without a call, if the row lacks a ``data_source`` or a
        ``reward_model.ground_truth`` that the function requires, or if ``reward_model``, ``extra_info`` or
        ``tool_extra_fields`` is not a mapping.

        Raises:
            ConfigError: ``data`` is a ``DataProto``, and the manager has no tokenizer.
        """
        if isinstance(data, RewardSample):
            return data
        if self._decoder is None:
            raise ConfigError(f"{type(self).__name__} needs a tokenizer to decode the responses of a DataProto")
        responses = data.batch["responses"]
        row = last_row(data, responses)
        ids = _response(responses, data.batch, row.get("response_len"))
        solution = await self._decoder.decode(ids)
        turns, lengths = None, row.get(TURNS)
        # Only records have the turns, and they need a second decoding.
        if lengths is not None and len(lengths) > 1 and self.records is not None:
            turns = await self._turns(self._decoder, ids, lengths, solution)
        broken: list[str] = []
        # A new dict: the row belongs to the caller, and the rollouts of a prompt may share its `extra_info`.
        extra_info = {**_mapping(row, "extra_info", broken), **_mapping(row, "tool_extra_fields", broken)}
        extra_info["num_turns"] = row.get("__num_turns__")
        extra_info["rollout_reward_scores"] = row.get("reward_scores", {})
        reference = _mapping(row, "reward_model", broken)
        source, validate = str(row.get("data_source", "")), row.get(VALIDATE)
        validate = None if validate is None else bool(validate)
        error = None
        if broken:
            error = broken[0]
        elif "ground_truth" not in reference and "ground_truth" in self.requires:
            error = 'its row has no non_tensor_batch["reward_model"]["ground_truth"], which the function requires'
        elif "data_source" not in row and "data_source" in self.requires:
            error = 'its row has no non_tensor_batch["data_source"], which the function requires'
        return RewardSample(
            solution_str=solution,
            data_source=source,
            ground_truth=reference.get("ground_truth"),
            extra_info=extra_info,
            uid=uid_of(row),
            error=error,
            response_length=len(ids),
            group=row.get("uid"),
            group_size=row.get("group_size"),
            validate=validate,
            prompt=row.get("raw_prompt"),
            step=training_step_of(row, self._trainer_mode),
            generated_step=generated_step_of(row),
            turns=turns,
            turn_count=None if lengths is None else sum(length > 0 for length in lengths[::2]),
            response_ids=ids.tolist() if "response_ids" in self._takes else None,
            is_truncated=self._is_truncated(ids) if "is_truncated" in self._takes else None,
            training_progress=self._progress(row) if "training_progress" in self._takes else None,
        )

    def _is_truncated(self, ids: Any) -> bool | None:
        """Return whether a response has verl's largest length and no end token; ``None`` without that length."""
        if self._longest_response is None:
            return None
        end = getattr(self.tokenizer, "eos_token_id", None)
        ends = end if isinstance(end, list | tuple) else [end]
        return len(ids) >= self._longest_response and int(ids[-1]) not in ends

    def _progress(self, row: Mapping[str, Any]) -> float | None:
        """Return the share of the run that is done after the step of a row; ``None`` if its length is not known."""
        step = training_step_of(row, self._trainer_mode) or generated_step_of(row)
        return progress_of(step, row.get(TOTAL_STEPS) or self._total_steps)

    @staticmethod
    async def _turns(decoder: ResponseDecoder, ids: Any, lengths: Sequence[int], solution: str) -> list[int] | None:
        """Return the characters of each part of a response of several turns, whose lengths in tokens are given.

        ``None`` if the texts of the parts do not make up the response: some tokenizers decode a part in another way.
        """
        ends = list(itertools.accumulate(map(int, lengths)))
        parts = [await decoder.decode(ids[start:end]) for start, end in itertools.pairwise([0, *ends])]
        return [len(part) for part in parts] if "".join(parts) == solution else None

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample: track it as active, call `score_one`, check its result, apply the policies, record it."""
        # Not in the constructor: a process that only creates a manager gets no thread.
        if asyncio.get_running_loop() not in watched_loops:  # a sample needs no call of the watchdog
            watch()
        member = nullcontext(bool) if self.groups is None else self.groups.member(sample)
        with ActiveSample(sample, self.name, self.options.watchdog_s, self.records is not None) as active:
            with member as joined:
                result = check_result(sample, await self.score_one(sample))
                if self.post_processes and not joined():  # an override has not called the method of this class
                    result = check_result(sample, await self._post_process(sample, result))
            result = decide(result, self.options, active.seconds)
            if self.records is not None:
                self.records.write_sample(active, result, self.options.record.full)
        return result

    def score_one(self, sample: RewardSample) -> Awaitable[RewardResult]:
        """Call the function for one sample. Errors in the function become *failed* results, not exceptions.

        If its class has ``post_process_scores``, the result is that of this method, when all samples of the group are
        scored.
        """
        # The function's coroutine directly: no extra coroutine per sample in flight.
        return self._with_group(sample) if self.post_processes else self._call(sample)

    async def _with_group(self, sample: RewardSample) -> RewardResult:
        return await self._post_process(sample, check_result(sample, await self._call(sample)))

    async def _post_process(self, sample: RewardSample, result: RewardResult) -> RewardResult:
        """Return a result with its score after ``post_process_scores``, when the whole group is scored."""
        assert self.groups is not None
        if result.score is None:
            return result
        if (release := CALLER.get().release) is not None:
            release()
        try:
            score: float = await self.groups.join(result.score)
        except ScoringError as error:
            failure = error.about(sample)
            failure.__cause__ = error
            return failed_after(result, failure)
        return replace(result, score=score, extra_info={"raw_score": result.score, **result.extra_info})

    def score_many(self, samples: list[RewardSample]) -> Awaitable[list[RewardResult]]:
        """Call a batched function once for several samples; return one result per sample, in order."""
        return self._call(samples)

    def _call(self, what: Any) -> Awaitable[Any]:
        if self.function is None:
            raise ConfigError(f"{type(self).__name__} has no compute_score: pass one to its constructor")
        return self.function(
            what,
            reward_router_address=self.reward_router_address,
            reward_model_tokenizer=self.reward_model_tokenizer,
        )

    def to_reward(self, result: RewardResult) -> Reward:
        """Count the outcome of a result of `score`, and return its reward.

        A sample without a score also gets the key that verl filters groups by: verl stops if a sample lacks it.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
            TooManyFailuresError: the share of failed samples among the recent samples is too large.
        """
        self.limits.count(result)
        reward = result.to_reward()
        if result.score is None and self._filter_metric:
            # The function may have returned the value without a score: then that one stays.
            reward["reward_extra_info"].setdefault(self._filter_metric, reward["reward_score"])
        return reward

    def close(self) -> None:
        """End the worker processes of the functions, and close the limits that the manager has created.

        Blocks until the processes have ended and all records are written: do not call it on the event loop.
        """
        # Each part before what it uses: calls of the functions hold permits, and all write records.
        for function in self._functions():
            function.close()
        if self._owns_limits:
            self.limits.close()
        if self.records is not None:
            self.records.flush()

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """Return token-level rewards, shape (rows, response width): each score at its row's last response token.

        verl calls this on the class.

        Args:
            data: a ``DataProto`` with ``responses`` and ``attention_mask``.
            scores: one score per row.
        """
        import torch

        responses, mask = data.batch["responses"], data.batch["attention_mask"]
        lengths = mask[:, -responses.shape[-1] :].sum(dim=-1)
        rewards = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        values = torch.tensor(scores, dtype=torch.float32, device=responses.device)
        # `scatter_` refuses the index -1 of an empty response.
        return rewards.scatter_(1, (lengths - 1).clamp(min=0).unsqueeze(1), values.unsqueeze(1))


def scoring_function(
    manager: type, function: Any, options: RewardLoopConfig, *, limits: Limits | None = None, **more: Any
) -> Any:
    """Return the scoring function for a manager class: for single samples or for batches, by its ``function_type``.

    Args:
        manager: the manager class.
        function: the user's function, or a scoring function, which is returned unchanged.
        options: the options of the scoring function.
        limits: the limits that the scoring function shares. A scoring function passed as ``function`` keeps its own.
        more: further arguments of the scoring function: ``reward_kwargs`` and ``limit``.

    Raises:
        FunctionLoadError: the function requires an argument that the reward loop does not provide.
        ConfigError: ``more`` is given, but ``function`` is already a scoring function, so it would have no effect.
    """
    kind = getattr(manager, "function_type", ScoringFunction)
    if isinstance(function, kind):
        if ignored := sorted(name for name, value in more.items() if value and (name, value) != ("limit", DEFAULT)):
            raise ConfigError(
                f"{ignored[0]}={more[ignored[0]]!r} has no effect: {function.name} is a {kind.__name__} already; pass "
                f"{ignored[0]} to its constructor"
            )
        return function
    return kind(function, options=options, limits=limits, **more)


def _limits_of(function: Any, options: RewardLoopConfig) -> Limits | None:
    """Return the limits of a scoring function if their options equal ``options``, otherwise ``None``."""
    limits: Limits | None = getattr(function, "limits", None)
    if not isinstance(limits, Limits):
        return None
    same = all(getattr(limits.options, name) == getattr(options, name) for name in _SHARED)
    return limits if same else None


def open_records(options: RewardLoopConfig) -> Records | None:
    """Return this process's writer for ``log_dir``; ``None`` if it is not set."""
    return records(options.log_dir, options.record.max_bytes) if options.log_dir else None


def verl_options(config: Any, path: str) -> Any:
    """Return the value at a dotted path of verl's configuration, or ``None`` if there is none."""
    for part in path.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(part)
    return config


def last_row(data: Any, responses: Any) -> dict[str, Any]:
    """Return the non-tensor fields of the last row of a ``DataProto`` with these ``responses``.

    A single item, whose responses are one-dimensional, is that row.
    """
    if responses.ndim == 1:
        return dict(data.non_tensor_batch)
    # As in verl: the reward of a rollout with several sequences is that of its last one.
    return {name: column[-1] for name, column in data.non_tensor_batch.items()}


def _mapping(row: Mapping[str, Any], name: str, broken: list[str]) -> Mapping[str, Any]:
    """Return a field of a row that must be a mapping, or ``{}`` if it is missing.

    If the field is not a mapping, append an error message to ``broken`` and return ``{}``.
    """
    value = row.get(name)
    if value is not None and not isinstance(value, Mapping):
        broken.append(f'in its row, non_tensor_batch["{name}"] must be a mapping; got {shorten(value)}')
        value = None
    return value or {}


def _response(responses: Any, batch: Any, length: int | None) -> Any:
    """Return the token ids of the last row's response as an array; tokenizers read arrays faster than tensors.

    Args:
        responses: token ids of shape (rows, response width), or (response width,) for a single item.
        batch: contains ``attention_mask`` of shape (rows, total width), or (total width,).
        length: the number of response tokens; by default the sum of the attention mask over the response. That sum is
            wrong if outputs with prompts of different lengths are padded into one batch, as verl's agent loop does.
    """
    width = responses.shape[-1]
    if length is None:
        mask = batch["attention_mask"]
        mask = mask[-1] if mask.ndim == 2 else mask
        # `mask[-0:]` would be the whole mask, with the prompt.
        length = int(mask[-width:].sum()) if width else 0
    ids = responses.cpu().numpy() if hasattr(responses, "cpu") else responses
    if ids.ndim == 2:
        ids = ids[-1]
    return ids if length == width else ids[: int(length)]


TRAINER_MODE = "trainer.v1.trainer_mode"
"""The option with the mode of verl's trainer."""


def generated_step_of(row: Mapping[str, Any]) -> int | None:
    """Return the training step in which the prompt of a row of verl's batch was submitted, or ``None``."""
    step = row.get("global_steps")
    return None if step is None else int(step)


def training_step_of(row: Mapping[str, Any], mode: str | None, *, validate: bool = False) -> int | None:
    """Return the training step that trains on a row of verl's batch, or that validates it; ``None`` if not known yet.

    Args:
        row: the row.
        mode: the mode of verl's trainer. In ``sync``, a step trains on the rollouts whose prompts it submits.
        validate: whether the row belongs to validation, also without the column `VALIDATE`.
    """
    if validate or row.get(VALIDATE) or mode in (None, "sync"):
        return generated_step_of(row)
    step = row.get(TRAINING_STEP)
    return None if step is None else int(step)


def progress_of(step: int | None, total: int | None) -> float | None:
    """Return the share of ``total`` training steps that is done after ``step``; ``None`` if one is not known."""
    return min(1.0, step / total) if step is not None and total else None


def uid_of(row: Mapping[str, Any]) -> str | None:
    """Return the uid of a row of verl's batch (with its session id, if any), for messages and logs."""
    name = [row.get("uid", row.get("index")), row.get("session_id")]
    return "_".join([str(part) for part in name if part is not None]) or None
