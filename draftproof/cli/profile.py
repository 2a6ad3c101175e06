"""The command that stores what acceptance a pair should have: profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import TARGET, Device, DrafterName, Dtype, TargetName, app, which_drafter


@app.command()
def profile(
    out: Annotated[Path, typer.Argument(help="JSON file to write")],
    texts: Annotated[Path, typer.Option(help="JSON with prompt_ids and continuation_ids: what the server answers")],
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="only the first tokens of each continuation")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Store what acceptance a pair should have on given texts, sound and with each known fault. Made where the weights
    are; the doctor then needs none."""
    from draftproof.doctor.facts import Answer
    from draftproof.doctor.profile import checkpoint_hashes, make_profile, save_profile
    from draftproof.engine.pair import load_pair
    from draftproof.engine.replay import load_texts
    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.hub import resolve_drafter, resolve_target

    drafter, _ = which_drafter(target, drafter, "dflash", None)
    assert drafter is not None
    loaded = [text for text in load_texts(texts, max_tokens) if len(text.continuation_ids) > 1]
    answers = [Answer(tuple(t.prompt_ids), tuple(t.continuation_ids), "", None, 0.0) for t in loaded]
    pair = load_pair(target, drafter, dtype=dtype, device=device, plain=True)
    assert isinstance(pair.drafter, DFlashDrafter)
    folders = {"target": resolve_target(target), "drafter": resolve_drafter(drafter)}
    hashes = {role: checkpoint_hashes(folder) for role, folder in folders.items()}
    made = make_profile(pair.target, pair.drafter, answers, hashes, say=lambda line: typer.echo(line, err=True))
    save_profile(made, out)
    typer.echo(f"{out}: {len(answers)} texts, {len(made.tables)} hypotheses")
