"""Measures how many prompt tokens judges compute behind each policy of the router.

    python -m benchmarks.affinity [--quick] [--peers-python PATH]

Two parts: two real vLLM servers on the CPU with a tiny model, whose own counters show the cached tokens, and 4 to 32
simulated servers, behind the router's own policies. The simulation runs while vLLM starts. The cache-aware policies of
other routers are measured on the real servers if `--peers-python` is given. The start of vLLM takes a minute, so
`--quick` only simulates. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.judge_workloads import Sizes, Unit, text_of, units
from benchmarks.router_servers import PACKAGES, PEERS, Servers, say
from benchmarks.simulated_judges import Outcome, Rendezvous, moved_keys, simulate
from examples.tiny_models import build_tiny_model
from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.client import chat_complete
from reward_loop.config import RewardModelConfig
from reward_loop.router.policies import Affinity, LeastInFlight, Policy, RoundRobin
from reward_loop.serving import RewardModelManager

RESPONSES_IN_FLIGHT = 16
"""Responses that are judged at the same time for each server, real or simulated. A tournament has eight responses."""
FEW_IN_FLIGHT = 2
"""The same on servers that are nearly idle, where an uneven load costs most."""

POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_in_flight": LeastInFlight,
    "rendezvous": Rendezvous,
    "affinity": Affinity,
}
SIMULATED = ("rubric", "tournament", "pointwise", "nothing shared")
REAL = ("rubric", "tournament", "pointwise")

GROUPS = 24
"""Groups of 8 responses: all of them on vLLM, and for each simulated server."""
MORE_GROUPS = {"nothing shared": 8, "tournament": 2}
"""Factors for workloads with one unit in a group, so that p99 is of enough units."""

REAL_SIZES = Sizes(template=64, question=192, answer=384, criterion=48, reply=4)
MODEL = "judge"
BLOCK = 32
"""Tokens in a block of vLLM's prefix cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only simulated servers, and fewer: under 50 s")
    parser.add_argument("--peers-python", metavar="PATH", help=f"path of a Python with {PACKAGES}")
    parser.add_argument("--only", choices=("simulated", "vllm"), help="only one of the two parts")
    args = parser.parse_args()
    if args.quick and args.only == "vllm":
        parser.error("--quick has no part with vLLM")
    print(json.dumps(asyncio.run(run(args))))


async def run(args: argparse.Namespace) -> dict[str, Any]:
    simulation = None if args.only == "vllm" else asyncio.create_task(asyncio.to_thread(simulated, args.quick))
    measured = {} if args.quick or args.only == "simulated" else await real(args)
    return (await simulation if simulation else {}) | measured


# The simulated servers


def simulated(quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    table = []
    groups = 10 if quick else GROUPS
    for busy, load in ((True, RESPONSES_IN_FLIGHT), (False, FEW_IN_FLIGHT)):
        for servers in (4, 16) if quick else (4, 8, 16, 32):
            for workload in SIMULATED:
                outcomes = compare(workload, servers, load, groups)
                base, ours = outcomes["round_robin"], outcomes["affinity"]
                speed, p99 = ours.per_s / base.per_s, ours.p99_s / base.p99_s
                name = key(workload) if busy else "nearly_idle"
                results[f"judged_vs_round_robin_{name}"] = min(speed, results.get(f"judged_vs_round_robin_{name}", 9))
                results[f"p99_vs_round_robin_{name}"] = max(p99, results.get(f"p99_vs_round_robin_{name}", 0))
                if busy and servers == 4 and workload == "rubric":
                    results["prefill_vs_round_robin"] = ours.prefilled / base.prefilled
                    first = compare("rubric, criterion first", servers, load, groups)["round_robin"]
                    results["prefill_vs_criterion_first"] = ours.prefilled / first.prefilled
                table += [
                    f"{load:>9} {servers:>7} {workload:15} {policy:16} {one.prefilled / one.prompt_tokens:>8.1%}"
                    f" {one.per_s / base.per_s:>8.2f} {one.p99_s / base.p99_s:>5.2f} {one.largest:>7.2f}"
                    for policy, one in outcomes.items()
                ]
    results["moved_when_killed"], results["moved_when_added"] = moved_keys(8)
    say("\nSimulated servers. Relative to round robin: judged/s, p99. Largest: the largest load by the mean")
    say(f"in flight servers {'':15} {'policy':16} computed judged/s   p99 largest")
    say("\n".join(table))
    killed, added = results["moved_when_killed"], results["moved_when_added"]
    say(f"groups that move when one of 8 servers leaves: {killed:.1%}; when one is added: {added:.1%}")
    return {name: round(value, 3) for name, value in results.items()}


def compare(workload: str, servers: int, load: int, groups: int) -> dict[str, Outcome]:
    """Judge the same responses behind each policy; `load` and `groups` are numbers for each server."""
    groups *= MORE_GROUPS.get(workload, 1)
    work = units(workload, groups * servers, Sizes(), workload)
    slots = in_flight(workload, load * servers)
    return {name: simulate(policy(), servers, work, slots) for name, policy in POLICIES.items()}


def in_flight(workload: str, responses: int) -> int:
    return max(1, responses // 8) if workload == "tournament" else responses


def key(workload: str) -> str:
    return workload.replace(" ", "_")


# The real servers


async def real(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = build_tiny_model(folder / "model", "generative", max_position_embeddings=4096)
        config = RewardModelConfig(
            engine="vllm",
            device="cpu",
            model_path=str(model),
            served_model_name=MODEL,
            replicas=2,
            max_model_len=4096,
            dtype="float32",
            engine_args={"kv_cache_memory_bytes": "64M", "max_num_seqs": 64, "block_size": BLOCK},
            log_dir=str(folder / "logs"),
        )
        began = time.perf_counter()
        async with RewardModelManager(config) as models:
            say(f"two vLLM servers were ready after {time.perf_counter() - began:.0f} s")
            servers = Servers(folder, stack)
            urls = sorted(servers.requests(f"http://{models.reward_router_address}"))
            routers = {"round_robin": (await asyncio.to_thread(servers.start_own, urls))[0].removeprefix("http://")}
            if not args.peers_python:
                say(f"{', '.join(PEERS)} are skipped: --peers-python needs the path of a Python with {PACKAGES}")
            for name in PEERS if args.peers_python else ():
                if peer := await asyncio.to_thread(servers.start_peer, name, args.peers_python, urls, "cache_aware"):
                    routers[name] = peer[0].removeprefix("http://")
            routers["affinity"] = models.reward_router_address
            return await behind_each(routers, urls)


async def behind_each(routers: Mapping[str, str], urls: list[str]) -> dict[str, Any]:
    """Judge as many responses behind each router, never the same ones twice."""
    say(f"\nTwo vLLM servers, {GROUPS} groups of 8 responses")
    say(f"{'':24} {'router':14} {'cached':>7} {'of ideal':>8} {'largest':>7} {'seconds':>7}")
    results: dict[str, Any] = {}
    computed: dict[tuple[str, str], float] = {}
    runs = [("rubric, criterion first", "round_robin")]
    runs += [(workload, router) for workload in REAL for router in routers]
    for number, (workload, router) in enumerate(runs):
        work = units(workload, GROUPS, REAL_SIZES, f"{number}")
        before = counters(urls)
        seconds = await judge(routers[router], work, in_flight(workload, RESPONSES_IN_FLIGHT * len(urls)))
        changes = [(now[0] - was[0], now[1] - was[1]) for now, was in zip(counters(urls), before, strict=True)]
        queried = [change[0] for change in changes]
        share = sum(change[1] for change in changes) / sum(queried)
        of_ideal, largest = share / ideal_share(work), max(queried) * len(urls) / sum(queried)
        computed[workload, router] = 1 - share
        say(f"{workload:24} {router:14} {share:>7.1%} {of_ideal:>8.1%} {largest:>7.2f} {seconds:>7.1f}")
        if router == "affinity":
            results[f"vllm_of_ideal_{key(workload)}"] = round(of_ideal, 3)
            results[f"vllm_largest_{key(workload)}"] = round(largest, 2)
    ours = computed["rubric", "affinity"]
    peers = {
        "round_robin": ("rubric", "round_robin"),
        "criterion_first": runs[0],
        **{name: ("rubric", name) for name in PEERS},
    }
    return results | {
        f"vllm_prefill_vs_{name}": round(ours / computed[run], 3) for name, run in peers.items() if run in computed
    }


async def judge(address: str, work: list[Unit], in_flight: int) -> float:
    """Judge the units through the library's client, and return the seconds that it took."""

    async def ask_all(solution_str: str, extra_info: Any, reward_router_address: str) -> float:
        texts = [text_of(prompt) for prompt in extra_info["unit"].prompts]
        asked = (chat_complete(reward_router_address, text, model=MODEL, max_tokens=4) for text in texts)
        return float(len(await asyncio.gather(*asked)))

    manager = NaiveRewardLoopManager(compute_score=ask_all, reward_router_address=address)
    slots = asyncio.Semaphore(in_flight)

    async def score(unit: Unit) -> None:
        async with slots:
            reward = await manager.run_single(RewardSample("", group=unit.group, extra_info={"unit": unit}))
            if reward["reward_score"] != len(unit.prompts):
                raise RuntimeError(f"a unit was not judged: {reward['reward_extra_info'].get('reward_error')}")

    began = time.perf_counter()
    await asyncio.gather(*(score(unit) for unit in work))
    seconds = time.perf_counter() - began
    await asyncio.to_thread(manager.close)
    return seconds


def counters(urls: Iterable[str]) -> list[tuple[float, float]]:
    """Return the prompt tokens that each vLLM server has looked up in its prefix cache, and those it has found."""
    found = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            page = response.read().decode()
        values = [
            re.search(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", page, re.M) for name in ("queries", "hits")
        ]
        found.append(tuple(float(value[1]) for value in values))  # type: ignore[index]
    return found  # type: ignore[return-value]


def ideal_share(work: list[Unit]) -> float:
    """Return the share of cached tokens with one unlimited cache: in whole blocks, and never the last token."""
    seen: set[int] = set()
    total = hits = 0
    for unit in work:
        for prompt in unit.prompts:
            text = "\0" * 6 + text_of(prompt) + "\0" * 13  # the tokens of the chat template
            ends = range(BLOCK, len(text) + 1, BLOCK)
            blocks = [hash(text[:end]) for end in ends]
            cached = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            hits += min(cached, (len(text) - 1) // BLOCK) * BLOCK
            total += len(text)
            seen.update(blocks)
    return hits / total


if __name__ == "__main__":
    main()
