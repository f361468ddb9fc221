"""Reward functions in the forms that other trainers call: recognised by their parameters, and called as there.

`form_of` is the one place that recognises a form. A `Published` function is called with rows, which are mappings with
the names of verl's arguments (``solution_str``), and returns what a function of this library returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import InvalidScoreError

Row = Mapping[str, Any]

BY_NAME = (
    "prompt",
    "response_ids",
    "response_length",
    "is_truncated",
    "global_steps",
    "training_progress",
    "validate",
)
"""The arguments that a function receives only if it declares them: not every place has them."""

LISTS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
    "prompts": "prompt",
    "response_lengths": "response_length",
    **{name: name for name in BY_NAME if name not in ("prompt", "response_length")},
}
"""The arguments of functions that score several samples -> the argument for one sample that each list contains."""

REFERENCES = frozenset(
    {"ground_truth", "ground_truths", "solution", "solutions", "answer", "answers", "label", "labels"}
    | {"target", "targets", "reference", "references", "gold"}
)
"""The names by which functions call the reference answer."""

_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Form:
    """A form of reward functions."""

    label: str
    """For messages: ``a TRL function``."""
    marks: frozenset[str]
    """The parameters by which the form is recognised."""
    takes_lists: bool
    """Whether its arguments and its result are lists, with an item for each sample."""
    values: Mapping[str, Callable[[Row], Any]]
    """Parameter -> its value for one sample."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the argument of verl's names that its value is made of, if a sample may lack it."""
    shared: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)
    """Parameter -> its one value for all samples of a call, made from the first."""
    item: Callable[[Any], Any] = lambda item: item
    """Makes a value that `normalise` reads from the result for one sample."""
    items: Callable[[Any], Any] = lambda returned: returned
    """Makes a sequence of results from what a function of lists returns."""


def form_of(missing: Collection[str], *, of_lists: bool) -> str | None:
    """Return the name of the form of a function, or ``None`` if it is not known.

    Args:
        missing: the parameters without a default that the reward loop does not provide by name.
        of_lists: whether the function is called with several samples; it must then be of a form that takes lists.
    """
    if "prompt_ids" in missing:  # AReaL's `completions` is the text of one sample
        return None
    for name, form in _FORMS.items():
        if form.marks.intersection(missing) and (form.takes_lists or not of_lists):
            return name
    return None


class Published:
    """Calls a function in its own form.

    Args:
        func: the function.
        form: the name of its form.
        parameters: its parameters, and whether they have a default.
        takes_any: whether it takes ``**kwargs``.
        own: the arguments that are configured, or that are the same for all samples.
        of_lists: whether a call scores several samples, and returns a list.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        form: str,
        parameters: Mapping[str, bool],
        takes_any: bool,
        own: Collection[str],
        *,
        of_lists: bool,
    ) -> None:
        self.func = func
        self._form = form
        needs = self._needs()
        known = {*self._values(), *self.form.shared, *(_LOGS if self.form.shared else ())}
        named = {name: has_default for name, has_default in parameters.items() if name not in own}
        self._named = [name for name in named if name in known]
        self.columns = frozenset(name for name, has_default in named.items() if name not in known and not has_default)
        """The parameters without a default that are columns of the data set."""
        self._optional = [name for name, has_default in named.items() if name not in known and has_default]
        self._takes_any = takes_any
        self._of_lists = of_lists
        self._chat = _takes_messages(func)
        required = {name for name in self._named if not named[name]}
        truths = REFERENCES & (self.columns | set(self._optional))
        # Of several such parameters, each is a column of its own if the data set has it.
        self._truth_first = len(truths) == 1
        self.reads_truth = bool(required & _OF_THE_TRUTH) or (self._truth_first and bool(truths & self.columns))
        """Whether a parameter without a default is the reference answer."""
        self.requires = frozenset(
            {"solution_str", *(needs[name] for name in required & needs.keys())}
            | ({"ground_truth"} if required & _OF_THE_TRUTH else set())
        )
        """The arguments by verl's names that a sample must have."""
        with_truth = takes_any or truths or _OF_THE_TRUTH.intersection(self._named)
        self.passes = frozenset(
            {"data_source", "solution_str", "extra_info", *self.requires}
            | ({"ground_truth"} if with_truth else set())
            | {_READS[name] for name in self._named if name in _READS}
            | {needs[name] for name in self._named if name in needs}
        )
        """The arguments by verl's names that a row has, if the sample has them."""

    @property
    def form(self) -> Form:
        """The form of the function. Looked up by its name: worker processes get this object pickled."""
        return _FORMS[self._form]

    def _values(self) -> dict[str, Callable[[Row], Any]]:
        return {**{name: _field(name) for name in (*BY_NAME, "extra_info")}, **self.form.values}

    def _needs(self) -> dict[str, str]:
        return {**{name: name for name in BY_NAME}, **self.form.needs}

    def missing(self, row: Row) -> str | None:
        """Return the first column that a sample lacks, or ``None``."""
        return next((name for name in sorted(self.columns) if self._column(row, name) is _MISSING), None)

    def __call__(self, rows: Sequence[Row], **own: Any) -> Any:
        """Return what the function returns for the rows: a list, or for functions of one sample the only item.

        Async functions return an awaitable.
        """
        logs: list[dict[str, Any]] = [{} for _ in rows]
        returned = self.func(**self._arguments(rows, logs), **own)
        return self._later(returned, logs) if inspect.isawaitable(returned) else self._read(returned, logs)

    async def _later(self, returned: Awaitable[Any], logs: list[dict[str, Any]]) -> Any:
        return self._read(await returned, logs)

    def _arguments(self, rows: Sequence[Row], logs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [{**row, _CHAT: self._chat} for row in rows]
        values, named = self._values(), self._named
        arguments: dict[str, Any] = {name: [values[name](row) for row in rows] for name in named if name in values}
        for name in self.columns:
            arguments[name] = [self._column(row, name) for row in rows]
        optional = list(self._optional)
        if self._takes_any:
            keys = dict.fromkeys(key for row in rows for key in row["extra_info"] if isinstance(key, str))
            optional += [name for name in (*keys, "ground_truth", "data_source") if name not in {*arguments, *optional}]
        for name in optional:
            column = [self._column(row, name) for row in rows]
            # Otherwise the function's own default applies.
            if any(value is not _MISSING for value in column):
                arguments[name] = [None if value is _MISSING else value for value in column]
        if not self.form.takes_lists:
            return {name: column[0] for name, column in arguments.items()}
        arguments |= {name: self.form.shared[name](rows[0]) for name in named if name in self.form.shared}
        return arguments | {name: _LOGS[name](logs) for name in named if name in _LOGS}

    def _column(self, row: Row, name: str) -> Any:
        """Return the value of a column: a key of ``extra_info``, or the ground truth if the name means that."""
        truth = row.get("ground_truth") if name in REFERENCES else None
        if truth is not None and (self._truth_first or name == "ground_truth"):
            return truth
        if name in row["extra_info"]:
            return row["extra_info"][name]
        if name == "data_source":
            return row["data_source"]
        return _MISSING if truth is None else truth

    def _read(self, returned: Any, logs: list[dict[str, Any]]) -> Any:
        if not self.form.takes_lists:
            return self.form.item(returned)
        items = self.form.items(returned)
        items = items.tolist() if hasattr(items, "tolist") else items
        if not isinstance(items, Sequence) or isinstance(items, str | bytes) or len(items) != len(logs):
            raise InvalidScoreError(
                f"must return a list of {len(logs)} scores, one for each sample, as {self.form.label} does; "
                f"got {shorten(returned)}"
            )
        read = [self._item(item, log) for item, log in zip(items, logs, strict=True)]
        if self._of_lists:
            return read
        if isinstance(read[0], BaseException):
            raise read[0]
        return read[0]

    def _item(self, item: Any, log: dict[str, Any]) -> Any:
        if isinstance(item, BaseException):
            return item
        item = self.form.item(_scalar(item))
        if not log or item is None:
            return item
        return {**log, **(item if isinstance(item, Mapping) else {"score": item})}


def _scalar(item: Any) -> Any:
    """Return the number in an array or tensor with one element."""
    return item.item() if getattr(item, "shape", None) in ((), (1,)) and hasattr(item, "item") else item


_CHAT = "chat"
"""The key of a row: whether the function takes completions as messages; ``None`` if it depends on the prompt."""


def _takes_messages(function: Callable[..., Any]) -> bool | None:
    """Return whether the annotation of the completions says messages or texts; ``None`` if it says neither."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    for name in ("completions", "completion"):
        if name in parameters and parameters[name].annotation is not inspect.Parameter.empty:
            # As text, which annotations are with `from __future__ import annotations`.
            annotation = str(parameters[name].annotation).lower()
            if "dict" in annotation or "message" in annotation:
                return True
            return False if "str" in annotation else None
    return None


def _completion(row: Row) -> Any:
    """Return a completion as in TRL: messages if the prompt is a conversation, otherwise text."""
    chat = row[_CHAT] if row[_CHAT] is not None else _is_conversation(row.get("prompt"))
    if not chat:
        return row["solution_str"]
    whole = row["extra_info"].get("completion")
    return whole if _is_conversation(whole) else [{"role": "assistant", "content": row["solution_str"]}]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _prompt_text(row: Row) -> str:
    """Return the prompt as text; of a conversation, the contents of its messages, one a line."""
    prompt = row.get("prompt") or ""
    return "\n".join(map(content_of, prompt)) if _is_conversation(prompt) else str(prompt)


def _easyr1_input(row: Row) -> dict[str, Any]:
    length = row.get("response_length")
    given = {} if length is None else {"response_length": length}
    return {
        **row["extra_info"],
        "response": row["solution_str"],
        "ground_truth": row.get("ground_truth"),
        "data_source": row["data_source"],
        **given,
    }


def _easyr1_score(item: Any) -> Any:
    return {"score": item["overall"], **item} if isinstance(item, Mapping) and "overall" in item else item


def _task(row: Row) -> dict[str, Any]:
    """Return the dict with the fields of a task that rllm and verifiers pass."""
    question = _prompt_text(row)
    data = {"question": question, "problem": question} if question else {}
    return {**data, **row["extra_info"], "data_source": row["data_source"], "ground_truth": row.get("ground_truth")}


def _rllm_score(returned: Any) -> Any:
    if not hasattr(returned, "reward"):
        return returned
    metadata = getattr(returned, "metadata", None) or {}
    is_correct = getattr(returned, "is_correct", None)
    return {**metadata, **({} if is_correct is None else {"is_correct": is_correct}), "score": returned.reward}


def _openrlhf_items(returned: Any) -> Any:
    """Return an item for each sample: its reward, and the values of ``extra_logs`` that are lists."""
    if not isinstance(returned, Mapping) or "rewards" not in returned:
        return returned
    rewards = _list(returned["rewards"])
    logs = {name: _list(values) for name, values in (returned.get("extra_logs") or {}).items()}
    logs = {name: values for name, values in logs.items() if isinstance(values, list) and len(values) == len(rewards)}
    return [
        {**{name: _scalar(values[i]) for name, values in logs.items()}, "score": _scalar(reward)}
        for i, reward in enumerate(rewards)
    ]


def _list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else list(values) if isinstance(values, tuple) else values


def _field(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _state(row: Row) -> dict[str, Any]:
    return {
        "prompt": row.get("prompt"),
        "completion": _completion(row),
        "answer": row.get("ground_truth"),
        "info": dict(row["extra_info"]),
        "task": row["data_source"],
    }


def _trainer_state(row: Row) -> SimpleNamespace:
    """Return the fields of TRL's trainer state that are known: its ``global_step`` counts the steps that have ended."""
    step, progress = row["global_steps"], row.get("training_progress")
    return SimpleNamespace(global_step=step - 1, max_steps=-1 if not progress else round(step / progress))


def _log_extra(logs: list[dict[str, Any]]) -> Callable[[str, Sequence[Any]], None]:
    """Return TRL's function that logs a value for each completion."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        for log, value in zip(logs, values, strict=True):
            log[column] = value

    return log_extra


def _log_metric(logs: list[dict[str, Any]]) -> Callable[[str, float], None]:
    """Return TRL's function that logs a number for the whole call."""

    def log_metric(name: str, value: float) -> None:
        for log in logs:
            log[name] = value

    return log_metric


_LOGS = {"log_extra": _log_extra, "log_metric": _log_metric}
"""The functions that TRL passes for logging. Here, what they log becomes a part of the results."""

_TEXT = _field("solution_str")
_TRUTH = _field("ground_truth")
_TEXTS = ("predict_str", "predict", "response", "response_str", "completion_str", "output")
_FORMS: dict[str, Form] = {
    "verl": Form(
        "a function of lists, as verl's reward manager `batch` calls it",
        frozenset({"data_sources", "solution_strs", "extra_infos"}),
        True,
        {plural: _field(name) for plural, name in LISTS.items()},
        needs={plural: name for plural, name in LISTS.items() if name in BY_NAME},
    ),
    "openrlhf": Form(
        "an OpenRLHF function",
        frozenset({"queries"}),
        True,
        {
            "queries": lambda row: _prompt_text(row) + row["solution_str"],
            "prompts": _prompt_text,
            "labels": _TRUTH,
        },
        needs={"queries": "prompt", "prompts": "prompt"},
        items=_openrlhf_items,
    ),
    "easyr1": Form(
        "an EasyR1 function", frozenset({"reward_inputs"}), True, {"reward_inputs": _easyr1_input}, item=_easyr1_score
    ),
    "easyr1 of one": Form(
        "an EasyR1 function of one response",
        frozenset({"reward_input"}),
        False,
        {"reward_input": _easyr1_input},
        item=_easyr1_score,
    ),
    "predicts": Form(
        "a function of EasyR1's older form",
        frozenset({"predicts"}),
        True,
        {"predicts": _TEXT, "ground_truths": _TRUTH},
        item=_easyr1_score,
    ),
    "trl": Form(
        "a TRL function",
        frozenset({"completions", "completion_ids"}),
        True,
        {"completions": _completion, "prompts": _field("prompt"), "completion_ids": _field("response_ids")},
        needs={"prompts": "prompt", "completion_ids": "response_ids", "trainer_state": "global_steps"},
        shared={"trainer_state": _trainer_state},
    ),
    "rllm": Form(
        "an rllm function",
        frozenset({"task_info", "action"}),
        False,
        {"task_info": _task, "action": _TEXT},
        item=_rllm_score,
    ),
    "verifiers": Form(
        "a verifiers function",
        frozenset({"completion"}),
        False,
        {
            "completion": _completion,
            "prompt": _field("prompt"),
            "info": _field("extra_info"),
            "task": _field("data_source"),
            "state": _state,
        },
        needs={"prompt": "prompt"},
    ),
    "text": Form(
        "a function of the text of a response",
        frozenset(_TEXTS),
        False,
        dict.fromkeys(_TEXTS, _TEXT),
        item=_easyr1_score,
    ),
}
"""The forms by name, in the order in which they are tried."""

_OF_THE_TRUTH = frozenset({"ground_truths", "labels", "reward_inputs", "reward_input", "task_info"})
"""Parameters of forms that are the reference answer, or contain it."""

_READS = {
    **dict.fromkeys(("completions", "completion", "task_info", "state"), "prompt"),
    **dict.fromkeys(("reward_inputs", "reward_input"), "response_length"),
    "trainer_state": "training_progress",
}
"""Parameter -> an argument of verl's names that its value contains, if the sample has it."""
