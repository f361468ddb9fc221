"""The report of a demo run, read from the metrics that verl logs: values for the table and JSON, and a figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = {
    "rollout": ("timing_s/gen",),
    "waiting for rewards": ("timing_s/wait_reward",),
    "log-probabilities": ("timing_s/old_log_prob", "timing_s/ref"),
    "advantage": ("timing_s/adv",),
    "update": ("timing_s/update_actor",),
    "weights to rollout": ("timing_s/update_weights",),
}
"""Phases of a step, with verl's metrics for each. The rest of ``timing_s/step`` is "other"."""

COLORS = ("#0b6e4f", "#a23b72", "#e0a458", "#9c9c9c", "#3a6ea5", "#6b4c9a", "#d7d9dd")
"""Colors of the phases and of "other"."""

HIDDEN = "#7fb8a4"
"""Color of hidden judging time."""

OVERLAP = "reward_pipeline/"
"""Prefix of the metrics that the trainer mode ``reward_pipeline`` logs."""

OUTCOMES = ("scored", "unscored", "failed")


@dataclass(frozen=True)
class Step:
    """One training step."""

    number: int
    reward: float
    seconds: float
    phases: dict[str, float]
    outcomes: dict[str, int]
    reward_seconds: float | None
    """Mean time of a reward, in seconds; ``None`` if it was not logged."""
    overlap: dict[str, float]
    """Metrics of the trainer mode ``reward_pipeline``, without their prefix; empty in other modes."""

    @property
    def waited(self) -> float:
        """Seconds of this step's judging during which the trainer waited."""
        return min(self.overlap.get("waiting_for_rewards_s", 0.0), self.overlap.get("judging_s", 0.0))


@dataclass(frozen=True)
class Report:
    """The metrics of a run, or of the completed part of a run."""

    accuracy: dict[int, float]
    """Share of held-out problems with an exactly right answer, by the number of the step before the measurement."""
    steps: list[Step]

    @property
    def before(self) -> float | None:
        return next(iter(self.accuracy.values()), None)

    @property
    def after(self) -> float | None:
        return list(self.accuracy.values())[-1] if self.accuracy else None

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of training rewards by outcome."""
        return {name: sum(step.outcomes[name] for step in self.steps) for name in OUTCOMES}

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Median seconds per step of each phase. The first of several steps is excluded: it includes the warm-up."""
        steps = self.steps[1:] or self.steps
        phases = [*PHASES, "other"]
        return {name: median(step.phases[name] for step in steps) for name in phases} if steps else {}

    @property
    def total_by_phase(self) -> dict[str, float]:
        """Seconds of each phase, summed over all steps."""
        return {name: sum(step.phases[name] for step in self.steps) for name in (*PHASES, "other")}

    @property
    def totals(self) -> dict[str, float]:
        """Seconds summed over all steps, and the hidden share of judging; empty if the trainer logged no judging.

        ``without_overlap`` is the time that the same steps would have taken without overlap: the length of the steps,
        minus the time waited for rewards, plus the time of all judging.
        """
        steps = [step for step in self.steps if "judging_s" in step.overlap]
        if not steps:
            return {}
        seconds = sum(step.seconds for step in steps)
        judging = sum(step.overlap["judging_s"] for step in steps)
        waited = sum(step.waited for step in steps)
        return {
            "seconds": seconds,
            "judging": judging,
            "waited": waited,
            "hidden": judging - waited,
            "hidden_share": 1 - waited / judging if judging else 1.0,
            "without_overlap": seconds + judging - waited,
        }

    @property
    def seconds_per_step(self) -> float:
        return median(step.seconds for step in self.steps[1:] or self.steps)

    @property
    def overlap(self) -> dict[str, float]:
        """Median of each metric of the trainer mode ``reward_pipeline``, without the first of several steps."""
        steps = self.steps[1:] or self.steps
        names = dict.fromkeys(name for step in steps for name in step.overlap)
        return {name: median(step.overlap[name] for step in steps if name in step.overlap) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy_before": self.before,
            "accuracy_after": self.after,
            "accuracy_by_step": self.accuracy,
            "rewards": self.outcomes,
            "seconds_per_step": self.seconds_per_step,
            "seconds_by_phase": self.seconds_by_phase,
            "total_seconds_by_phase": self.total_by_phase,
            "total_seconds": self.totals,
            "overlap": self.overlap,
            "steps": [asdict(step) for step in self.steps],
        }


def read_report(metrics_file: Path) -> Report:
    """Read the metrics that verl's ``file`` logger has written so far."""
    accuracy, steps = {}, []
    for number, metrics in _records(metrics_file):
        for name, value in metrics.items():
            if name.startswith("val-core/") and name.endswith("/acc/mean@1"):
                accuracy[number] = value
        if "timing_s/step" in metrics:
            steps.append(_step(number, metrics))
    return Report(accuracy, steps)


def _records(metrics_file: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    if not metrics_file.exists():
        return
    for line in metrics_file.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # the last line may be incomplete while verl writes it
            record = json.loads(line)
            yield record["step"], record["data"]


def _step(number: int, metrics: dict[str, Any]) -> Step:
    seconds = metrics["timing_s/step"]
    phases = {phase: sum(metrics.get(name, 0.0) for name in names) for phase, names in PHASES.items()}
    phases["other"] = max(0.0, seconds - sum(phases.values()))
    return Step(
        number=number,
        reward=metrics["critic/score/mean"],
        seconds=seconds,
        phases=phases,
        outcomes={name: int(metrics.get(f"reward_loop/{name}", 0)) for name in OUTCOMES},
        reward_seconds=metrics.get("reward_loop/seconds/mean"),
        overlap={name.removeprefix(OVERLAP): value for name, value in metrics.items() if name.startswith(OVERLAP)},
    )


def median(values: Iterable[float]) -> float:
    """Return the median; 0 if there are no values."""
    known = list(values)
    return statistics.median(known) if known else 0.0


def plot(report: Report, path: Path) -> None:
    """Draw accuracy, reward and time by step and, if it was logged, the hidden part of judging."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    judged = [step for step in report.steps if "judging_s" in step.overlap]
    figure = Figure(figsize=(16 if judged else 11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    quality, time, *others = figure.subplots(1, 3 if judged else 2)
    for judging in others:
        _plot_judging(judging, judged, report.totals["hidden_share"])

    numbers = [step.number for step in report.steps]
    quality.plot(numbers, [step.reward for step in report.steps], color="#b0b7c3", label="mean reward in training")
    quality.plot(
        list(report.accuracy),
        list(report.accuracy.values()),
        color="#0b6e4f",
        marker="o",
        label="exact match on held-out problems",
    )
    if report.accuracy:
        first, last = min(report.accuracy), max(report.accuracy)
        for step, offset in {first: (10, -4), last: (0, 8)}.items():
            quality.annotate(
                f"{report.accuracy[step]:.0%}",
                (step, report.accuracy[step]),
                textcoords="offset points",
                xytext=offset,
                ha="left" if step == first else "center",
                color="#0b6e4f",
            )
    quality.set(title="Quality: additions of two-digit numbers", xlabel="training step", ylim=(0, 1.05))
    quality.yaxis.set_major_formatter(PercentFormatter(1))
    quality.legend(loc="lower right", frameon=False)

    _plot_phases(time, report)
    for axes in (quality, time, *others):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.03)
    outcomes = ", ".join(f"{count:,} {name}" for name, count in report.outcomes.items())
    figure.supxlabel(f"Rewards in training: {outcomes}", fontsize=10, color="#5a5f69")
    figure.savefig(path, dpi=150)


def _plot_phases(axes: Any, report: Report) -> None:
    """Draw the seconds of each step by phase. If the first step, with the warm-up, is too high, its length is printed.

    Phases that take no time in any step are omitted. The height of a bar is the length of the step.
    """
    phases = [name for name, seconds in report.total_by_phase.items() if seconds > 0]
    colors = dict(zip([*PHASES, "other"], COLORS, strict=True))
    numbers = [step.number for step in report.steps]
    bottom = [0.0] * len(numbers)
    for name in phases:
        heights = [step.phases[name] for step in report.steps]
        axes.bar(numbers, heights, bottom=bottom, color=colors[name], label=name, width=0.8)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    top = 1.5 * max(step.seconds for step in report.steps[1:] or report.steps)
    axes.set(title="Time by phase", xlabel="training step", ylabel="seconds a step", ylim=(0, top))
    first = report.steps[0]
    if first.seconds > top:
        label = f"{first.seconds:.0f} s"
        axes.annotate(
            label, (first.number, top), textcoords="offset points", xytext=(0, 2), ha="center", annotation_clip=False
        )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", frameon=False, ncols=2, fontsize=9)


def _plot_judging(axes: Any, steps: list[Step], hidden_share: float) -> None:
    """Draw the seconds of each step's judging: waited for, and hidden.

    Args:
        axes: where to draw.
        steps: the steps for which the trainer logged the judging.
        hidden_share: hidden share of the judging of all steps, for the title.
    """
    judging = [step.overlap["judging_s"] for step in steps]
    waited = [step.waited for step in steps]
    numbers = [step.number for step in steps]
    axes.bar(numbers, waited, color=COLORS[1], label="waited for", width=0.8)
    hidden = [s - w for s, w in zip(judging, waited, strict=True)]
    axes.bar(numbers, hidden, bottom=waited, color=HIDDEN, label="hidden behind the rest", width=0.8)
    title = f"Judging: {hidden_share:.1%} of all its seconds hidden"
    axes.set(title=title, xlabel="training step", ylabel="seconds a step", ylim=(0, 1.3 * max(judging)))
    axes.legend(loc="upper right", frameon=False, ncols=2, fontsize=9)
