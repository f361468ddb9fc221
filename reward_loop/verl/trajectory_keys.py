"""verl's keys of trajectories in TransferQueue: ``{uid}_{session}_{index}``.

A prompt has the uid, a session is one of its rollouts, and a session has one or several outputs, each with an index.
The tags of prompts and trajectories are the only state of rewards: agent loop workers write them, the trainer reads
them. State in a worker would be lost with the worker, and could contradict the tags after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable

GENERATED = "generated"
"""Tag of one trajectory of a prompt: ``True`` if no session of the prompt is being generated any more. Not a status of
the prompt: verl's replay buffer raises an error for a status that it does not know."""

JUDGED = "judged"
"""Tag of a trajectory whose reward is written: the times at which judging began and at which the reward was written."""

FAILURE = "error"
"""Tag of a prompt: the latest session that failed without a trajectory, and its error; ``None`` after a resume."""


def uid_of(key: str) -> str:
    """Return the uid of the prompt."""
    return key.rsplit("_", 2)[0]


def number_of(key: str) -> str:
    """Return the number of the session among those of its prompt."""
    return key.rsplit("_", 2)[1]


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
