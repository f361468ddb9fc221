"""A training run of verl, started from a program: its data file, its process and its metrics."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STOP_WITHIN_S = 30.0
"""Time in seconds that an interrupted training has to end before it is killed."""


def write_dataset(file: Path, data_source: str, split: str, problems: Iterable[tuple[str, str]]) -> None:
    """Write questions and answers to a parquet file in verl's data format.

    Args:
        file: the file to write.
        data_source: name of the data set, which verl shows in its metrics.
        split: name of the split; reward functions receive it in ``extra_info``, together with question and index.
        problems: questions and answers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index, "split": split, "question": question},
        }
        for index, (question, answer) in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def read_metrics(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the number of each logged step and its metrics, from the file that verl's ``file`` logger writes.

    A last line that is not complete yet is omitted. The list is empty if the file does not exist yet.
    """
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [(entry["step"], entry["data"]) for entry in entries]


class TrainingProcess:
    """A training in a separate session, so that all processes that it starts can be found and killed.

    A context manager. On exit, it interrupts a running training, waits up to `STOP_WITHIN_S` seconds, and kills all
    processes of the session.

    Args:
        command: the command that trains.
        log_file: receives the output.
        metrics_file: receives the metrics; see `read_metrics`. ``None`` for a program without metrics.
    """

    def __init__(self, command: list[str], log_file: Path, metrics_file: Path | None = None) -> None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        if metrics_file is not None:
            environment["VERL_FILE_LOGGER_PATH"] = str(metrics_file)
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.status() is None:
                self._process.send_signal(signal.SIGINT)
                self._process.wait(STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            self._kill_session()
            self._process.wait()

    @property
    def session(self) -> int:
        """ID of the session of all processes."""
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status; ``None`` while the process runs."""
        return self._process.poll()

    def _kill_session(self) -> None:
        """Kill all remaining processes of the session, including Ray's, which are in separate process groups."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):  # the process has just ended
                if int(stat.read_text().rsplit(")", 1)[1].split()[3]) == self.session:
                    os.kill(int(stat.parent.name), signal.SIGKILL)
