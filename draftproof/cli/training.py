"""Commands that make models: train, train-target, prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import TARGET, Device, Dtype, TargetName, app


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="folder of the run; the same command resumes it")],
    recipe: Annotated[Path | None, typer.Option(help="TOML recipe (default: the embedded drafter's)")] = None,
    target: TargetName = TARGET,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of chats the target answers")] = None,
    texts: Annotated[int, typer.Option(min=1, help="texts the target writes at most")] = 60000,
    texts_seconds: Annotated[
        float, typer.Option(min=1, help="time for writing answers; prompts get a fifth on top")
    ] = 3600,
    steps: Annotated[int, typer.Option(min=1, help="training steps of the whole run")] = 6000,
    seconds: Annotated[float, typer.Option(min=0, help="time for training in this call; the rest resumes")] = 1e9,
    slots: Annotated[int, typer.Option(min=0, help="texts written side by side; 0: 1536 on a GPU, 32 on a CPU")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Make a drafter for a target: the target writes texts, the drafter learns to draft them."""
    from importlib.resources import files

    from draftproof.engine.pair import load_pair
    from draftproof.train.recipe import load_recipe
    from draftproof.train.run import Stage, run_training

    plan = load_recipe(recipe or Path(str(files("draftproof") / "train" / "recipes" / "smollm2-135m.toml")))
    pair = load_pair(target, None, dtype=dtype, device=device, plain=True)
    wide = slots or (1536 if pair.target.device.type == "cuda" else 32)
    stage = Stage(texts, texts_seconds, steps, seconds, wide)
    run_training(pair.target, pair.tokenizer, plan, prompts, out, stage, say=lambda s: print(s, flush=True))


@app.command("train-target")
def train_target(
    out: Annotated[Path, typer.Option(help="folder of the run; the same command resumes it")],
    texts: Annotated[Path, typer.Option(help="texts.safetensors of a `train` run, or JSONL of chats with answers")],
    texts_target: Annotated[str, typer.Option(help="the target that wrote texts.safetensors")] = TARGET,
    seconds: Annotated[float, typer.Option(min=0, help="training in all; 0 stops behind the tokenizer")] = 300,
    sequences: Annotated[int, typer.Option(min=0, help="rows of 512 tokens a step; 0: 64 on a GPU, 4 on a CPU")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="largest learning rate")] = 3e-3,
    functions: Annotated[int, typer.Option(min=0, help="documented Python functions to read beside the texts")] = 4000,
    device: Device = "auto",
    seed: int = 20261130,
) -> None:
    """Train the toy target from scratch: Qwen3.5's architecture with an MTP head, 9 M parameters."""
    import torch

    from draftproof.engine.pair import choose_device, load_tokenizer
    from draftproof.models.hub import resolve_target
    from draftproof.train.toy.run import Settings, run_toy

    where = torch.device(choose_device(device).value)
    rows = sequences or (64 if where.type == "cuda" else 4)
    settings = Settings(seconds, rows, lr=lr, functions=functions, seed=seed)
    run_toy(
        out,
        texts,
        settings,
        where,
        say=lambda line: print(line, flush=True),
        text_tokenizer=lambda: load_tokenizer(resolve_target(texts_target)),
    )


@app.command()
def prompts(
    out: Annotated[Path, typer.Argument(help="JSONL file to write")],
    count: Annotated[int, typer.Option(min=1)] = 60000,
    seed: int = 0,
) -> None:
    """Write training prompts from permissive sources (none of the evaluation sets)."""
    from draftproof.train.prompts import write_prompts

    write_prompts(out, count, seed)
