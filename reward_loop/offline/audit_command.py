"""The command ``reward-loop audit``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from reward_loop._util.json import encode, look_up
from reward_loop._util.signals import run
from reward_loop._util.standard_streams import console, reserve_stdout
from reward_loop._util.text import counted, listing, rounded, shorten
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.managers.scorer import Scorer, load_scorer, scores_groups
from reward_loop.offline import cli_options
from reward_loop.offline.audit import Audit, ProbeResult, middle, read
from reward_loop.offline.fields import Fields, check_fields
from reward_loop.offline.report_command import show_table
from reward_loop.offline.run import ScoringProgress
from reward_loop.scoring import ListScoringFunction
from reward_loop.scoring.signature import resolve
from reward_loop.types import finite_number

_FOLLOW_S = 30.0
"""The seconds between two looks at the records of a run."""
_ACCEPT_HELP = (
    "The score from which an answer counts as accepted. Default: the middle between the lowest and the highest "
    "recorded score."
)
_ADDRESS_HELP = "Passed to functions as [cyan]reward_router_address[/]. Default: the judge's address in the records."


def audit(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR FUNCTION",
            help="A folder of records, such as checkpoints/.../rewards, and the reward function, that of the run or "
            "another one: [cyan]file.py:name[/], [cyan]package.module:name[/] or a ready judge.",
            show_default=False,
        ),
    ],
    rows: Annotated[int, typer.Option(min=1, help="Recorded answers to use, chosen by chance.")] = 50,
    accept: Annotated[float | None, typer.Option(help=_ACCEPT_HELP, show_default=False)] = None,
    fail_above: Annotated[
        float, typer.Option(min=0, max=1, help="The share of wrong verdicts of a probe above which it is a problem.")
    ] = 0.05,
    label: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="The field with known verdicts, e.g. [cyan]extra_info.label[/]: numbers."),
    ] = None,
    reference_judge: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="A function to compare the recorded scores with.")
    ] = None,
    reference_kwarg: cli_options.RewardKwargs = None,
    judge_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=_ADDRESS_HELP, show_default=False)
    ] = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    concurrency: Annotated[int, typer.Option(min=1, help="Answers that are scored at a time.")] = 8,
    option: cli_options.MoreOptions = None,
    follow: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Repeat it with each N new scored answers, until Ctrl-C.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find out what a reward function accepts, on the answers of a run.

    Calls the function with recorded answers again, with answers that are wrong
    for certain (empty, master keys, instructions to the judge, the reference of
    another row), and with rewarded answers whose final answer is exchanged or
    negated. Also compares it with a reference judge, and with labels. Works
    beside a run, with --follow until Ctrl-C: it writes no records. A judge on
    the trainer's GPUs cannot be asked beside its run.

    [bold]Example[/]

      reward-loop audit checkpoints/rewards judge.py:compute_score --label extra_info.label

    With 50 rows, the function is called up to 350 times; requests to a paid judge
    cost money. Its output goes to stderr.

    Exit status: 0 no problems, 1 a share is above --fail-above, or all calls
    failed, 2 wrong usage, 130 Ctrl-C.
    """
    fn, folders = cli_options.function_and_files(arguments)
    if fn is None or len(folders) != 1:
        raise ConfigError("name the folder of the records and the function: reward-loop audit DIR FUNCTION")
    given = {"max_threads": concurrency, **cli_options.more_options(context, option)}
    options = parse(RewardLoopConfig, given, cli_options.option_names(context))
    # A wrong verdict is what the audit is to find, so it must not end it; and an audit leaves no records.
    update = {"max_failed_share": 1.0, "on_failed": "mask", "on_unscored": "mask", "log_dir": None}
    options = options.model_copy(update=update)
    kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    reference_kwargs = cli_options.values(reference_kwarg, "--reference-kwarg")

    def once(after: float, stdout: Any) -> tuple[bool, float]:
        """Audit answers later than ``after``; return whether there are problems, and the time of the last answer."""
        with contextlib.ExitStack() as stack:
            recorded = read(Path(folders[0]), rows, after)
            address = judge_address or recorded.address

            def load(spec: str, kwargs: dict[str, Any]) -> Scorer:
                scorer = load_scorer(spec, manager, options, reward_kwargs=kwargs, router_address=address)
                stack.callback(scorer.function.close)
                if scores_groups(scorer.manager):
                    raise ConfigError(
                        f"{spec} scores groups, and an answer by itself has no verdict: it is not audited"
                    )
                if address is None and "reward_router_address" in scorer.requires:
                    raise ConfigError(f"--judge-address: {spec} needs it, and the records name no judge's address")
                return scorer

            scorer = load(fn, kwargs)
            reference = None if reference_judge is None else load(reference_judge, reference_kwargs)
            of_lists = getattr(scorer.manager, "function_type", None) is ListScoringFunction
            target = resolve(scorer.loaded, kwargs, of_lists=of_lists)
            fields = Fields(requires=scorer.requires | (reference.requires if reference else frozenset()))
            about = f"{folders[0]}: {recorded.with_texts:,} of {counted(recorded.samples, 'scored sample')} have texts"
            check_fields(recorded.rows, about, fields)
            pairs = [(row, sample) for row in recorded.rows if (sample := fields.to_sample(row)).error is None]
            if not pairs:
                raise ConfigError(f"{about}: there is no answer to audit")
            labels = [finite_number(look_up(row.columns, label)) for row, _ in pairs] if label is not None else []
            if label is not None and not any(one is not None for one in labels):
                raise ConfigError(f"--label {label}: no row has a number there. Fields: {listing(pairs[0][0].columns)}")
            level = middle([recorded.low, recorded.high], math.nan) if accept is None else accept
            if math.isnan(level):
                raise ConfigError(f"all recorded scores are {recorded.low:g}: name the lowest accepted one by --accept")
            err = console(stderr=True)
            if judge_address is None and address is not None and "reward_router_address" in target.passes:
                err.print(escape(f"The judge's address in the records is {address}: another one by --judge-address."))
            samples, scores = [sample for _, sample in pairs], [float(row.columns["score"]) for row, _ in pairs]
            made = Audit(samples, scores, labels, level, scorer, reference, "ground_truth" in target.passes)
            with contextlib.chdir("."):
                run(made.run(concurrency, ScoringProgress(len(made.jobs), err).completed))
            found = made.findings(fail_above)
            problems = [one for one in found if one.is_problem]
            seen = {
                "samples": recorded.samples,
                "with_texts": recorded.with_texts,
                "audited": len(pairs),
                "accept": level,
            }
            if as_json:
                probes = [asdict(one) for one in found]
                stdout.write(encode({**seen, "problems": len(problems), "probes": probes}).decode() + "\n")
            else:
                out = console(stdout)
                out.print(escape(f"{about} ({recorded.with_texts / recorded.samples:.0%}), {len(pairs)} audited"))
                out.print(f"accepted: a score of {rounded(level)} or more")
                _show(found, out)
            return bool(problems), recorded.latest

    with reserve_stdout() as stdout:
        problems, latest = once(0.0, stdout)
        while follow is not None:
            time.sleep(_FOLLOW_S)
            if read(Path(folders[0]), 0, latest).samples >= follow:
                problems, latest = once(latest, stdout)
    if problems:
        raise typer.Exit(1)


def _show(found: Sequence[ProbeResult], out: Console) -> None:
    rows = []
    for one in found:
        share, interval = "no verdict" if one.failed else "no row fits", "-"
        if one.share is not None and one.interval is not None:
            share, interval = f"{one.share:.0%}", "{:.0%} to {:.0%}".format(*one.interval)
        rows.append((one.probe, one.answers, one.wrong, share, interval, one.failed, one.correlation))
    show_table(("probe", "verdicts", "wrong", "share", "95 % interval", "failed calls", "correlation"), rows, out)
    out.print()
    problems = [one for one in found if one.is_problem]
    for one in problems:
        score = "unscored" if one.score is None else f"scores {rounded(one.score)}"
        out.print(f"[bold red]{one.probe}:[/] {escape(f'{one.advice}. {shorten(one.example, 60)}: {score}')}")
    out.print(f"{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'} found")
