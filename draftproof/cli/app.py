"""The typer application and the options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

TargetName = Annotated[str, typer.Option("--target", help="target: embedded name, folder or hub id")]
DrafterName = Annotated[str, typer.Option("--drafter", help="drafter: embedded name, folder or hub id")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of text")]
WIDE = 118  # columns of a table that goes into a file or a pipe
TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash"


@app.callback()
def root() -> None:
    """Speculative decoding you can prove."""


def table_console() -> Console:
    """The terminal as it is; a file or a pipe gets lines wide enough for a table."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
