"""Our server beside transformers' under the same load (`make bench-serve`): side by side, one of them busy at a time.

Every round asks every server the same fresh prompts at every concurrency, the servers in a rotating order, so that a
drift of the machine meets all of them and no prefix cache has seen a prompt. Writes load.json and load.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.bench.speed import OtherLoad
from draftproof.bench.workloads import load_workload
from draftproof.models.hub import resolve_drafter, resolve_target
from draftproof.provenance import provenance
from tests.launch import free_port
from tests.serve.guide import PROGRAM, Load, Told, measure
from tests.serve.running import Running, program, serving

TARGET, DRAFTER, DTYPE = "smollm2-135m", "smollm2-135m-dflash", "float32"
PLAIN, HF = "draftproof --method none", "transformers serve"
BATCHED = f"{HF} --continuous-batching"
OURS = {"draftproof": (), PLAIN: ("--method", "none")}
# without the limit it takes the memory of the whole machine for its cache
THEIRS = {HF: (), BATCHED: ("--continuous-batching", "--cb-max-memory-percent", "0.05")}
REQUESTS = {1: 8, 4: 8, 8: 16}  # of a round, by concurrency


@dataclass(frozen=True)
class Server:
    name: str
    model: str
    running: Running


@dataclass(frozen=True)
class Window:
    """One server under one load. others: share of the machine's CPU time that neither the server nor the load took."""

    server: str
    streams: int
    round: int
    told: Told
    others: float


@contextmanager
def servers(folder: Path, wanted: Sequence[str]) -> Iterator[tuple[list[Server], dict[str, str]]]:
    """All of them, up and warm; and of those that do not come up, why."""
    target, missing = str(resolve_target(TARGET)), dict[str, str]()
    resolve_drafter(DRAFTER)
    with ExitStack() as stack:
        up: list[Server] = []
        for name in wanted:
            log = folder / f"{len(up)}.log"
            try:
                if name in OURS:
                    options = ("--target", TARGET, "--dtype", DTYPE, *OURS[name])
                    up.append(Server(name, "default", stack.enter_context(serving(log, *options))))
                else:
                    port = free_port()
                    argv = [str(Path(sys.executable).with_name("transformers")), "serve", target, "--device", "cpu"]
                    argv += ["--dtype", DTYPE, "--port", str(port), *THEIRS[name]]
                    up.append(Server(name, target, stack.enter_context(program(argv, port, log))))
            except AssertionError as error:
                missing[name] = str(error)[-600:]
        yield up, missing


def window(server: Server, load: Load, number: int, folder: Path) -> Window:
    other, begun = OtherLoad(), time.monotonic()
    own, children = server.running.cpu(), spent()
    told = measure(load, folder)
    took = server.running.cpu() - own + spent() - children
    machine = (time.monotonic() - begun) * (os.cpu_count() or 1)
    return Window(server.name, load.streams, number, told, max(0.0, other.share() - took / machine))


def spent() -> float:
    """CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = [p.messages[0]["content"] for p in load_workload("mtbench")]
    levels = {streams: asked.requests or REQUESTS[streams] for streams in asked.streams}
    needed = 1 + asked.rounds * sum(levels.values())
    if needed > len(prompts):
        raise SystemExit(f"{needed} prompts are needed, the set has {len(prompts)}: lower --rounds or --requests")
    windows: list[Window] = []
    with servers(folder, asked.servers) as (up, missing):
        for server in up:  # warm-up, by the prompt that no round asks
            measure(Load(server.running.url, server.model, prompts[-1:], 1, asked.max_tokens), folder)
        for number in range(asked.rounds):
            for streams, count in levels.items():
                fresh, prompts = prompts[:count], prompts[count:]
                turn = number % len(up)
                for server in up[turn:] + up[:turn]:
                    load = Load(server.running.url, server.model, fresh, streams, asked.max_tokens)
                    windows.append(window(server, load, number, folder))
                    print(f"round {number + 1}, {streams} at once, {server.name}: {rate([windows[-1]]):.1f} tokens/s")
        memory = {server.name: server.running.rss() / 2**20 for server in up}
    rows = [row(windows, server.name, streams) for streams in levels for server in up]
    machine = provenance("cpu", DTYPE) | {"command": sys.argv, "guidellm": str(PROGRAM)}
    return {
        "rows": rows, "missing": missing, "rss_mib": memory, "max_tokens": asked.max_tokens, "rounds": asked.rounds,
        "requests": levels, "provenance": machine, "windows": [asdict(one) for one in windows],
    }  # fmt: skip


def rate(windows: Sequence[Window]) -> float:
    """Tokens/s of all windows together."""
    seconds = sum(one.told.seconds for one in windows)
    return sum(one.told.tokens for one in windows) / seconds if seconds else 0.0


def row(windows: Sequence[Window], server: str, streams: int) -> dict[str, Any]:
    at = {one.server: [w for w in windows if (w.server, w.streams) == (one.server, streams)] for one in windows}
    mine = at[server]
    first = sorted(value for one in mine for value in one.told.first)
    same = [
        text == plain.told.texts.get(prompt)
        for one, plain in zip(mine, at.get(PLAIN, []), strict=False)
        for prompt, text in one.told.texts.items()
    ]
    return {
        "server": server,
        "streams": streams,
        "tokens_per_second": rate(mine),
        "over_none": ratio(mine, at.get(PLAIN)),
        "over_transformers": ratio(mine, at.get(HF)),
        "first_mean": statistics.fmean(first) if first else None,
        "first_p95": first[min(len(first) - 1, int(0.95 * len(first)))] if first else None,
        "same_text": sum(same) / len(same) if same else None,
        "errors": [error for one in mine for error in one.told.errors],
        "others_cpu": [round(one.others, 3) for one in mine],
    }


def ratio(mine: Sequence[Window], base: Sequence[Window] | None) -> float | None:
    return rate(mine) / rate(base) if base and rate(base) else None


def table(result: dict[str, Any]) -> str:
    head = "server|at once|tokens/s|over none|over transformers|first token mean, s|p95, s|same text|errors|others' CPU"
    lines = [f"| {head.replace('|', ' | ')} |", "|---" * 10 + "|"]
    for r in result["rows"]:
        cells = [r["tokens_per_second"], r["over_none"], r["over_transformers"], r["first_mean"], r["first_p95"]]
        shown = [f"{cell:.2f}" if cell is not None else "-" for cell in cells]
        same = "-" if r["same_text"] is None else f"{r['same_text']:.0%}"
        others = ", ".join(f"{share:.0%}" for share in r["others_cpu"])
        lines.append(f"| {' | '.join([r['server'], str(r['streams']), *shown, same, str(len(r['errors'])), others])} |")
    told = result["provenance"]
    lines += ["", *(f"{name} did not start: {why}" for name, why in result["missing"].items())]
    lines.append(
        f"{TARGET}, {DTYPE}, temperature 0, {result['max_tokens']} tokens at most, first turns of MT-bench, "
        f"{result['rounds']} rounds; {told['cpu']}, {told['cpus']} cores, {told['threads']} threads; {told['git']}, "
        f"{told['versions']}"
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__)
    asking.add_argument("--rounds", type=int, default=2)
    asking.add_argument("--streams", type=int, nargs="+", choices=REQUESTS, default=list(REQUESTS))
    asking.add_argument("--requests", type=int, help="of every window (default: by concurrency)")
    asking.add_argument("--max-tokens", type=int, default=48)
    asking.add_argument("--servers", nargs="+", choices=[*OURS, *THEIRS], default=[*OURS, *THEIRS])
    asking.add_argument("--out", type=Path, default=Path("out/bench-serve"))
    asked = asking.parse_args()
    if not PROGRAM.exists():
        raise SystemExit(f"{PROGRAM} is missing: make guidellm-kit, or name its environment in DRAFTPROOF_GUIDELLM")
    asked.out.mkdir(parents=True, exist_ok=True)
    result = run(asked, asked.out)
    (asked.out / "load.json").write_text(json.dumps(result, indent=1))
    (asked.out / "load.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
