"""The tables of the index, and how lines of records get into them.

======================  ============================================================================================
Table                   Rows
======================  ============================================================================================
``samples``             one for each sample, with its revision applied
``exchanges``           one for each exchange with a model server in a row; several samples of a batch share theirs
``advantages``          the advantage of a sample, by its uid
``revisions``           revisions whose sample has not been read yet
``chunks``              the lines of files that were read together; ``samples.chunk`` names one
``files``               how far each file has been read
``summaries``           what `summaries` has computed for a step
======================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb

from reward_loop.view.growth import Lines

__all__ = ["LAYOUT", "create", "load", "max_version", "read_chunk", "revise"]

LAYOUT = 1
"""The version of these tables. An index with another version is built again."""

_ROW = {
    "id": "VARCHAR",
    "uid": "VARCHAR",
    "group": "VARCHAR",
    "step": "BIGINT",
    "validate": "BOOLEAN",
    "time": "DOUBLE",
    "data_source": "VARCHAR",
    "function": "VARCHAR",
    "batch": "VARCHAR",
    "outcome": "VARCHAR",
    "score": "DOUBLE",
    "reward": "DOUBLE",
    "masked": "BOOLEAN",
    "error": "VARCHAR",
    "components": "JSON",
    "response_length": "DOUBLE",
    "total_s": "DOUBLE",
    "work_s": "DOUBLE",
    "attempts": "BIGINT",
    "advantage": "DOUBLE",
    "prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "text_file": "VARCHAR",
    "text_offset": "BIGINT",
    "text_bytes": "BIGINT",
    "exchange_file": "VARCHAR",
    "exchange_offset": "BIGINT",
    "exchange_bytes": "BIGINT",
}
_EXCHANGE = {
    "id": "VARCHAR",
    "time": "DOUBLE",
    "model": "VARCHAR",
    "url": "VARCHAR",
    "backend": "VARCHAR",
    "seconds": "DOUBLE",
    "error": "VARCHAR",
    "unscored": "VARCHAR",
    "prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "score": "JSON",
}

_ERROR = 500
"""The number of characters of an error that the index keeps. The row in the file has all of it."""


def _struct(fields: Mapping[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in fields.items())


_LINE = {"version": "BIGINT", "kind": "VARCHAR", **_ROW, "judges": f"STRUCT({_struct(_EXCHANGE)})[]"}
_COLUMNS = ", ".join(f"\"{name}\": '{kind}'" for name, kind in _LINE.items())

# A sample without `step` may belong to a run that has none, so it stays NULL; the other defaults are those of the row.
_SAMPLES = f"""
SELECT id, uid, "group", step, coalesce(validate, false) AS validate, coalesce(time, 0) AS time, data_source,
    function, outcome, score, reward, coalesce(masked, false) AS masked, left(error, {_ERROR}) AS error,
    components::VARCHAR AS components, response_length, coalesce(total_s, work_s) AS total_s, attempts,
    prompt_tokens, completion_tokens, text_file, text_offset, text_bytes, exchange_file, exchange_offset,
    exchange_bytes, coalesce(len(judges), 0)::INTEGER AS judges, list_sum([j.seconds FOR j IN judges]) AS judge_s,
    NULL::DOUBLE AS revised_at, ?::INTEGER AS chunk
FROM lines WHERE kind = 'sample'
"""
_EXCHANGES = """
SELECT j.id, step, coalesce(validate, false) AS validate, function, batch, j.time, coalesce(j.model, j.url) AS model,
    j.backend, j.seconds, coalesce(j.error, '') != '' AS error, coalesce(j.unscored, '') != '' AS unscored,
    j.prompt_tokens, j.completion_tokens, try_cast(j.score AS DOUBLE) AS score
FROM (SELECT step, validate, function, batch, unnest(judges) AS j FROM lines WHERE kind = 'sample')
"""
_ADVANTAGES = """
SELECT uid, coalesce(time, 0) AS time, advantage FROM lines WHERE kind = 'advantage' AND uid IS NOT NULL
"""
_REVISIONS = f"""
SELECT uid, coalesce(time, 0) AS time, outcome, left(error, {_ERROR}) AS error, reward,
    coalesce(masked, false) AS masked
FROM lines WHERE kind = 'revision' AND uid IS NOT NULL
"""

# A revision changes the last earlier row with its uid. Clocks of several nodes differ, so if no row is earlier, it
# changes the first one.
_TARGETS = """
CREATE OR REPLACE TEMP TABLE targets AS
WITH known AS (SELECT rowid AS target, uid, time FROM samples WHERE uid IN (SELECT uid FROM revisions)),
    earlier AS (SELECT r.*, k.target FROM revisions r ASOF JOIN known k ON r.uid = k.uid AND r.time >= k.time),
    later AS (
        SELECT r.*, arg_min(k.target, k.time) AS target FROM revisions r JOIN known k ON r.uid = k.uid
        GROUP BY ALL HAVING min(k.time) > r.time
    )
SELECT target, max(time) AS time, arg_max({o: outcome, e: error, r: reward, m: masked}, time) AS new
FROM (FROM earlier UNION ALL FROM later) GROUP BY target
"""
_REVISE = """
UPDATE samples SET reward = new.r, masked = new.m, outcome = coalesce(new.o, outcome),
    error = coalesce(new.e, error), revised_at = targets.time
FROM targets WHERE samples.rowid = targets.target AND coalesce(revised_at, 0) <= targets.time
"""
_APPLIED = """
DELETE FROM revisions
WHERE uid IN (SELECT uid FROM samples WHERE rowid IN (SELECT target FROM targets))
"""


def create(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables of an empty index."""
    connection.execute(f"CREATE TABLE about AS SELECT {LAYOUT} AS layout, 0::BIGINT AS incomplete")
    connection.execute("CREATE TABLE files (name VARCHAR, bytes BIGINT, fingerprint BLOB)")
    connection.execute("CREATE TABLE chunks (chunk INTEGER, name VARCHAR, start BIGINT, bytes BIGINT)")
    connection.execute("CREATE TABLE summaries (step BIGINT, validate BOOLEAN, content VARCHAR)")
    connection.execute(f"CREATE TEMP TABLE lines ({_struct(_LINE)})")
    connection.execute(f"CREATE TABLE samples AS {_SAMPLES} LIMIT 0", [0])
    connection.execute(f"CREATE TABLE exchanges AS {_EXCHANGES} LIMIT 0")
    connection.execute(f"CREATE TABLE advantages AS {_ADVANTAGES} LIMIT 0")
    connection.execute(f"CREATE TABLE revisions AS {_REVISIONS} LIMIT 0")
    connection.execute("DROP TABLE lines")


_BUFFER = 2 * 2**20
"""``maximum_object_size`` of DuckDB, in bytes. Threads share the work in buffers of twice this size. Longer lines are
read, too: their buffer grows."""


def read_chunk(connection: duckdb.DuckDBPyConnection, path: str) -> None:
    """Read a file of lines into the temporary table ``lines``. Lines that are not JSON become rows of nulls."""
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE lines AS FROM read_json(?, format = 'newline_delimited', "
        f"ignore_errors = true, maximum_object_size = {_BUFFER}, columns = {{{_COLUMNS}}})",
        [path],
    )


def max_version(connection: duckdb.DuckDBPyConnection) -> int:
    """Return the highest version of the records in ``lines``; 0 if there are none."""
    row = connection.execute("SELECT coalesce(max(version), 0) FROM lines").fetchone()
    assert row is not None
    return int(row[0])


def load(
    connection: duckdb.DuckDBPyConnection, chunk: int, parts: Sequence[Lines], fingerprints: Mapping[str, bytes]
) -> None:
    """Add the rows in ``lines`` to the tables.

    Args:
        connection: a connection within a transaction.
        chunk: the number of the chunk.
        parts: the lines of files in it.
        fingerprints: the `fingerprint` of each file.
    """
    connection.execute(f"INSERT INTO samples {_SAMPLES}", [chunk])
    connection.execute(f"INSERT INTO exchanges {_EXCHANGES}")
    connection.execute(f"INSERT INTO advantages {_ADVANTAGES}")
    connection.execute(f"INSERT INTO revisions {_REVISIONS}")
    connection.execute(
        "UPDATE about SET incomplete = incomplete + "
        "(SELECT count(*) FROM lines WHERE kind IS NULL AND version IS NULL AND id IS NULL AND uid IS NULL)"
    )
    for part in parts:
        name = part.path.name
        connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", [chunk, name, part.start, part.bytes])
        connection.execute("DELETE FROM files WHERE name = ?", [name])
        connection.execute("INSERT INTO files VALUES (?, ?, ?)", [name, part.start + part.bytes, fingerprints[name]])
    connection.execute("DROP TABLE lines")
    _forget(connection, f"chunk = {chunk}")


def revise(connection: duckdb.DuckDBPyConnection) -> None:
    """Apply the revisions whose samples have been read. The connection must be within a transaction."""
    connection.execute(_TARGETS)
    connection.execute(_REVISE)
    connection.execute(_APPLIED)
    _forget(connection, "rowid IN (SELECT target FROM targets)")
    connection.execute("DROP TABLE targets")


def _forget(connection: duckdb.DuckDBPyConnection, samples: str) -> None:
    """Delete the summaries of the steps that contain samples."""
    connection.execute(
        f"DELETE FROM summaries USING (SELECT DISTINCT step, validate FROM samples WHERE {samples}) AS changed "
        "WHERE summaries.step IS NOT DISTINCT FROM changed.step AND summaries.validate = changed.validate"
    )
