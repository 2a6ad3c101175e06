"""Acceptance of a pair along a given text, without sampling: the oracle that says what acceptance a pair should have.

The text plays the target's choices. Its features come from one causal pass of the target, then the drafter walks the
text exactly as the loop would: draft at the anchor, count the leading drafts that equal the text, commit, move on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.acceptance import Acceptance, TextAcceptance
from draftproof.engine.batch import Drafter
from draftproof.errors import UserError
from draftproof.models.target import Tap, Target, causal_plan

GROUP = 32  # texts walked side by side
CHUNK = 512  # target rows per forward


@dataclass(frozen=True)
class Text:
    """Token ids: the prompt as the model saw it, and what the target wrote behind it."""

    prompt_ids: list[int]
    continuation_ids: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.continuation_ids


def load_texts(path: str | Path, max_tokens: int | None = None) -> list[Text]:
    """A JSON object with equally long lists `prompt_ids` and `continuation_ids` (lists of token ids)."""
    try:
        data: Any = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError("not-found", f"{path} does not exist", "name a JSON file of texts") from None
    except (OSError, ValueError) as error:
        raise UserError("bad-texts", f"{path} is not a readable JSON file: {error}", TEXTS_HELP) from None
    if not isinstance(data, dict) or not {"prompt_ids", "continuation_ids"} <= data.keys():
        raise UserError("bad-texts", f"{path} lacks prompt_ids or continuation_ids", TEXTS_HELP)
    prompts, continuations = data["prompt_ids"], data["continuation_ids"]
    if not (_id_lists(prompts) and _id_lists(continuations)) or len(prompts) != len(continuations):
        raise UserError("bad-texts", f"{path}: the two lists do not hold as many lists of token ids", TEXTS_HELP)
    return [Text(p, c[:max_tokens]) for p, c in zip(prompts, continuations, strict=True)]


TEXTS_HELP = 'the format is {"prompt_ids": [[1, 2], ...], "continuation_ids": [[3, 4], ...]}'


def _id_lists(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids) for ids in value)
    )


def replay(target: Target, drafter: Drafter, texts: Sequence[Text]) -> Acceptance:
    """Walk every text; the number of texts side by side changes nothing but speed."""
    _require_vocabulary(target, texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    done: dict[int, TextAcceptance] = {}
    for begin in range(0, len(order), GROUP):
        group = order[begin : begin + GROUP]
        done.update(zip(group, _walk_group(target, drafter, [texts[i] for i in group]), strict=True))
    return Acceptance([done[i] for i in range(len(texts))], drafter.depth)


def _require_vocabulary(target: Target, texts: Sequence[Text]) -> None:
    top, limit = max(max(t.ids) for t in texts), target.spec.max_positions
    if top >= target.spec.vocab_size:
        raise UserError(
            "bad-texts",
            f"token id {top} in the texts, the target's vocabulary has {target.spec.vocab_size}",
            "replay texts that this target's tokenizer made",
        )
    longest = max(len(t.ids) for t in texts)
    if limit is not None and longest > limit:
        raise UserError("prompt-too-long", f"a text of {longest} tokens, the context is {limit}", "lower --max-tokens")


def features_of(target: Target, ids: Sequence[int], taps: Sequence[Tap]) -> Tensor:
    """Tapped features of every token from one plain causal pass: [T, K * H]."""
    cache = target.new_cache(slots=1, capacity=len(ids), chunk=min(CHUNK, len(ids)))
    parts = []
    for begin in range(0, len(ids), CHUNK):
        tokens = torch.tensor([ids[begin : begin + CHUNK]], device=target.device)
        plan = causal_plan(cache, slice(0, 1), tokens.shape[1], begin + tokens.shape[1])
        features = target.forward(tokens, plan, taps=taps, rows=1).features
        assert features is not None
        cache.commit(slice(0, 1), torch.tensor([tokens.shape[1]], device=target.device))
        parts.append(features[0])
    return torch.cat(parts)


def _walk_group(target: Target, drafter: Drafter, texts: Sequence[Text]) -> list[TextAcceptance]:
    longest, slots = max(len(t.ids) for t in texts), slice(0, len(texts))
    drafter.allocate(slots=len(texts), capacity=longest + drafter.depth, chunk=longest)
    rows = drafter.depth + 1
    ids = torch.zeros(len(texts), longest + rows, dtype=torch.long, device=target.device) - 1
    features = None
    for i, text in enumerate(texts):
        own = features_of(target, text.ids, drafter.taps)
        if features is None:
            features = own.new_zeros(len(texts), longest + rows, own.shape[-1])
        features[i, : len(own)] = own
        ids[i, : len(own)] = torch.tensor(text.ids, device=target.device)
    assert features is not None
    at = torch.tensor([len(t.prompt_ids) for t in texts], device=target.device)  # positions of the anchors
    last = torch.tensor([len(t.ids) - 1 for t in texts], device=target.device)
    drafter.extend(slots, features[:, : int(at.max())], at, longest)
    results = [TextAcceptance() for _ in texts]
    for accepted, running in _steps(drafter, slots, ids, features, at, last):
        for result, count, alive in zip(results, accepted.tolist(), running.tolist(), strict=True):
            if alive:
                result.accepted.append(count)
    return results


def _steps(
    drafter: Drafter, slots: slice, ids: Tensor, features: Tensor, at: Tensor, last: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (accepted drafts [R], still running [R]) per step. Past a text's end ids are -1: equal to no draft."""
    columns = torch.arange(drafter.depth + 1, device=ids.device)
    while bool((running := at < last).any()):
        window = ids.gather(1, at[:, None] + columns)
        reach = int(at.max()) + drafter.depth + 1
        drafts = drafter.draft(slots, window[:, 0].clamp(min=0), reach).ids[..., 0]
        accepted = (drafts == window[:, 1:]).int().cumprod(1).sum(1)
        counts = torch.where(running, accepted + 1, 0)
        block = at[:, None] + columns
        rows = features.gather(1, block[:, :, None].expand(-1, -1, features.shape[-1]))
        drafter.extend(slots, rows, counts, reach)
        at = (at + counts).clamp(max=ids.shape[1] - drafter.depth - 1)
        yield accepted, running
