"""The options of records and of the watchdog."""

from __future__ import annotations

from pydantic import Field

from reward_loop.config import Config


class RecordConfig(Config):
    """What the records in ``log_dir`` contain, and how much disk space they take."""

    full: float = Field(default=1.0, ge=0, le=1)
    """The share of samples, or of whole groups, that are recorded with their texts: prompt, response, and the
    exchanges with judges. Samples without a score always are. All samples have a summary row."""

    max_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """The largest size in bytes of all files in ``log_dir``. Above it, the oldest texts are deleted, first those of
    exchanges with judges. Summary rows are kept."""


class RecordOptions(Config):
    """Where samples are recorded, and which of them are logged."""

    watchdog_s: float | None = Field(default=60.0, gt=0)
    """Samples that have been running for longer than this many seconds are logged, repeatedly at this interval;
    ``null`` disables it. Each manager of a process may have its own value."""

    log_dir: str | None = None
    """Directory in which every process records its samples, see docs/records.md; ``null`` for no records. The default
    in a verl run is ``rewards`` in verl's ``trainer.default_local_dir``."""

    record: RecordConfig = Field(default_factory=RecordConfig)
    """What the records contain."""
