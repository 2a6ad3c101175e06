"""Requests in, steps out: prefill, then `step` until every request has finished."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftproof.engine.batch import Batch, Drafter
from draftproof.engine.propose import Proposer, Round, Speculation
from draftproof.engine.request import Request, SamplingParams, StepResult, StepTree
from draftproof.engine.step import Step, advance, choices, step
from draftproof.errors import UserError
from draftproof.models.target import Target, causal_plan
from draftproof.spec.accept import walk
from draftproof.spec.budget import Auto
from draftproof.spec.sampling import GREEDY_BELOW, Sampling
from draftproof.spec.tree import chain

PREFILL_CHUNK = 512  # prompt rows per forward


class Engine:
    """A target, maybe a drafter, and their caches for `slots` requests of at most `context` tokens each."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        context: int,
        how: Speculation | None = None,
        auto: Auto | None = None,
        keep_trees: bool = False,
    ) -> None:
        """how: what to draft (default: the drafter's chain); auto: the measured choice, for its budget "auto"
        (`calibrate.auto_for`). keep_trees: every StepResult brings its draft tree."""
        limit = target.spec.max_positions
        if limit is not None and context > limit:
            raise UserError(
                "prompt-too-long",
                f"{context} tokens of prompt and answer, the model's context is {limit}",
                f"shorten the prompt or lower --max-tokens so that both fit {limit}",
            )
        self.target, self.drafter, self.slots, self.context = target, drafter, slots, context
        self.keep_trees = keep_trees
        self.proposer = Proposer(drafter, how or Speculation(), target.spec.vocab_size, auto) if drafter else None
        self.chunk = min(PREFILL_CHUNK, context + 1)
        rows = max(self.chunk, self.proposer.rows if self.proposer else 1)
        self.cache = target.new_cache(slots=slots, capacity=context, chunk=rows)
        if drafter:
            drafter.allocate(slots=slots, capacity=context, chunk=rows)

    def generate(self, requests: Sequence[Request]) -> Iterator[StepResult]:
        """Decode up to `slots` requests side by side; yields each request's tokens step by step.

        The text depends on the request and its seed alone: not on the drafter, nor on what shares the batch (up to the
        rounding of kernels that see another batch shape).
        """
        self._require_fit(requests)
        batch, progress = self.admit(requests), [Progress(r) for r in requests]
        logits = torch.stack([self.prefill(i, r, batch) for i, r in enumerate(requests)])
        first = first_tokens(batch, logits, self.cache.lengths[batch.slots])
        yield from emit(first, batch, progress, prefill=True)
        while any(p.running for p in progress):
            batch.longest = max(p.committed for p in progress)
            batch.left = [p.left for p in progress]
            done = step(batch, self.target, self.cache, self.proposer)
            yield from emit(done, batch, progress, keep_trees=self.keep_trees)

    def _require_fit(self, requests: Sequence[Request]) -> None:
        if not 1 <= len(requests) <= self.slots:
            raise AssertionError(f"{len(requests)} requests for {self.slots} slots")
        limit, budget = self.target.spec.max_positions, self.proposer.how.budget if self.proposer else 0
        for r in requests:
            if len(r.prompt_ids) + r.max_tokens > self.context:
                raise UserError(
                    "prompt-too-long",
                    f"{len(r.prompt_ids)} prompt tokens and {r.max_tokens} new ones, the context holds {self.context}",
                    "shorten the prompt or lower --max-tokens",
                )
            if isinstance(budget, int) and limit is not None and budget > limit - len(r.prompt_ids):
                raise UserError(
                    "bad-option",
                    f"a budget of {budget} nodes, the model's context has {limit - len(r.prompt_ids)} tokens left "
                    "behind the prompt",
                    "lower --budget, or shorten the prompt",
                )

    def admit(self, requests: Sequence[Request]) -> Batch:
        device, slots = self.target.device, slice(0, len(requests))
        self.cache.drop(slots)
        if self.proposer:
            self.proposer.drop(slots)
        stops = sorted({t for r in requests for t in r.stop_ids})
        if any(set(r.stop_ids) != set(stops) for r in requests):
            raise AssertionError("requests of one batch share their stop tokens")
        own = any(r.processors for r in requests)
        batch = Batch(
            slots=slots,
            anchors=torch.tensor([r.prompt_ids[-1] for r in requests], device=device),
            budget=torch.tensor([r.max_tokens for r in requests], device=device),
            stops=torch.tensor(stops, dtype=torch.long, device=device),
            sampling=sampling_of(requests, self.target.spec.vocab_size, device),
            longest=max(len(r.prompt_ids) for r in requests),
            left=[r.max_tokens for r in requests],
            kinds=[kind_of(r.sampling, self.proposer) for r in requests],
            processors=[tuple(r.processors) for r in requests] if own else (),
            texts=[list(r.prompt_ids) for r in requests] if own else [],
        )
        if any(batch.sequential) and self.proposer and self.proposer.how.budget not in ("chain", "none"):
            warnings.warn(
                "a logits processor keeps state from call to call, so it cannot be asked at every node of a tree: its "
                "request drafts a chain",
                stacklevel=3,
            )
        return batch

    def prefill(self, index: int, request: Request, batch: Batch) -> Tensor:
        """Run one prompt in chunks and return the logits [V] after its last token."""
        slot, prompt = slice(index, index + 1), torch.tensor(list(request.prompt_ids), device=self.target.device)
        for begin in range(0, len(prompt), self.chunk):
            tokens = prompt[None, begin : begin + self.chunk]
            rows, reach = tokens.shape[1], begin + tokens.shape[1]
            counts = torch.tensor([rows], device=tokens.device)
            plan = causal_plan(self.cache, slot, rows, reach)
            out = self.target.forward(tokens, plan, taps=self.drafter.taps if self.drafter else (), rows=1)
            self.cache.commit(slot, counts)
            if self.proposer:
                assert out.features is not None
                self.proposer.extend(slot, out.features, counts, reach)
        if batch.sampling.seen is not None:
            batch.sampling.seen[index, prompt] = True
        return out.logits[0, -1]


class Progress:
    """The host's view of one request: what was emitted, and whether it ended."""

    def __init__(self, request: Request) -> None:
        self.request, self.emitted, self.running = request, 0, True

    @property
    def committed(self) -> int:
        """Rows in the cache, or one more (the last emitted token is not in it yet)."""
        return len(self.request.prompt_ids) + self.emitted

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_tokens - self.emitted if self.running else 0

    def take(self, tokens: list[int]) -> str | None:
        """Count the tokens; the finish reason if they end the request."""
        self.emitted += len(tokens)
        stopped = tokens[-1] in self.request.stop_ids
        finish = "stop" if stopped else "length" if self.emitted == self.request.max_tokens else None
        self.running = finish is None
        return finish


def emit(
    done: Step, batch: Batch, progress: Sequence[Progress], *, prefill: bool = False, keep_trees: bool = False
) -> Iterator[StepResult]:
    taken, tree = done.taken, done.tree
    columns = [taken.tokens, *(c[:, None] for c in (taken.counts, taken.drafts, tree.n))]
    trees = step_trees(done) if keep_trees and not prefill else [None] * len(progress)
    for index, (*tokens, count, drafts, nodes) in enumerate(torch.cat(columns, 1).tolist()):  # one copy to the host
        if count:
            emitted = tokens[:count]
            if batch.texts:
                batch.texts[index] += emitted
            finish = progress[index].take(emitted)
            yield StepResult(index, emitted, min(drafts, count), finish, nodes - 1, trees[index], prefill)


def step_trees(done: Step) -> list[StepTree]:
    """The verified trees on the host, without padding."""
    tree, trees = done.tree, []
    columns = [t.tolist() for t in (tree.token, tree.parent, tree.depth, tree.logw, done.taken.path)]
    sizes = zip(tree.n.tolist(), done.taken.drafts.tolist(), strict=True)
    for (n, drafts), *row, path in zip(sizes, *columns, strict=True):
        token, parent, depth, logw = (values[:n] for values in row)
        trees.append(StepTree(token, parent, depth, logw, path[: drafts + 1]))
    return trees


def first_tokens(batch: Batch, logits: Tensor, lengths: Tensor) -> Step:
    """The token after each prompt, chosen like any other: logits [R, V] of its last token, at lengths - 1."""
    tree = chain(batch.anchors)
    picks = choices(batch, logits[:, None], Round(tree), lengths[:, None] - 1)
    taken = walk(tree, picks, batch.stops, batch.budget)
    advance(batch, taken)
    return Step(tree, taken)


def kind_of(sampling: SamplingParams, proposer: Proposer | None) -> str:
    """Requests whose drafts are accepted alike: by temperature, and by how candidates are ranked."""
    aware = proposer is not None and proposer.how.noise_aware and sampling.temperature > GREEDY_BELOW
    return f"T {sampling.temperature:.1f}" + (", noise-aware" if aware else "")


def sampling_of(requests: Sequence[Request], vocab: int, device: torch.device) -> Sampling:
    params = [r.sampling.seeded() for r in requests]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    penalised = any(p.repetition_penalty != 1 for p in params)
    return Sampling(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.long),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        penalty=column("repetition_penalty", torch.float32),
        seed=column("seed", torch.long),
        choice=column("choice", torch.long),
        seen=torch.zeros(len(params), vocab, dtype=torch.bool, device=device) if penalised else None,
        sampled=any(p.temperature > GREEDY_BELOW for p in params),
        filtered=any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params),
    )
