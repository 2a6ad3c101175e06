"""A whole training run in one folder, stage by stage; a stage that is done is not done again.

out/run.json              target, recipe, prompts, texts and steps that it began with
out/texts.safetensors     what the target wrote
out/run.pt  out/log.jsonl the run so far, saved every two minutes and when it is interrupted
out/drafter/              the exported drafter (out/drafter-25, out/drafter-50 on the way)
out/provenance.json       command, versions, hardware, data, acceptance; written last: a run that has it is finished
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftproof.config.pair import check_pair, require_pair
from draftproof.config.reading import load_object
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.pair import turn_ends
from draftproof.engine.replay import Text, replay
from draftproof.errors import UserError
from draftproof.fetch import sha256_of, write_atomically, writing
from draftproof.models.dflash import DFlash, DFlashDrafter
from draftproof.models.target import Target
from draftproof.provenance import provenance
from draftproof.train.data import (
    AFTER,
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
from draftproof.train.prompts_file import require_file
from draftproof.train.recipe import Recipe
from draftproof.train.regen import Writer

HELD_OUT = 64  # texts kept from training, for tau on the way
MARKS = (25, 50, 100)  # percent of the run at which tau is measured and a drafter exported
DTYPES = (torch.float32, torch.bfloat16)
# What a config may do to logits behind the head, and the value that does nothing. Labels and drafts use the bare head.
BEHIND_HEAD = {"logit_scale": 1, "logits_scaling": 1, "lm_head_multiplier": 1, "final_logit_softcapping": None}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """Limits of this invocation: texts to write (count and seconds), training steps in all, seconds to train now.

    `texts_seconds` bounds the answers; the prompts that the target writes before get a fifth of it on top.
    """

    texts: int
    texts_seconds: float
    steps: int
    train_seconds: float
    slots: int


def run_training(
    target: Target, tokenizer: Any, recipe: Recipe, prompts: Path | None, out: Path, stage: Stage, say: Say
) -> bool:
    """Bring the run in `out` forward; True when it is finished. What can be refused is refused before any work."""
    _require_target(target)
    config = _checked_config(target, recipe)
    header = _checked_header(tokenizer, recipe)
    texts = out / "texts.safetensors"
    given = read_prompts(prompts, tokenizer) if prompts and not texts.exists() else []
    settings = _settings(target, recipe, prompts, stage)
    _same_run(out, settings)
    if (out / "provenance.json").exists():
        say(f"the run in {out} is finished; its files are left as they are")
        return True
    if not texts.exists():
        save_examples(texts, _enough(_write_texts(target, tokenizer, recipe, header, given, stage, say)))
    examples = _enough(load_examples(texts))
    held, examples = examples[:HELD_OUT], examples[HELD_OUT:]
    run = start(DFlash(write_config(out / "drafter", config)).to(target.device), recipe, stage.steps)
    if (out / "run.pt").exists():
        resume(run, out / "run.pt")
        # what was logged after the last save happens again
        write_atomically(out / "log.jsonl", (_line(entry) for entry in run.log))
        say(f"resumed at step {run.step} of {run.total}")

    def save() -> None:
        save_run(run, out / "run.pt")

    begun = time.monotonic()
    for percent in MARKS:
        if any(entry.get("percent") == percent for entry in run.log):
            continue
        mark = math.ceil(run.total * percent / 100)
        left = stage.train_seconds - (time.monotonic() - begun)
        train(run, target, examples, until=mark, seconds=left, report=_reporter(out, say), save=save)
        if run.step < mark:
            say(f"stopped at step {run.step} of {run.total}; the same command continues")
            return False
        _mark(run, target, held, config, out, percent, say)
        save()
    _write_provenance(out, target, settings, examples, run)
    return True


# --- before the work ----------------------------------------------------------------------------------


def _require_target(target: Target) -> None:
    if target.dtype not in DTYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError("bad-option", f"training runs in {names}, not in {target.dtype}", f"set --dtype {names}")
    config = target.model.config.get_text_config()
    found = [name for name, none in BEHIND_HEAD.items() if getattr(config, name, None) not in (None, none)]
    if getattr(target.head, "bias", None) is not None:
        found.append("a bias of the head")
    if found:
        raise UserError(
            "target-unsupported",
            f"{target.spec.model_type}: {', '.join(found)} changes the logits; training knows the head's weight alone",
            "train for a target without it",
        )


def _checked_config(target: Target, recipe: Recipe) -> dict[str, Any]:
    """The drafter's config.json, once it fits the target as `run` and `serve` will ask for."""
    intermediate = int(target.model.config.get_text_config().intermediate_size)
    config = drafter_config(recipe.shape, target.spec, intermediate)
    with TemporaryDirectory(prefix="draftproof-") as scratch:  # `out` may hold another run's config
        spec = write_config(Path(scratch), config)
    require_pair(check_pair(spec, target.spec, target_path=Path(target.spec.path)))
    return config


def _checked_header(tokenizer: Any, recipe: Recipe) -> tuple[list[int], list[int]]:
    header = chat_header(tokenizer)
    least = len(header[0]) + AFTER + 1
    if recipe.data.max_prompt < least:
        raise UserError(
            "bad-config",
            f"data.max_prompt is {recipe.data.max_prompt}; this target's chat header leaves no room for words",
            f"set it to {least} at the very least",
        )
    return header


def _settings(target: Target, recipe: Recipe, prompts: Path | None, stage: Stage) -> dict[str, Any]:
    if prompts:
        require_file(prompts)
    return {
        "target": str(Path(target.spec.path).resolve()),
        "recipe": recipe.model_dump(),
        "prompts": sha256_of(prompts) if prompts else None,
        "texts": stage.texts,
        "steps": stage.steps,
    }


def _same_run(out: Path, settings: dict[str, Any]) -> None:
    """A run continues with the settings it began with; others would be silently ignored. Without texts none began."""
    path = out / "run.json"
    if not (path.exists() and (out / "texts.safetensors").exists()):
        write_atomically(path, iter([(json.dumps(settings, indent=2) + "\n").encode()]))
        return
    begun = load_object(path)
    if other := [name for name in settings if begun.get(name) != settings[name]]:
        names = ", ".join(other)
        raise UserError(
            "bad-option",
            f"{out} holds a run with another {names}",
            f"keep the {names} of {path}, or name another --out",
        )


# --- texts --------------------------------------------------------------------------------------------


def _write_texts(
    target: Target,
    tokenizer: Any,
    recipe: Recipe,
    header: tuple[list[int], list[int]],
    given: list[list[int]],
    stage: Stage,
    say: Say,
) -> list[Example]:
    data, begun = recipe.data, time.monotonic()
    own_share = data.self_prompts if given else 1.0
    stops = turn_ends(target, tokenizer)
    writer = Writer(
        target,
        slots=stage.slots,
        max_prompt=data.max_prompt,
        max_tokens=max(data.max_response, data.max_prompt),
        stops=stops,
    )
    before, after = header
    own = []
    for _, ids in writer.write(
        prompt_jobs(before, round(stage.texts * own_share), data, recipe.seed), seconds=stage.texts_seconds / 5
    ):
        if ids[-1] in stops and len(ids) > 4:
            own.append(before + ids[:-1] + after)
    given = given[: stage.texts - len(own)]
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
    return examples


def _enough(examples: list[Example]) -> list[Example]:
    if len(examples) <= HELD_OUT:
        raise UserError("bad-texts", f"only {len(examples)} texts, {HELD_OUT} are held out", "write more texts")
    return examples


# --- on the way ---------------------------------------------------------------------------------------


def _reporter(out: Path, say: Say) -> Callable[[dict[str, Any]], None]:
    def report(entry: dict[str, Any]) -> None:
        _log(out, entry)
        say(f"step {entry['step']}  loss {entry['loss']}  expected tau at random anchors {entry['expected']}")

    return report


def _log(out: Path, entry: dict[str, Any]) -> None:
    with writing(out / "log.jsonl"), (out / "log.jsonl").open("ab") as file:
        file.write(_line(entry))


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry) + "\n").encode()


def held_acceptance(model: DFlash, target: Target, held: Sequence[Example]) -> Acceptance:
    """Replay of held-out texts with the weights as they would be served."""
    served = DFlash(model.spec)
    served.load_state_dict(model.state_dict())
    drafter = DFlashDrafter(served.to(target.device, target.dtype), target)
    return replay(target, drafter, [Text(e.prompt_ids, e.response_ids) for e in held])


def _mark(
    run: Run, target: Target, held: Sequence[Example], config: dict[str, Any], out: Path, percent: int, say: Say
) -> None:
    """Measure and export; the entry in `run.log` comes last, for it says that the mark is done."""
    acceptance = held_acceptance(run.model, target, held)
    folder = out / ("drafter" if percent == 100 else f"drafter-{percent}")
    write_config(folder, config)
    export(run.model, folder)
    entry = {"percent": percent, "step": run.step, "held_out": acceptance.as_dict()}
    _log(out, entry)
    run.log.append(entry)
    low, high = acceptance.interval()
    say(f"{percent} % of training: tau {acceptance.tau:.3f} ({low:.3f} to {high:.3f}) on {len(held)} held-out texts")


def _write_provenance(
    out: Path, target: Target, settings: dict[str, Any], examples: Sequence[Example], run: Run
) -> None:
    cuda = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if cuda else target.device.type
    facts = {
        **provenance(device, str(target.dtype).removeprefix("torch.")),
        **settings,
        "texts": len(examples),
        "response_tokens": sum(len(e.response_ids) for e in examples),
        "steps": run.step,
        "acceptance": [entry for entry in run.log if "percent" in entry],
    }
    write_atomically(out / "provenance.json", iter([(json.dumps(facts, indent=2) + "\n").encode()]))
