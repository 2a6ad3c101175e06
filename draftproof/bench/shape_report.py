"""The table of `draftproof bench --shape`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def _imposed(rows: list[dict[str, Any]]) -> Table:
    """Nodes 0 is plain decoding; auto is the product's choice among the measured rounds."""
    budgets = list(rows[0]["tau"])
    table = Table("context", "imposed", "", *(f"{b} nodes" if b.isdigit() else b for b in budgets))
    for row in rows:
        table.add_row(str(row["context"]), row["profile"], "tau", *(f"{row['tau'][b]:.2f}" for b in budgets))
        table.add_row("", "", "tokens/s", *(f"{row['tokens_per_second'][b]:.1f}" for b in budgets))
    return table


def print_shape(result: dict[str, Any]) -> None:
    console = Console(highlight=False, width=118)
    weights = result["weights"]
    table = Table(
        "context", "rows", "part", "ms", "ms, one graph", "floor ms", "x floor", "peak GiB", title=result["shape"]
    )
    for part in result["parts"]:
        graph = part["graph"]
        best = part["eager"] if graph is None else min(part["eager"], graph)
        table.add_row(
            str(part["context"]), str(part["rows"]), part["name"], f"{part['eager']:.2f}",
            "-" if graph is None else f"{graph:.2f}", f"{part['floor']:.2f}",
            f"{best / part['floor']:.2f}" if part["floor"] else "-",
            f"{part['peak'] / 2**30:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"floor: the part's bytes at {result['bandwidth'] / 1e9:.0f} GB/s (a copy on this device); weights "
        f"{weights['target'] / 2**30:.1f} GiB target, {weights['drafter'] / 2**30:.1f} GiB drafter, random"
    )
    for row in result["assumed"]:
        console.print(
            f"context {row['context']}, tau {row['assumed_tau']:g} assumed: {row['drafted']:.1f} tokens/s against "
            f"{row['plain']:.1f} plain, ratio {row['ratio']:.2f}"
        )
    console.print(_imposed(result["imposed"]))
    p = result["provenance"]
    console.print(
        f"{p['device']}; {p['dtype']}; torch {p['versions']['torch']}, transformers {p['versions']['transformers']}"
    )
