"""Equal calls of a job's processes: one is made at a time, and its result is that of all others.

The first process that joins a key makes the call. The others wait, each for the result, or for its turn to make the
call: if the call gave no result that can be shared, was cancelled, or its process has died.
"""

from __future__ import annotations

from dataclasses import dataclass

from reward_loop.limits.protocol import MessageQueue

__all__ = ["EqualCall", "EqualCalls"]


@dataclass(slots=True)
class EqualCall:
    """A call, of which other processes of the job may make an equal one."""

    is_shared: bool = False
    """Whether other processes may wait for `result`."""
    received: str | None = None
    """The result of an equal call; ``None``: make the call."""
    result: str | None = None
    """The result for the others; ``None`` if there is none."""


class EqualCalls:
    """The equal calls in flight of a job, by key. A member is a connection with the number that its process gave."""

    def __init__(self) -> None:
        self._members: dict[str, dict[tuple[MessageQueue, int], None]] = {}
        """The members of each key; the first makes the call."""

    def join(self, process: MessageQueue, number: int, key: str) -> None:
        """Add a member. It gets ``None`` once it is the first, or else the result."""
        members = self._members.setdefault(key, {})
        members[process, number] = None
        if len(members) == 1:
            process.send("answer", number, None)

    def leave(self, process: MessageQueue, number: int, key: str, result: str | None) -> None:
        """Remove a member, and send its result, if there is one, to all others; a second time without effect."""
        members = self._members.get(key, {})
        if (process, number) not in members:
            return
        is_first = next(iter(members)) == (process, number)
        del members[process, number]
        if result is not None:
            for other, waiting in members:
                other.send("answer", waiting, result)
            members.clear()
        if not members:
            del self._members[key]
        elif is_first:
            other, waiting = next(iter(members))
            other.send("answer", waiting, None)

    def forget(self, process: MessageQueue) -> None:
        """Remove all members of a connection that has ended."""
        for key, members in list(self._members.items()):
            for other, number in list(members):
                if other is process:
                    self.leave(process, number, key, None)
