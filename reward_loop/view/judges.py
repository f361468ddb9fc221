"""Statistics of the exchanges with judges and model servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop.records.report import Price
from reward_loop.view.filters import SampleFilter
from reward_loop.view.index import Index

__all__ = ["PARAMETERS", "judges"]

SLOWEST = 10
"""The number of the slowest requests in an answer."""

BINS = 20
"""The number of intervals of a histogram."""

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
_HISTOGRAM = """
WITH ends AS (SELECT judge, min({value}) AS low, max({value}) AS high FROM calls GROUP BY judge)
SELECT judge, low, high,
    CASE WHEN high > low THEN least(floor(({value} - low) / (high - low) * {bins}), {bins} - 1) ELSE 0
        END::INTEGER AS bin,
    count(*) AS n
FROM calls JOIN ends USING (judge) WHERE {value} IS NOT NULL GROUP BY ALL
"""
_SLOWEST_OF_EACH = """
SELECT rowid AS row, id FROM samples WHERE rowid IN (SELECT arg_max(sample, seconds) FROM calls GROUP BY judge)
"""
_SLOWEST = """
WITH slow AS (FROM calls WHERE seconds IS NOT NULL ORDER BY seconds DESC LIMIT {limit})
SELECT samples.id, uid, samples.step, validate, model, backend, slow.function, seconds, slow.error, unscored, slow.score
FROM slow JOIN samples ON samples.rowid = slow.sample ORDER BY seconds DESC
"""


PARAMETERS = ("step", "validate")
"""The parameters of a request for judges."""


def judges(index: Index, price: Price | None, query: Mapping[str, str]) -> dict[str, Any]:
    """Return statistics of each model, backend and function, the most frequent first, as ``rows``.

    Args:
        index: the index.
        price: the price of tokens, if it is known.
        query: the parameters of the request: ``step`` and ``validate``.

    Returns:
        also the ``slowest`` requests, each with its sample.

    Raises:
        BadRequestError: a parameter is not valid.
    """
    chosen = SampleFilter.parse(query)
    rows, slowest = _statistics(index, chosen)
    for row in rows:
        row["cost"] = price and price.cost(row)
    return {"rows": rows, "slowest": slowest}


def _statistics(index: Index, chosen: SampleFilter) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the statistics of each judge, and the slowest requests."""
    with index.cursor() as cursor:
        cursor.execute(_CALLS.format(where=chosen.where, shortest=SHORTEST_S), chosen.parameters)

        def rows(statement: str) -> list[dict[str, Any]]:
            cursor.execute(statement)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

        found = {row.pop("judge"): row for row in rows(_JUDGES)}
        for row in found.values():
            row["seconds"] |= _quantiles(row.pop("quantiles"))
            row |= {"verdicts": {"edges": [], "counts": []}, "by_step": []}
            row["seconds"]["histogram"] = {"edges": [], "counts": []}
        for row in rows(_BY_STEP):
            row |= _quantiles(row.pop("quantiles"))
            found[row.pop("judge")]["by_step"].append(row)
        for judge, histogram in _histograms(rows(_HISTOGRAM.format(value="size", bins=BINS))).items():
            edges = [2.718281828459045**edge for edge in histogram["edges"]]
            found[judge]["seconds"]["histogram"] = {"edges": edges, "counts": histogram["counts"]}
        for judge, histogram in _histograms(rows(_HISTOGRAM.format(value="score", bins=BINS))).items():
            found[judge]["verdicts"] = histogram
        names = {row["row"]: row["id"] for row in rows(_SLOWEST_OF_EACH)}
        for row in found.values():
            row["slowest"] = names.get(row["slowest"])
        slowest = rows(_SLOWEST.format(limit=SLOWEST))
        cursor.execute("DROP TABLE calls")
    return list(found.values()), slowest


def _quantiles(values: Sequence[float] | None) -> dict[str, float | None]:
    return dict(zip(("p50", "p95"), values or (None, None), strict=True))


def _histograms(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, list[Any]]]:
    found: dict[int, dict[str, list[Any]]] = {}
    for row in rows:
        low, high = row["low"], row["high"]
        if row["judge"] not in found:
            bins = BINS if high > low else 1
            edges = [low + (high - low) * number / bins for number in range(bins)] + [high]
            found[row["judge"]] = {"edges": edges, "counts": [0] * bins}
        found[row["judge"]]["counts"][row["bin"]] = row["n"]
    return found
