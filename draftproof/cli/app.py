"""The typer application and the options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from draftproof.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

TargetName = Annotated[str, typer.Option("--target", help="target: embedded name, folder or hub id")]
DrafterName = Annotated[
    str | None,
    typer.Option("--drafter", help="drafter: embedded name, folder or hub id (default: the embedded target's)"),
]
Method = Annotated[str, typer.Option(help="dflash, mtp (the target's own head), or none for plain decoding")]
Drafts = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-k", min=1, help="mtp: drafts a step (default 2)")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of text")]
WIDE = 118  # columns of a table that goes into a file or a pipe
TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash"
OWN_DRAFTERS: Final = {TARGET: DRAFTER, "toy-qwen3.5": "toy-qwen3.5-dflash"}
MTP_DRAFTS = 2  # what Qwen advises for its own heads


@app.callback()
def root() -> None:
    """Speculative decoding you can prove."""


def table_console() -> Console:
    """The terminal as it is; a file or a pipe gets lines wide enough for a table."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def drafting(target: str, drafter: str | None, method: str, drafts: int | None) -> tuple[str | None, int]:
    """(drafter, drafts of the target's own head): one of them, or neither for plain decoding."""
    if method not in ("dflash", "mtp", "none"):
        raise UserError("bad-option", f"method {method!r} is not known", "use --method dflash, mtp or none")
    if method != "dflash" and drafter:
        raise UserError(
            "bad-option", f"--method {method} uses no drafter", "leave --drafter out, or use --method dflash"
        )
    if method != "mtp" and drafts:
        fix = "leave -k out: a DFlash drafter's block size decides" if method == "dflash" else "leave -k out"
        raise UserError("bad-option", f"-k means nothing for --method {method}", fix)
    if method == "dflash" and drafter is None and target not in OWN_DRAFTERS:
        raise UserError(
            "bad-option", f"no drafter is known for {target}", "name one with --drafter, or use --method mtp"
        )
    own = OWN_DRAFTERS.get(target) if method == "dflash" else None
    return drafter or own, (drafts or MTP_DRAFTS) if method == "mtp" else 0
