"""The typer application and the options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from draftproof.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.engine.propose import Drafting, Speculation

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

TargetName = Annotated[str, typer.Option("--target", help="target: embedded name, folder or hub id")]
DrafterName = Annotated[
    str | None,
    typer.Option("--drafter", help="drafter: embedded name, folder or hub id (default: the embedded target's)"),
]
Method = Annotated[
    str, typer.Option(help="dflash (a chain), ddtree (a tree), mtp (the target's own head), or none for plain decoding")
]
Budget = Annotated[
    str | None,
    typer.Option(help="ddtree: nodes a round; auto (measured), none, chain, or a number"),
]
BuilderName = Annotated[
    str | None, typer.Option("--builder", help="ddtree: spine-first (default), best-first or siblings")
]
NoNoise = Annotated[
    bool, typer.Option("--no-noise-aware", help="rank drafts by probability alone when sampling, not with the noise")
]
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


METHODS = ("dflash", "ddtree", "mtp", "none")


def drafting(
    target: str,
    drafter: str | None,
    method: str,
    drafts: int | None,
    *,
    budget: str | None = None,
    builder: str | None = None,
    no_noise: bool = False,
    default_budget: str = "auto",
) -> Drafting:
    """The options of one command, checked against each other. default_budget: of `--method ddtree`."""
    from draftproof.engine.propose import Drafting

    name, mtp = which_drafter(target, drafter, method, drafts)
    return Drafting(name, mtp, speculation(method, budget, builder, no_noise, default_budget))


def which_drafter(target: str, drafter: str | None, method: str, drafts: int | None) -> tuple[str | None, int]:
    """(drafter, drafts of the target's own head): one of them, or neither for plain decoding."""
    if method not in METHODS:
        raise UserError("bad-option", f"method {method!r} is not known", f"use --method {', '.join(METHODS)}")
    by_drafter = method in ("dflash", "ddtree")
    if drafter and not by_drafter:
        raise UserError(
            "bad-option", f"--method {method} uses no drafter", "leave --drafter out, or use --method dflash"
        )
    if method != "mtp" and drafts:
        fix = "leave -k out: a DFlash drafter's block size decides" if by_drafter else "leave -k out"
        raise UserError("bad-option", f"-k means nothing for --method {method}", fix)
    if by_drafter and drafter is None and target not in OWN_DRAFTERS:
        raise UserError(
            "bad-option", f"no drafter is known for {target}", "name one with --drafter, or use --method mtp"
        )
    own = OWN_DRAFTERS.get(target) if by_drafter else None
    return drafter or own, (drafts or MTP_DRAFTS) if method == "mtp" else 0


def speculation(
    method: str, budget: str | None, builder: str | None, no_noise: bool, default_budget: str
) -> Speculation:
    from draftproof.engine.propose import Speculation
    from draftproof.spec.budget import parse_budget
    from draftproof.spec.builders import BUILDERS

    if method != "ddtree":
        for option, value in (("--budget", budget), ("--builder", builder)):
            if value is not None:
                raise UserError("bad-option", f"{option} means nothing for --method {method}", "use --method ddtree")
        if method == "none" and no_noise:
            raise UserError("bad-option", "--no-noise-aware means nothing for --method none", "leave it out")
        return Speculation(noise_aware=not no_noise)
    given = default_budget if budget is None else budget
    if given in ("none", "chain") and builder is not None:
        raise UserError("bad-option", f"--builder means nothing for --budget {given}", "leave it out")
    if given == "none" and no_noise:
        raise UserError("bad-option", "--no-noise-aware means nothing for --budget none", "leave it out")
    if builder is not None and builder not in BUILDERS:
        raise UserError("bad-option", f"builder {builder!r} is not known", f"use {', '.join(BUILDERS)}")
    chosen = BUILDERS[builder or "spine-first"]
    return Speculation(parse_budget(given), chosen, noise_aware=not no_noise)
