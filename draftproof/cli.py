"""The command line: one function a command, imports inside, errors as one message and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftproof.errors import UserError

app = typer.Typer(
    help="Speculative decoding you can prove.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def root() -> None:
    """Speculative decoding you can prove."""


TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash"


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="folder of the run; the same command resumes it")],
    recipe: Annotated[Path | None, typer.Option(help="TOML recipe (default: the embedded drafter's)")] = None,
    target: Annotated[str, typer.Option(help="target: name, folder or hub id")] = TARGET,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of chats the target answers")] = None,
    texts: Annotated[int, typer.Option(help="texts the target writes at most")] = 60000,
    texts_seconds: Annotated[float, typer.Option(help="time for writing texts")] = 3600,
    steps: Annotated[int, typer.Option(help="training steps of the whole run")] = 6000,
    seconds: Annotated[float, typer.Option(help="time for training in this call; the rest resumes")] = 1e9,
    slots: Annotated[int, typer.Option(help="texts written side by side; 0: 1536 on a GPU, 32 on a CPU")] = 0,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Make a drafter for a target: the target writes texts, the drafter learns to draft them."""
    from importlib.resources import files

    from draftproof.engine.pair import load_pair
    from draftproof.train.recipe import load_recipe
    from draftproof.train.run import Stage, run_training

    chosen = recipe or Path(str(files("draftproof") / "train" / "recipes" / "smollm2-135m.toml"))
    plan = load_recipe(chosen)
    pair = load_pair(target, None, dtype=dtype, device=device)
    wide = slots or (1536 if pair.target.device.type == "cuda" else 32)
    stage = Stage(texts, texts_seconds, steps, seconds, wide)
    run_training(pair.target, pair.tokenizer, plan, prompts, out, stage, say=lambda s: print(s, flush=True))


def main() -> None:
    """Entry point: a UserError becomes one message on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"draftproof: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
