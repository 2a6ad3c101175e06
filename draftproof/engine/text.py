"""Between text and tokens: chat templates in, pieces of text out, stop strings in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.engine.request import StepResult
from draftproof.errors import UserError

# Tokens that may wait for the rest of a character, far more than one can have; then all but the last few are text, in
# which another one may have begun.
MOST_WAITING, LAST_WAITING = 64, 3
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
    of either is held back. After `stopped` is set the caller stops the request. keep_special: special tokens are text,
    for parsers that look for them. min_tokens: so many tokens are not looked through for stop strings. The stop token
    that ended the request is never text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, keep_special: bool = False, min_tokens: int = 0
    ) -> None:
        self.tokenizer, self.min_tokens = tokenizer, min_tokens
        self.stopped: str | None = None  # the stop string that ended the text
        self.used = 0  # tokens read, those behind a stop string not among them
        self._stops = [Stop(s) for s in stops if s]
        self._ids: list[int] = []  # tokens whose text is not out yet, behind the last few that are, for context
        self._before = ""  # the text of that context alone
        self._held: deque[Piece] = deque()  # decoded, but maybe the beginning of a stop string
        self._length = 0  # characters held
        self._special = set() if keep_special else set(tokenizer.all_special_ids)

    def feed(self, result: StepResult) -> Iterator[Piece]:
        for number, token in enumerate(result.tokens):
            if self.stopped:
                return
            self.used += 1
            ended = result.finish == "stop" and number == len(result.tokens) - 1
            if ended or token in self._special:
                continue
            self._ids.append(token)
            text = self._decode(self._ids)
            waiting = 0
            if text.endswith(BROKEN):
                if len(self._ids) < MOST_WAITING:
                    continue
                waiting, text = LAST_WAITING, self._decode(self._ids[:-LAST_WAITING])
            yield from self._take(text, waiting, number < result.accepted)
        if result.finish and not self.stopped:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        """The text held back, when the request ends without a stop string; half a character stays a broken one."""
        text = self._decode(self._ids) if self._ids else self._before
        if len(text) > len(self._before):
            self._held.append(Piece(text[len(self._before) :], False))
        yield from self._held
        self._held.clear()
        self._ids, self._before, self._length = [], "", 0

    def _take(self, text: str, waiting: int, drafted: bool) -> Iterator[Piece]:
        """Hold what the text of all tokens but the last `waiting` adds to its context. The last of it is the next
        context, for decoders strip a space from the first token they are given."""
        piece = Piece(text[len(self._before) :], drafted)
        self._ids = self._ids[-1 - waiting :]
        self._before = self._decode(self._ids[:1])
        self._held.append(piece)
        self._length += len(piece.text)
        if self._stops and self.used > self.min_tokens:
            yield from self._release(self._watch(piece.text))
        else:
            yield from self._release(self._length)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _watch(self, text: str) -> int:
        """Characters held that are surely text. The stop string that is complete first ends it, the longest of them."""
        for at, character in enumerate(text, 1):
            whole = [stop.text for stop in self._stops if stop.feed(character)]
            if whole:
                self.stopped = max(whole, key=len)
                return self._length - len(text) + at - len(self.stopped)
        return self._length - max(stop.matched for stop in self._stops)

    def _release(self, keep: int) -> Iterator[Piece]:
        while self._held and keep >= len(self._held[0].text):
            keep -= len(self._held[0].text)
            self._length -= len(self._held[0].text)
            yield self._held.popleft()
        if self.stopped:
            if keep:
                yield Piece(self._held[0].text[:keep], self._held[0].drafted)
            self._held.clear()
            self._length = 0


class Stop:
    """How much of a stop string the text ends with, one character at a time (Knuth, Morris and Pratt): the cost is
    linear in the text, however long the stop string and however it repeats."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0]  # the next shorter beginning that the first n + 1 characters end with
        for character in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def feed(self, character: str) -> bool:
        """Whether the text now ends with the whole stop string."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)
