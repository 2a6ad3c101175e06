"""Results as tables for a person, or as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.bench.lossless import Comparison
from draftproof.engine.acceptance import Acceptance

DEPTHS_SHOWN = 15


def print_acceptance(result: Acceptance) -> None:
    low, high = result.interval()
    around = "" if math.isnan(low) else f" (95 % interval {low:.3f} to {high:.3f}, texts as units)"
    console = Console(highlight=False)
    console.print(f"tau {result.tau:.3f}{around}")
    console.print(f"{result.emitted} tokens in {result.steps} steps over {len(result.texts)} texts")
    console.print("per position  " + " ".join(f"{rate:.3f}" for rate in result.per_position[:DEPTHS_SHOWN]))


def print_lossless(results: Sequence[Comparison]) -> None:
    table = Table("temperature", "compared", "prompts", "identical", "ties", "bugs")
    groups = {(r.temperature, r.ways): None for r in results}
    for temperature, ways in groups:
        group = [r for r in results if (r.temperature, r.ways) == (temperature, ways)]
        counts = [sum(r.verdict == v for r in group) for v in ("identical", "tie", "bug")]
        table.add_row(str(temperature), ways, str(len(group)), *map(str, counts))
    console = Console(highlight=False)
    console.print(table)
    for r in results:
        if r.verdict != "identical":
            gap = "one text ends early" if r.gap is None else f"scores {r.gap:.2e} apart"
            console.print(f"{r.verdict}: prompt {r.prompt}, T {r.temperature}, {r.ways}: token {r.at}, {gap}")


def machine_line(p: dict[str, Any], load: float) -> str:
    """What a table's numbers need beside them: the provenance, and the share of the CPUs that others took."""
    return (
        f"{p['device']}; {p['dtype']}; {p['cpu']}; {p['cpus']} CPUs, OMP_NUM_THREADS {p['threads']}; "
        f"torch {p['versions']['torch']}, transformers {p['versions']['transformers']}; git {p['git']}; "
        f"other load {load:.1%} of the CPUs"
    )


def print_bench(result: dict[str, Any]) -> None:
    console = Console(highlight=False, width=110)
    if "speed" in result:
        console.print(_speed_table(result["speed"]))
    if "memory" in result:
        m = result["memory"]
        console.print(
            f"peak memory {m['peak'] / 1e6:.0f} MB = {m['ratio']:.2f} x "
            f"(weights {m['weights'] / 1e6:.0f} MB + caches {m['caches'] / 1e6:.0f} MB)"
        )
    if "acceptance" in result:
        console.print(_acceptance_table(result["acceptance"]))
        if "gain" in result["acceptance"]:
            low, high = result["acceptance"]["gain_95"]
            gain = result["acceptance"]["gain"]
            console.print(f"mean gain over the second drafter {gain:+.1%} (95 % interval {low:+.1%} to {high:+.1%})")
    console.print(machine_line(result["provenance"], result["other_load"]))


def _speed_table(speed: dict[str, Any]) -> Table:
    table = Table(
        "T", "prompts", "loops left out", "tau", "tokens/s", "plain", "transformers", "x plain", "x transformers"
    )
    for temperature, s in speed.items():
        rates = s["tokens_per_second"]
        table.add_row(
            temperature,
            str(s["prompts"]),
            str(s["looped_excluded"]),
            f"{s['tau']:.2f}",
            *(f"{rates[m]:.1f}" for m in ("drafted", "none", "transformers")),
            *("{:.2f} ({:.2f}-{:.2f})".format(*s[key]) for key in ("over_none", "over_transformers")),
        )
    return table


def _acceptance_table(acceptance: dict[str, Any]) -> Table:
    table = Table("set", "T", "texts", "tokens", *(f"tau {name}" for name in acceptance["drafters"]))
    for cell in acceptance["cells"]:
        taus = ["{:.3f} ({:.2f}-{:.2f})".format(r["tau"], *(r["tau_95"] or (math.nan,) * 2)) for r in cell["runs"]]
        texts = str(cell["runs"][0]["texts"])
        table.add_row(cell["workload"], str(cell["temperature"]), texts, str(cell["tokens"]), *taus)
    table.add_row("mean", "", "", "", *(f"{t:.3f}" for t in acceptance["mean_tau"]))
    return table
