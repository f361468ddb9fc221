"""verl's rows, keys and configuration, as managers see them: `VerlSamples` makes a `RewardSample` of a row.

Managers load this module by its name when they get something of verl, also in verl's own reward loop, which creates
managers itself. It imports verl and torch only inside functions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_loop._util.daemon_threads import DaemonThreads
from reward_loop._util.text import listing, shorten
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.types import Reward, RewardResult, RewardSample, missing, progress_of

VALIDATE = "__validate__"
"""The column of verl's batch that marks the rows of a validation."""

TURNS = "__turns__"
"""The column with the tokens of each part of a response, by the policy and by the environment in turn."""

TRAINING_STEP = "__training_step__"
"""The column with the training step that trains on the row, in the mode ``reward_pipeline``."""

TOTAL_STEPS = "__total_training_steps__"
"""The column with the number of training steps of the run."""

TRAINER_MODE = "trainer.v1.trainer_mode"
"""The option with the mode of verl's trainer."""

# In TransferQueue, the key of a trajectory is `{uid}_{session}_{index}`: a prompt has the uid, a session is one of its
# rollouts, and has one or several outputs, each with an index.
# The tags of prompts and trajectories are the only state of rewards: agent loop workers write them, the trainer reads
# them. State in a worker would be lost with the worker, and could contradict the tags after a resume.

GENERATED = "generated"
"""Tag of one trajectory of a prompt: ``True`` if no session of the prompt is being generated any more. Not a status of
the prompt: verl's replay buffer raises an error for a status that it does not know."""

JUDGED = "judged"
"""Tag of a trajectory whose reward is written: ``True``. Only messages and the stall timeout read it, since it can get
lost: TransferQueue reads the tags of a row before each write of a field, and writes these tags back after it. Here, the
trainer writes log-probabilities while the reward arrives."""

JUDGING_TIMES = "judging_times"
"""Key of a trajectory's ``extra_fields``: when judging began, and when the reward had arrived."""

FAILURE = "error"
"""Tag of a prompt: the latest session that failed without a trajectory, and its error; ``None`` after a resume."""

_GROUPS = frozenset({"actor_rollout_ref", "trainer", "reward", "reward_model"})

_OF_COMMAND = ("check", "untested_verl")
"""Options of ``reward_loop`` that verl's command alone reads."""


def uid_of(key: str) -> str:
    """Return the uid of the prompt."""
    return key.rsplit("_", 2)[0]


def session_of(key: str) -> tuple[str, int]:
    """Return the session, as ``{uid}_{session}``, and the index."""
    session, index = key.rsplit("_", 1)
    return session, int(index)


def final_outputs(keys: Iterable[str]) -> list[str]:
    """Return the key of each session's last output, so that a sample with several outputs counts once."""
    last: dict[str, tuple[int, str]] = {}
    for key in keys:
        session, index = session_of(key)
        if session not in last or last[session][0] < index:
            last[session] = (index, key)
    return [key for _, key in last.values()]


def verl_options(config: Any, path: str) -> Any:
    """Return the value at a dotted path of verl's configuration, or ``None`` if there is none."""
    for part in path.split("."):
        if not isinstance(config, Mapping):
            return None
        config = config.get(part)
    return config


def options_of(config: Mapping[str, Any]) -> RewardLoopConfig:
    """Return the options of the reward loop from a mapping of them, or from verl's whole configuration.

    Raises:
        ConfigError: an option is invalid.
    """
    given: Any = config
    if "reward_loop" in config:
        given = {name: value for name, value in (config["reward_loop"] or {}).items() if name not in _OF_COMMAND}
    # A whole configuration of verl, without `reward_loop`: its keys are of verl, and must not be reported.
    elif _GROUPS & set(config):
        given = None
    return parse(RewardLoopConfig, given, "reward_loop")


class VerlSamples:
    """Converts for a manager what it gets from verl.

    Args:
        manager: a manager, with its options and its function.
    """

    options_of = staticmethod(options_of)

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._decoder = None
        if manager.tokenizer is not None:
            self._decoder = ResponseDecoder(manager.tokenizer, skip_special_tokens=manager.options.skip_special_tokens)
        # Read once: OmegaConf needs more time for it than a whole sample takes otherwise.
        self.option = option = functools.partial(verl_options, manager.config)
        """Returns the value at a dotted path of verl's configuration, or ``None`` if there is none."""
        self.group_size: int | None = option("actor_rollout_ref.rollout.n")
        """The number of rollouts of a prompt."""
        self._mode = option(TRAINER_MODE)
        self._longest_response = option("actor_rollout_ref.rollout.response_length")
        self._total_steps = option("trainer.total_training_steps")
        filters = option("algorithm.filter_groups") or {}
        metric = filters.get("metric") if filters.get("enable") else None
        # Not `reward` in the extra info: verl's validation appends it to its own column of that name, and then fails.
        self._filter_metric = None if metric == "reward" else metric
        """The key of the extra info by which verl filters groups; ``None`` also if it filters by the reward itself."""

    def check(self) -> None:
        """Check that the manager needs nothing that verl's own reward loop does not do, if that is what runs.

        Raises:
            ConfigError: a function requires an argument that it does not pass, or an option has no effect there.
        """
        manager, config = self._manager, self._manager.config
        # A configuration of verl in which this library is off: verl's own reward worker has made this manager.
        if verl_options(config, "actor_rollout_ref") is None or verl_options(config, "reward_model.use_reward_loop"):
            return
        on = "set reward_model.use_reward_loop=True"
        if manager.needs_group:
            rollout, workers = verl_options(config, "actor_rollout_ref.rollout") or {}, "reward.num_workers"
            if (number := verl_options(config, workers) or 1) > 1:
                raise ConfigError(
                    f"{workers}={number}: {manager.name} scores the rollouts of a prompt together, which verl's own "
                    f"reward loop distributes among its reward workers: set {workers}=1, or {on}"
                )
            if (size := verl_options(rollout, "val_kwargs.n")) not in (None, rollout.get("n")):
                raise ConfigError(
                    f"actor_rollout_ref.rollout.val_kwargs.n={size}: {manager.name} scores the rollouts of a prompt "
                    "together, and in verl's own reward loop it is not known whether they belong to a validation: set "
                    f"it to actor_rollout_ref.rollout.n={rollout.get('n')}, or {on}"
                )
        lacking = {"validate"} & manager.requires
        if not self._total_steps:
            lacking |= {"training_progress"} & manager.requires
        if lacking:
            fix = "set trainer.total_training_steps, " if "training_progress" in lacking else ""
            raise ConfigError(
                f"{manager.name} requires {listing(lacking)}, which verl's own reward loop does not pass: {fix}{on}, "
                "or give the parameter a default"
            )

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in the last row of a ``DataProto``.

        Its ``error`` is set, so that it fails without a call, if the row has no ``data_source`` or
        ``reward_model.ground_truth`` and the function requires it, or if ``reward_model``, ``extra_info`` or
        ``tool_extra_fields`` is not a mapping.

        Raises:
            ConfigError: the manager has no tokenizer.
        """
        if self._decoder is None:
            raise ConfigError(
                f"{type(self._manager).__name__} needs a tokenizer to decode the responses of a DataProto"
            )
        function, records = self._manager.function, self._manager.records
        takes = function.takes if function is not None else ()
        tensors = dict(data.batch.items())  # a key of a TensorDict takes three times as long
        responses = tensors["responses"]
        row = last_row(data, responses)
        ids = _response(responses, tensors, row.get("response_len"))
        solution = await self._decoder.decode(ids)
        turns, lengths = None, row.get(TURNS)
        # Only records have the turns, and they need a second decoding.
        if lengths is not None and len(lengths) > 1 and records is not None:
            turns = await self._turns(ids, lengths, solution)
        broken: list[str] = []
        # A new dict: the row belongs to the caller, and the rollouts of a prompt may share its `extra_info`.
        extra_info = {**_mapping(row, "extra_info", broken), **_mapping(row, "tool_extra_fields", broken)}
        extra_info["num_turns"] = row.get("__num_turns__")
        extra_info["rollout_reward_scores"] = row.get("reward_scores", {})
        reference = _mapping(row, "reward_model", broken).get("ground_truth")
        reference = None if missing(reference) else reference
        common = _common(row, self._mode)
        requires = self._manager.requires
        lacks = 'its row has no non_tensor_batch["{}"], which the function requires'
        if "ground_truth" in requires and reference is None:
            broken.append(lacks.format('reward_model"]["ground_truth'))
        if "data_source" in requires and not common["data_source"] and missing(row.get("data_source")):
            broken.append(lacks.format("data_source"))
        return RewardSample(
            solution,
            ground_truth=reference,
            extra_info=extra_info,
            error=broken[0] if broken else None,
            response_length=len(ids),
            turns=turns,
            turn_count=None if lengths is None else sum(length > 0 for length in lengths[::2]),
            response=solution if self._manager.changes_samples else None,
            response_ids=ids.tolist() if "response_ids" in takes else None,
            is_truncated=self._is_truncated(ids) if "is_truncated" in takes else None,
            training_progress=self._progress(row) if "training_progress" in takes else None,
            **common,
        )

    def undecoded(self, data: Any) -> dict[str, Any]:
        """Return the fields of the sample in a ``DataProto`` that need no tokenizer and no function."""
        return _common(last_row(data, data.batch["responses"]), self._mode)

    def to_reward(self, result: RewardResult) -> Reward:
        """Return verl's dict of a result.

        A sample without a score also gets the key that verl filters groups by: verl stops if a sample lacks it.
        """
        reward = result.to_reward()
        if result.score is None and self._filter_metric:
            # The function may have returned the value without a score: then that one stays.
            reward["reward_extra_info"].setdefault(self._filter_metric, reward["reward_score"])
        return reward

    @staticmethod
    def assemble_rm_scores(data: Any, scores: list[float]) -> Any:
        """Return token-level rewards, shape (rows, response width): each score at its row's last response token.

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

    def _is_truncated(self, ids: Any) -> bool | None:
        """Return whether a response has verl's largest length and no end token; ``None`` without that length."""
        if self._longest_response is None:
            return None
        end = getattr(self._manager.tokenizer, "eos_token_id", None)
        ends = end if isinstance(end, list | tuple) else [end]
        return len(ids) >= self._longest_response and int(ids[-1]) not in ends

    def _progress(self, row: Mapping[str, Any]) -> float | None:
        """Return the share of the run that is done after the step of a row; ``None`` if its length is not known."""
        step = training_step_of(row, self._mode) or generated_step_of(row)
        return progress_of(step, row.get(TOTAL_STEPS) or self._total_steps)

    async def _turns(self, ids: Any, lengths: Sequence[int], solution: str) -> list[int] | None:
        """Return the characters of each part of a response of several turns, whose lengths in tokens are given.

        ``None`` if the texts of the parts do not make up the response: some tokenizers decode a part in another way.
        """
        assert self._decoder is not None
        ends = list(itertools.accumulate(map(int, lengths)))
        parts = [await self._decoder.decode(ids[start:end]) for start, end in itertools.pairwise([0, *ends])]
        return [len(part) for part in parts] if "".join(parts) == solution else None


def _common(row: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    source, validate = row.get("data_source"), row.get(VALIDATE)
    return {
        "data_source": "" if missing(source) else str(source),
        "uid": row_name(row),
        "group": row.get("uid"),
        "group_size": row.get("group_size"),
        # `None` is not `False`: verl's own reward loop does not know it.
        "validate": None if validate is None else bool(validate),
        "prompt": row.get("raw_prompt"),
        "step": training_step_of(row, mode),
        "generated_step": generated_step_of(row),
    }


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
    if value is None:
        return {}
    if type(value) is dict or isinstance(value, Mapping):
        return value
    if not missing(value):
        broken.append(f'in its row, non_tensor_batch["{name}"] must be a mapping; got {shorten(value)}')
    return {}


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
    is_of_generation = validate or row.get(VALIDATE) or mode in (None, "sync")
    step = row.get("global_steps" if is_of_generation else TRAINING_STEP)
    return None if step is None else int(step)


def row_name(row: Mapping[str, Any]) -> str | None:
    """Return the name of a row of verl's batch, with its session id, if any: a sample's ``uid``."""
    name, session = row.get("uid", row.get("index")), row.get("session_id")
    if session is None:
        return None if name is None else str(name) or None
    return str(session) if name is None else f"{name}_{session}"


_SHORT_RESPONSE = 1024
"""Tokens up to which a fast tokenizer decodes on the event loop: about 0.1 ms, less than the handover to a thread."""

_THREADS = 2
"""Decoding holds the GIL for much of its time, so more threads do not help."""


class ResponseDecoder:
    """Decodes responses as ``tokenizer.decode`` does, by default without special tokens.

    In a byte-level tokenizer, which most models have, each token always represents the same bytes. For these, a lookup
    table takes 2 us for a response of 93 tokens, and ``tokenizer.decode`` 34 us, of about 60 us for the whole sample.

    Args:
        tokenizer: a transformers tokenizer, or another object with the same ``decode``.
        skip_special_tokens: as in ``tokenizer.decode``.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._bytes = _bytes_of_tokens(tokenizer, skip_special_tokens)
        self._is_fast = getattr(tokenizer, "is_fast", False)
        self._threads = DaemonThreads(_THREADS)

    async def decode(self, ids: Any) -> str:
        """Return the text of a response.

        Args:
            ids: the token ids, 0 or larger, a one-dimensional array. Ids above those of the vocabulary give no text if
                the lookup table is used.
        """
        if self._bytes is not None:
            return _join(self._bytes, ids)
        if self._is_fast and len(ids) <= _SHORT_RESPONSE:
            text: str = self._decode(ids)
            return text
        return await self._threads.run(functools.partial(self._decode, ids))


def _bytes_of_tokens(tokenizer: Any, skips: bool) -> Any:
    """Return an array of the bytes of each token id; ``None`` if they do not reproduce the tokenizer's decoding."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    # By name: the package `tokenizers` is imported only if the user has a tokenizer of it.
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    vocabulary = backend.get_vocab()
    import numpy as np  # which transformers needs anyway: other tokenizers have no such backend

    # One more: all ids above the vocabulary stand for the last item. Models have more rows than tokens.
    table = np.full(2 + max(vocabulary.values(), default=-1), b"", dtype=object)
    for token, id in vocabulary.items():
        table[id] = _bytes_of(token) if token not in special else b"" if skips else token.encode()
    # Compare on the whole vocabulary: the tokenizer's class may do more than its backend.
    ids = sorted(vocabulary.values())
    text = _join(table, np.array(ids, dtype=np.int64))
    return table if text == tokenizer.decode(ids, skip_special_tokens=skips) else None


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # an added token: its text is literal
        return token.encode()


def _join(table: Any, ids: Any) -> str:
    # As a list: `join` takes twice as long for an array.
    return b"".join(table.take(ids, mode="clip").tolist()).decode(errors="replace")


def _alphabet() -> dict[str, int]:
    """Return the mapping character -> byte of byte-level tokenizers, as in OpenAI's GPT-2 (``bytes_to_unicode``).

    A visible character represents its own code point; other bytes are represented by characters from U+0100 on.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()
