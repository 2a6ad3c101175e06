"""Stop strings of any length at linear cost, special tokens as text, and the stop token that is none."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.engine.request import StepResult
from draftproof.engine.text import TextStream
from tests.serve.made import STOP, ids_of, tokenizer

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, database=None)
few = st.text("ab", min_size=1, max_size=6)


def text_of(stream: TextStream, text: str, size: int = 1, finish: str = "length") -> str:
    ids, out = ids_of(text), ""
    for at in range(0, len(ids), size):
        last = finish if at + size >= len(ids) else None
        out += "".join(p.text for p in stream.feed(StepResult(0, ids[at : at + size], 0, last)))
        if stream.stopped:
            break
    return out


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        whole = [s for s in stops if text[:end].endswith(s)]
        if whole:
            longest = max(whole, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("ab", min_size=1, max_size=30), st.lists(few, min_size=1, max_size=4), st.integers(1, 5))
@SETTINGS
def test_the_stop_string_that_is_complete_first_ends_the_text(text: str, stops: list[str], size: int) -> None:
    stream = TextStream(tokenizer(), stops)
    out = text_of(stream, text, size)
    assert (out, stream.stopped) == cut(text, stops)
    assert stream.used == (len(out) + len(stream.stopped) if stream.stopped else len(text))


@given(st.text("ab", min_size=1, max_size=30), few)
@SETTINGS
def test_nothing_is_held_that_cannot_be_part_of_a_stop_string(text: str, stop: str) -> None:
    stream, out = TextStream(tokenizer(), [stop]), ""
    for token in ids_of(text):
        out += "".join(p.text for p in stream.feed(StepResult(0, [token], 0, None)))
        if stream.stopped:
            return
        seen = text[: stream.used]
        held = max(n for n in range(len(stop)) if n == 0 or seen.endswith(stop[:n]))
        assert out == seen[: len(seen) - held]


def test_a_long_stop_string_costs_linear_time() -> None:
    """The worst case of a search that starts anew at every token: all of the text nearly matches."""

    def seconds(length: int) -> float:
        stream = TextStream(tokenizer(), ["a" * length + "b"] * 16)
        begun = time.perf_counter()
        out = text_of(stream, "a" * 2 * length, 50)
        assert out == "a" * 2 * length
        return time.perf_counter() - begun

    seconds(100)
    assert seconds(8000) < 12 * 8 * max(seconds(1000), 0.01)  # quadratic would be 64 times


def test_special_tokens_are_text_where_a_parser_looks_for_them() -> None:
    text = "a<|im_start|>b"
    assert text_of(TextStream(tokenizer()), text) == "ab"
    assert text_of(TextStream(tokenizer(), keep_special=True), text) == text


def test_the_stop_token_is_never_text() -> None:
    step = StepResult(0, [*ids_of("ab"), STOP], 0, "stop")
    assert "".join(p.text for p in TextStream(tokenizer(), keep_special=True).feed(step)) == "ab"
    step = StepResult(0, ids_of("ab"), 0, "stop")  # b is a stop token of the request's own
    assert "".join(p.text for p in TextStream(tokenizer()).feed(step)) == "a"


def test_stop_strings_wait_for_min_tokens() -> None:
    assert text_of(TextStream(tokenizer(), ["b"], min_tokens=3), "abcbd") == "abc"
