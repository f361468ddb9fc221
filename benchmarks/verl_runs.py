"""The parts of `benchmarks.pipeline` that run verl's trainer."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import Report

__all__ = ["VerlRuns"]


FILTERED_SCALE = 0.5
"""The scale of the judge's latency where groups are filtered, so that judging takes less than the rest of a step."""


class VerlRuns:
    """Runs verl's trainer, as shipped and in our modes, in one folder and with the same judge."""

    def __init__(self, report: Report, folder: Path) -> None:
        from benchmarks import training

        folder.mkdir(parents=True, exist_ok=True)
        training.prepare(folder)
        self._training = training
        self._report = report
        self._folder = folder
        self._scale = folder / "scale"

    def compare(self, rounds: int) -> None:
        """Compare both overlaps with verl's mode ``sync``, as shipped and with a short polling interval.

        The two trainings alternate, so that other load on the machine slows both down equally.

        Args:
            rounds: number of turns of each training.
        """
        training, report = self._training, self._report
        calibration = training.Calibration(self._scale)
        both: list[dict[str, float]] = []
        verl: list[dict[str, float]] = []
        judging: list[float] = []
        steps = 2 * training.FIRST + training.SETTLING + 2 * rounds * (1 + training.BLOCK)
        task = report.task("verl's trainer, as shipped and ours, in turn", steps)
        made = {"both": 0, "verl": 0}

        def show(run: str, rows: list[dict[str, float]]) -> None:
            made[run] = len(rows)
            report.progress.update(task, completed=sum(made.values()))
            if run == "both":
                calibration.look(rows)

        look_at_ours, look_at_verl = functools.partial(show, "both"), functools.partial(show, "verl")
        with (
            self._in_turn("both") as ours,
            self._in_turn("verl", POLL_INTERVALS=",".join(training.INTERVALS)) as theirs,
        ):
            for run in (ours, theirs):
                run.begin(training.FIRST)
            theirs.finish(look_at_verl)
            ours.finish(look_at_ours)
            ours.begin(training.SETTLING)
            ours.finish(look_at_ours)
            for number in range(rounds):
                both += ours.turn(training.BLOCK, look_at_ours)
                # verl notices the last reward at its next poll, up to 2 s later: the delay depends on chance. Judging
                # is made longer or shorter by evenly spread amounts, so that the mean delay is measured.
                longer = training.POLL_S * ((number + 0.5) / rounds - 0.5)
                judging.append(calibration.hold(training.BLOCK, longer))
                verl += theirs.turn(training.BLOCK, look_at_verl)
                calibration.hold(training.BLOCK)
            ours.end()  # both trainings end at the same time
            theirs.end()
        report.progress.remove_task(task)
        self._compared(training.Steps(both), verl, statistics.fmean(judging))

    def _compared(self, both: Any, verl: list[dict[str, float]], judging: float) -> None:
        training, report = self._training, self._report
        working = both.without_judging
        report.add(
            "verl: judging of a step at full concurrency, R",
            f"{judging:.2f} s, {judging / working:.2f} of G + T",
            ("about G + T", abs(judging / working - 1) <= 0.1),
        )
        self._add(training.MODES["both"].name, both)
        shipped, short = (
            training.Steps([row for row in verl if row["training/global_step"] % 2 == odd]) for odd in (1, 0)
        )
        for name, steps in zip(training.INTERVALS.values(), (shipped, short), strict=True):
            self._add(name, steps)

        # Over a few steps, a growing backlog of judging can stay unnoticed. A step therefore counts at least R seconds.
        lasting = max(both.seconds, judging)
        reduction, fair = 1 - lasting / shipped.seconds, 1 - lasting / short.seconds
        waiting = both.waiting_share + (lasting - both.seconds) / lasting
        over_floor = lasting / max(working, judging) - 1
        report.add(
            "Both overlaps, off verl's step as shipped", f"{reduction:.1%}", ("at least 45 %", reduction >= 0.45)
        )
        report.add("  off the short interval's", f"{fair:.1%}", ("at least 35 %", fair >= 0.35))
        report.add("  share of a step spent waiting for rewards", f"{waiting:.1%}", ("under 3 %", waiting < 0.03))
        report.add("  over the floor max(G + T, R)", f"{over_floor:.1%}")
        report.figures |= {
            "verl_step_reduction": round(reduction, 4),
            "verl_step_reduction_fair": round(fair, 4),
            "verl_waiting_share": round(waiting, 4),
            "verl_over_floor": round(over_floor, 4),
            "verl_judging_share": round(judging / working, 3),
            "verl_steps": {"verl": len(shipped.rows), "verl_fair": len(short.rows), "both": len(both.rows)},
            "verl_step_s": {
                "verl": round(shipped.seconds, 3),
                "verl_fair": round(short.seconds, 3),
                "both": round(both.seconds, 3),
            },
            "verl_phases_s": {
                name: {"generation": round(steps.generation, 3), "training": round(steps.working, 3)}
                for name, steps in (("verl", shipped), ("both", both))
            },
            "verl_judging_s": round(judging, 3),
        }

    def filtered(self, rounds: int, share: float) -> None:
        """Compare both overlaps with verl's mode ``sync`` where a filter removes a share of the groups.

        Args:
            rounds: number of turns of each training.
            share: the share of the prompts whose responses all get the same score.
        """
        training, report = self._training, self._report
        self._scale.write_text(str(FILTERED_SCALE))
        options = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward")
        rows: dict[str, list[dict[str, float]]] = {"both": [], "verl": []}
        task = report.task("verl's trainer with a filter, as shipped and ours, in turn", rounds)
        with (
            self._in_turn("both", *options, folder="filtered-both", JUDGE_ALIKE=share) as ours,
            self._in_turn(
                *("verl", *options),
                folder="filtered-verl",
                JUDGE_ALIKE=share,
                POLL_INTERVALS=",".join(training.INTERVALS),
            ) as theirs,
        ):
            for run in (ours, theirs):
                run.begin(training.FIRST)
                run.finish()
            ours.begin(training.SETTLING)
            ours.finish()
            for _ in range(rounds):
                rows["both"] += ours.turn(training.BLOCK)
                rows["verl"] += theirs.turn(training.BLOCK)
                report.progress.advance(task)
            ours.end()  # both trainings end at the same time
            theirs.end()
        report.progress.remove_task(task)
        both = training.Steps(rows["both"])
        self._add(f"{training.MODES['both'].name}, {share:.0%} of the prompts filtered", both)
        figures = {"both": round(both.seconds, 3)}
        for (interval, name), odd in zip(training.INTERVALS.items(), (1, 0), strict=True):
            steps = training.Steps([row for row in rows["verl"] if row["training/global_step"] % 2 == odd])
            self._add(f"{name}, filtered", steps)
            report.add("  both overlaps, off that", f"{1 - both.seconds / steps.seconds:.1%}")
            figures[f"verl_{interval}"] = round(steps.seconds, 3)
        report.add(
            "  share of the rollouts that are one step old", f"{both.mean('reward_pipeline/off_policy_share'):.0%}"
        )
        report.figures["verl_filtered_step_s"] = figures

    def overlaps_alone(self, steps: int) -> None:
        """Measure each overlap separately, with the judge latency that `compare` set."""
        for key in ("mini_batch", "off_policy"):
            name, first = self._training.MODES[key].name, self._training.FIRST
            task = self._report.task(name, first + steps)
            with self._in_turn(key) as run:
                run.begin(first + steps)
                rows = run.finish(lambda rows, task=task: self._report.progress.update(task, completed=len(rows)))
            self._report.progress.remove_task(task)
            alone = self._training.Steps(rows[first:])
            self._add(name, alone)
            self._report.figures["verl_step_s"][key] = round(alone.seconds, 3)

    def learning(self, steps: int, seeds: int) -> None:
        """Compare the rewards of both overlaps and of ``sync`` over a longer run, for several seeds.

        Responses are short and the judge is fast: durations change when a step runs, but hardly what it computes.
        """
        self._scale.write_text("0.1")
        curves: dict[str, list[list[float]]] = {"verl": [], "both": []}
        for seed in range(1, seeds + 1):
            chosen = (
                "data.max_response_length=32",
                *(f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
            )
            for key, mode in curves.items():
                rows = self._learn(key, steps, self._folder / f"{key}-{seed}", *chosen)
                mode.append([row["critic/score/mean"] for row in rows])
                self._report.add(
                    f"{self._training.MODES[key].name}, seed {seed}: mean reward of {steps} steps, of the last 5",
                    f"{statistics.fmean(mode[-1]):.3f}, {statistics.fmean(mode[-1][-5:]):.3f}",
                )
        last = {key: [statistics.fmean(curve[-5:]) for curve in mode] for key, mode in curves.items()}
        apart = statistics.fmean(last["both"]) - statistics.fmean(last["verl"])
        noise = max(max(values) - min(values) for values in last.values())
        self._report.add(
            f"Both overlaps, reward of the last 5 of {steps} steps over that of sync",
            f"{apart:+.3f}; seeds are up to {noise:.3f} apart",
            ("not below by more than seeds differ", apart >= -noise),
        )
        self._report.figures |= {
            "verl_reward": {key: [round(value, 4) for value in values] for key, values in last.items()},
            "verl_reward_apart": round(apart, 4),
            "verl_reward_noise": round(noise, 4),
        }

    def faults(self) -> None:
        """Inject faults into a run and resume it; lose a node of another run; kill an agent outside verl."""
        from benchmarks import faults, lost_node

        report = self._report
        task = report.task("Faults in the middle of a run", faults.STEPS + lost_node.STEPS)
        run = faults.train_through(self._folder, lambda done: report.progress.update(task, completed=done))
        node = lost_node.lose_node(
            self._folder, lambda done: report.progress.update(task, completed=faults.STEPS + done)
        )
        report.progress.remove_task(task)
        agent = faults.agent_through()
        happened = run.happened | node.happened | agent.happened
        for what, how in happened.items():
            report.add(f"Faults: {what}", how)
        for what, why in node.left_out.items():
            report.add(f"Faults: {what}", f"left out: {why}")
        wrong = [*run.wrong, *node.wrong, *agent.wrong]
        report.add(
            "  every step made, every sample ended exactly once",
            "; ".join(wrong) or "yes",
            ("nothing lost, nothing twice", not wrong),
        )
        report.figures |= {"faults": sorted(happened), "faults_left_out": node.left_out, "faults_wrong": wrong}

    def _learn(self, key: str, steps: int, output: Path, *overrides: str) -> list[dict[str, float]]:
        training, progress = self._training, self._report.progress
        command = training.command(
            *(training.MODES[key], self._folder, output, steps, *overrides),
            JUDGE_SCALE=self._scale,
            POLL_INTERVALS="0.05" if key == "verl" else "",
        )
        task = self._report.task(training.MODES[key].name, steps)
        try:
            return training.run(command, output, steps, lambda rows: progress.update(task, completed=len(rows)))
        finally:
            progress.remove_task(task)

    def _in_turn(self, key: str, *overrides: str, folder: str = "", **environment: Any) -> Any:
        return self._training.InTurn(
            *(self._training.MODES[key], self._folder, self._folder / (folder or key), *overrides),
            JUDGE_SCALE=self._scale,
            **environment,
        )

    def _add(self, name: str, steps: Any) -> None:
        self._report.add(name, steps.text)
