"""The figures of records, each computed here alone: for report, viewer, audit, and the comparison of two scorings.

A *summary* describes some samples: those of a step, those with a value of a field, or all. Samples of training and of
validation never share one. The summaries of steps are kept in the index until the step gets further rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any

import duckdb
import orjson

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError
from reward_loop.index.filters import SampleFilter, number_of, value_of
from reward_loop.index.index import Index, rows_of
from reward_loop.types import Outcome

_Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""

SHOWN = 5
"""The number of the samples whose scores differ most."""

LARGEST = 1e150
"""Larger numbers are left out: the squares of their differences are beyond the range of float."""

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p95": 0.95}


def _spread(number: str) -> str:
    """Return SQL for the distribution of a number; `_named` adds the names of its quantiles."""
    number = f"CASE WHEN abs({number}) <= {LARGEST} THEN {number} END"
    return (
        f"{{count: count({number}), mean: avg({number}), std: stddev_pop({number}), min: min({number}), "
        f"max: max({number}), quantiles: quantile_cont({number}, {list(_QUANTILES.values())})}}"
    )


def _component(name: str) -> str:
    """Return SQL for the JSON value of the component whose name is the value of an SQL expression."""
    return f"json_extract(components, '/' || replace(replace({name}, '~', '~0'), '/', '~1'))"


def _named(spread: dict[str, Any]) -> dict[str, Any]:
    return spread | dict(zip(_QUANTILES, spread.pop("quantiles") or [None] * len(_QUANTILES), strict=True))


_SPREADS = ("score", "reward", "total_s", "judge_s")

_FIGURES = f"""
SELECT $key AS key, validate, count(*) AS samples,
    {{{", ".join(f"{name}: count(*) FILTER (outcome = '{name}')" for name in Outcome)}}} AS outcomes,
    count(*) FILTER (masked) AS masked, count(*) FILTER (over_budget) AS over_budget,
    count(*) FILTER (masked = false AND reward IS NULL) AS stopped,
    {", ".join(f"{_spread(name)} AS {name}" for name in _SPREADS)},
    avg(response_length) AS response_length, coalesce(sum(prompt_tokens), 0)::BIGINT AS prompt_tokens,
    coalesce(sum(completion_tokens), 0)::BIGINT AS completion_tokens, sum(cost) AS reported_cost,
    min(time) AS first_time, max(time) AS last_time,
    list(DISTINCT function) FILTER (function IS NOT NULL) AS functions,
    list(DISTINCT data_source) FILTER (data_source IS NOT NULL) AS data_sources
FROM $source GROUP BY ALL
"""
_GROUPS = """
SELECT key, validate, count(*) AS groups, count(*) FILTER (rewards > 1 AND low = high) AS zero_variance,
    count(*) FILTER (rewards = 0) AS all_failed, count(*) FILTER (rewards > 0 AND rewards < n) AS partly_failed
FROM (
    SELECT $key AS key, step, validate, "group", count(*) AS n, count(reward) AS rewards, min(reward) AS low,
        max(reward) AS high
    FROM $source WHERE "group" IS NOT NULL GROUP BY ALL HAVING n > 1
) GROUP BY ALL
"""
_NAMED = """
SELECT $key AS key, validate, components, unnest(json_keys(components)) AS name FROM $source
WHERE json_type(components) = 'OBJECT'
"""
_COMPONENTS = f"""
SELECT key, validate, name, count(number) AS count, avg(number) AS mean, stddev_pop(number) AS std,
    min(number) AS min, max(number) AS max
FROM (
    SELECT key, validate, name, CASE WHEN abs(number) <= {LARGEST} THEN number END AS number
    FROM (SELECT *, {number_of(_component("name"))} AS number FROM ({_NAMED}))
) WHERE name != 'score' GROUP BY ALL ORDER BY ALL
"""
_MODELS = """
SELECT step AS key, validate, list(DISTINCT model) FILTER (model IS NOT NULL) AS models FROM $source GROUP BY ALL
"""

_OF_MISSING = "{table} JOIN missing ON {table}.step IS NOT DISTINCT FROM of_step AND {table}.validate = of_validate"

_INTERNAL = ("first_time", "last_time", "functions", "data_sources", "models", "names")
"""The fields of a summary that only the summary of the run shows."""

_GROUP_COUNTS = ("groups", "zero_variance", "all_failed", "partly_failed")

_COUNTED = ("samples", "masked", "over_budget", "stopped", "prompt_tokens", "completion_tokens", *_GROUP_COUNTS)

Key = tuple[Any, bool]
"""The step, or the value of another field, and whether the samples are those of validation."""


def _summaries(cursor: duckdb.DuckDBPyConnection, key: str, source: str) -> dict[Key, dict[str, Any]]:
    """Return the summary of the samples with each value of an SQL expression."""

    def keyed(query: str) -> Iterator[tuple[Key, dict[str, Any]]]:
        for row in rows_of(cursor, Template(query).substitute(key=key, source=source)):
            yield (row.pop("key"), row.pop("validate")), row

    found: dict[Key, dict[str, Any]] = {}
    for place, row in keyed(_FIGURES):
        row |= {name: _named(row[name]) for name in _SPREADS}
        row |= {"functions": row["functions"] or [], "data_sources": row["data_sources"] or []}
        found[place] = row | dict.fromkeys(_GROUP_COUNTS, 0) | {"components": {}, "names": []}
    for place, row in keyed(_GROUPS):
        found[place] |= row
    for place, row in keyed(_COMPONENTS):
        found[place]["names"].append(name := row.pop("name"))
        if row["count"]:
            found[place]["components"][name] = row
    return found


def empty_summary() -> dict[str, Any]:
    """Return the summary of no samples."""
    spread = {"count": 0, **dict.fromkeys(("mean", "std", "min", "max", *_QUANTILES))}
    found = {**dict.fromkeys(_COUNTED, 0), "outcomes": {str(name): 0 for name in Outcome}}
    found |= {name: dict(spread) for name in _SPREADS} | {"components": {}}
    return found | {"response_length": None, "reported_cost": None}


def keep_summaries(index: Index) -> None:
    """Compute the summaries of the steps that have changed."""
    # Before a transaction, which waits for the thread that loads new rows.
    if not index.rows("SELECT 1 FROM summaries WHERE content IS NULL LIMIT 1"):
        return
    with index.writing() as cursor:
        cursor.execute(
            "CREATE OR REPLACE TEMP TABLE missing AS SELECT step AS of_step, validate AS of_validate FROM summaries "
            "WHERE content IS NULL"
        )
        cursor.execute("DELETE FROM summaries WHERE content IS NULL")
        found = _summaries(cursor, "step", _OF_MISSING.format(table="samples"))
        for row in rows_of(cursor, Template(_MODELS).substitute(source=_OF_MISSING.format(table="exchanges"))):
            found[row["key"], row["validate"]]["models"] = row["models"] or []
        for key, summary in found.items():
            cursor.execute("INSERT INTO summaries VALUES (?, ?, ?)", [*key, orjson.dumps(summary).decode()])
        cursor.execute("DROP TABLE missing")


def _kept(index: Index) -> list[dict[str, Any]]:
    keep_summaries(index)
    rows = index.rows("SELECT step, validate, content FROM summaries ORDER BY step NULLS LAST, validate")
    return [{"step": row["step"], "validate": row["validate"], **orjson.loads(row["content"])} for row in rows]


def steps(index: Index, validate: bool) -> list[dict[str, Any]]:
    """Return the summaries of all steps, in their order. The summary of samples without a step is the last one.

    Args:
        index: the index.
        validate: whether to return those of validation, or those of training.
    """
    return [_public(summary) for summary in _kept(index) if summary["validate"] is validate]


def resumed(index: Index) -> list[dict[str, Any]]:
    """Return ``time`` and ``step`` of each trainer that has continued from a checkpoint; it does later steps again."""
    return index.rows("SELECT time, step FROM resumed")


def run(index: Index) -> dict[str, Any]:
    """Return what the records contain. ``training`` and ``validation`` have counts; ``None`` without samples."""
    kept = _kept(index)

    def counts(validate: bool) -> dict[str, Any] | None:
        parts = [step for step in kept if step["validate"] is validate]
        outcomes = {str(name): sum(step["outcomes"][name] for step in parts) for name in Outcome}
        return {"samples": sum(outcomes.values()), "outcomes": outcomes} if parts else None

    def united(name: str) -> list[str]:
        return sorted({one for step in kept for one in step.get(name) or ()})

    return {
        "samples": sum(step["samples"] for step in kept),
        "first_time": min((step["first_time"] for step in kept), default=None),
        "last_time": max((step["last_time"] for step in kept), default=None),
        "steps": sorted({step["step"] for step in kept if step["step"] is not None}),
        "training": counts(False),
        "validation": counts(True),
        **{name: united(name) for name in ("functions", "data_sources", "models")},
        "components": sorted({name for step in kept for name in step["names"]}),
    }


# A sample without a score has its error, or the reason why the reply of a judge has no verdict, without its quotes.
_CAUSES = r"""
WITH found AS (
    SELECT *, list_filter([one.unscored FOR one IN exchanges], lambda text: text != '')[1] AS reason
    FROM samples WHERE validate = ? AND outcome != 'scored'
), named AS (
    SELECT id, time, outcome,
        CASE outcome WHEN 'failed' THEN coalesce(cause, regexp_replace(split_part(error, chr(10), 1), '^[^:]*: ', ''))
            ELSE coalesce(cause, outcome)
                || coalesce(': ' || regexp_replace(reason, '''[^'']*''|"[^"]*"|-?\d+(\.\d+)?', '...', 'g'), '')
            END AS cause,
        coalesce(error, concat('sample ', coalesce(uid, id, 'without uid'), ': ',
            coalesce('the judge''s reply has no verdict: ' || reason, 'the function returned no score'))) AS error
    FROM found
)
SELECT outcome, cause, count(*) AS count, arg_min(error, time) AS example, arg_min(id, time) AS id
FROM named GROUP BY outcome, cause ORDER BY count DESC, cause LIMIT 1000
"""


def overview(index: Index, validate: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the causes of samples without a score.

    Args:
        index: the index.
        validate: whether to return those of validation, or those of training.
    """
    return {"causes": index.rows(_CAUSES, [validate])}


# All samples of a batch have its exchanges: each counts once.
_CALLS = """
WITH chosen AS (FROM exchanges WHERE {where}),
    counted AS (
        FROM chosen WHERE batch IS NULL UNION ALL SELECT DISTINCT ON (id) * FROM chosen WHERE batch IS NOT NULL
    ),
    calls AS (
        SELECT counted.* REPLACE (coalesce(served.only, counted.model) AS model)
        FROM counted LEFT JOIN served ON counted.model = counted.url AND served.url = counted.url
    )
"""
# A failed request may lack the model that the answers of its server name.
_SERVED = """
CREATE OR REPLACE TEMP TABLE served AS SELECT url, min(model) AS only FROM exchanges WHERE model != url AND {where}
GROUP BY url HAVING min(model) = max(model)
"""
_COUNTS = """
    count(*) AS requests, count(*) FILTER (error) AS errors, count(*) FILTER (unscored) AS no_verdict,
    count(*) FILTER (asked_again) AS asked_again,
    {mean: avg(seconds), max: max(seconds), quantiles: quantile_cont(seconds, [0.5, 0.95])} AS seconds
"""
_JUDGES = f"""
SELECT model, backend, function, {_COUNTS}, arg_max(sample, seconds) AS slowest,
    coalesce(sum(prompt_tokens), 0)::BIGINT AS prompt_tokens,
    coalesce(sum(completion_tokens), 0)::BIGINT AS completion_tokens
FROM calls GROUP BY model, backend, function ORDER BY requests DESC, model, backend, function
"""
_BY_STEP = f"""
SELECT model, backend, function, step, {_COUNTS}, avg(score) AS mean_score,
    {{p10: quantile_cont(score, 0.1), p90: quantile_cont(score, 0.9)}} AS scores
FROM calls GROUP BY model, backend, function, step ORDER BY step NULLS LAST
"""


def judges(index: Index, chosen: SampleFilter, *, by_step: bool = False) -> list[dict[str, Any]]:
    """Return statistics of each model, backend and function, the most frequent first.

    Args:
        index: the index.
        chosen: the samples.
        by_step: whether to add those of each step.
    """
    calls = _CALLS.format(where=chosen.where)
    with index.cursor() as cursor:
        cursor.execute(_SERVED.format(where=chosen.where), chosen.parameters)
        found = rows_of(cursor, calls + _JUDGES, chosen.parameters)
        steps = rows_of(cursor, calls + _BY_STEP, chosen.parameters) if by_step else []
        ids = "SELECT rowid AS row, id FROM samples WHERE list_contains(?, rowid)"
        names = {row["row"]: row["id"] for row in rows_of(cursor, ids, [[row["slowest"] for row in found]])}
    of_steps: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in (*found, *steps):
        row["seconds"] |= zip(("p50", "p95"), row["seconds"].pop("quantiles") or (None, None), strict=True)
    for row in steps:
        of_steps[tuple(row.pop(name) for name in ("model", "backend", "function"))].append(row)
    for row in found:
        row["slowest"] = names.get(row["slowest"])
        row["by_step"] = of_steps[row["model"], row["backend"], row["function"]]
    return found


def report(index: Index, by: str | None = None) -> dict[str, Any]:
    """Return the summary of the samples of training, with that of validation as ``validation``.

    Args:
        index: the index.
        by: the field by whose values samples are also summarised, as ``parts``.

    Raises:
        ConfigError: the field is unknown.
    """
    with index.cursor() as cursor:
        whole = {validate: summary for (_, validate), summary in _summaries(cursor, "NULL", "samples").items()}
        found = {} if by is None else _summaries(cursor, value_of(by), "samples")
    parts = [(_plain(value, by), validate, part) for (value, validate), part in found.items() if value is not None]
    if by is not None and whole and not parts:
        raise ConfigError(f"--group-by: no sample has {by}. Components: {listing(run(index)['components'])}")
    parts.sort(key=lambda part: _rank(part[0]))

    def of(validate: bool) -> dict[str, Any]:
        summary = _public(whole.get(validate, empty_summary())) | overview(index, validate)
        summary["judges"] = judges(index, SampleFilter().also("validate = ?", validate))
        if by is not None:
            chosen = [{"value": value, **_public(part)} for value, kind, part in parts if kind is validate]
            summary |= {"by": by, "parts": chosen}
        return summary

    return {**of(False), "validation": of(True) if True in whole else None}


def _public(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in _INTERNAL}


def _plain(value: Any, name: str | None) -> Any:
    """Return a value of a field; those of components are JSON texts in the index, and JSON values here."""
    try:
        found = orjson.loads(value) if str(name).startswith("components.") else value
    except orjson.JSONDecodeError:
        return value
    return value if found is None else found  # the text "null"


def _rank(value: Any) -> tuple[bool, float, str]:
    """Return the key for the order of values: numbers, then all others by their texts."""
    return (False, value, "") if isinstance(value, int | float) else (True, 0.0, str(value))


# Of samples with the same uid, such as those of an environment, the first is compared with the first, and so on.
_PAIRED = """
CREATE OR REPLACE TEMP TABLE paired AS
WITH ours AS ({of_ours}), theirs AS ({of_theirs})
SELECT coalesce(ours.value, theirs.value) AS value, coalesce(ours.uid, theirs.uid) AS sample,
    ours.score AS a, theirs.score AS b, ours.uid IS NOT NULL AND theirs.uid IS NOT NULL AS is_pair
FROM ours FULL JOIN theirs USING (uid, number)
"""
_NUMBERED = """
SELECT uid, row_number() OVER (PARTITION BY uid ORDER BY time, id) AS number, {value} AS value,
    CASE WHEN abs(score) <= {largest} THEN score END AS score
FROM {table} WHERE validate = {validate}
"""
_DIFFERENCES = """
SELECT {value} AS value, count(*) FILTER (is_pair) AS pairs, count(a) AS scored_a, count(b) AS scored_b,
    avg(a) AS mean_a, avg(b) AS mean_b, var_samp(a) AS variance_a, var_samp(b) AS variance_b,
    avg(a) FILTER (b IS NOT NULL) AS paired_a, avg(b) FILTER (a IS NOT NULL) AS paired_b,
    count(a + b) AS both, avg(b - a) AS difference, stddev_samp(b - a) AS std,
    count(*) FILTER (abs(b - a) <= 1e-9) AS equal, corr(a, b) AS correlation
FROM paired GROUP BY ALL ORDER BY value
"""
_FURTHEST = f"""
SELECT sample, a, b, b - a AS difference FROM paired WHERE abs(b - a) > 1e-9
ORDER BY abs(b - a) DESC, sample LIMIT {SHOWN}
"""


def compare(index: Index, other: Index, by: str) -> dict[str, Any]:
    """Compare the scores of two scorings of the same samples, which are joined by ``uid``.

    If they have no sample in common, as two runs, only their means are compared. Samples of validation are compared
    only if A has no others.

    Args:
        index: the first one, A.
        other: the second one, B.
        by: the field of A's samples by whose values they are compared; of B's, where A has none.

    Returns:
        the comparison of all samples; ``validate`` says whether they are those of validation, ``parts`` has the
        comparison of each value, and ``furthest`` the samples whose scores differ most.

    Raises:
        ConfigError: the field is unknown.
    """
    validate = run(index)["training"] is None
    with index.beside(other) as (cursor, theirs):
        fields = {"value": value_of(by), "largest": LARGEST, "validate": validate}
        of = [_NUMBERED.format(**fields, table=table) for table in ("samples", theirs)]
        cursor.execute(_PAIRED.format(of_ours=of[0], of_theirs=of[1]))
        (whole,) = rows_of(cursor, _DIFFERENCES.format(value="NULL"))
        parts = rows_of(cursor, _DIFFERENCES.format(value="value"))
        furthest = rows_of(cursor, _FURTHEST)
        cursor.execute("DROP TABLE paired")
    is_paired = whole["pairs"] > 0
    parts = [_difference(part, is_paired) for part in parts if part["value"] is not None]
    return {**_difference(whole, is_paired), "validate": validate, "by": by, "parts": parts, "furthest": furthest}


def _difference(row: dict[str, Any], is_paired: bool) -> dict[str, Any]:
    """Return a comparison with the difference of the means, B - A, and its interval of 95 %.

    With samples in both, means and difference are those of the samples with two scores.
    """
    variances, std = [row.pop(name) for name in ("variance_a", "variance_b")], row.pop("std")
    means, both = (row.pop("paired_a"), row.pop("paired_b")), row["both"]
    if row["correlation"] is not None and math.isnan(row["correlation"]):  # the scores of one are all equal
        row["correlation"] = None
    if is_paired:
        if both:  # of the same samples, as their difference is
            row["mean_a"], row["mean_b"] = means
        error = None if std is None else std / math.sqrt(both)
    else:
        known = row["scored_a"] and row["scored_b"]
        row["difference"] = row["mean_b"] - row["mean_a"] if known else None
        counts = (row["scored_a"], row["scored_b"])
        error = None if None in variances else math.sqrt(sum(v / n for v, n in zip(variances, counts, strict=True)))
    low, high = (None, None) if error is None else (row["difference"] + sign * _Z95 * error for sign in (-1, 1))
    return {**row, "interval": None if low is None else [low, high], "agreement": row["equal"] / both if both else None}


_SCORED = "outcome = 'scored' AND score IS NOT NULL"
_SCORED_COUNTS = f"""
SELECT count(*) FILTER (time > $after) AS samples, coalesce(max(time), 0) AS latest,
    count(*) FILTER (time > $after AND list_contains($files, text_file)) AS with_texts,
    coalesce(min(score), 0) AS low, coalesce(max(score), 0) AS high
FROM samples WHERE {_SCORED}
"""
_CHOSEN = f"""
SELECT id FROM samples WHERE {_SCORED} AND time > $after AND list_contains($files, text_file)
ORDER BY hash(id) LIMIT $count
"""
_ASKED = """
SELECT regexp_extract(url, '^http://([^/]+)', 1) AS address, bool_or(backend IS NOT NULL) AS is_routed
FROM exchanges GROUP BY address ORDER BY is_routed DESC, max(sample) DESC
"""


def scored(index: Index, files: Sequence[str], count: int, after: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Count the scored samples, and choose some of them by chance, but the same in each call.

    Args:
        index: the index.
        files: the files of texts that are left. Samples with texts in these are chosen.
        count: the number of samples to choose.
        after: the time after which they were scored.

    Returns:
        ``samples`` after this time and those ``with_texts``; of all, the ``latest`` time and the bounds of the score,
        ``low`` and ``high``. And the whole rows of the chosen ones.
    """
    parameters = {"after": after, "files": files}
    (counts,) = index.rows(_SCORED_COUNTS, parameters)
    ids = [row["id"] for row in index.rows(_CHOSEN, {**parameters, "count": count})]
    return counts, list(index.records(SampleFilter().also("list_contains(?, id)", ids)))


def judge_address(index: Index) -> str | None:
    """Return ``host:port`` of the run's judge: of the last answer through the router, else the only one asked."""
    asked = index.rows(_ASKED)
    return (asked[0]["address"] or None) if asked and (asked[0]["is_routed"] or len(asked) == 1) else None
