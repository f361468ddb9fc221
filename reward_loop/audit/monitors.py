"""The table of monitors: the values, the limit and the warning of each, and their history; `HealthWatch` warns."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reward_loop._util.intervals import wilson
from reward_loop.audit.counts import ProbeCount
from reward_loop.audit.phrases import PhraseHistory, unexplained_rewards
from reward_loop.audit.reference import JUDGE, MOST_SAMPLES, StepMeans, divergence, judged_too_high, step_means
from reward_loop.audit.values import (
    Observation,
    Pool,
    component_saturation,
    component_share,
    false_accepts,
    identical_responses,
    judge_latency,
    length_correlation,
    masked_share,
    repetition,
    score_jump,
    unparsable_verdicts,
    zero_variance_groups,
)
from reward_loop.config import HealthConfig

CANARY = "canary/"
"""The start of the names of the kinds of canaries."""

LABELLED = "labelled"
"""The kind of the labelled answers: many probes in one step, and then none for several steps."""

REFERENCE = "reference"
"""The kind of the answers that the reference judge rejects."""

CANARY_ERRORS = 4.0
"""Half the width of Wilson's interval, in standard errors. Many kinds are tested in each step: with fewer standard
errors, chance gives a warning in some runs of 1,000 steps."""

FALL_ERRORS = 3.0
"""A fall is real if it is larger than this number of its standard errors. In simulated runs of 1,000 steps without a
fall, chance gives at most about one warning in 30 runs."""

MIN_CANARIES = 5
"""With fewer canaries of a kind in the window, their share is not compared with the limit."""

MIN_PROBES = 32
"""A fall is computed from at least this number of probes, in the baseline and in the window."""


class ProbeHistory:
    """The probes of one kind: the first ones, and those of the latest steps.

    Args:
        baseline_steps: the smallest number of steps of the baseline.
        window: the number of latest steps.
    """

    def __init__(self, baseline_steps: int, window: int) -> None:
        self._baseline_steps = baseline_steps
        self._window = window
        self._steps: deque[tuple[int, ProbeCount]] = deque()
        self._first: list[ProbeCount] = []

    def add(self, step: int, counts: ProbeCount) -> None:
        """Add the probes of a step."""
        self._steps.append((step, counts))
        while self._steps[0][0] <= step - self._window:
            self._steps.popleft()
        if len(self._first) < self._baseline_steps or self.first.asked < MIN_PROBES:
            self._first.append(counts)

    @property
    def first(self) -> ProbeCount:
        """The baseline: the first steps with probes, until there are at least `MIN_PROBES`."""
        return _total(self._first)

    @property
    def recent(self) -> ProbeCount:
        """The probes of the window."""
        return _total(counts for _, counts in self._steps)


def _total(steps: Iterable[ProbeCount]) -> ProbeCount:
    pairs = [(counts.asked, counts.accepted) for counts in steps]
    return ProbeCount(sum(asked for asked, _ in pairs), sum(accepted for _, accepted in pairs))


def wilson_lower(counts: ProbeCount) -> float:
    """Return the lower bound of the confidence interval of the accepted share, by Wilson's formula.

    0 with fewer than `MIN_CANARIES` probes.

    Example::

        wilson_lower(ProbeCount(asked=32, accepted=19))  # 0.28
    """
    if counts.asked < MIN_CANARIES:
        return 0.0
    return wilson(counts.accepted, counts.asked, CANARY_ERRORS)[0]


def fall(first: ProbeCount, recent: ProbeCount) -> tuple[float, float] | None:
    """Return how far the accepted share fell, and this number again if it is not chance; otherwise 0.

    ``None`` if one of both has fewer than `MIN_PROBES` probes.
    """
    if min(first.asked, recent.asked) < MIN_PROBES:
        return None
    pooled = (first.accepted + recent.accepted) / (first.asked + recent.asked)
    error = math.sqrt(pooled * (1 - pooled) * (1 / first.asked + 1 / recent.asked))
    fallen = first.accepted / first.asked - recent.accepted / recent.asked
    return fallen, fallen if fallen > FALL_ERRORS * error else 0.0


NEW = 0.8
"""A component that was already above this share in the baseline steps is not reported as dominating or saturated."""


class Reading(NamedTuple):
    """The value of a monitor in one step."""

    value: float
    certain: float | None = None
    """What is compared with the limit, if it is not the value: the part of the value that is not chance."""
    detail: str = ""
    """What else the warning says about the value."""
    samples: Sequence[str] = ()
    """The uids of samples that show it."""
    tokens: Sequence[int] = ()
    """The token IDs of a phrase."""


class History:
    """The values of earlier steps that the monitors need, and the options that they depend on.

    Args:
        options: the thresholds and windows.
        decode: returns the text of token IDs, for warnings.
    """

    def __init__(self, options: HealthConfig, decode: Decode) -> None:
        self.options = options
        self.decode = decode
        self.pools: deque[Pool] = deque(maxlen=options.baseline_steps)
        self.means: dict[str, deque[StepMeans]] = defaultdict(lambda: deque(maxlen=options.window))
        """The means of each reference."""
        self.probes: dict[str, ProbeHistory] = {}
        """The counts of each kind of probe."""
        self.phrases = PhraseHistory(options.window, options.phrases or 0.0)
        self.ranges: dict[str, tuple[float, float]] = {}
        """The smallest and the largest value of each component in the run."""

    def add(self, observation: Observation) -> None:
        """Add a step, after it was read."""
        trained = observation.trained
        if trained.any():
            groups = len(np.unique(observation.groups[trained]))
            self.pools.append(Pool(observation.rewards[trained], groups))

    def recent(self, step: int, kind: str, counts: ProbeCount) -> ProbeCount:
        """Add the probes of a step, and return those of the window."""
        if kind not in self.probes:
            baseline = 1 if kind == LABELLED else self.options.baseline_steps
            self.probes[kind] = ProbeHistory(baseline, self.options.window)
        self.probes[kind].add(step, counts)
        return self.probes[kind].recent

    def widen(self, components: Mapping[str, np.ndarray]) -> None:
        """Extend the ranges by the values of a step, before it is read."""
        for name, values in components.items():
            values = values[np.isfinite(values)]
            if len(values):
                low, high = self.ranges.get(name, (math.inf, -math.inf))
                self.ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))


Decode = Callable[[list[int]], str]
"""Returns the text of token IDs."""

Limit = Callable[[float, float | None], float]
"""Returns the largest healthy value, from the threshold and the baseline (``None`` before it is known)."""


def _fixed(threshold: float, baseline: float | None) -> float:
    return threshold


def _new(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None or baseline > min(NEW, threshold) else threshold


def _added(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None else baseline + threshold


def _times(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None else baseline * threshold


@dataclass(frozen=True)
class Monitor:
    """One monitor. Its name is also that of its option, with the threshold, and of its metric."""

    name: str
    read: Callable[[Observation, History], Mapping[str, Reading]]
    """Returns the values of a step by subject: the name of a component, or an empty text if there is only one."""
    seen: str
    """The first part of the warning, with the fields ``value``, ``limit``, ``baseline``, ``subject`` and
    ``detail``."""
    look: str
    """The second part of the warning: where to look."""
    limit: Limit = _fixed
    """The largest healthy value of a step; by default the threshold."""
    is_event: bool = False
    """Whether one step is enough for a warning. Otherwise, ``patience`` steps in a row are needed."""


def _one(value: float | None) -> dict[str, Reading]:
    return {} if value is None else {"": Reading(value)}


def _each(values: Mapping[str, float]) -> dict[str, Reading]:
    return {name: Reading(value) for name, value in values.items()}


def _gap(step: Observation, history: History) -> dict[str, Reading]:
    found = {}
    for name in filter(None, (history.options.reference, JUDGE)):
        means = step_means(step, name)
        if means is None:
            continue
        steps = history.means[name]
        steps.append(means)
        if len(steps) < history.options.window or (compared := divergence(steps)) is None:
            continue
        reward, reference = compared.rises
        detail = f"{reward:+.3g} for the reward, {reference:+.3g} for the reference, over {len(steps)} steps"
        samples = judged_too_high(step, name) if compared.is_real else ()
        found[name] = Reading(compared.gap, compared.gap if compared.is_real else 0.0, detail, samples)
    return found


def _canaries(step: Observation, history: History) -> dict[str, Reading]:
    """Return the shares of accepted canaries of each kind, and of all kinds together but the labelled answers.

    The window finds a small share, the step alone a sudden change.
    """
    kinds = {kind: counts for kind, counts in step.probes.items() if kind.startswith(CANARY) and counts.asked}
    # The monitor `false_accepts` reads these.
    kinds.pop(CANARY + REFERENCE, None)
    made = [counts for kind, counts in kinds.items() if kind != CANARY + LABELLED]
    if len(made) > 1:
        asked, accepted = (sum(values) for values in zip(*((c.asked, c.accepted) for c in made), strict=True))
        kinds["all"] = ProbeCount(asked, accepted, [uid for counts in made for uid in counts.samples])
    return {kind.removeprefix(CANARY): _accepted(step, history, kind, counts) for kind, counts in kinds.items()}


def _false_accepts(step: Observation, history: History) -> dict[str, Reading]:
    """Return the shares of accepted ones of the answers that a second judge, asked at random, rejects."""
    kinds = {
        f"spot check {name}".rstrip(): counts for name, counts in false_accepts(step.components, step.uids).items()
    }
    if (rejected := step.probes.get(CANARY + REFERENCE)) is not None and rejected.asked:
        kinds[JUDGE] = rejected
    return {kind: _accepted(step, history, kind, counts) for kind, counts in kinds.items()}


def _accepted(step: Observation, history: History, kind: str, counts: ProbeCount) -> Reading:
    recent = history.recent(step.step, kind, counts)
    window = f"{recent.accepted} of {recent.asked} in the window"
    detail = f"{counts.accepted} of {counts.asked} wrong answers, {window}"
    certain = max(wilson_lower(recent), wilson_lower(counts))
    return Reading(recent.accepted / recent.asked, certain, detail, counts.samples[:MOST_SAMPLES])


def _falls(step: Observation, history: History, kinds: Collection[str]) -> dict[str, Reading]:
    """Return how far the share of probes that agree, or are correct, fell below its baseline."""
    found = {}
    for kind in kinds:
        counts = step.probes.get(kind)
        if counts is None or not counts.asked:
            continue
        recent = history.recent(step.step, kind, counts)
        first = history.probes[kind].first
        if (fallen := fall(first, recent)) is not None:
            detail = (
                f"{recent.accepted / recent.asked:.0%}, after {first.accepted / first.asked:.0%} in the first steps"
            )
            found[kind] = Reading(*fallen, detail, counts.samples[:MOST_SAMPLES])
    return found


def _phrase(step: Observation, history: History) -> dict[str, Reading]:
    if not len(step.response_samples):
        return {}
    phrase = history.phrases.add(step, unexplained_rewards(step, history.options.reference))
    if phrase is None:
        return {"": Reading(0.0)}
    detail = (
        f"{history.decode(phrase.tokens)!r} is in {phrase.share:.0%} of the responses; within groups, rewards with it "
        f"are higher by {phrase.effect:.2f} standard deviations"
    )
    return {"": Reading(phrase.rise, None, detail, phrase.uids, phrase.tokens)}


def _jump(step: Observation, history: History) -> dict[str, Reading]:
    found = score_jump(step.rewards, step.groups, history.pools)
    if found is None:
        return {}
    distance, critical = found
    return {"": Reading(distance, distance if distance > critical else 0.0)}


# No name contains `max`, `min`, `sum`, `mean` or `std`: by these words, verl chooses how it aggregates a metric.
MONITORS = (
    Monitor(
        "zero_variance_groups",
        lambda step, _: _one(zero_variance_groups(step.rewards, step.groups)),
        "{value:.0%} of the groups have equal rewards, so their samples have no advantage (limit {limit:.0%})",
        "Compare the rewards and responses of these groups: the task may be too easy or too hard, or the judge may "
        "give the same score to all responses",
    ),
    Monitor(
        "masked_share",
        lambda step, _: _one(masked_share(step.rewards)),
        "{value:.0%} of the samples are masked (limit {limit:.0%})",
        "Look at the errors of samples without a score (`outcome` and `error` in the records)",
    ),
    Monitor(
        "component_share",
        lambda step, _: _each(component_share(step.scores, step.components)),
        "the component {subject!r} now makes up {value:.0%} of the variance of the score (limit {limit:.0%}; "
        "{baseline:.0%} in the first steps)",
        "Compare responses with a high and a low {subject!r}: the other components have almost no influence any more",
        limit=_new,
    ),
    Monitor(
        "component_saturation",
        lambda step, history: _each(component_saturation(step.components, history.ranges)),
        "{value:.0%} of the samples have the largest value of the component {subject!r} (limit {limit:.0%}; "
        "{baseline:.0%} in the first steps)",
        "Read responses with the largest {subject!r}: the task may be solved, or the policy may exploit the component",
        limit=_new,
    ),
    Monitor(
        "length_correlation",
        lambda step, _: _one(length_correlation(step.rewards, step.groups, step.lengths)),
        "the reward has a correlation of {value:+.2f} with the response length (limit {limit:.2f} in both directions)",
        "Compare the longest and the shortest responses of a group: the reward may depend on the length only",
    ),
    Monitor(
        "repetition",
        lambda step, _: _one(repetition(step.responses)),
        "{value:.0%} of the responses repeat more than half of their 4-grams (limit {limit:.0%})",
        "Read the longest responses with a high reward",
    ),
    Monitor(
        "identical_responses",
        lambda step, _: _one(identical_responses(step.responses)),
        "{value:.0%} of the responses are identical to another one (limit {limit:.0%})",
        "Read the most frequent response and its rewards: the policy may have collapsed to it",
    ),
    Monitor(
        "unparsable_verdicts",
        lambda step, _: _one(unparsable_verdicts(len(step.rewards), step.unscored, step.judges)),
        "{value:.0%} of the judgements have no verdict (limit {limit:.0%}; {baseline:.0%} in the first steps)",
        "Read the judge's replies without a verdict (`unscored` in the exchanges of the records): they may be cut off, "
        "or responses may address the judge",
        limit=_added,
    ),
    Monitor(
        "judge_latency",
        lambda step, _: _one(judge_latency(step.judges)),
        "95% of the requests to judges take up to {value:.3g} s (limit {limit:.3g} s; {baseline:.3g} s in the first "
        "steps)",
        "Look at the load and the logs of the judge's servers, and at the lengths of requests and replies",
        limit=_times,
    ),
    Monitor(
        "reference_gap",
        _gap,
        "the reward rises, but {subject!r} falls behind: {detail}; the gap grew by {value:.2f} standard "
        "deviations (limit {limit:.2f})",
        "Read samples with a high reward and a low {subject!r}: the policy may exploit the reward",
    ),
    Monitor(
        "canaries",
        _canaries,
        "the judge accepted {detail} (kind {subject}; limit {limit:.0%})",
        "Read these answers and the judge's replies in the records of the probes: the policy may find such answers",
        is_event=True,
    ),
    Monitor(
        "false_accepts",
        _false_accepts,
        "the judge accepts answers that a second judge, which is asked at random, rejects: {detail} ({subject}; limit "
        "{limit:.0%})",
        "Read these answers: the policy may learn what deceives the judge. With spot checks the mean of the reward is "
        "right nevertheless, but its variance grows: raise the share, or use a better cheap judge",
        is_event=True,
    ),
    Monitor(
        "agreement",
        lambda step, history: _falls(step, history, ("again", "order", "frame")),
        "the judge's scores of the same answers ({subject}) agree less often: {detail} (limit of the fall {limit:.0%})",
        "Compare the judge's replies to the first and the second request: its scores may be noise",
        is_event=True,
    ),
    Monitor(
        "labelled",
        lambda step, history: _falls(step, history, (LABELLED,)),
        "the judge's accuracy on labelled answers fell: {detail} (limit of the fall {limit:.0%})",
        "Check whether the judge's model, prompt or server changed",
        is_event=True,
    ),
    Monitor(
        "phrases",
        _phrase,
        "a phrase becomes more frequent together with the reward: {detail}; its share rose by {value:.0%} (limit "
        "{limit:.0%})",
        "Compare responses with and without the phrase: the judge may reward its words, or better answers may need it",
    ),
    Monitor(
        "score_jump",
        _jump,
        "the distribution of rewards differs from that of the steps before by {value:.2f} (Kolmogorov-Smirnov "
        "distance; limit {limit:.2f})",
        "Compare the responses with the highest rewards before and after: the policy may have found an exploit, or "
        "the judge may have changed",
        is_event=True,
    ),
)
"""All monitors."""


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A monitor that has just exceeded its limit."""

    step: int
    """The step in which the warning was raised."""
    monitor: str
    subject: str
    """The component, reference or kind of probe; empty if the warning is about the step as a whole."""
    message: str
    """The observation, its first step, and where to look."""
    value: float
    threshold: float
    """The limit that the value exceeded."""
    since: int
    """The first of the steps in a row that exceeded the limit."""
    samples: list[str]
    """The uids of samples of the step that show the problem; only of monitors that compare samples."""
    tokens: list[int] = field(default_factory=list)
    """The token IDs of the phrase of a warning about one."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The values of the monitors in one step, and the warnings that begin with it."""

    values: dict[str, float]
    """The value of each monitor that has one; of several components, the largest."""
    warnings: list[HealthWarning]
    active: int
    """The number of warnings that have begun and not ended."""


@dataclass
class _Series:
    """The values of one monitor for one subject."""

    first: list[float] = field(default_factory=list)
    """The values of the baseline steps."""
    beyond: list[int] = field(default_factory=list)
    """The latest steps in a row whose values exceeded the limit."""
    within: int = 0
    """The number of latest steps in a row whose values were within the limit."""
    is_active: bool = False
    is_cleared: bool = False
    """Whether a test has cleared the active warning."""

    def baseline(self, steps: int) -> float | None:
        """Return the median of the first values; ``None`` before there are `steps` of them."""
        return statistics.median(self.first) if len(self.first) >= steps else None


class HealthWatch:
    """Runs the monitors on each training step. Keeps the history that they need.

    A warning begins when the value of a monitor exceeds its limit in ``patience`` steps in a row, and ends after the
    same number of steps in a row within the limit; only then can the monitor warn again. For ``score_jump`` and
    the monitors of probes, which compare with earlier steps themselves, one step is enough for both. Steps without a
    value change nothing.

    Example::

        watch = HealthWatch(HealthConfig(masked_share=0.1))
        for warning in watch.check(observation).warnings:
            print(warning.message)

    Args:
        options: the thresholds.
        decode: returns the text of token IDs; called only for the phrases of warnings. By default a list of numbers.
    """

    def __init__(self, options: HealthConfig, decode: Decode = str) -> None:
        self._options = options
        self._thresholds = {monitor.name: getattr(options, monitor.name) for monitor in MONITORS}
        self._history = History(options, decode)
        self._series: dict[tuple[str, str], _Series] = {}

    def check(self, observation: Observation) -> Findings:
        """Return the values of the monitors for the next step, and its new warnings."""
        # Before the monitors read the step: values above all earlier ones would otherwise count as saturated.
        self._history.widen(observation.components)
        values: dict[str, float] = {}
        warnings: list[HealthWarning] = []
        for monitor in MONITORS:
            if self._thresholds[monitor.name] is None:
                continue
            readings = monitor.read(observation, self._history)
            if readings:
                values[monitor.name] = max((reading.value for reading in readings.values()), key=abs)
            warnings += self._judge(monitor, readings, observation.step)
        self._history.add(observation)
        active = sum(series.is_active and not series.is_cleared for series in self._series.values())
        return Findings(values, warnings, active)

    def clear(self, warning: HealthWarning) -> None:
        """End a warning without a reason: the judge does not pay for the phrase, or for length.

        Later warnings are about other phrases; that of another monitor comes again only after the value was within the
        limit.
        """
        series = self._series[warning.monitor, warning.subject]
        if warning.tokens:
            self._history.phrases.clear(warning.tokens)
            series.is_active = False
            series.beyond.clear()
        else:
            series.is_cleared = series.is_active

    def _judge(self, monitor: Monitor, readings: Mapping[str, Reading], step: int) -> list[HealthWarning]:
        warnings = []
        patience = 1 if monitor.is_event else self._options.patience
        for subject, reading in readings.items():
            series = self._series.setdefault((monitor.name, subject), _Series())
            baseline = series.baseline(self._options.baseline_steps)
            limit = monitor.limit(self._thresholds[monitor.name], baseline)
            if baseline is None:
                series.first.append(reading.value)
            if abs(reading.value if reading.certain is None else reading.certain) <= limit:
                series.beyond.clear()
                series.within += 1
                series.is_active = series.is_active and series.within < patience
                series.is_cleared = series.is_cleared and series.is_active
                continue
            series.within = 0
            series.beyond = [*series.beyond, step][-patience:]
            if len(series.beyond) == patience and not series.is_active:
                series.is_active = True
                warnings.append(_warning(monitor, subject, reading, limit, baseline, series.beyond[0], step))
        return warnings


def _warning(
    monitor: Monitor, subject: str, reading: Reading, limit: float, baseline: float | None, since: int, step: int
) -> HealthWarning:
    fields = {**reading._asdict(), "subject": subject, "limit": limit, "baseline": baseline}
    steps = f"In step {step}" if since == step else f"Since step {since}"
    message = f"{steps}, {monitor.seen.format(**fields)}. {monitor.look.format(**fields)}."
    shown = list(reading.samples), list(reading.tokens)
    return HealthWarning(step, monitor.name, subject, message, reading.value, limit, since, *shown)
