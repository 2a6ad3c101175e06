"""A whole training run in one folder, stage by stage; a stage that is done is not done again.

out/run.json              recipe and steps that it began with
out/texts.safetensors     what the target wrote
out/run.pt  out/log.jsonl the run so far
out/drafter/              the exported drafter (out/drafter-25, out/drafter-50 on the way)
out/provenance.json       command, versions, hardware, data, acceptance
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import __version__
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.replay import Text, replay
from draftproof.errors import UserError
from draftproof.fetch import writing
from draftproof.models.dflash import DFlash, DFlashDrafter
from draftproof.models.target import Target
from draftproof.train.data import (
    Example,
    answer_jobs,
    chat_header,
    keep,
    load_examples,
    prompt_jobs,
    read_prompts,
    save_examples,
)
from draftproof.train.export import drafter_config, export, write_config
from draftproof.train.loop import Run, resume, save_run, start, train
from draftproof.train.recipe import Recipe
from draftproof.train.regen import Writer

HELD_OUT = 64  # texts kept from training, for tau on the way
MARKS = (25, 50, 100)  # percent of the run at which tau is measured and a drafter exported

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """Limits of this invocation: texts to write (count and seconds), training steps in all, seconds to train now."""

    texts: int
    texts_seconds: float
    steps: int
    train_seconds: float
    slots: int


def run_training(
    target: Target, tokenizer: Any, recipe: Recipe, prompts: Path | None, out: Path, stage: Stage, say: Say
) -> bool:
    """Bring the run in `out` forward; True when it is finished."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        _same_run(out, recipe, stage)
    examples = _texts(target, tokenizer, recipe, prompts, out, stage, say)
    if len(examples) <= HELD_OUT:
        raise UserError("bad-texts", f"only {len(examples)} texts, {HELD_OUT} are held out", "write more texts")
    held, examples = examples[:HELD_OUT], examples[HELD_OUT:]
    intermediate = int(target.model.config.get_text_config().intermediate_size)
    spec = write_config(out / "drafter", drafter_config(recipe.shape, target.spec, intermediate))
    run = start(DFlash(spec).to(target.device), recipe, stage.steps)
    if (out / "run.pt").exists():
        resume(run, out / "run.pt")
        say(f"resumed at step {run.step} of {run.total}")
    begun = time.monotonic()
    for percent in MARKS:
        mark = math.ceil(run.total * percent / 100)
        if run.step >= mark:
            continue
        left = stage.train_seconds - (time.monotonic() - begun)
        train(run, target, examples, until=mark, seconds=left, report=_reporter(out, say))
        save_run(run, out / "run.pt")
        if run.step < mark:
            say(f"stopped at step {run.step} of {run.total}; the same command continues")
            return False
        _mark(run, target, held, out, percent, say)
    _provenance(out, recipe, examples, run)
    return True


def _same_run(out: Path, recipe: Recipe, stage: Stage) -> None:
    """A run continues with the recipe and the number of steps it began with; others would be silently ignored."""
    path, asked = out / "run.json", {"recipe": recipe.model_dump(), "steps": stage.steps}
    if not path.exists():
        path.write_text(json.dumps(asked, indent=2) + "\n")
    begun = json.loads(path.read_text())
    if begun != asked:
        what = "steps" if begun["recipe"] == asked["recipe"] else "recipe"
        raise UserError(
            "bad-option", f"{out} holds a run with another {what}", f"keep the {what} of {path}, or name another --out"
        )


def _texts(
    target: Target, tokenizer: Any, recipe: Recipe, prompts: Path | None, out: Path, stage: Stage, say: Say
) -> list[Example]:
    path = out / "texts.safetensors"
    if path.exists():
        return load_examples(path)
    data, begun = recipe.data, time.monotonic()
    own_share = data.self_prompts if prompts else 1.0
    writer = Writer(
        target,
        slots=stage.slots,
        max_prompt=data.max_prompt,
        max_tokens=max(data.max_response, data.max_prompt),
        stops=[tokenizer.eos_token_id],
    )
    before, after = chat_header(tokenizer)
    own = []
    for _, ids in writer.write(
        prompt_jobs(before, round(stage.texts * own_share), data, recipe.seed), seconds=stage.texts_seconds / 5
    ):
        if ids[-1] == tokenizer.eos_token_id and len(ids) > 4:
            own.append(before + ids[:-1] + after)
    given = read_prompts(prompts, tokenizer)[: stage.texts - len(own)] if prompts else []
    say(f"{len(own)} prompts of the target's own, {len(given)} given; {time.monotonic() - begun:.0f} s")
    pool = own + given
    random.Random(recipe.seed).shuffle(pool)
    examples, tokens, begun = [], 0, time.monotonic()
    for job, ids in writer.write(answer_jobs(pool, data, recipe.seed), seconds=stage.texts_seconds):
        tokens += len(ids)
        example = Example(job.prompt_ids, ids)
        if keep(example, data):
            examples.append(example)
    spent = time.monotonic() - begun
    say(f"{len(examples)} texts kept, {tokens} tokens written in {spent:.0f} s ({tokens / spent:.0f} tokens/s)")
    random.Random(recipe.seed + 1).shuffle(examples)  # rows finish short texts first
    save_examples(path, examples)
    return examples


def _reporter(out: Path, say: Say) -> Callable[[dict[str, Any]], None]:
    def report(entry: dict[str, Any]) -> None:
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        say(f"step {entry['step']}  loss {entry['loss']}  expected tau at random anchors {entry['expected']}")

    return report


def held_acceptance(model: DFlash, target: Target, held: Sequence[Example]) -> Acceptance:
    """Replay of held-out texts with the weights as they would be served."""
    served = DFlash(model.spec)
    served.load_state_dict(model.state_dict())
    drafter = DFlashDrafter(served.to(target.device, target.dtype), target)
    return replay(target, drafter, [Text(e.prompt_ids, e.response_ids) for e in held])


def _mark(run: Run, target: Target, held: Sequence[Example], out: Path, percent: int, say: Say) -> None:
    acceptance = held_acceptance(run.model, target, held)
    entry = {"percent": percent, "step": run.step, "held_out": acceptance.as_dict()}
    run.log.append(entry)
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    folder = out / ("drafter" if percent == 100 else f"drafter-{percent}")
    write_config(folder, json.loads((out / "drafter" / "config.json").read_text()))
    export(run.model, folder)
    low, high = acceptance.interval()
    say(f"{percent} % of training: tau {acceptance.tau:.3f} ({low:.3f} to {high:.3f}) on {len(held)} held-out texts")


def _provenance(out: Path, recipe: Recipe, examples: Sequence[Example], run: Run) -> None:
    import transformers

    facts = {
        "command": sys.argv,
        "draftproof": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "cpus": os.cpu_count(),
        "recipe": recipe.model_dump(),
        "texts": len(examples),
        "response_tokens": sum(len(e.response_ids) for e in examples),
        "steps": run.step,
        "acceptance": [entry for entry in run.log if "percent" in entry],
    }
    (out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
