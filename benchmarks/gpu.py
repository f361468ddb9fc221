"""Runs this library on one GPU: what works there, and how much time it saves. At most 12 minutes.

    python -m benchmarks.gpu [--only STAGE ...] [--cpu]

Needs an NVIDIA GPU and the environment of verl 0.9.1 with vLLM. Models with random weights and data are made first;
nothing is downloaded. Stages:

- probe: the machine, versions, a product of matrices, a kernel of vLLM, memory that two processes share.
- servers: a generative and a discriminative vLLM server; requests through the router and direct; the generative server
  is killed with requests in flight.
- colocated: verl's trainer with a judge on the trainer's GPU. The judge and the rollout are awake in turn.
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
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import Report
from examples.training import TrainingProcess

STAGES = {
    "probe": 120.0,
    "servers": 200.0,
    "colocated": 240.0,
    "sync": 240.0,
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
CAUSE = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Timeout)\b|out of memory)")
LOOK_S = 0.1
LONGEST_CAUSE = 300


class StageError(Exception):
    """A stage failed. The message has the cause."""


class Stages:
    """The stages of the benchmark, on a GPU or on the CPU.

    Args:
        report: receives rows and figures.
        inputs: a folder for models and data.
        output: a folder for logs; each stage has one in it.
        options: the options of the command.
    """

    def __init__(self, report: Report, inputs: Path, output: Path, options: argparse.Namespace) -> None:
        from benchmarks.gpu_runs import GpuRuns, make_inputs

        self._report = report
        self._inputs = inputs
        self._output = output
        self._cpu = options.cpu
        began = time.monotonic()
        make_inputs(inputs, options.cpu)
        report.add("Models and data", f"made in {time.monotonic() - began:.0f} s")
        self._runs = GpuRuns(report, inputs, output, cpu=options.cpu, more=tuple(options.verl))

    def run(self, names: list[str], until: float) -> None:
        """Run stages, each until its end or its deadline, and all until a time of the monotonic clock."""
        failed: dict[str, str] = {}
        left_out: list[str] = []
        seconds: dict[str, float] = {}
        for name in names:
            began = time.monotonic()
            if until - began < LEAST_S:
                self._report.add(name, f"left out: the time is over; --only {name} runs it alone")
                left_out.append(name)
                continue
            try:
                self._stage(name)(min(STAGES[name], until - began))
            except Exception as error:  # the next stages run
                failed[name] = self._cause(name, error)
                self._report.add(name, f"FAILED: {failed[name]}")
            seconds[name] = round(time.monotonic() - began, 1)
        self._runs.compare()
        self._report.figures |= {"stage_s": seconds, "failed": failed, "left_out": left_out}

    def _stage(self, name: str) -> Callable[[float], None]:
        log = self._output / name
        shutil.rmtree(log, ignore_errors=True)
        if name in ("probe", "servers"):
            log.mkdir(parents=True)
            return getattr(self, f"_{name}")  # type: ignore[no-any-return]
        if name in ("colocated", "learning"):
            return getattr(self._runs, name)  # type: ignore[no-any-return]
        return lambda within_s: self._runs.compared(name, within_s)

    def _probe(self, within_s: float) -> None:
        log = self._output / "probe" / "log"
        command = [sys.executable, "-m", "benchmarks.gpu_probe", "cpu" if self._cpu else "cuda"]
        deadline = time.monotonic() + within_s
        with TrainingProcess(command, log) as process:
            while process.status() is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            status = process.status()
        checks = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"check"')]
        for check in checks:
            found = check.get("found") or f"FAILED: {check['error']}"
            self._report.add(f"  {check['check']}", f"{found} ({check['seconds']} s)")
        self._report.figures["probe"] = {check["check"]: check.get("found") for check in checks}
        if status != 0:
            failed = [check["check"] for check in checks if "error" in check]
            raise StageError(", ".join(failed) or f"the checks ended with status {status}, the last was {checks[-1:]}")

    def _servers(self, within_s: float) -> None:
        from benchmarks.gpu_servers import measure

        measure(self._report, self._inputs, self._output / "servers", cpu=self._cpu, within_s=within_s)

    def _cause(self, name: str, error: Exception) -> str:
        """Return one line with the cause of a failure and the place of its log."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        log, text = self._output / name, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, TimeoutError):
            text = f"did not end within its deadline ({STAGES[name]:.0f} s, or what was left)"
        if (summary := getattr(error, "summary", None)) is not None:  # a run of verl
            log, text = log / "log", f"{summary}: {last_error((log / 'log').read_text(errors='replace'))}"
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
        "--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"only these stages: {', '.join(STAGES)}"
    )
    parser.add_argument("--minutes", type=float, default=12.0, metavar="N", help="the longest time of all stages (12)")
    parser.add_argument(
        *("--verl",),
        nargs="+",
        default=[],
        metavar="OPTION",
        help="more options of verl for each run, such as "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN",
    )
    parser.add_argument(
        *("--output",), type=Path, default=Path("outputs/gpu"), metavar="DIR", help="folder of the logs (outputs/gpu)"
    )
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error("--minutes: a positive number")
    if importlib.util.find_spec("verl") is None:
        parser.error("verl is not installed: pip install '.[verl]'")
    if not options.cpu:
        if shutil.which("nvidia-smi") is None:
            parser.error("there is no NVIDIA GPU (no nvidia-smi); --cpu rehearses the stages on the CPU")
        if importlib.util.find_spec("vllm") is None:
            parser.error("vLLM is not installed: pip install 'verl[vllm]==0.9.1'")
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    started = time.monotonic()
    names = [name for name in STAGES if name in (options.only or STAGES)]
    try:
        with (
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
            tempfile.TemporaryDirectory(prefix="gpu-") as inputs,
        ):
            report = Report(console, progress)
            report.figures["device"] = "cpu" if options.cpu else "cuda"
            stages = Stages(report, Path(inputs), options.output.resolve(), options)
            stages.run(names, started + 60 * options.minutes)
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have ended.")
        return 130
    report.figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(report.table(), highlight=False)
    print(json.dumps(report.figures))
    return 1 if report.figures["failed"] else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
