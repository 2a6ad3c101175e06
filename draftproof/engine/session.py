"""`draftproof run`: one prompt answered on the terminal, with what was drafted and accepted."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from draftproof.engine.acceptance import Acceptance, TextAcceptance
from draftproof.engine.calibrate import auto_for, remember
from draftproof.engine.drawing import draw
from draftproof.engine.engine import Engine
from draftproof.engine.output import print_json
from draftproof.engine.pair import Pair, load_pair
from draftproof.engine.propose import Drafting, Speculation
from draftproof.engine.request import Request, SamplingParams, StepResult, StepTree
from draftproof.engine.text import Piece, TextStream, encode_chat, encode_raw
from draftproof.errors import UserError

DRAFTED = "bold green"  # accepted draft tokens; the target's own stay plain


@dataclass(frozen=True)
class Ask:
    """What to answer, with which pair, and when to stop."""

    prompt: str
    target: str
    drafting: Drafting
    sampling: SamplingParams
    max_tokens: int
    stops: tuple[str, ...] = ()
    raw: bool = False
    trees: int = 0  # steps whose draft tree is drawn


@dataclass
class Answer:
    """One finished generation. seconds covers prefill and decoding."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    accepted: TextAcceptance = field(default_factory=TextAcceptance)
    nodes: list[int] = field(default_factory=list)  # drafted tokens that each step verified
    trees: list[StepTree] = field(default_factory=list)
    finish: str = ""
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


def answer(ask: Ask, *, device: str, dtype: str, compare: bool, stats: bool, as_json: bool) -> None:
    """Load, generate and print; with `compare` the same prompt again without the drafter."""
    Request([0], ask.max_tokens, ask.sampling)  # refuse bad options before anything is loaded
    if not all(ask.stops):
        raise UserError("bad-option", "a stop string is empty", "give --stop a text")
    if not _is_text(ask.prompt):
        raise UserError("bad-option", "the prompt is not valid UTF-8", "convert it to UTF-8")
    if not ask.prompt.strip():
        raise UserError("prompt-empty", "the prompt is empty", "give at least one word")
    asked = ask.drafting
    pair = load_pair(ask.target, asked.drafter, mtp=asked.mtp, dtype=dtype, device=device)
    encode = encode_raw(pair.tokenizer, ask.prompt) if ask.raw else _chat(pair, ask.prompt)
    sampling = ask.sampling.seeded()
    request = Request(encode, ask.max_tokens, sampling, pair.stop_ids)
    out = Console(highlight=False, soft_wrap=True)
    show = (lambda _: None) if as_json else _printer(out)
    answered = generate(pair, request, ask.stops, show, asked.how, ask.trees)
    plain = generate(replace(pair, drafter=None), request, ask.stops, lambda _: None) if compare else None
    if as_json:
        print_json(_report(pair, asked.how, sampling, answered, plain))
        return
    out.file.write("\n")
    _draw_trees(pair, answered)
    if ask.sampling.seed is None and sampling.temperature and not sys.stdout.isatty() and not stats:
        print(f"seed {sampling.seed}", file=sys.stderr)  # a text that nobody could repeat would be worth less
    if stats or compare or sys.stdout.isatty():
        _print_stats(Console(stderr=True, highlight=False), pair, asked.how, sampling, answered, plain)


def generate(
    pair: Pair,
    request: Request,
    stops: tuple[str, ...],
    show: Callable[[Piece], None],
    how: Speculation | None = None,
    trees: int = 0,
) -> Answer:
    """Decode one request; pieces of text go to `show` as they come; the first `trees` draft trees are kept."""
    context, sampled, auto = len(request.prompt_ids) + request.max_tokens, request.sampling.temperature > 0, None
    if pair.drafter and how and how.budget == "auto":
        auto = auto_for(pair.target, pair.drafter, how, context=context, sampled=sampled)
    request = replace(request, keep_trees=trees > 0)
    engine = Engine(pair.target, pair.drafter, context=context, how=how, auto=auto)
    result, stream = Answer(), TextStream(pair.tokenizer, stops)
    begun = time.perf_counter()
    for step in engine.generate([request]):
        _count(result, step, trees)
        for piece in stream.feed(step):
            result.text += piece.text
            show(piece)
        if stream.stopped:
            result.finish = "stop string"
            break
    result.seconds = time.perf_counter() - begun
    if auto and pair.drafter:
        remember(auto, pair.drafter, sampled)
    return result


def _spent(nodes: list[int]) -> str:
    """How often each number of drafted nodes was verified, the most frequent first."""
    common = Counter(nodes).most_common()
    return ", ".join(f"{n} nodes in {count} steps" if n else f"no draft in {count} steps" for n, count in common)


def _is_text(words: str) -> bool:
    """Undecodable bytes of stdin or an argument arrive as lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in words)


def _count(result: Answer, step: StepResult, trees: int) -> None:
    result.tokens += step.tokens
    if not step.prefill:
        result.accepted.accepted.append(len(step.tokens) - 1)
        result.nodes.append(step.nodes)
    if step.tree and len(result.trees) < trees:
        result.trees.append(step.tree)
    result.finish = step.finish or result.finish


def _chat(pair: Pair, prompt: str) -> list[int]:
    return encode_chat(pair.tokenizer, [{"role": "user", "content": prompt}])


def _printer(out: Console) -> Callable[[Piece], None]:
    def show(piece: Piece) -> None:
        if out.is_terminal:
            out.print(Text(piece.text, style=DRAFTED if piece.drafted else ""), end="")
        else:
            out.file.write(piece.text)  # rich would expand tabs
        out.file.flush()

    return show


def _draw_trees(pair: Pair, answered: Answer) -> None:
    def word(token: int) -> str:
        return repr(pair.tokenizer.decode([token]))

    err = Console(stderr=True, highlight=False)
    for number, tree in enumerate(answered.trees, 1):
        title = f"step {number}: {len(tree.token) - 1} nodes, {len(tree.path) - 1} accepted (*), chances of the paths"
        err.print(draw(tree, word, title))


def _report(
    pair: Pair, how: Speculation, sampling: SamplingParams, answered: Answer, plain: Answer | None
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "text": answered.text,
        "tokens": len(answered.tokens),
        "finish": answered.finish,
        "seed": sampling.seed,
        "seconds": answered.seconds,
        "tokens_per_second": answered.rate,
        "device": {"value": pair.device.value, "reason": pair.device.reason},
        "dtype": {"value": pair.dtype.value, "reason": pair.dtype.reason},
    }
    if pair.drafter:
        acceptance = Acceptance([answered.accepted], pair.drafter.depth).as_dict()
        report["acceptance"] = {k: v for k, v in acceptance.items() if k not in ("texts", "tau_95")}
        report["speculation"] = {
            "budget": how.budget,
            "builder": how.builder.name,
            "noise_aware": how.noise_aware and sampling.temperature > 0,
            "nodes": answered.nodes,
        }
        if answered.trees:
            report["trees"] = [asdict(tree) for tree in answered.trees]
    if plain:
        report["plain"] = {"tokens_per_second": plain.rate, "same_tokens": plain.tokens == answered.tokens}
        report["ratio"] = answered.rate / plain.rate
    return report


def _print_stats(
    err: Console, pair: Pair, how: Speculation, sampling: SamplingParams, answered: Answer, plain: Answer | None
) -> None:
    seed = f", seed {sampling.seed}" if sampling.temperature else ""
    err.print(f"{len(answered.tokens)} tokens in {answered.seconds:.1f} s: {answered.rate:.1f} tokens/s{seed}")
    if pair.drafter:
        a = Acceptance([answered.accepted], pair.drafter.depth)
        err.print(f"tau {a.tau:.2f}: {a.emitted - a.steps} of {a.emitted} tokens were accepted drafts, {a.steps} steps")
        err.print("accepted at least 1, 2, ... drafts: " + " ".join(f"{r:.2f}" for r in a.per_position))
        if how.budget != "chain":
            err.print(f"budget {how.budget}: {_spent(answered.nodes)}")
    if plain:
        same = "the same tokens" if plain.tokens == answered.tokens else "other tokens (rounding; see lossless)"
        err.print(f"without drafter: {plain.rate:.1f} tokens/s, {same}; ratio {answered.rate / plain.rate:.2f}")
    err.print(f"device {pair.device.value} ({pair.device.reason}); dtype {pair.dtype.value} ({pair.dtype.reason})")
