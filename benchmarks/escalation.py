"""A policy that is rewarded by a cheap judge, a strong one, or both: who is deceived, and for how many strong calls.

    python -m benchmarks.escalation [--quick] [--seeds N] [--steps N] [--share P]

The demo's policy learns to add by GRPO in plain torch (32 problems with 8 answers a step). The strong judge is the
demo's reward model. The cheap judge is a small network that was trained without six kinds of near misses, such as sums
that are off by 1: it accepts them. The designs:

    cheap      the cheap judge's score
    strong     the strong judge's verdict
    uncertain  the strong judge's verdict for the share of answers about which the cheap judge is least sure
    random     the strong judge's verdict for a random share of the answers
    debiased   `reward_loop.client.spot_check` with the share

The last line of the output is JSON. The demo's models are made first, in about a minute, unless they are cached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.table import Table

from examples.arithmetic.demo import CACHE, UNSEEN
from examples.arithmetic.models import Recipe, make_models

DESIGNS = ("cheap", "strong", "uncertain", "random", "debiased")
QUICK = Recipe(steps=80, hidden_size=64, layers=2, bound=0.0)
"""Weaker models: with them, the figures mean nothing."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.escalation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="weak models, one seed, 4 steps: to see that it works")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (3; quick: 1)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (24; quick: 4)")
    parser.add_argument("--share", type=float, default=0.2, metavar="P", help="share of strong calls (0.2)")
    parser.add_argument("--no-std", action="store_true", help="as with algorithm.norm_adv_by_std_in_grpo=False")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=DESIGNS, help="by default all")
    parser.add_argument("--models", type=Path, default=CACHE, metavar="DIR", help="the cache of the demo's models")
    args = parser.parse_args()
    if not 0 < args.share <= 1:
        parser.error("--share: above 0 and at most 1")
    seeds = args.seeds or (1 if args.quick else 3)
    steps = args.steps or (4 if args.quick else 24)

    from benchmarks import _escalation_training as training

    began = time.monotonic()
    console = Console(width=110)
    models = make_models(args.models, QUICK if args.quick else Recipe())
    trainer = training.Training(models)
    found: dict[str, list[dict[str, float]]] = {design: [] for design in args.designs}
    for seed in range(seeds):
        judges = training.Judges(models, seed, 300 if args.quick else 2000, UNSEEN)
        for design in args.designs:
            started = time.monotonic()
            run = trainer.run(training.DESIGNS[design], judges, seed, steps, args.share, not args.no_std)
            found[design].append({**run, "seconds": time.monotonic() - started})
            console.print(f"seed {seed}, {design}: {run['exact']:.1%} right, {time.monotonic() - started:.0f} s")
    table = Table("reward from", "strong calls", "exact match", "mean", "wrong and rewarded", box=None)
    for design, runs in found.items():
        calls, exact, deceived = ([run[name] for run in runs] for name in ("calls", "exact", "deceived"))
        table.add_row(
            design,
            f"{statistics.fmean(calls):.0%}",
            " ".join(f"{share:.1%}" for share in exact),
            f"{statistics.fmean(exact):.1%}",
            f"{statistics.fmean(deceived):.1%}",
        )
    console.print(table)
    settings = {"share": args.share, "seeds": seeds, "steps": steps, "quick": args.quick, "no_std": args.no_std}
    print(json.dumps({**settings, "seconds": round(time.monotonic() - began, 1), "designs": found}))


if __name__ == "__main__":
    main()
