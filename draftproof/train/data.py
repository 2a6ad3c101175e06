"""Training texts: jobs for the target to write, the shards they are kept in, and batches with anchors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.train.loops import repeated_4grams
from draftproof.train.prompts_file import read_chats
from draftproof.train.recipe import Data
from draftproof.train.regen import Job

AFTER = 8  # tokens of a prompt kept free for what the template writes behind a user's words


@dataclass(frozen=True)
class Example:
    """Prompt and response as token ids; only the response is learnt."""

    prompt_ids: list[int]
    response_ids: list[int]


def answer_jobs(prompts: Iterable[list[int]], data: Data, seed: int) -> Iterator[Job]:
    """One job a prompt, greedy or at the recipe's temperature; prompts over the limit are left out."""
    draw = random.Random(seed)
    for ids in prompts:
        greedy, key = draw.random() < data.greedy, draw.getrandbits(48)
        if len(ids) <= data.max_prompt:
            yield Job(ids, 0.0 if greedy else data.temperature, key, data.max_response)


def prompt_jobs(header: list[int], count: int, data: Data, seed: int) -> Iterator[Job]:
    """The target writes a user's turn behind the bare chat header, at temperature 1 for variety."""
    draw = random.Random(seed)
    for _ in range(count):
        yield Job(header, 1.0, draw.getrandbits(48), data.max_prompt - len(header) - AFTER)


def read_prompts(path: str | Path, tokenizer: Any) -> list[list[int]]:
    """A prompts file -> prompt ids by the tokenizer's own chat template."""
    prompts = [_templated(tokenizer, chat) for chat in read_chats(Path(path))]
    return list(tokenizer(prompts, add_special_tokens=False)["input_ids"])


def chat_header(tokenizer: Any) -> tuple[list[int], list[int]]:
    """(ids up to where a user's words begin, ids from where they end up to the answer), read off the chat template."""
    mark = "\x00draftproof\x00"
    parts = _templated(tokenizer, [{"role": "user", "content": mark}]).split(mark)
    if len(parts) != 2:
        raise _no_template(f"writes a user's words {len(parts) - 1} times")
    before, after = tokenizer(parts, add_special_tokens=False)["input_ids"]
    return before, after


def _templated(tokenizer: Any, chat: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError, TypeError) as error:  # ValueError: there is no template
        raise _no_template(f"fails on the roles {[m['role'] for m in chat]}: {str(error).splitlines()[0]}") from error


def _no_template(why: str) -> UserError:
    return UserError(
        "target-unsupported",
        f"training needs the target's chat template, which {why}",
        "add a usable chat_template to the target's tokenizer, or leave out chats with roles that it refuses",
    )


def keep(example: Example, data: Data) -> bool:
    return len(example.response_ids) >= 3 and repeated_4grams(example.response_ids) <= data.drop_loops


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    """One safetensors file: all ids behind each other (int32) and the two lengths of every example."""
    from safetensors.torch import save

    ids = torch.tensor([t for e in examples for t in (*e.prompt_ids, *e.response_ids)], dtype=torch.int32)
    sizes = torch.tensor([(len(e.prompt_ids), len(e.response_ids)) for e in examples], dtype=torch.int32)
    write_atomically(path, iter([save({"ids": ids, "sizes": sizes})]))


def load_examples(path: Path) -> list[Example]:
    from safetensors.torch import load_file

    data = load_file(path)
    ids, examples, at = data["ids"].tolist(), [], 0
    for prompt, response in data["sizes"].tolist():
        examples.append(Example(ids[at : at + prompt], ids[at + prompt : at + prompt + response]))
        at += prompt + response
    return examples


@dataclass(frozen=True)
class TrainBatch:
    """tokens int64 [S, T] padded right; anchors int64 [S, A] positions; labelled bool [S, A, B - 1]."""

    tokens: Tensor
    anchors: Tensor
    labelled: Tensor


def batches(
    examples: Sequence[Example], *, sequences: int, anchors: int, block: int, seed: int, start: int = 0
) -> Iterator[TrainBatch]:
    """Endless batches of like-long texts; the order follows the seed alone, so a run can resume at batch `start`."""
    order = sorted(range(len(examples)), key=lambda i: _size(examples[i]))
    groups = [order[i : i + sequences] for i in range(0, len(order), sequences)]
    groups = [g for g in groups if len(g) == sequences] or groups
    number = 0
    while True:
        epoch = list(range(len(groups)))
        random.Random(f"{seed} {number // len(groups)}").shuffle(epoch)
        for group in epoch:
            if number >= start:
                draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
                yield make_batch([examples[i] for i in groups[group]], anchors, block, draw)
            number += 1


def _size(example: Example) -> int:
    return len(example.prompt_ids) + len(example.response_ids)


def make_batch(examples: Sequence[Example], anchors: int, block: int, draw: torch.Generator) -> TrainBatch:
    """Anchors: distinct random response positions whose successor is in the text, fewer if there are fewer."""
    width = -(-max(map(_size, examples)) // 32) * 32
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    prompt = torch.tensor([len(e.prompt_ids) for e in examples])
    end = torch.tensor([_size(e) for e in examples])
    for row, e in enumerate(examples):
        tokens[row, : end[row]] = torch.tensor(e.prompt_ids + e.response_ids)
    position = torch.arange(width)
    allowed = (position >= prompt[:, None]) & (position < end[:, None] - 1)
    score = torch.rand(tokens.shape, generator=draw).masked_fill(~allowed, -1)
    best, where = score.topk(min(anchors, width), dim=1)
    where = torch.where(best >= 0, where, prompt[:, None])
    label = where[:, :, None] + torch.arange(1, block)
    return TrainBatch(tokens, where, (label < end[:, None, None]) & (best >= 0)[:, :, None])
