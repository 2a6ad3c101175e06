"""A target with a memory, its weights written by hand: the next token is the one two places before the last.

So its greedy text repeats the last three prompt tokens, and an anchor says nothing about the token behind it: a drafter
can only know it from the context features. Layer 0 attends to the row two back (a constant query and key, turned apart
by the rotary embedding) and copies that row's token vector to where the head reads; the other layers do nothing.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

from draftproof.engine.engine import Engine
from draftproof.engine.request import Request
from draftproof.models.target import Target
from draftproof.train.data import Example
from draftproof.train.recipe import Recipe
from tests import tiny

VOCAB, CODE, BACK, SHARP = 32, 15, 2, 60.0
CONSTANT = tiny.HIDDEN - 1  # the dimension that holds the constant


@cache
def folder() -> Path:
    import transformers as hf

    config = tiny.target_config("llama")
    config.num_hidden_layers, config.vocab_size = 3, VOCAB
    model = hf.LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 2, (VOCAB, CODE), generator=draw).float() * 2 - 1
    assert len({tuple(c) for c in codes.tolist()}) == VOCAB
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.ndim == 1 else 0.0)
        model.model.embed_tokens.weight[:, :CODE] = codes
        model.model.embed_tokens.weight[:, CONSTANT] = 4.0
        model.lm_head.weight[:, CODE : 2 * CODE] = codes
        attention, width = model.model.layers[0].self_attn, config.head_dim
        angle = BACK * config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        for head in range(2):
            attention.k_proj.weight[head * width : head * width + width // 2, CONSTANT] = 1.0
        for head in range(4):
            rows = slice(head * width, (head + 1) * width)
            attention.q_proj.weight[rows, CONSTANT] = SHARP * torch.cat([angle.cos(), -angle.sin()])
        attention.v_proj.weight[:CODE, :CODE] = torch.eye(CODE)
        source = [*range(width), *range(2 * width, 2 * width + CODE - width)]  # heads 0 and 2 read the two value heads
        attention.o_proj.weight[CODE : 2 * CODE, source] = torch.eye(CODE)
    path = Path(tempfile.mkdtemp(prefix="draftproof-copying-"))
    model.save_pretrained(path)
    return path


@cache
def target(dtype: torch.dtype = torch.float32) -> Target:
    return Target.load(folder(), dtype=dtype)


@cache
def examples(count: int = 96) -> tuple[Example, ...]:
    """Random prompts and what the target greedily writes behind them."""
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(3, 7, (count,), generator=draw).tolist()
    prompts = [torch.randperm(VOCAB - 4, generator=draw)[:n].add(4).tolist() for n in sizes]
    engine = Engine(target(), None, slots=count, context=32)
    written: list[list[int]] = [[] for _ in prompts]
    for result in engine.generate([Request(p, 15, stop_ids=()) for p in prompts]):
        written[result.index] += result.tokens
    return tuple(Example(p, w) for p, w in zip(prompts, written, strict=True))


def recipe(**changes: dict[str, object]) -> Recipe:
    """A small recipe for this target; `changes` replace values of a part: optimiser={"lr": ...}."""
    raw: dict[str, dict[str, object]] = {
        "shape": {"layers": 2, "full_layers": 1, "window": 6, "block_size": 4, "taps": [0, 1], "mask_token_id": 3},
        "loss": {"target": "ce", "weights": "decay"},
        "optimiser": {"name": "adamw", "lr": 1e-2, "sequences": 16, "anchors": 6, "warmup": 0.05},
    }
    for part, values in changes.items():
        raw.setdefault(part, {}).update(values)
    return Recipe.model_validate({"seed": 3, **raw})
