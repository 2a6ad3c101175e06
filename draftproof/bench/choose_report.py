"""The tables of `draftproof choose` and `draftproof calibrate`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.bench.choose import advice
from draftproof.bench.report import machine_line


def print_choice(results: list[dict[str, Any]], provenance: dict[str, Any], load: float) -> None:
    console = Console(highlight=False, width=110)
    table = Table("T", "way", "tau", "nodes", "tokens/s", "x plain (95 %)", "median", "other texts")
    for result in results:
        for name, row in result["ways"].items():
            over, mark = row["over_none"], " <" if name == result["fastest"] else ""
            ratio = "{:.2f} ({:.2f}-{:.2f})".format(over["mean"], *over["interval"]) if over else "-"
            table.add_row(
                f"{result['temperature']:g}", name + mark, f"{row['tau']:.2f}", f"{row['nodes']:.1f}",
                f"{row['tokens_per_second']:.2f}", ratio, f"{over['median']:.3f}" if over else "-",
                f"{row['other_texts']} of {result['prompts']}",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    for result in results:
        console.print(advice(result))
        for key in ("auto", "auto_over_chain"):
            if r := result.get(key):
                low, high = r["interval"]
                against = r.get("against", "chain")
                console.print(
                    f"  auto over {against}: {r['mean']:.3f} (95 % {low:.3f}-{high:.3f}), median {r['median']:.3f}"
                )
    console.print(machine_line(provenance, load))


def print_costs(costs: dict[int, list[dict[str, float]]], drafts: dict[int, float]) -> None:
    console = Console(highlight=False, width=110)
    table = Table("context", "nodes", "ms a round", "x plain", "tau that pays")
    for context, rows in costs.items():
        for row in rows:
            nodes = int(row["nodes"])
            pays = "-" if nodes == 0 else f"{row['ratio']:.2f}" if row["ratio"] <= nodes + 1 else "none can"
            table.add_row(str(context), str(nodes), f"{row['ms']:.2f}", f"{row['ratio']:.2f}", pays)
        table.add_section()
    console.print(table)
    for context, ms in drafts.items():
        console.print(f"context {context}: a draft alone, with its tree, takes {ms:.2f} ms")
