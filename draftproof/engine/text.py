"""Between text and tokens: chat templates in, pieces of text out, stop strings in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.engine.request import StepResult
from draftproof.errors import UserError

BROKEN = "\ufffd"  # what a tokenizer gives for the first half of a character


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat by the tokenizer's own template, with the header of the answer."""
    if not any(m["content"].strip() for m in messages):
        raise UserError("prompt-empty", "the prompt is empty", "give at least one word")
    if not getattr(tokenizer, "chat_template", None):
        return encode_raw(tokenizer, "\n".join(m["content"] for m in messages))
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_raw(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it stands, for base models and completions."""
    if not text.strip():
        raise UserError("prompt-empty", "the prompt is empty", "give at least one word")
    return list(tokenizer(text)["input_ids"])


@dataclass(frozen=True)
class Piece:
    """Text of one or more tokens; `drafted` when the last of them was an accepted draft."""

    text: str
    drafted: bool


class TextStream:
    """Turns step results of one request into pieces of text; ends the text at a stop string.

    A token may end inside a character, and a stop string may span tokens and steps: text that could still become part
    of either is held back. After `stopped` is set the caller stops the request.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops, self.stopped = tokenizer, [s for s in stops if s], False
        self._ids: list[int] = []  # tokens whose text is not out yet, behind the last few that are, for context
        self._before = ""  # the text of that context alone
        self._held: list[Piece] = []  # decoded, but maybe the beginning of a stop string
        self._special = set(tokenizer.all_special_ids)

    def feed(self, result: StepResult) -> Iterator[Piece]:
        for number, token in enumerate(result.tokens):
            if self.stopped:
                return
            if token in self._special:
                continue
            self._ids.append(token)
            text = self._decode(self._ids)
            if text.endswith(BROKEN):
                continue
            yield from self._take(text, token, number < result.accepted)
        if result.finish and not self.stopped:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        """The text held back, when the request ends without a stop string; half a character stays a broken one."""
        text = self._decode(self._ids) if self._ids else self._before
        if len(text) > len(self._before):
            self._held.append(Piece(text[len(self._before) :], False))
        yield from self._held
        self._held, self._ids, self._before = [], [], ""

    def _take(self, text: str, token: int, drafted: bool) -> Iterator[Piece]:
        """Hold what the token adds to its context: decoders strip a space from the first token they are given."""
        self._held.append(Piece(text[len(self._before) :], drafted))
        self._ids = [token]
        self._before = self._decode(self._ids)
        yield from self._release()

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _release(self) -> Iterator[Piece]:
        text = "".join(p.text for p in self._held)
        ends = [at for at in (text.find(s) for s in self.stops) if at >= 0]
        if ends:
            self.stopped = True
            keep = min(ends)
        else:
            keep = len(text) - max((_overlap(text, s) for s in self.stops), default=0)
        while self._held and keep >= len(self._held[0].text):
            keep -= len(self._held[0].text)
            yield self._held.pop(0)
        if self.stopped:
            if keep:
                yield Piece(self._held[0].text[:keep], self._held[0].drafted)
            self._held = []


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
