"""One choice of an answer as it comes: a step of the engine -> what it adds to the message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NotRequired

from typing_extensions import TypedDict

from draftproof.engine.request import StepResult, StepTree, TokenLogprob
from draftproof.engine.text import Piece, TextStream
from draftproof.serve.errors import failed
from draftproof.serve.parsers import Delta, Parser
from draftproof.serve.parsers.base import CallDelta


class DraftTree(TypedDict):
    """As StepTree, the tokens as text."""

    tokens: list[str]
    parent: list[int]
    depth: list[int]
    logw: list[float]
    path: list[int]


class DraftPiece(TypedDict):
    text: str
    drafted: bool


class DraftDetails(TypedDict):
    """What one step drafted (nodes) and accepted; `pieces` is the text that it brought to the light."""

    pieces: list[DraftPiece]
    nodes: int
    accepted: int
    tree: DraftTree | None


class SpeculativeDecoding(TypedDict):
    """vLLM's names. The last two with `detailed`: accepted and drafted tokens of every step that drafted."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


@dataclass(frozen=True)
class Part:
    """What one step adds. finish: None, stop, length or tool_calls; stopped_by: the stop string or token of the request
    that ended it."""

    choice: int
    delta: Delta
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    draft: DraftDetails | None = None
    finish: str | None = None
    stopped_by: str | int | None = None


@dataclass
class SpecCount:
    """Accepted and drafted of every step that drafted."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    def add(self, result: StepResult, accepted: int) -> None:
        if result.nodes and not result.prefill:
            self.accepted.append(accepted)
            self.drafted.append(result.nodes)


@dataclass
class Choice:
    """index: its place in the answer. stop_ids: those that the request itself named. details: what steps drafted is
    told. parallel: more than one tool call may come. hide_reasoning: it is parsed, and left out.
    """

    index: int
    text: TextStream
    parser: Parser
    stop_ids: frozenset[int] = frozenset()
    details: bool = False
    parallel: bool = True
    hide_reasoning: bool = False
    tokens: int = 0  # of the answer so far
    cached: int = 0  # of the prompt, as `StepResult.cached`
    finish: str | None = None
    called: bool = False  # a tool call has begun
    spec: SpecCount = field(default_factory=SpecCount)

    def take(self, result: StepResult) -> Part:
        """ApiError 500 when the engine broke the request off. Do not go on after `finish`."""
        if result.finish == "error":
            raise failed(result.error or "the engine failed")
        before = self.text.used
        pieces = [p for p in self.text.feed(result) if p.text]
        tokens = result.tokens[: self.text.used - before]
        accepted = min(result.accepted, len(tokens))
        self.tokens += len(tokens)
        self.cached += result.cached if result.prefill and not self.cached else 0
        self.spec.add(result, accepted)
        delta = self._filtered(self.parser.feed("".join(p.text for p in pieces)))
        if self.finish is None and (result.finish or self.text.stopped):
            delta = _joined(delta, self._filtered(self.parser.finish()))
            stopped = self.text.stopped is not None or result.finish == "stop"
            self.finish = "tool_calls" if stopped and self.called else "stop" if stopped else "length"
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        draft = self._details(result, pieces, accepted) if self.details else None
        return Part(self.index, delta, tokens, logprobs, draft, self.finish, self._stopped_by(result))

    def _filtered(self, delta: Delta) -> Delta:
        """Without what the request does not want to see. A second call where only one may come ends the answer."""
        self.called = self.called or bool(delta.calls)
        calls = delta.calls
        if not self.parallel and any(call.index for call in calls):
            calls, self.finish = tuple(call for call in calls if not call.index), "tool_calls"
        return Delta("" if self.hide_reasoning else delta.reasoning, delta.content, calls)

    def _stopped_by(self, result: StepResult) -> str | int | None:
        if self.text.stopped is not None:
            return self.text.stopped
        last = result.tokens[-1] if result.finish == "stop" else -1
        return last if last in self.stop_ids else None

    def _details(self, result: StepResult, pieces: list[Piece], accepted: int) -> DraftDetails:
        shown: list[DraftPiece] = [{"text": p.text, "drafted": p.drafted} for p in pieces]
        tree = self._tree(result.tree) if result.tree else None
        return {"pieces": shown, "nodes": result.nodes, "accepted": accepted, "tree": tree}

    def _tree(self, tree: StepTree) -> DraftTree:
        decode = self.text.tokenizer.decode
        return {
            "tokens": [str(decode([token], clean_up_tokenization_spaces=False)) for token in tree.token],
            "parent": tree.parent,
            "depth": tree.depth,
            "logw": tree.logw,
            "path": tree.path,
        }


def _joined(one: Delta, two: Delta) -> Delta:
    """As if both had come at once."""
    calls: dict[int, CallDelta] = {}
    for call in (*one.calls, *two.calls):
        first = calls.get(call.index, CallDelta(call.index, None, None, ""))
        id_, name = first.id or call.id, first.name or call.name
        calls[call.index] = CallDelta(call.index, id_, name, first.arguments + call.arguments)
    return Delta(one.reasoning + two.reasoning, one.content + two.content, tuple(calls.values()))


def spec_metrics(spec: SpecCount, depth: int, *, detailed: bool) -> SpeculativeDecoding:
    """vLLM's numbers of one request. depth: drafts in a row at most. In a tree the drafted tokens are its nodes, so
    the acceptance rate is of nodes."""
    steps, accepted, drafted = len(spec.accepted), sum(spec.accepted), sum(spec.drafted)
    told: SpeculativeDecoding = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [spec.accepted.count(n) for n in range(depth + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
    }
    if detailed:
        told["per_step_accepted"], told["per_step_drafted"] = spec.accepted, spec.drafted
    return told
