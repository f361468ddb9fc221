"""Runs this library on one GPU: what works there, and how much time it saves. At most 20 minutes.

    python -m benchmarks.gpu [--only STAGE ...] [--cpu]

Needs an NVIDIA GPU and the environment of verl 0.9.1 with vLLM. Models with random weights and data are made first;
nothing is downloaded. Stages:

- probe: the machine, versions, a product of matrices, a kernel of vLLM, memory that two processes share.
- servers: a generative and a discriminative vLLM server; requests through the router and direct; the generative server
  is killed with requests in flight.
- colocated: verl's trainer with a judge on the trainer's GPU, awake while the rollout sleeps.
- sync, reward_pipeline, verl: the same work in verl's mode, in ours, and in verl's own command. Judging a step takes as
  long as generation and training, which the first of these runs measures.
- learning: the policy of the demo (examples/arithmetic) and its served reward model. The demo's models are made on the
  CPU, unless they are cached.

Each stage has a deadline. A stage that fails is named with the cause and its log, and the next one begins. A stage
without time left is left out: run it alone with --only. With --cpu, all stages run on the CPU, with tiny models, verl's
CPU configuration and the embedded engine: to try the command before a GPU is rented.

The last line of the output is JSON. The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.report import Report, run_benchmark
from examples.training import STOP_WITHIN_S, TrainingProcess

DEADLINES = {
    "probe": 120.0,
    "servers": 200.0,
    "colocated": 240.0,
    "sync": 300.0,  # It also measures generation and training.
    "reward_pipeline": 240.0,
    "verl": 240.0,
    "learning": 240.0,
}
"""The stages in their order, with the seconds that each may take."""
LEAST_S = 60.0
"""A stage does not begin with less time."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer would compile its sampler, for minutes.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # All processes are on this machine; a container may have no other interface.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment variables of all stages. Values that the user has set take precedence."""
Stage = Callable[[float], None]
CAUSE = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Timeout)\b|out of memory)")
LOOK_S = 0.1
LONGEST_CAUSE = 300


class ProbeError(Exception):
    """A check of the machine failed."""


def stages(report: Report, inputs: Path, output: Path, *, cpu: bool, more: tuple[str, ...]) -> dict[str, Stage]:
    """Make the inputs, and return the stages by name. Each gets the seconds that it may take.

    Args:
        report: receives rows and figures.
        inputs: a folder for models and data.
        output: a folder for logs; each stage has one in it.
        cpu: whether the stages run on the CPU.
        more: further options of verl.
    """
    from benchmarks.gpu_runs import MODES, GpuRuns, make_inputs
    from benchmarks.gpu_servers import measure

    began = time.monotonic()
    make_inputs(inputs, cpu)
    report.add("Models and data", f"made in {time.monotonic() - began:.0f} s")
    runs = GpuRuns(report, inputs, output, cpu=cpu, more=more)
    return {
        "probe": partial(probe, report, output / "probe", cpu),
        "servers": partial(measure, report, inputs, output / "servers", cpu),
        "colocated": runs.colocated,
        **{mode: partial(runs.compared, mode) for mode in MODES},
        "learning": runs.learning,
    }


def run(report: Report, stages: Mapping[str, Stage], output: Path, until: float) -> None:
    """Run stages, each until its end or its deadline, and all until a time of the monotonic clock."""
    output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    left_out: list[str] = []
    seconds: dict[str, float] = {}
    for name, stage in stages.items():
        began = time.monotonic()
        if until - began < LEAST_S:
            report.add(name, f"left out: the time is over; --only {name} runs it alone")
            left_out.append(name)
            continue
        shutil.rmtree(output / name, ignore_errors=True)
        try:
            stage(min(DEADLINES[name], until - began))
        except Exception as error:  # the next stages run
            failed[name] = cause(error, output / name)
            report.add(name, f"FAILED: {failed[name]}")
        seconds[name] = round(time.monotonic() - began, 1)
    report.figures |= {"stage_s": seconds, "failed": failed, "left_out": left_out}


def probe(report: Report, output: Path, cpu: bool, within_s: float) -> None:
    """Try what a run of verl needs from the machine.

    Raises:
        ProbeError: a check failed.
    """
    output.mkdir()
    log = output / "log"
    deadline = time.monotonic() + within_s
    with TrainingProcess([sys.executable, "-m", "benchmarks.gpu_probe", "cpu" if cpu else "cuda"], log) as process:
        while process.status() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        status = process.status()
    checks = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"check"')]
    report.add("Checks of the machine", f"{sum('found' in check for check in checks)} passed")
    for check in checks:
        found = check.get("found") or f"FAILED: {check['error']}"
        report.add(f"  {check['check']}", f"{found} ({check['seconds']} s)")
    report.figures["probe"] = {check["check"]: check.get("found") for check in checks}
    if status != 0:
        failed = ", ".join(check["check"] for check in checks if "error" in check)
        ended = "they took too long" if status is None else f"they ended with status {status}"
        raise ProbeError(f"failed: {failed}" if failed else f"{ended} after {len(checks)} checks")


def cause(error: Exception, output: Path) -> str:
    """Return one line with the cause of a failure and the place of its log."""
    from benchmarks.training import TrainingFailedError

    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    log, text = output, f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError):
        text = "did not end in time"
    if isinstance(error, TrainingFailedError):
        log, text = error.log, f"{error.summary}: {last_error(error.log.read_text(errors='replace'))}"
    return f"{' '.join(text.split())[:LONGEST_CAUSE]} (log: {log})"


def last_error(log: str) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if CAUSE.search(line)), lines[-1] if lines else "an empty log")


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="rehearse the stages on the CPU, with tiny models: minutes")
    parser.add_argument(
        "--only", nargs="+", choices=DEADLINES, metavar="STAGE", help=f"only these stages: {', '.join(DEADLINES)}"
    )
    parser.add_argument("--minutes", type=float, default=20.0, metavar="N", help="the longest time of all stages (20)")
    parser.add_argument(
        "--verl",
        nargs="+",
        default=[],
        metavar="OPTION",
        help="more options of verl for each run, such as "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/gpu"), metavar="DIR", help="folder of the logs (%(default)s)"
    )
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error("--minutes: a positive number")
    if importlib.util.find_spec("verl") is None:
        parser.error("verl is not installed: pip install '.[verl]'")
    if not options.cpu:
        if shutil.which("nvidia-smi") is None:
            parser.error("no NVIDIA GPU was found (no nvidia-smi); --cpu rehearses the stages on the CPU")
        if importlib.util.find_spec("vllm") is None:
            parser.error("vLLM is not installed: pip install 'verl[vllm]==0.9.1'")
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if not gpu:
            parser.error("CUDA_VISIBLE_DEVICES is empty: unset it, or name a GPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})

    def measure(report: Report) -> None:
        until = time.monotonic() + 60 * options.minutes - STOP_WITHIN_S
        report.figures["device"] = "cpu" if options.cpu else "cuda"
        output = options.output.resolve()
        with tempfile.TemporaryDirectory(prefix="gpu-") as inputs:
            found = stages(report, Path(inputs), output, cpu=options.cpu, more=tuple(options.verl))
            run(report, {name: found[name] for name in DEADLINES if name in (options.only or DEADLINES)}, output, until)

    rehearsal = "A rehearsal on the CPU: the figures say nothing about a GPU."
    return run_benchmark(measure, rehearsal if options.cpu else None)


if __name__ == "__main__":
    sys.exit(main())
