"""Streamed text is the decoded text, however steps split the tokens; stop strings end it exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from draftproof.engine.request import StepResult
from draftproof.engine.text import BROKEN, TextStream

WORDS = ["<eos>", "\u2581Hello", "\u2581world", "lo", "\u2581", "!", "\u2581a\u2581b"]
BYTES = [f"<0x{b:02X}>" for b in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x41)]  # euro sign, e acute, A


@cache
def tokenizer() -> Any:
    """Decodes as Llama 2 does: the mark becomes a space, bytes become characters, the first space goes."""
    import transformers as hf

    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, *BYTES])}, unk_token="<eos>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def stream(ids: list[int], sizes: list[int], stops: tuple[str, ...] = ()) -> str:
    """Feed the tokens in steps of the given sizes."""
    out, at = TextStream(tokenizer(), stops), 0
    text = ""
    steps = []
    for size in [*sizes, len(ids)]:
        if at < len(ids):
            steps.append(ids[at : at + size])
            at += size
    for number, tokens in enumerate(steps):
        finish = "length" if number == len(steps) - 1 else None
        text += "".join(p.text for p in out.feed(StepResult(0, tokens, len(tokens) - 1, finish)))
        if out.stopped:
            break
    return text


tokens = st.lists(st.sampled_from(range(1, len(WORDS) + len(BYTES))), min_size=1, max_size=24)
splits = st.lists(st.integers(1, 5), max_size=12)


def whole(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, clean_up_tokenization_spaces=False))


words_only = st.lists(st.sampled_from(range(1, len(WORDS))), min_size=1, max_size=24)


@given(words_only, splits)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_pieces_make_the_decoded_text(ids: list[int], sizes: list[int]) -> None:
    assert stream(ids, sizes) == whole(ids)


def test_a_character_of_several_tokens_comes_whole() -> None:
    euro = [len(WORDS) + i for i in range(3)]
    assert stream([1, *euro, 2], [1, 1, 1, 1, 1]) == "Hello\u20ac world"


def test_half_a_character_at_the_limit_is_not_lost() -> None:
    assert stream([1, len(WORDS)], [1, 1]) == whole([1, len(WORDS)]) != "Hello"


@given(words_only, splits, st.sampled_from(["lo", "o w", " wor", "!", "a b", "zzz"]))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_stop_string_cuts_where_it_begins(ids: list[int], sizes: list[int], stop: str) -> None:
    text = whole(ids)
    assert stream(ids, sizes, (stop,)) == (text[: text.index(stop)] if stop in text else text)


def test_control_decoding_each_token_alone_loses_spaces() -> None:
    assert "".join(whole([t]) for t in [1, 2, 1]) != whole([1, 2, 1])


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_drafted_pieces_are_marked(accepted: int) -> None:
    pieces = list(TextStream(tokenizer()).feed(StepResult(0, [1, 2, 3], accepted, "length")))
    assert [p.drafted for p in pieces if p.text] == [i < accepted for i in range(3)]


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self) -> None:
        self.all_special_ids: list[int] = []
        self.decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(tokenizer().decode(ids, **options))


def test_bytes_that_never_become_a_character_cost_no_more_with_every_token() -> None:
    lead, word = len(WORDS), WORDS.index("lo")
    counting, pieces = Counting(), list[str]()
    out = TextStream(counting)
    for token in [lead] * 2000 + [word]:
        pieces += [piece.text for piece in out.feed(StepResult(0, [token], 0, None))]
    assert counting.decoded < 100 * 2000
    assert len(pieces) > 20 and set("".join(pieces)) == {BROKEN, *"lo"} and pieces[-1].endswith("lo")


@pytest.mark.parametrize("broken", range(55, 75))
def test_a_character_behind_many_broken_bytes_is_whole(broken: int) -> None:
    """Byte-level tokens, as of most models: a first byte, and again."""
    from tests.serve.made import ids_of
    from tests.serve.made import tokenizer as by_bytes

    out = TextStream(by_bytes())
    tokens = [ids_of("\u20ac")[0]] * broken + ids_of("\u2014x")
    text = "".join(piece.text for token in tokens for piece in out.feed(StepResult(0, [token], 0, None)))
    assert text == BROKEN * broken + "\u2014x"
