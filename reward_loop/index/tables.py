"""The tables of the index, and the SQL that loads lines of records into them.

======================  ============================================================================================
Table                   Rows
======================  ============================================================================================
``samples``             one for each sample
``exchanges``           one for each exchange with a model server (a view); samples of a batch have the same ones;
                        ``sample`` is the row of the sample
``resumed``             one for each trainer that has continued from a checkpoint
``advantages``          the advantage of a sample, by its uid
``chunks``              the lines of files that were read together; ``samples.chunk`` names one
``files``               one for each file: the offset up to which it has been read
``summaries``           the summary of a step; null if it must be computed
======================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

LAYOUT = 14
"""The version of these tables. An index with another version is built again."""

_ROW = {
    "id": "VARCHAR",
    "uid": "VARCHAR",
    "group": "VARCHAR",
    "step": "BIGINT",
    "generated_step": "BIGINT",
    "validate": "BOOLEAN",
    "time": "DOUBLE",
    "data_source": "VARCHAR",
    "function": "VARCHAR",
    "batch": "VARCHAR",
    "outcome": "VARCHAR",
    "score": "DOUBLE",
    "reward": "DOUBLE",
    "masked": "BOOLEAN",
    "over_budget": "BOOLEAN",
    "error": "VARCHAR",
    "cause": "VARCHAR",
    "components": "JSON",
    "response_length": "DOUBLE",
    "total_s": "DOUBLE",
    "work_s": "DOUBLE",
    "attempts": "BIGINT",
    "cost": "DOUBLE",
    "advantage": "DOUBLE",
    "prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "text_file": "VARCHAR",
    "text_offset": "BIGINT",
    "text_bytes": "BIGINT",
    "exchange_file": "VARCHAR",
    "exchange_offset": "BIGINT",
    "exchange_bytes": "BIGINT",
    "kept": "VARCHAR[]",
    "validates": "BOOLEAN",
}
_EXCHANGE = {
    "id": "VARCHAR",
    "model": "VARCHAR",
    "url": "VARCHAR",
    "backend": "VARCHAR",
    "seconds": "DOUBLE",
    "error": "VARCHAR",
    "unscored": "VARCHAR",
    "asked_again": "BOOLEAN",
    "prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "score": "DOUBLE",
}

_BUFFER = 2 * 2**20
"""``maximum_object_size`` of DuckDB, in bytes. Threads share the work in buffers of twice this size. Longer lines are
read, too: their buffer grows."""

_ERROR = 500
"""The number of characters of an error that the index keeps. The row in the file has all of it."""


def _struct(fields: Mapping[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in fields.items())


_LINE = {"version": "BIGINT", "kind": "VARCHAR", **_ROW, "judges": f"STRUCT({_struct(_EXCHANGE)})[]"}
_TYPES = ", ".join(f"\"{name}\": '{kind}'" for name, kind in _LINE.items())

# A sample without `step` may belong to a run that has none, so it stays NULL. Rows of other kinds are in `samples` only
# until the chunks have been loaded: reading the lines into a table of their own first takes half as long again. A chunk
# is a file with its number as name.
_SAMPLES = f"""
SELECT version, kind, id, uid, "group", step, generated_step, coalesce(validate, false) AS validate,
    coalesce(time, 0) AS time, data_source, function, batch, outcome, score, reward, masked,
    left(error, {_ERROR}) AS error, cause, components::VARCHAR AS components, response_length,
    coalesce(total_s, work_s) AS total_s, attempts, cost,
    coalesce(over_budget, false) AS over_budget, advantage, prompt_tokens, completion_tokens,
    text_file, text_offset, text_bytes, exchange_file, exchange_offset, exchange_bytes, kept, validates,
    judges AS exchanges,
    coalesce(len(judges), 0)::INTEGER AS judges, list_sum([j.seconds FOR j IN judges]) AS judge_s,
    try_cast(string_split(id, '-')[-1] AS BIGINT) AS number,
    parse_filename(filename, true)::INTEGER AS chunk
FROM read_json(?, format = 'newline_delimited', ignore_errors = true, maximum_object_size = {_BUFFER}, filename = true,
    columns = {{{_TYPES}}})
"""
_EXCHANGES = """
SELECT sample, e.id, step, validate, function, batch, coalesce(e.model, e.url) AS model, e.url,
    e.backend, e.seconds,
    coalesce(e.error, '') != '' AS error, coalesce(e.unscored, '') != '' AS unscored,
    coalesce(e.asked_again, false) AS asked_again, e.prompt_tokens,
    e.completion_tokens, e.score
FROM (SELECT rowid AS sample, step, validate, function, batch, unnest(exchanges) AS e FROM samples)
"""
_NEW = "FROM samples WHERE chunk >= ? AND"
_ADVANTAGES = f"SELECT uid, time, step, advantage {_NEW} kind = 'advantage' AND uid IS NOT NULL"
_RESUMED = f"SELECT time, step, kept, validates {_NEW} kind = 'resumed'"

# A sample does not count if a run that resumed later has done it again: its step is after the checkpoint, or it belongs
# to the validation of the checkpoint's step, which the run repeats; and its group is not in the checkpoint. Without a
# step, a sample was generated ahead: for the step after the one in which it was generated.
_ROLLED_BACK = """
CREATE OR REPLACE TEMP TABLE rolled_back AS
SELECT DISTINCT samples.rowid AS target FROM samples JOIN resumed
    ON samples.time < resumed.time AND (coalesce(samples.step, samples.generated_step + 1) > resumed.step
        OR (samples.step = resumed.step AND samples.validate AND resumed.validates))
    AND NOT coalesce(list_contains(resumed.kept, samples."group"), false)
"""

_BOOKED = """
CREATE OR REPLACE TEMP TABLE booked AS
WITH trained AS (
    SELECT uid, arg_max(step, time) AS step FROM advantages WHERE step >= (SELECT booked FROM about) GROUP BY uid
)
SELECT samples.rowid AS target, coalesce(generated_step, samples.step) AS generated, trained.step AS step
FROM samples JOIN trained USING (uid)
WHERE trained.step IS NOT NULL AND samples.step IS DISTINCT FROM trained.step
"""

# Of the last trainer alone: after a resume, the steps begin again at a lower one.
_LOOKED_AT = """
UPDATE about SET booked = coalesce(
    (SELECT max(step) - 1 FROM advantages WHERE time > coalesce((SELECT max(time) FROM resumed), 0)),
    (SELECT arg_max(step, time) FROM resumed), 0)
"""


def create(connection: duckdb.DuckDBPyConnection, empty: str) -> None:
    """Create the tables of an empty index.

    Args:
        connection: the database.
        empty: the path of an empty file.
    """
    connection.execute(f"CREATE TABLE about AS SELECT {LAYOUT} AS layout, 0::BIGINT AS incomplete, 0::BIGINT AS booked")
    connection.execute("CREATE TABLE files (name VARCHAR, bytes BIGINT, fingerprint BLOB)")
    connection.execute("CREATE TABLE chunks (chunk INTEGER, name VARCHAR, start BIGINT, bytes BIGINT)")
    connection.execute("CREATE TABLE summaries (step BIGINT, validate BOOLEAN, content VARCHAR)")
    connection.execute(f"CREATE TABLE samples AS {_SAMPLES}", [[empty]])
    connection.execute(f"CREATE VIEW exchanges AS {_EXCHANGES}")
    connection.execute(f"CREATE TABLE advantages AS {_ADVANTAGES}", [0])
    connection.execute(f"CREATE TABLE resumed AS {_RESUMED}", [0])


def load(
    connection: duckdb.DuckDBPyConnection,
    samples: Sequence[Path],
    places: Sequence[tuple[int, str, int, int]],
    fingerprints: Mapping[str, bytes],
) -> int:
    """Add chunks of records to the tables. The connection must be within a transaction.

    Args:
        connection: a connection to the database.
        samples: the chunks of the files of samples. Their numbers are higher than all earlier ones.
        places: the parts of the chunks: the number of the chunk, and name, offset and size in the folder.
        fingerprints: the `fingerprint` of each file in the folder, by its name.

    Returns:
        the highest version of these records; 0 if there are none.
    """
    first = places[0][0]
    connection.execute(f"INSERT INTO samples {_SAMPLES}", [list(map(str, samples))])
    others, incomplete, version = _row(
        connection,
        "SELECT count(*) FILTER (kind IS DISTINCT FROM 'sample'), count(*) FILTER (kind IS NULL AND version IS NULL "
        "AND id IS NULL AND uid IS NULL), coalesce(max(version), 0) FROM samples WHERE chunk >= ?",
        [first],
    )
    if others:
        connection.execute(f"INSERT INTO advantages {_ADVANTAGES}", [first])
        connection.execute(f"INSERT INTO resumed {_RESUMED}", [first])
        # The steps that it does again are looked at again.
        connection.execute(f"UPDATE about SET booked = least(booked, (SELECT min(step) FROM ({_RESUMED})))", [first])
        connection.execute("DELETE FROM samples WHERE chunk >= ? AND kind IS DISTINCT FROM 'sample'", [first])
    if incomplete:
        connection.execute("UPDATE about SET incomplete = incomplete + ?", [incomplete])
    _insert(connection, "chunks", places)
    ends = {name: start + size for _, name, start, size in places}
    connection.execute("DELETE FROM files WHERE list_contains(?, name)", [list(ends)])
    _insert(connection, "files", [(name, end, fingerprints[name]) for name, end in ends.items()])
    _forget(connection, f"chunk >= {first}")
    return int(version)


def next_chunk(connection: duckdb.DuckDBPyConnection) -> int:
    """Return the number of the next chunk."""
    (number,) = _row(connection, "SELECT coalesce(max(chunk), 0) + 1 FROM chunks")
    return int(number)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows by one statement: `executemany` runs one for each row."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    connection.execute(f"INSERT INTO {table} SELECT {', '.join('unnest(?)' for _ in columns)}", columns)


def _row(connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
    row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return row


def book(connection: duckdb.DuckDBPyConnection) -> None:
    """Give samples the step that trains on them, and delete those that a resumed run has done again.

    The rows of the last two steps with advantages are looked at again by the next call: those of their samples may be
    read later. The connection must be within a transaction.
    """
    connection.execute(_BOOKED)
    # Before and after the change: the summaries of both steps are no longer true.
    _forget(connection, "rowid IN (SELECT target FROM booked)")
    connection.execute(
        "UPDATE samples SET generated_step = booked.generated, step = booked.step FROM booked WHERE "
        "samples.rowid = booked.target"
    )
    _forget(connection, "rowid IN (SELECT target FROM booked)")
    connection.execute("DROP TABLE booked")
    connection.execute(_ROLLED_BACK)
    _forget(connection, "rowid IN (SELECT target FROM rolled_back)")
    connection.execute("DELETE FROM samples WHERE rowid IN (SELECT target FROM rolled_back)")
    connection.execute("DROP TABLE rolled_back")
    connection.execute(_LOOKED_AT)


def _forget(connection: duckdb.DuckDBPyConnection, samples: str) -> None:
    """Replace the summaries of the steps that contain samples by nulls."""
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE changed AS SELECT DISTINCT step, validate FROM samples WHERE {samples}"
    )
    connection.execute(
        "DELETE FROM summaries USING changed "
        "WHERE summaries.step IS NOT DISTINCT FROM changed.step AND summaries.validate = changed.validate"
    )
    connection.execute("INSERT INTO summaries SELECT step, validate, NULL FROM changed")
    connection.execute("DROP TABLE changed")
