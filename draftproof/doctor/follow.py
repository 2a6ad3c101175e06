"""A drafter follows given texts: how many leading drafts are right at each anchor of a route. No torch at import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftproof.doctor.facts import Answer
from draftproof.doctor.told import first_anchor, last_position

if TYPE_CHECKING:
    from torch import Tensor

    from draftproof.engine.batch import Drafter
    from draftproof.models.cache import Slots
    from draftproof.models.target import Target

ANCHORS = 64  # side by side
Route = Sequence[int] | None  # tokens of each step; None: the drafter's own steps


@dataclass(frozen=True)
class Evidence:
    """The answers, and features of their tokens by tap: [T, H] a text."""

    answers: tuple[Answer, ...]
    features: tuple[Mapping[int, Tensor], ...]

    def subset(self, chosen: Sequence[int]) -> Evidence:
        return Evidence(tuple(self.answers[i] for i in chosen), tuple(self.features[i] for i in chosen))


def features_by_tap(target: Target, answers: Sequence[Answer], taps: Sequence[int]) -> tuple[dict[int, Tensor], ...]:
    """One causal pass a text."""
    from draftproof.engine.replay import Text, _require_vocabulary, features_of

    _require_vocabulary(target, [Text(list(a.prompt_ids), list(a.output_ids)) for a in answers])
    found = []
    for answer in answers:
        joined = features_of(target, [*answer.prompt_ids, *answer.output_ids], taps)
        found.append(dict(zip(taps, joined.chunk(len(taps), dim=-1), strict=True)))
    return tuple(found)


def accept_at(
    target: Target, drafter: Drafter, evidence: Evidence, anchors: Sequence[Sequence[int]], whole_head: bool = False
) -> list[dict[int, int]]:
    """Accepted drafts at chosen anchors of each text. An anchor's context is every row before it, so all anchors of a
    text run side by side: as many slots with the same rows, each of its own length. `whole_head`: `leading_drafts`."""
    found = []
    for answer, by_tap, chosen in zip(evidence.answers, evidence.features, anchors, strict=True):
        seen = dict[int, int]()
        if chosen:
            features = _joined(drafter, by_tap)
            drafter.allocate(
                slots=1 + min(len(chosen), ANCHORS), capacity=len(features) + drafter.depth, chunk=len(features)
            )
            _fill(target, drafter, features, first_anchor(answer))
            for begin in range(0, len(chosen), ANCHORS):
                group = chosen[begin : begin + ANCHORS]
                seen.update(zip(group, _draft_at(target, drafter, answer, group, whole_head), strict=True))
        found.append(seen)
    drafter.cache = None
    return found


def _joined(drafter: Drafter, by_tap: Mapping[Any, Tensor]) -> Tensor:
    import torch

    return torch.cat([by_tap[tap] for tap in drafter.taps], dim=-1)


def _fill(target: Target, drafter: Drafter, features: Tensor, prompt: int) -> None:
    """The text's rows into slot 0, the prompt's first as in service."""
    import torch

    for rows, reach in ((features[:prompt], prompt), (features[prompt:], len(features))):
        count = torch.tensor([len(rows)], device=target.device)
        drafter.extend(slice(0, 1), rows[None], count, reach)


def _draft_at(target: Target, drafter: Drafter, answer: Answer, anchors: Sequence[int], whole_head: bool) -> list[int]:
    """Slot 0 keeps the text's rows; a draft overwrites its own slot's from the anchor on."""
    import torch

    assert drafter.cache is not None
    for store in (*drafter.cache.keys.values(), *drafter.cache.values.values()):
        store[1:] = store[:1]
    slots = slice(1, 1 + len(anchors))
    drafter.cache.lengths[slots] = torch.tensor(anchors, device=target.device)
    ids = [*answer.prompt_ids, *answer.output_ids, *[-1] * (drafter.depth + 1)]  # -1 is equal to no draft
    truth = torch.tensor([ids[a : a + drafter.depth + 1] for a in anchors], device=target.device)
    return leading_drafts(drafter, slots, truth, max(anchors) + drafter.depth + 1, whole_head)


def follow(
    target: Target, drafter: Drafter, evidence: Evidence, routes: Sequence[Route], whole_head: bool = False
) -> list[dict[int, int]]:
    """The same along a route, step by step: for drafters whose context depends on where steps end."""
    import torch

    walk = _start(target, drafter, evidence, routes)
    while alive := [i for i in range(len(routes)) if walk.at[i] < walk.last[i] and _more(routes[i], walk.taken[i])]:
        slots = torch.tensor(alive, device=target.device)
        starts = [walk.at[i] for i in alive]
        truth = torch.stack([walk.ids[i, a : a + drafter.depth + 1] for i, a in zip(alive, starts, strict=True)])
        reach = max(starts) + drafter.depth + 1
        accepted = leading_drafts(drafter, slots, truth, reach, whole_head)
        counts = []
        for i, count in zip(alive, accepted, strict=True):
            walk.seen[i][walk.at[i]] = count
            route = routes[i]
            counts.append(min(count + 1 if route is None else route[walk.taken[i]], walk.last[i] - walk.at[i] + 1))
        wide = max(counts)
        rows = torch.stack([walk.features[i, a : a + wide] for i, a in zip(alive, starts, strict=True)])
        drafter.extend(slots, rows, torch.tensor(counts, device=target.device), max(starts) + wide)
        for i, count in zip(alive, counts, strict=True):
            walk.at[i] += count
            walk.taken[i] += 1
    drafter.cache = None
    return walk.seen


@dataclass
class _Walk:
    ids: Tensor  # [R, T], -1 behind a text: equal to no draft
    features: Tensor  # [R, T, K * H]
    at: list[int]
    last: list[int]
    taken: list[int]
    seen: list[dict[int, int]]


def _start(target: Target, drafter: Drafter, evidence: Evidence, routes: Sequence[Route]) -> _Walk:
    import torch

    answers, count = evidence.answers, len(evidence.answers)
    longest = max(last_position(a) for a in answers) + 1
    slack = max(drafter.depth + 1, *(max(route or (0,)) for route in routes))
    drafter.allocate(slots=count, capacity=longest + slack, chunk=longest)
    own = [_joined(drafter, by_tap) for by_tap in evidence.features]
    features = own[0].new_zeros(count, longest + slack, own[0].shape[-1])
    ids = torch.full((count, longest + slack), -1, device=target.device)
    for i, (answer, rows) in enumerate(zip(answers, own, strict=True)):
        features[i, : len(rows)] = rows
        ids[i, : len(rows)] = torch.tensor([*answer.prompt_ids, *answer.output_ids], device=target.device)
    at = [first_anchor(a) for a in answers]
    counts = torch.tensor(at, device=target.device)
    drafter.extend(slice(0, count), features[:, : max(at)], counts, longest)
    return _Walk(ids, features, at, [last_position(a) for a in answers], [0] * count, [{} for _ in answers])


def _more(route: Route, taken: int) -> bool:
    return route is None or taken < len(route)


def leading_drafts(drafter: Drafter, slots: Slots, truth: Tensor, reach: int, whole_head: bool = False) -> list[int]:
    """Drafts that are right from the first on: truth [R, 1 + D] is the anchor and the text behind it.

    The head over the vocabulary is most of the work, so it runs on a block's next row only where all rows before it
    were right. `whole_head` leaves the drafter alone: a random one needs every row's probabilities.
    """
    with _normed_rows(None if whole_head else getattr(drafter, "model", None)) as rows:
        ids = drafter.draft(slots, truth[:, 0], reach).ids[..., 0]
    if not rows:
        return (ids == truth[:, 1 : ids.shape[1] + 1]).int().cumprod(1).sum(1).tolist()
    from draftproof.models.dflash import head_logits

    owner: Any = drafter
    right = ids[:, 0] == truth[:, 1]
    accepted = right.long()
    for row in range(1, rows[0].shape[1]):
        going = right.nonzero()[:, 0]
        if not len(going):
            break
        best = head_logits(rows[0][going, row : row + 1], owner.target, owner.spec).float().argmax(-1)[:, 0]
        right[going] = best == truth[going, row + 1]
        accepted += right
    return accepted.tolist()


@contextmanager
def _normed_rows(model: Any) -> Iterator[list[Tensor]]:
    """Collect the block rows in front of the head, and let the head see the first of them only."""
    rows: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
        rows.append(output)
        return output[:, :1]

    handle = model.norm.register_forward_hook(keep) if model is not None else None
    try:
        yield rows
    finally:
        if handle:
            handle.remove()
