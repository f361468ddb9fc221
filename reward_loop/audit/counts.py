"""The numbers of probes that have ended, as they go from the workers to the trainer, and their metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from reward_loop._util.intervals import Z95, kappa
from reward_loop.audit.ablation import AblationCount
from reward_loop.audit.probes import CANARY

WRONG = f"{CANARY}/labelled"
"""The kind of labelled answers that are wrong."""

REJECTED = f"{CANARY}/reference"
"""The kind of answers of the run that the reference judge rejects."""

MAX_SAMPLES = 8
"""The number of samples that are named for each kind of probe."""


@dataclass
class ProbeCount:
    """The probes of one kind that ended with a score."""

    asked: int = 0
    accepted: int = 0
    """Canaries: those that the judge accepted. Labelled answers: those judged as labelled. Other kinds: those whose
    score agrees with the first one."""
    samples: list[str] = field(default_factory=list)
    """The uids of some samples with an accepted canary, or with a score that does not agree."""
    difference: float = 0.0
    """The sum of the absolute differences to the first scores."""


@dataclass(frozen=True, slots=True)
class ReferencePair:
    """A sample that both judges scored."""

    uid: str | None
    score: float
    """The score of the judge."""
    reference: float
    """The score of the reference judge."""
    components: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The other numbers that both judges returned, by name: that of the judge, and that of the reference judge."""


@dataclass
class AuditCounts:
    """What the probes of one or more processes have found since the last time."""

    probes: dict[str, ProbeCount] = field(default_factory=dict)
    """By kind: ``canary/KIND``, ``again``, ``frame``, ``order``, ``labelled``. Labelled answers that are wrong are also
    canaries: `WRONG`; and so are answers that the reference judge rejects: `REJECTED`."""
    labels: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """The number of labelled answers by label and by whether the judge accepted them."""
    drifts: list[float] = field(default_factory=list)
    """For labelled answers: the absolute differences to their first scores."""
    pairs: list[ReferencePair] = field(default_factory=list)
    """The samples that the reference judge scored."""
    ablations: dict[str, AblationCount] = field(default_factory=dict)
    """By the name of the feature."""
    without_score: int = 0
    """Probes that failed, or that the judge could not score."""
    skipped: int = 0
    """Probes that were not made, because too many others waited: the limits had no room for them."""

    def add(self, kind: str, uid: str | None, accepted: bool, difference: float = 0.0) -> None:
        """Count a probe that ended with a score."""
        count = self.probes.setdefault(kind, ProbeCount())
        count.asked += 1
        count.accepted += accepted
        count.difference += difference
        if accepted == kind.startswith(CANARY) and uid is not None and len(count.samples) < MAX_SAMPLES:
            count.samples.append(uid)

    def add_labelled(self, uid: str | None, label: bool, accepted: bool) -> None:
        """Count a labelled answer that the judge has scored; a wrong one is also a canary."""
        self.labels[label, accepted] += 1
        self.add("labelled", uid, accepted == label)
        if not label:
            self.add(WRONG, uid, accepted)

    @classmethod
    def merged(cls, parts: Iterable[Self]) -> Self:
        """Return the sum of the counts of several processes."""
        total = cls()
        for part in parts:
            for kind, count in part.probes.items():
                ours = total.probes.setdefault(kind, ProbeCount())
                ours.asked += count.asked
                ours.accepted += count.accepted
                ours.difference += count.difference
                ours.samples = [*ours.samples, *count.samples][:MAX_SAMPLES]
            total.labels.update(part.labels)
            total.drifts += part.drifts
            total.pairs += part.pairs
            for name, ablation in part.ablations.items():
                added = total.ablations.setdefault(name, AblationCount())
                added.pairs += ablation.pairs
                added.failed += ablation.failed
            total.without_score += part.without_score
            total.skipped += part.skipped
        return total

    def metrics(self, group: str = "reward_loop/audit") -> dict[str, float]:
        """Return the metrics by name, each below ``group``; docs/health.md has their meanings."""
        found = {"without_score": float(self.without_score), "skipped": float(self.skipped)}
        # These two repeat probes that are counted elsewhere: among the labelled answers, and in `pairs`.
        asked = sum(count.asked for kind, count in self.probes.items() if kind not in (WRONG, REJECTED))
        asked += sum(len(ablation.pairs) for ablation in self.ablations.values())
        found["asked"] = float(asked + len(self.pairs))
        for kind, count in self.probes.items():
            if kind.startswith(CANARY):
                found[f"{kind}/accepted"] = count.accepted / count.asked
            elif kind != "labelled":
                found[f"{kind}/agreement"] = count.accepted / count.asked
                found[f"{kind}/difference"] = count.difference / count.asked
        if self.labels:
            right = sum(number for (label, accepted), number in self.labels.items() if label == accepted)
            found["labelled/accuracy"] = right / self.labels.total()
            found["labelled/kappa"] = kappa(self.labels)
        if self.drifts:
            found["labelled/drift"] = statistics.fmean(self.drifts)
        if self.pairs:
            found |= _gap("reference", [(pair.score, pair.reference) for pair in self.pairs])
        for name in dict.fromkeys(name for pair in self.pairs for name in pair.components):
            both = [pair.components[name] for pair in self.pairs if name in pair.components]
            found |= _gap(f"reference/{name}", both)
        return {f"{group}/{name}": value for name, value in found.items()}


def _gap(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the mean gap of two judges, and half of its confidence interval of 95 %, which needs two pairs."""
    gaps = [score - reference for score, reference in pairs]
    found = {f"{name}/gap": statistics.fmean(gaps)}
    if len(gaps) > 1:
        found[f"{name}/gap_error"] = Z95 * statistics.stdev(gaps) / len(gaps) ** 0.5
    return found
