"""Summaries of steps and of the run. A summary is kept in the index until the step gets further rows."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import duckdb
import orjson

from reward_loop._util.intervals import FALSE_ACCEPT, WeightedShare
from reward_loop.records import Price, false_accepts_of
from reward_loop.view.filters import SampleFilter, number_of
from reward_loop.view.index import Index, rows_of

BINS = 20
"""The number of intervals of a histogram of many different values."""

MOST_VALUES = 41
"""Up to this number of equally spaced values, a histogram has a bar for each: intervals of another width would leave
some of the bars empty."""

_MISSING = "CREATE OR REPLACE TEMP TABLE missing AS SELECT step, validate FROM summaries WHERE content IS NULL"
_CHOSEN = (
    "samples JOIN missing ON samples.step IS NOT DISTINCT FROM missing.step AND samples.validate = missing.validate"
)
_KEY = "samples.step, samples.validate"

_STEPS = f"""
SELECT {_KEY}, count(*) AS count, count(*) FILTER (outcome = 'scored') AS scored,
    count(*) FILTER (outcome = 'unscored') AS unscored, count(*) FILTER (outcome = 'failed') AS failed,
    count(*) FILTER (masked) AS masked,
    {{mean: avg(reward), std: stddev_pop(reward), min: min(reward), max: max(reward)}} AS reward,
    quantile_cont(reward, [0.1, 0.5, 0.9]) AS reward_quantiles,
    avg(response_length) AS response_length,
    quantile_cont(total_s, [0.5, 0.95]) AS total_s, quantile_cont(judge_s, [0.5, 0.95]) AS judge_s,
    coalesce(sum(prompt_tokens), 0)::BIGINT AS prompt_tokens,
    coalesce(sum(completion_tokens), 0)::BIGINT AS completion_tokens,
    min(time) AS first_time, max(time) AS last_time,
    list(DISTINCT function) FILTER (function IS NOT NULL) AS functions,
    list(DISTINCT data_source) FILTER (data_source IS NOT NULL) AS data_sources
FROM {_CHOSEN} GROUP BY ALL
"""
_GROUPS = f"""
SELECT step, validate, count(*) AS groups, count(*) FILTER (rewards > 1 AND low = high) AS zero_variance_groups,
    count(*) FILTER (rewards = 0) AS all_failed_groups
FROM (
    SELECT {_KEY}, "group", count(*) AS n, count(reward) AS rewards, min(reward) AS low, max(reward) AS high
    FROM {_CHOSEN} WHERE "group" IS NOT NULL GROUP BY ALL HAVING n > 1
) GROUP BY ALL
"""
_COMPONENTS = f"""
SELECT step, validate, name, avg(CASE WHEN isfinite(number) THEN number END) AS mean
FROM (
    SELECT step, validate, name, {number_of("value")} AS number
    FROM (
        SELECT step, validate, name,
            json_extract(components, '/' || replace(replace(name, '~', '~0'), '/', '~1')) AS value
        FROM (
            SELECT {_KEY}, components, unnest(json_keys(components)) AS name FROM {_CHOSEN}
            WHERE json_type(components) = 'OBJECT'
        )
    )
) WHERE name != 'score' GROUP BY ALL ORDER BY ALL
"""
_MODELS = """
SELECT e.step, e.validate, list(DISTINCT model) FILTER (model IS NOT NULL) AS models
FROM exchanges e JOIN missing ON e.step IS NOT DISTINCT FROM missing.step AND e.validate = missing.validate
GROUP BY ALL
"""

_SPOT_CHECKS = f"SELECT {_KEY}, components FROM {_CHOSEN} WHERE contains(components, '{FALSE_ACCEPT}\"')"

_OUTCOMES = "SELECT outcome, count(*) AS count FROM samples WHERE validate = ? GROUP BY outcome ORDER BY count DESC"
_CAUSES = """
WITH failures AS (
    SELECT id, cause, regexp_replace(split_part(error, chr(10), 1), '^[^:]*: ', '') AS line
    FROM samples WHERE validate = ? AND outcome = 'failed' AND error IS NOT NULL
)
SELECT coalesce(cause, line) AS cause, arg_min(line, id) AS error, count(*) AS count, min(id) AS id
FROM failures GROUP BY coalesce(cause, line) ORDER BY count DESC, 1 LIMIT 10
"""
_SLOWEST = """
SELECT id, uid, total_s FROM samples WHERE validate = ? AND total_s IS NOT NULL ORDER BY total_s DESC LIMIT 10
"""
_REWARDS = """
(SELECT 0 AS judge, reward AS score FROM samples WHERE validate = {validate} AND isfinite(reward))
"""

_QUANTILES = ("p10", "p50", "p90")
"""The quantiles of rewards."""

_TIMES = ("p50", "p95")
"""The quantiles of seconds."""

_GROUP_COUNTS = ("groups", "zero_variance_groups", "all_failed_groups")

_INTERNAL = ("first_time", "last_time", "functions", "data_sources", "models")
"""The fields of a summary that only the summary of the run shows."""


class Summaries:
    """Summaries of the steps in an index.

    Args:
        index: the index.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def compute(self) -> None:
        """Compute the summaries of the steps that have changed."""
        # Before a transaction, which waits for the thread that loads new rows.
        if not self._index.rows("SELECT 1 FROM summaries WHERE content IS NULL LIMIT 1"):
            return
        with self._index.writing() as cursor:
            cursor.execute(_MISSING)
            cursor.execute("DELETE FROM summaries WHERE content IS NULL")
            for key, summary in _computed(cursor).items():
                cursor.execute("INSERT INTO summaries VALUES (?, ?, ?)", [*key, orjson.dumps(summary).decode()])
            cursor.execute("DROP TABLE missing")

    def steps(self, validate: bool) -> list[dict[str, Any]]:
        """Return the summaries of all steps, in their order. The summary of samples without a step is the last one.

        Args:
            validate: whether to return those of validation, or those of training.
        """
        self.compute()
        return [
            {name: value for name, value in summary.items() if name not in _INTERNAL}
            for summary in self._all()
            if summary["validate"] is validate
        ]

    def run(self) -> dict[str, Any]:
        """Return the summary of all samples. ``training`` and ``validation`` have counts; ``None`` without samples."""
        self.compute()
        steps = self._all()
        training, validation = (_counts(step for step in steps if step["validate"] is kind) for kind in (False, True))
        return {
            "samples": sum(step["count"] for step in steps),
            "first_time": min((step["first_time"] for step in steps), default=None),
            "last_time": max((step["last_time"] for step in steps), default=None),
            "steps": sorted({step["step"] for step in steps if step["step"] is not None}),
            "training": training,
            "validation": validation,
            "components": _united(step["components"] for step in steps),
            "functions": _united(step["functions"] for step in steps),
            "data_sources": _united(step["data_sources"] for step in steps),
            "models": _united(step["models"] for step in steps),
        }

    def overview(self, validate: bool) -> dict[str, Any]:
        """Return what a run without training steps shows: causes of failures, slowest samples, histogram of rewards.

        Args:
            validate: whether to return those of validation, or those of training.
        """
        queries = {"outcomes": _OUTCOMES, "causes": _CAUSES, "slowest": _SLOWEST}
        rewards = _REWARDS.format(validate=validate)
        rows, values = (self._index.rows(query.format(calls=rewards, value="score")) for query in (_HISTOGRAM, _VALUES))
        found = {name: self._index.rows(query, [validate]) for name, query in queries.items()}
        return {**found, "rewards": _histogram(rows, values)}

    def _all(self) -> list[dict[str, Any]]:
        rows = self._index.rows("SELECT step, validate, content FROM summaries ORDER BY step NULLS LAST, validate")
        return [{"step": row["step"], "validate": row["validate"], **orjson.loads(row["content"])} for row in rows]


def _counts(steps: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the number of samples of some steps, and of each outcome; ``None`` if there are none."""
    outcomes: Counter[str] = Counter()
    samples = 0
    for step in steps:
        samples += step["count"]
        outcomes.update({name: step[name] for name in ("scored", "unscored", "failed")})
    return {"samples": samples, "outcomes": dict(outcomes)} if samples else None


def without_samples(step: int) -> dict[str, Any]:
    """Return the summary of a training step that has no samples, such as the last one with generation ahead."""
    counts = ("count", "scored", "unscored", "failed", "masked", "prompt_tokens", "completion_tokens", *_GROUP_COUNTS)
    spread, times = (dict.fromkeys(names) for names in (("mean", "std", "min", "max", *_QUANTILES), _TIMES))
    found = {"step": step, "validate": False, **dict.fromkeys(counts, 0), "reward": spread, "response_length": None}
    return {**found, "total_s": times, "judge_s": times, "components": {}, "false_accepts": WeightedShare().to_dict()}


def _computed(cursor: duckdb.DuckDBPyConnection) -> dict[tuple[int | None, bool], dict[str, Any]]:
    """Return the summaries of the steps in the table ``missing``."""
    found: dict[tuple[int | None, bool], dict[str, Any]] = {}
    for key, row in _keyed(cursor, _STEPS):
        row["reward"] |= zip(_QUANTILES, row.pop("reward_quantiles") or (None,) * 3, strict=True)
        for name in ("total_s", "judge_s"):
            row[name] = _quantiles(row[name])
        row |= {"functions": row["functions"] or [], "data_sources": row["data_sources"] or []}
        found[key] = {**row, **dict.fromkeys(_GROUP_COUNTS, 0), "components": {}, "models": []}
    for statement in (_GROUPS, _MODELS):
        for key, row in _keyed(cursor, statement):
            found[key] |= {name: value or ([] if name == "models" else 0) for name, value in row.items()}
    for key, row in _keyed(cursor, _COMPONENTS):
        found[key]["components"][row["name"]] = row["mean"]
    shares: defaultdict[Any, WeightedShare] = defaultdict(WeightedShare)
    for key, row in _keyed(cursor, _SPOT_CHECKS):
        for accepted, chance in false_accepts_of(orjson.loads(row["components"])):
            shares[key].add(accepted, chance)
    for key, summary in found.items():
        summary["false_accepts"] = shares[key].to_dict()
    return found


def _keyed(
    cursor: duckdb.DuckDBPyConnection, statement: str
) -> Iterable[tuple[tuple[int | None, bool], dict[str, Any]]]:
    for row in rows_of(cursor, statement):
        yield (row.pop("step"), row.pop("validate")), row


def _united(parts: Iterable[Iterable[str] | Mapping[str, Any]]) -> list[str]:
    return sorted({name for part in parts for name in part})


SLOWEST = 10
"""The number of the slowest requests in an answer."""

SHORTEST_S = 0.001
"""The lower end of the histogram of seconds, whose intervals grow by a constant factor."""

# All samples of a batch have its exchanges: each counts once. A failed request may lack the model that the answers of
# its server name.
_CALLS = """
CREATE OR REPLACE TEMP TABLE calls AS
WITH chosen AS (FROM exchanges WHERE {where}),
    counted AS (
        FROM chosen WHERE batch IS NULL UNION ALL SELECT DISTINCT ON (id) * FROM chosen WHERE batch IS NOT NULL
    ),
    served AS (
        SELECT url, min(model) AS only FROM counted WHERE model != url GROUP BY url HAVING min(model) = max(model)
    ),
    named AS (
        SELECT counted.* REPLACE (coalesce(served.only, counted.model) AS model)
        FROM counted LEFT JOIN served ON counted.model = counted.url AND served.url = counted.url
    )
SELECT dense_rank() OVER (ORDER BY model, backend, function) AS judge, sample, model, backend, function, step, seconds,
    error, unscored, prompt_tokens, completion_tokens, CASE WHEN isfinite(score) THEN score END AS score,
    ln(greatest(seconds, {shortest})) AS size
FROM named
"""
_JUDGES = """
SELECT judge, any_value(model) AS model, any_value(backend) AS backend, any_value(function) AS function,
    count(*) AS calls, count(*) FILTER (error) AS errors, count(*) FILTER (unscored) AS unscored,
    {mean: avg(seconds), max: max(seconds)} AS seconds,
    arg_max(sample, seconds) AS slowest, quantile_cont(seconds, [0.5, 0.95]) AS quantiles,
    coalesce(sum(prompt_tokens), 0)::BIGINT AS prompt_tokens,
    coalesce(sum(completion_tokens), 0)::BIGINT AS completion_tokens
FROM calls GROUP BY judge ORDER BY calls DESC, judge
"""
_BY_STEP = """
SELECT judge, step, count(*) AS calls, count(*) FILTER (error) AS errors, count(*) FILTER (unscored) AS unscored,
    quantile_cont(seconds, [0.5, 0.95]) AS quantiles, avg(score) AS mean_score,
    {p10: quantile_cont(score, 0.1), p90: quantile_cont(score, 0.9)} AS scores
FROM calls GROUP BY judge, step ORDER BY judge, step NULLS LAST
"""
# Of the numbers in a column of `calls`, for each judge: the ends, and the count of each interval that has some.
_HISTOGRAM = f"""
WITH ends AS (SELECT judge, min({{value}}) AS low, max({{value}}) AS high FROM {{calls}} GROUP BY judge)
SELECT judge, low, high,
    CASE WHEN high > low THEN least(floor(({{value}} - low) / (high - low) * {BINS}), {BINS} - 1) ELSE 0
        END::INTEGER AS bin,
    count(*) AS n
FROM {{calls}} JOIN ends USING (judge) WHERE {{value}} IS NOT NULL GROUP BY ALL
"""
_VALUES = f"""
SELECT judge, score AS value, count(*) AS n FROM {{calls}} WHERE score IS NOT NULL GROUP BY judge, score
QUALIFY count(*) OVER (PARTITION BY judge) <= {MOST_VALUES} ORDER BY judge, value
"""
_SLOWEST_OF_JUDGES = """
SELECT rowid AS row, id FROM samples WHERE rowid IN (SELECT arg_max(sample, seconds) FROM calls GROUP BY judge)
"""
_SLOWEST_CALLS = f"""
WITH slow AS (FROM calls WHERE seconds IS NOT NULL ORDER BY seconds DESC LIMIT {SLOWEST})
SELECT samples.id, uid, samples.step, validate, model, backend, slow.function, seconds, slow.error, unscored, slow.score
FROM slow JOIN samples ON samples.rowid = slow.sample ORDER BY seconds DESC
"""


def judges(index: Index, price: Price | None, query: Mapping[str, str]) -> dict[str, Any]:
    """Return statistics of each model, backend and function, the most frequent first, as ``rows``.

    Args:
        index: the index.
        price: the price of tokens, if it is known.
        query: the parameters of the request: ``step`` and ``validate``.

    Returns:
        also the ``slowest`` requests, each with its sample.

    Raises:
        ConfigError: a parameter is not valid.
    """
    chosen = SampleFilter.parse(query)
    with index.cursor() as cursor:
        cursor.execute(_CALLS.format(where=chosen.where, shortest=SHORTEST_S), chosen.parameters)

        def rows(statement: str, value: str = "score") -> list[dict[str, Any]]:
            return rows_of(cursor, statement.format(calls="calls", value=value))

        found = {row.pop("judge"): row for row in rows_of(cursor, _JUDGES)}
        for row in found.values():
            row["seconds"] |= _quantiles(row.pop("quantiles"))
            row["by_step"] = []
            row["cost"] = price and price.cost(row)
        for row in rows_of(cursor, _BY_STEP):
            row |= _quantiles(row.pop("quantiles"))
            found[row.pop("judge")]["by_step"].append(row)
        sizes, scores, values = map(_by_judge, (rows(_HISTOGRAM, "size"), rows(_HISTOGRAM), rows(_VALUES)))
        for judge, row in found.items():
            histogram = _histogram(sizes[judge])
            row["seconds"]["histogram"] = {
                name: numbers if name == "counts" else [math.exp(number) for number in numbers]
                for name, numbers in histogram.items()
            }
            row["verdicts"] = _histogram(scores[judge], values[judge])
        names = {row["row"]: row["id"] for row in rows_of(cursor, _SLOWEST_OF_JUDGES)}
        for row in found.values():
            row["slowest"] = names.get(row["slowest"])
        slowest = rows_of(cursor, _SLOWEST_CALLS)
        cursor.execute("DROP TABLE calls")
    return {"rows": list(found.values()), "slowest": slowest}


def _by_judge(rows: Iterable[dict[str, Any]]) -> Mapping[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["judge"]].append(row)
    return found


def _quantiles(values: Sequence[float] | None) -> dict[str, float | None]:
    return dict(zip(_TIMES, values or (None, None), strict=True))


def _histogram(rows: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, Any]] = ()) -> dict[str, list[Any]]:
    """Return the edges and counts of a histogram.

    Args:
        rows: of each interval that contains values, the ends of the whole range, its number and its count.
        values: all different values in their order, each with its count, if there are few. If they are equally spaced,
            each place has a bar, and the histogram has their ``centers``, as that of a single value.
    """
    if not rows:
        return {"edges": [], "counts": []}
    if rows[0]["low"] == rows[0]["high"]:
        value = rows[0]["low"]
        return {"edges": [value, value], "counts": [rows[0]["n"]], "centers": [value]}
    if centers := _equally_spaced([row["value"] for row in values]):
        amounts = {round((row["value"] - centers[0]) / (centers[1] - centers[0])): row["n"] for row in values}
        half = (centers[1] - centers[0]) / 2
        edges = [centers[0] - half, *(center + half for center in centers)]
        return {"edges": edges, "counts": [amounts.get(i, 0) for i in range(len(centers))], "centers": centers}
    low, high = rows[0]["low"], rows[0]["high"]
    counts = [0] * BINS
    for row in rows:
        counts[row["bin"]] = row["n"]
    edges = [low + (high - low) * number / len(counts) for number in range(len(counts))] + [high]
    return {"edges": edges, "counts": counts}


def _equally_spaced(values: Sequence[float]) -> list[float]:
    """Return the places of values that are multiples of their smallest distance, also those between them.

    Empty if they are not, or if these are too many places.
    """
    if len(values) < 2:
        return []
    step = min(later - sooner for sooner, later in itertools.pairwise(values))
    places = [(value - values[0]) / step for value in values]
    if places[-1] > MOST_VALUES - 1 or any(abs(place - round(place)) > 1e-6 for place in places):
        return []
    return [values[0] + (values[-1] - values[0]) * i / round(places[-1]) for i in range(round(places[-1]) + 1)]
