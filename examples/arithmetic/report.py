"""The report of a demo run, made from the metrics that verl logs: sentences, a table, JSON and a figure."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.training import read_metrics
from reward_loop.records.trainer_events import hidden_share

PHASES = {
    "rollout": ("timing_s/gen",),
    "waiting for rewards": ("timing_s/wait_reward",),
    "log-probabilities": ("timing_s/old_log_prob", "timing_s/ref"),
    "advantage": ("timing_s/adv",),
    "update": ("timing_s/update_actor",),
    "weights to rollout": ("timing_s/update_weights",),
}
"""Phases of a step, with verl's metrics for each. The rest of ``timing_s/step`` is "other"."""
OUTCOMES = ("scored", "unscored", "failed")
OVERLAP = "reward_pipeline/"
"""Prefix of the metrics of the trainer mode ``reward_pipeline``."""


@dataclass(frozen=True)
class Step:
    """One training step."""

    number: int
    reward: float
    seconds: float
    phases: dict[str, float]
    """Seconds of each phase."""
    outcomes: dict[str, int]
    """Number of rewards by outcome."""
    overlap: dict[str, float]
    """Metrics of the trainer mode ``reward_pipeline``, without their prefix."""

    @property
    def judging(self) -> float:
        return self.overlap.get("judging_s", 0.0)

    @property
    def waited(self) -> float:
        """Seconds of this step's judging during which the trainer waited."""
        return min(self.overlap.get("waiting_for_rewards_s", 0.0), self.judging)

    @property
    def hidden(self) -> float:
        """Seconds of this step's judging during which the trainer did something else."""
        return self.judging - self.waited


@dataclass(frozen=True)
class Report:
    """The metrics of a run, or of the completed part of a run."""

    accuracy: dict[int, float]
    """Share of held-out problems with an exactly right answer, by the number of the step before the measurement."""
    steps: list[Step]

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of training rewards by outcome."""
        return {name: sum(step.outcomes[name] for step in self.steps) for name in OUTCOMES}

    @property
    def hidden_share(self) -> float:
        """The hidden share of judging over all steps, as docs/verl.md defines it; 0 without judging."""
        waiting, pending = (
            sum(step.overlap.get(name, 0.0) for step in self.steps) for name in ("waiting_for_rewards_s", "judging_s")
        )
        return hidden_share(waiting, pending) or 0.0

    def sentences(self) -> list[str]:
        """Return what happened, in a few sentences."""
        found, first, last = self.as_dict(), self.steps[0], self.steps[-1]
        judging = _median([step.judging for step in self.steps])
        without = ", ".join(f"{count:,} {name}" for name, count in self.outcomes.items() if name != "scored" and count)
        return [
            f"Exact match on held-out problems {_change(found['accuracy_before'], found['accuracy_after'], '.0%')}.",
            f"The mean reward {_change(first.reward, last.reward, '.2f')} in {last.number} steps.",
            f"Judging took {judging:.1f} s a step, {self.hidden_share:.1%} of it hidden behind generation and "
            "training.",
            f"All steps took {found['total_seconds']:.0f} s. Without this overlap, waiting for rewards would have "
            f"added {sum(step.hidden for step in self.steps):.0f} s.",
            f"{self.outcomes['scored']:,} answers were scored; {without or 'none failed'}.",
        ]

    def lines(self) -> list[str]:
        """Return a line for the validation before training and for each step."""
        found = {number: f"   exact match {accuracy:6.1%}" for number, accuracy in self.accuracy.items()}
        before = [f"step   0{found[0]}   (before training)"] if 0 in found else []
        return before + [
            f"step {step.number:3d}   reward {step.reward:.3f}   {step.seconds:5.1f} s{found.get(step.number, '')}"
            for step in self.steps
        ]

    def as_dict(self) -> dict[str, Any]:
        accuracy = list(self.accuracy.values())
        phases, overlap = self.steps[-1].phases, self.steps[-1].overlap
        return {
            "accuracy_before": accuracy[0],
            "accuracy_after": accuracy[-1],
            "accuracy_by_step": self.accuracy,
            "rewards": self.outcomes,
            "seconds_per_step": _median([step.seconds for step in self.steps]),
            "seconds_by_phase": {name: _median([step.phases[name] for step in self.steps]) for name in phases},
            "overlap": {name: _median([step.overlap.get(name, 0.0) for step in self.steps]) for name in overlap},
            "total_seconds": sum(step.seconds for step in self.steps),
            "total_seconds_without_overlap": sum(step.seconds + step.hidden for step in self.steps),
            "steps": [asdict(step) for step in self.steps],
        }

    def table(self) -> list[tuple[str, str]]:
        """Return the rows of the whole table: a name and a text."""
        found, steps = self.as_dict(), self.steps
        some = [steps[0], steps[len(steps) // 2], steps[-1]]
        rewards = " -> ".join(f"{step.reward:.3f}" for step in some)
        seconds = {
            "Seconds a step (median), all steps": [step.seconds for step in steps],
            **{f"  {name}": [step.phases[name] for step in steps] for name in steps[0].phases},
            "Seconds of judging": [step.judging for step in steps],
            "  waited for": [step.waited for step in steps],
            "  hidden behind the rest": [step.hidden for step in steps],
        }
        return [
            ("Exact match on held-out problems", f"{found['accuracy_before']:.1%} -> {found['accuracy_after']:.1%}"),
            ("Mean reward", f"{rewards} (steps {', '.join(str(step.number) for step in some)})"),
            ("Rewards", ", ".join(f"{count:,} {name}" for name, count in self.outcomes.items())),
            *((name, f"{_median(values):7.2f} {sum(values):8.1f}") for name, values in seconds.items()),
            ("Hidden share of judging", f"{self.hidden_share:7.1%}"),
            ("All steps without overlap", f"{'':7} {found['total_seconds_without_overlap']:8.1f}"),
        ]


def _change(before: float, after: float, form: str) -> str:
    old, new = f"{before:{form}}", f"{after:{form}}"
    return f"stayed at {new}" if old == new else f"{'rose' if after > before else 'fell'} from {old} to {new}"


def _median(values: list[float]) -> float:
    """Return the median of a value of all steps. The first of several steps is excluded: it includes the warm-up."""
    return statistics.median(values[1:] or values)


def read_report(metrics_file: Path) -> Report:
    """Read the metrics that verl has logged so far."""
    accuracy, steps = {}, []
    for number, metrics in read_metrics(metrics_file):
        for name, value in metrics.items():
            if name.startswith("val-core/") and name.endswith("/acc/mean@1"):
                accuracy[number] = value
        if "timing_s/step" in metrics:
            steps.append(_step(number, metrics))
    return Report(accuracy, steps)


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
        overlap={name.removeprefix(OVERLAP): value for name, value in metrics.items() if name.startswith(OVERLAP)},
    )


def plot(report: Report, path: Path) -> None:
    """Draw accuracy and reward, and the time of each step by phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    quality, time = figure.subplots(1, 2)
    numbers = [step.number for step in report.steps]
    quality.plot(numbers, [step.reward for step in report.steps], label="mean reward in training")
    quality.plot(report.accuracy.keys(), report.accuracy.values(), marker="o", label="exact match, held-out problems")
    quality.set(title="Additions of two-digit numbers", xlabel="training step", ylim=(0, 1.05))
    phases = [[step.phases[name] for step in report.steps] for name in report.steps[0].phases]
    time.stackplot(numbers, phases, labels=report.steps[0].phases)
    time.plot(numbers, [step.judging for step in report.steps], color="black", label="judging")
    time.set(title="Time by phase", xlabel="training step", ylabel="seconds a step")
    for axes in (quality, time):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
