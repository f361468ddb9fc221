"""Reads a records folder, also while processes write it; the figures that the report and the viewer both show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_loop._util.intervals import FALSE_ACCEPT
from reward_loop._util.json import decode, encode
from reward_loop.errors import ConfigError
from reward_loop.records.files import ADVANTAGE, RESUMED, SAMPLE, VERSION
from reward_loop.types import finite_number

# At most 18 digits: `int` refuses numbers with thousands of them.
_STEP = re.compile(rb'"(?:generated_)?step":\s*(-?\d{1,18})\b')


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; ``None`` if the line is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = decode(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_files(
    folder: Path, is_wanted: Callable[[bytes], Any] | None = None
) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the file of each line in a folder, and the object in the line; ``None`` for an incomplete line.

    Nothing if there is no such folder. ``is_wanted`` selects the lines to parse; by default all.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                if is_wanted is None or is_wanted(line):
                    yield path, parse_line(line)


def read_rows(folder: Path, is_wanted: Callable[[bytes], Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows in all files of a folder, without incomplete lines; see `read_files`.

    Raises:
        ConfigError: a newer version has written them.
    """
    for path, row in read_files(folder, is_wanted):
        if row is not None:
            check_version(row.get("version", 0), path)
            yield row


def is_of_steps(row: Mapping[str, Any], steps: Collection[int]) -> bool:
    """Return whether a row belongs to one of the training steps, or was generated in one."""
    found = (row.get("step"), row.get("generated_step"))
    # `None in range(...)` would look at each number of the range.
    return any(isinstance(step, int) and step in steps for step in found)


def has_step(line: bytes, steps: Collection[int], head: int | None = None) -> bool:
    """Return whether a line, which is not parsed, has one of some steps as ``step`` or ``generated_step``.

    Only its first bytes are searched.

    ``head`` is the number of these bytes; ``None`` searches the whole line.
    """
    return any(int(step) in steps for step in _STEP.findall(line, 0, len(line) if head is None else head))


def check_version(version: Any, where: Path) -> None:
    """Check that this version of the library reads the records in a file or folder.

    Raises:
        ConfigError: a newer version has written them.
    """
    if isinstance(version, int) and version > VERSION:  # another program may use other versions
        raise ConfigError(
            f"{where} has records of version {version}, and this version of reward_loop reads version "
            f"{VERSION}: use the reward_loop that wrote them, or a newer one"
        )


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
        row["time"] < run["time"]
        and (step > run["step"] or (step == run["step"] and row.get("validate") and run.get("validates")))
        and row.get("group") not in run["kept"]
        for run in resumed
    )


_OF_ADVANTAGE = re.compile(rf'"kind":\s*"{ADVANTAGE}"'.encode())

_OF_RESUMED = re.compile(rf'"kind":\s*"{RESUMED}"'.encode())

_HEAD, _KIND_HEAD = 4096, 64
"""The numbers of bytes within which a row has its step, and its kind."""


class NoRecordsError(ConfigError):
    """A folder does not exist, or contains no records."""


class RecordsReader:
    """The records in a folder.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: a newer version has written them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incomplete = 0
        """Lines that could not be read in the last pass over the rows: of processes that were killed, or are writing
        them."""
        if not folder.is_dir():
            why = "it is a file" if folder.exists() else "it does not exist"
            raise NoRecordsError(f"{folder} is not a folder of records: {why}")
        if not any(True for _ in self._lines()):
            raise NoRecordsError(
                f"{folder} contains no records. A verl run writes them to trainer.default_local_dir/rewards, other "
                "runs to the folder in reward_loop.log_dir"
            )

    def rows(self, uid: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of all samples, with their advantages.

        A sample that was trained on has a field ``advantage``, if the trainer recorded it, and its ``step`` is that of
        the training, even if this was not known when it was scored. Samples that a resumed run did again are left out.

        Args:
            uid: yield only the rows with this uid; other lines are not parsed. ``None`` for all.
        """
        needle = b"" if uid is None else encode(uid)
        advantages, resumed = self._advantages(needle), self._resumed()
        self.incomplete = 0
        for row in self._lines(lambda line: needle in line):
            if row["kind"] != SAMPLE:
                continue
            name = row.get("uid")
            if (place := (name, row.get("id"))) in advantages:
                row = _trained(row, advantages[place])
            if (uid is None or name == uid) and not is_rolled_back(row, resumed):
                yield row

    def rows_of(self, steps: Collection[int]) -> Iterator[dict[str, Any]]:
        """Yield the rows of the samples of some training steps, or generated in them, without their advantages."""
        lines, resumed = self._lines(lambda line: has_step(line, steps, _HEAD)), self._resumed()
        # Again on the parsed row: in the bytes, a component may have the same name.
        found = (row for row in lines if row["kind"] == SAMPLE and is_of_steps(row, steps))
        return (row for row in found if not is_rolled_back(row, resumed))

    def text(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the texts of a sample: prompt, response, ground truth, extra info and large components.

        ``None`` if they were not recorded, or have been deleted.
        """
        lines = self._read(row, "text")
        # A segment that is deleted while its process still writes to it begins again, with other texts at this offset.
        return lines[0] if lines and lines[0].get("id") == row.get("id") else None

    def exchanges(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the exchanges of a sample with model servers; without their texts if these have been deleted."""
        lines = [line for line in self._read(row, "exchange") if line.get("sample") == row.get("id")]
        return lines or list(row.get("judges") or ())

    def _resumed(self) -> list[dict[str, Any]]:
        """Return the rows with which runs began that continued from a checkpoint."""
        lines = self._lines(lambda line: _OF_RESUMED.search(line, 0, _KIND_HEAD))
        return [row for row in lines if row["kind"] == RESUMED]

    def _advantages(self, needle: bytes) -> dict[tuple[Any, Any], dict[str, Any]]:
        """Return the advantages of rows, by uid and ID of the row.

        Lines that do not contain ``needle`` are not read.
        """
        advantages: dict[str, dict[str, Any]] = {}
        for row in self._lines(lambda line: _OF_ADVANTAGE.search(line, 0, _KIND_HEAD) and needle in line):
            uid = row.get("uid")
            # The files are in no order of time.
            if uid is not None and row["kind"] == ADVANTAGE and row["time"] >= advantages.get(uid, row)["time"]:
                advantages[uid] = row
        # A resumed run scores some uids again: the last row was trained on.
        last: dict[str, tuple[float, str]] = {}
        for row in self._lines(lambda line: needle in line) if advantages else ():
            uid = row.get("uid")
            if uid in advantages and row["kind"] == SAMPLE:
                last[uid] = max(last.get(uid, (0.0, "")), (row["time"], row.get("id", "")))
        return {(uid, name): advantages[uid] for uid, (_, name) in last.items()}

    def _lines(self, is_wanted: Callable[[bytes], Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows in all files; with `is_wanted`, those of the lines for which it returns true."""
        for path, row in read_files(self.folder, is_wanted):
            if row is None:
                self.incomplete += 1
                continue
            check_version(row.get("version", 0), path)
            if "kind" in row and isinstance(row.get("version"), int):  # otherwise, not a file of records
                yield row

    def _read(self, row: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
        name = row.get(f"{kind}_file")
        if name is None:
            return []
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            return []  # not written by this library
        try:
            with path.open("rb") as file:
                file.seek(row[f"{kind}_offset"])
                content = file.read(row[f"{kind}_bytes"])
        except OSError:
            return []
        parsed = (parse_line(line) for line in content.splitlines(keepends=True))
        return [line for line in parsed if line is not None]


def _trained(row: dict[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if trained["advantage"] is not None:
        changes["advantage"] = trained["advantage"]
    if trained.get("step") not in (None, row.get("step")):
        changes |= {"step": trained["step"], "generated_step": row.get("generated_step", row.get("step"))}
    return {**row, **changes}


def false_accepts_of(components: Mapping[str, Any]) -> list[tuple[bool, float]]:
    """Return, for each spot check of a sample with a wrong answer, whether it was accepted, and its chance."""
    found = []
    for name, value in components.items():
        prefix = name.removesuffix(FALSE_ACCEPT)
        # A function of the user may return anything under this name.
        number = finite_number(value) if name == f"{prefix}{FALSE_ACCEPT}" else None
        if number is not None and (not prefix or prefix.endswith("/")):
            chance = components.get(f"{prefix}chance")
            found.append((number > 0, chance if isinstance(chance, int | float) and chance > 0 else 1.0))
    return found


class Price(NamedTuple):
    """The prices of a million tokens, in any currency."""

    prompt: float
    reply: float

    @classmethod
    def parse(cls, text: str | None) -> Price | None:
        """Return the prices in ``PROMPT:REPLY``; ``None`` without a text.

        Raises:
            ConfigError: they are not two numbers of at least 0.
        """
        if text is None:
            return None
        try:
            prompt, reply = map(float, text.split(":"))
        except ValueError:
            prompt = reply = math.nan
        if not (math.isfinite(prompt + reply) and min(prompt, reply) >= 0):
            raise ConfigError(
                f"--price {text}: expected the prices of a million tokens as PROMPT:REPLY, such as 0.15:0.6"
            )
        return cls(prompt, reply)

    def cost(self, counts: Mapping[str, Any]) -> float:
        """Return the cost of ``prompt_tokens`` and ``completion_tokens``, as an exchange has; missing numbers are 0."""
        prompt, reply = counts.get("prompt_tokens") or 0, counts.get("completion_tokens") or 0
        return float(prompt * self.prompt + reply * self.reply) / 1e6
