"""Measures what the monitors of reward_loop.health cost the trainer in each step. Needs verl.

    python -m benchmarks.health [--samples N] [--group N] [--tokens N] [--steps N]

Made-up steps with eight components per sample, and responses of 1 to `--tokens` tokens. A dict of tensors takes the
place of TransferQueue; what it takes is measured separately, and subtracted. The last line of the output is JSON:
milliseconds of processor time per step, of everything the trainer does (median and largest), and of the monitors alone.
"""

from __future__ import annotations

import argparse
import json


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.health", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=5120, help="samples per step (5120)")
    parser.add_argument("--group", type=int, default=16, help="samples per group (16)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the longest response (8192)")
    parser.add_argument("--steps", type=int, default=20, help="steps (20)")
    args = parser.parse_args()

    from benchmarks._health_steps import measure  # imports torch and verl

    found = measure(args.samples, args.group, args.tokens, args.steps)
    print(json.dumps({"samples": args.samples, **found}))


if __name__ == "__main__":
    main()
