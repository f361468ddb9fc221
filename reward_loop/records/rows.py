"""The rows of records; docs/records.md describes their fields."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from types import NoneType
from typing import Any, Literal

from reward_loop._util.text import cut
from reward_loop.errors import BudgetSpentError
from reward_loop.records.active import ActiveSample
from reward_loop.types import RewardResult, RewardSample

VERSION = 1
"""The version of the format. A reader rejects higher versions."""

SAMPLE, ADVANTAGE, RESUMED = "sample", "advantage", "resumed"
"""The kinds of rows. An advantage adds to an earlier row of the same ``uid``; `resumed_row` takes earlier rows back."""

PHASE, ROLLOUT, OVERLAP = "phase", "rollout", "overlap"
"""The kinds of events of a trainer: they are in files of their own."""

WaitsFor = Literal["rollouts", "rewards"]
"""What the trainer waits for in a phase: for responses, or for responses and their rewards."""

TEXT_FIELDS = frozenset({"messages", "request", "response", "reply"})
"""The large fields of an exchange. They are in the files of exchanges, the others in the row of the sample, too."""

MAX_TEXT, MAX_ITEMS = 256, 64
"""The largest numbers of characters and of items of a component in a summary row."""

_SCALARS = (int, float, NoneType)

UNFINISHED = "no answer when the sample ended"


def new_row(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a row of a kind, written now."""
    # The kind first: readers search for it in the first 64 bytes of a line.
    return {"version": VERSION, "kind": kind, "time": time.time(), **fields}


def sample_row(active: ActiveSample, result: RewardResult, large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary row of a sample.

    Args:
        active: the sample, with what it measured.
        result: its result, with the reward.
        large: its `large_components`; their texts are cut, their lists become ``None``.
    """
    # Kind and steps come before what the function returned: readers search only the first bytes of a line for them.
    sample = active.sample
    return {
        "version": VERSION,
        "kind": SAMPLE,
        "time": time.time(),
        "uid": sample.uid,
        "group": sample.group,
        "step": sample.step,
        "generated_step": sample.generated_step,
        "validate": bool(sample.validate),
        "data_source": sample.data_source,
        "function": active.function,
        "batch": None if active.batch is None else active.batch.id,
        "outcome": str(result.outcome),
        "score": result.score,
        "reward": result.reward,
        "masked": result.masked,
        "error": result.error,
        "cause": result.cause,
        "components": {**result.extra_info, **{name: _cut(large[name]) for name in large}}
        if large
        else result.extra_info,
        "response_length": sample.response_length,
        "total_s": result.total_s,
        "batch_s": active.batch_s,
        "queue_s": result.queue_s,
        "wait_s": result.wait_s,
        "work_s": result.work_s,
        "attempts": result.attempts,
        # The times of a single call are those of the row.
        "calls": [call._asdict() for call in active.calls] if len(active.calls) > 1 else (),
        "prompt_tokens": active.prompt_tokens,
        "completion_tokens": active.completion_tokens,
        "cost": active.cost or None,
        **({"outage_s": result.outage_s} if result.outage_s else {}),
        **({"over_budget": True} if isinstance(result.exception, BudgetSpentError) else {}),
    }


def large_components(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components that are too large for a summary row."""
    return {
        name: value
        for name, value in components.items()
        if not isinstance(value, _SCALARS) and _length(value) > (MAX_TEXT if isinstance(value, str) else MAX_ITEMS)
    }


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:  # no length, or a type of the user
        return 0


def _cut(value: Any) -> str | None:
    return cut(value, MAX_TEXT) if isinstance(value, str) else None


def text_row(sample: RewardSample, large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the large fields of a sample, with the `large_components` of its result."""
    return {
        "version": VERSION,
        "uid": sample.uid,
        "prompt": sample.prompt,
        "response": sample.solution_str if sample.response is None else sample.response,
        **({} if sample.response in (None, sample.solution_str) else {"solution_str": sample.solution_str}),
        **({} if sample.turns is None else {"turns": sample.turns}),
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        "components": large,
    }


def exchanges_of(active: ActiveSample) -> list[dict[str, Any]]:
    """Return copies of the exchanges of a sample: a thread past its deadline may still change the originals."""
    now = time.time()
    # `list` in one step: such a thread may also add an exchange.
    found = [dict(exchange) for exchange in list(active.exchanges.values())]
    for exchange in found:
        if "seconds" not in exchange:
            # The clock may have been set back.
            exchange |= {"seconds": max(0.0, now - exchange.get("time", now)), "error": UNFINISHED}
    return found


def advantage_row(uid: str, step: int, advantage: float | None) -> dict[str, Any]:
    """Return a row that adds the advantage and the step to the last earlier row of the sample with this ``uid``.

    ``step`` is the training step whose batch has the sample; it may be generated in an earlier one. The advantage is
    the mean over the tokens of the response that are trained on; ``None`` if there are none.
    """
    return new_row(ADVANTAGE, uid=uid, step=step, advantage=advantage)


def resumed_row(step: int, kept: Collection[str]) -> dict[str, Any]:
    """Return the row with which a trainer begins that continues from a checkpoint: it does later steps again.

    Args:
        step: the last step that is not done again; 0 if all are.
        kept: the groups whose rollouts and rewards are in the checkpoint, so that they are trained on as they are.
    """
    return new_row(RESUMED, step=step, kept=sorted(kept))


def is_rolled_back(row: Mapping[str, Any], resumed: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a sample was done again by a run that resumed later, so that it does not count.

    Without a step, a sample was generated ahead: for the step after the one in which it was generated.
    `view.tables` has the same rule in SQL.

    Args:
        row: the row of the sample, with the step that trains on it.
        resumed: the `resumed_row` of each run.
    """
    step, generated = row.get("step"), row.get("generated_step")
    if step is None:
        step = None if generated is None else generated + 1
    return step is not None and any(
        row["time"] < run["time"] and step > run["step"] and row.get("group") not in run["kept"] for run in resumed
    )


def phase_event(name: str, step: int, start: float, end: float, waits_for: WaitsFor | None = None) -> dict[str, Any]:
    """Return the event of a phase of the trainer.

    Args:
        name: the name of verl's timing, such as ``update_actor``.
        step: the training step.
        start: when the phase began, in seconds since 1970.
        end: when it ended.
        waits_for: what the trainer waited for; ``None`` if it computed.
    """
    return {
        "version": VERSION,
        "kind": PHASE,
        "step": step,
        "name": name,
        "start": start,
        "end": end,
        "waits_for": waits_for,
    }


def overlap_event(step: int, waiting_s: float, pending_s: float) -> dict[str, Any]:
    """Return the event with the seconds of a step that `records.events.hidden_share` takes."""
    return new_row(OVERLAP, step=step, waiting_s=waiting_s, pending_s=pending_s)


def rollout_event(
    uid: str,
    group: str | None,
    step: int | None,
    *,
    generated_step: int | None = None,
    validate: bool,
    start: float,
    times: Mapping[str, float],
    error: str | None,
) -> dict[str, Any]:
    """Return the event of a rollout that has ended, rewards included.

    Args:
        uid: the uid of its sample.
        group: the uid of the prompt.
        step: the training step that trains on it; ``None`` if this is not known yet.
        generated_step: the training step in which the prompt was submitted.
        validate: whether it belongs to validation.
        start: when generation began, in seconds since 1970.
        times: when generation ended (``end``), and when the reward was requested (``scoring``) and arrived
            (``scored``), as far as they are known.
        error: why the rollout failed.
    """
    return {
        "version": VERSION,
        "kind": ROLLOUT,
        "step": step,
        "generated_step": generated_step,
        "validate": validate,
        "uid": uid,
        "group": group,
        "start": start,
        "end": times.get("end") or time.time(),
        "scoring": times.get("scoring"),
        "scored": times.get("scored"),
        "error": None if error is None else cut(error, MAX_TEXT),
    }
