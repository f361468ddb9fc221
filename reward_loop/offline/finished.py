"""The output file of a finished run, whose failed rows can be scored again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_loop._util.json import to_json
from reward_loop.errors import ConfigError
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.output import RESULT_COLUMNS
from reward_loop.offline.partial import PartialResults, differences
from reward_loop.offline.rows import is_parquet, read_rows
from reward_loop.types import Outcome

__all__ = ["FinishedOutput"]


class FinishedOutput:
    """A complete output file ``<output>``, and the identity file ``<output>.run``.

    The identity file exists only while the output has failed rows. It contains the header of the run's
    `PartialResults`, so that `check` never mixes the results of two different runs.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self._identity = output.with_name(output.name + ".run")

    @property
    def is_identified(self) -> bool:
        """Whether the identity file exists."""
        return self._identity.exists()

    def identify(self, header: Mapping[str, Any]) -> None:
        """Write the identity file; called when the output has failed rows."""
        self._identity.write_bytes(to_json(header) + b"\n")

    def forget(self) -> None:
        """Remove the identity file if it exists."""
        self._identity.unlink(missing_ok=True)

    def advice(self) -> str:
        """Return the end of the error message for an output that already exists: what the user can do."""
        failed = rows = 0
        with contextlib.suppress(ConfigError):  # the file is not an output of `reward-loop score`
            for _, record in self._records():
                rows += 1
                failed += record["outcome"] == Outcome.FAILED
        if failed:
            return (
                f", and {failed} of its {rows} rows failed: score these rows again with --retry-failed, choose another "
                "output, or score all rows again with --restart"
            )
        return ": choose another output, or replace it: --restart"

    def check(self, source: Inputs, header: Mapping[str, Any]) -> None:
        """Check that the output belongs to the run with this input, and this header of its partial results.

        Raises:
            ConfigError: the file is not an output of `reward-loop score`, its number of rows differs from that of the
                input, it contains results of a different run, or the identity file is damaged.
        """
        has_results, rows = False, 0
        for _, record in self._records():
            rows += 1
            has_results = has_results or record["outcome"] != Outcome.FAILED
        expected = source.count()
        if rows != expected:
            raise ConfigError(
                f"{self.output} has {rows} rows, and {source.name} has {expected} rows: it is the output of another "
                "input"
            )
        changed = differences(header, self._read_identity()) if self.is_identified else ""
        if has_results and changed:
            raise ConfigError(
                f"{self.output} is the output of a run with another {changed}. Use the old command to score its failed "
                "rows again, or score all rows again with --restart"
            )

    def _read_identity(self) -> Mapping[str, Any]:
        try:
            identity: Mapping[str, Any] = json.loads(self._identity.read_bytes())
        except ValueError:
            raise ConfigError(
                f"{self._identity} is damaged, so nothing shows which run wrote {self.output}: score all rows again "
                "with --restart, or delete the damaged file if the command is the same"
            ) from None
        return identity

    def take_over(self, results: PartialResults) -> None:
        """Copy the records of rows that did not fail to the partial results, unless these contain the row already."""
        for row, record in self._records():
            if record["outcome"] != Outcome.FAILED and row not in results:
                results.append(row, record)

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for row in read_rows(self.output):
            if row.error is not None or not row.columns.keys() >= set(RESULT_COLUMNS):
                raise ConfigError(f"{self.output} is not the output of `reward-loop score`: see its {row.name}")
            record = {name: row.columns[name] for name in RESULT_COLUMNS if name != "row"}
            if is_parquet(self.output):
                record["reward_extra_info"] = json.loads(record["reward_extra_info"])
            yield row.columns["row"], record
