"""Pure checks of a drafter alone and of a pair, from configs only: specs in, findings out.

Nothing here opens weights. `check_drafter` needs no target; `check_pair` adds what a target says;
`require_pair` turns errors into one refusal. Every finding carries the expected and the seen value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from draftproof.config.drafter import DrafterSpec
from draftproof.config.finding import Finding, Severity, error, note, warning
from draftproof.config.taps import check_order, check_taps
from draftproof.config.target import TargetSpec
from draftproof.config.tokens import check_mask_token
from draftproof.errors import UserError

PADDING: Final = 1024  # embeddings padded for kernels differ by less; a foreign vocabulary differs by more


def check_drafter(drafter: DrafterSpec) -> list[Finding]:
    """Faults a drafter's config shows without a target."""
    layers = drafter.num_target_layers
    findings = [
        *_block(drafter),
        *_window(drafter),
        *_mask_in(drafter, drafter.vocab_size, "its own vocab_size"),
    ]
    if layers is not None:
        findings += check_taps(drafter, layers, f"num_target_layers = {layers}")
    return [*findings, *check_order(drafter)]


def check_pair(drafter: DrafterSpec, target: TargetSpec, *, target_path: Path | None = None) -> list[Finding]:
    """Faults of the pair, `check_drafter`'s included. `target_path` (folder or config.json) adds the
    tokenizer's word on the mask id; its absence is no finding."""
    findings = [*_block(drafter), *_window(drafter), *check_order(drafter)]
    findings += _widths(drafter, target)
    findings += _vocabulary(drafter, target)
    findings += _mask_in(drafter, target.vocab_size, "the target's vocab_size")
    findings += _target_layers(drafter, target)
    findings += check_taps(drafter, target.num_layers, f"the target has {target.num_layers} layers")
    findings += _rope(drafter, target)
    findings += _positions(drafter, target)
    findings += _heads(drafter, target)
    if target_path is not None:
        folder = target_path if target_path.is_dir() else target_path.parent
        findings += check_mask_token(drafter.mask_token_id, folder, _at(drafter, "mask_token_id"))
    return findings


def require_pair(findings: list[Finding]) -> None:
    """UserError pair-mismatch naming every error-level finding; nothing when there is none."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if not errors:
        return
    lines = [f"{e.message} (expected {e.expected or '-'}, seen {e.seen or '-'})" for e in errors]
    fixes = dict.fromkeys(e.fix for e in errors if e.fix)
    raise UserError("pair-mismatch", "; ".join(lines), "; ".join(fixes) or "choose the drafter made for this target")


def _at(drafter: DrafterSpec, field: str) -> str:
    return drafter.sources.get(field, field)


def _block(drafter: DrafterSpec) -> Iterator[Finding]:
    if drafter.block_size < 2:
        yield error(
            "block-too-small",
            "a block counts its anchor, so this one leaves no draft",
            "at least 2",
            drafter.block_size,
            _at(drafter, "block_size"),
            "take block_size from the drafter's own repository",
        )


def _window(drafter: DrafterSpec) -> Iterator[Finding]:
    windows = {layer.window for layer in drafter.layers if layer.window is not None}
    for window in sorted(windows):
        if window < drafter.block_size:
            yield error(
                "window-below-block",
                "the sliding window is smaller than the block",
                f"at least {drafter.block_size}",
                window,
                _at(drafter, "window"),
                "take the window from the drafter's own repository",
            )
    unused = drafter.extras.get("sliding_window")
    if windows or unused is None:
        return
    message = f"sliding_window is {unused} but no layer slides: a window that nothing uses is often the rest of a "
    message += "lost layer_types"
    where = _at(drafter, "layers")
    if drafter.extras.get("use_sliding_window") is False:
        yield note("window-unused", message, "no window, or a sliding layer", "all full_attention", where)
        return
    yield warning(
        "window-unused",
        message,
        "no window, or a sliding layer",
        "all full_attention",
        where,
        "compare layer_types with the drafter's own repository",
    )


def _mask_in(drafter: DrafterSpec, rows: int, whose: str) -> Iterator[Finding]:
    if drafter.mask_token_id >= rows:
        yield error(
            "mask-id-out-of-range",
            f"the mask id is no row of the embedding ({whose})",
            f"below {rows}",
            drafter.mask_token_id,
            _at(drafter, "mask_token_id"),
            "take the mask id from the drafter's own repository; a trimmed embedding needs its rows back",
        )


def _widths(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    fix = "use the target this drafter was made for"
    if drafter.target_hidden_size != target.hidden_size:
        yield error(
            "target-width",
            "the drafter reads features of another width than the target's",
            target.hidden_size,
            drafter.target_hidden_size,
            _at(drafter, "target_hidden_size"),
            fix,
        )
    elif drafter.hidden_size != target.hidden_size and drafter.dialect != "speculators":
        yield error(
            "drafter-width",
            "the drafter borrows the target's embedding and head, so both need one width",
            target.hidden_size,
            drafter.hidden_size,
            _at(drafter, "hidden_size"),
            fix,
        )


def _vocabulary(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    difference = abs(drafter.vocab_size - target.vocab_size)
    if difference:
        make = error if difference >= PADDING else warning
        yield make(
            "vocabulary",
            "drafter and target differ in vocabulary"
            + ("" if difference >= PADDING else " by less than a padding; some engines then draft from a zero head"),
            target.vocab_size,
            drafter.vocab_size,
            _at(drafter, "vocab_size"),
            "use the target this drafter was made for",
        )
    if drafter.draft_vocab_size is not None:
        where = _at(drafter, "draft_vocab_size")
        if drafter.draft_vocab_size > target.vocab_size:
            yield error(
                "draft-vocabulary",
                "the drafter's own head has more tokens than the target",
                f"at most {target.vocab_size}",
                drafter.draft_vocab_size,
                where,
                "use the target this drafter was made for",
            )
        else:
            message = "the drafter has a head of its own over part of the vocabulary"
            yield note("draft-vocabulary", message, target.vocab_size, drafter.draft_vocab_size, where)


def _target_layers(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    if drafter.num_target_layers not in (None, target.num_layers):
        yield error(
            "num-target-layers",
            "the drafter was made for a target of another depth",
            drafter.num_target_layers,
            target.num_layers,
            _at(drafter, "num_target_layers"),
            "use the target this drafter was made for",
        )


def _rope(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    if target.rope_base is not None and drafter.rope.base != target.rope_base:
        yield warning(
            "rope-base",
            "rope base differs from the target's; published drafters mostly share it, some do not",
            f"{target.rope_base:g}",
            f"{drafter.rope.base:g}",
            _at(drafter, "rope.base"),
            "check the base against the drafter's own repository",
        )
    factor = drafter.rope.rotary_dim / drafter.head_dim
    if factor == target.partial_rotary_factor:
        return
    where = _at(drafter, "rope.rotary_dim")
    message = "the drafter rotates another share of each head than the target"
    expected, seen = f"{target.partial_rotary_factor:g}", f"{factor:g}"
    if factor == 1:  # the rule among published drafters of partly rotating targets
        yield note("partial-rotary", message, expected, seen, where)
    else:
        fix = "check partial_rotary_factor against the drafter's own repository"
        yield warning("partial-rotary", message, expected, seen, where, fix)


def _positions(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    ours, theirs = drafter.max_positions, target.max_positions
    if ours is not None and theirs is not None and ours < theirs:
        yield warning(
            "max-positions",
            "the drafter covers fewer positions than the target; beyond them engines stop drafting or draft badly",
            f"at least {theirs}",
            ours,
            _at(drafter, "max_positions"),
            f"keep the context within {ours}, or take the value from the drafter's own repository",
        )


def _heads(drafter: DrafterSpec, target: TargetSpec) -> Iterator[Finding]:
    if drafter.tie_word_embeddings != target.tie_word_embeddings:
        yield note(
            "tied-heads",
            "drafter and target differ in tying embedding and head; both are borrowed from the target, so "
            "only exporters and converters are affected",
            str(target.tie_word_embeddings).lower(),
            str(drafter.tie_word_embeddings).lower(),
            _at(drafter, "tie_word_embeddings"),
        )
    scale_unsaid = drafter.sources.get("input_embedding_scale", "").startswith("default")
    if target.model_type.startswith("gemma") and scale_unsaid:
        yield warning(
            "embedding-scale",
            "the target multiplies its embeddings by sqrt(hidden_size) and the drafter's config names no "
            "input_embedding_scale; public readers then differ: torch code uses 1, MLX code the target's "
            "factor",
            "input_embedding_scale",
            "absent, 1 is used",
            _at(drafter, "input_embedding_scale"),
            "compare the acceptance of both with `draftproof replay`",
        )
