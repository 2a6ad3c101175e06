"""Log-probabilities in OpenAI's two shapes, and what single tokens are as text and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from typing_extensions import TypedDict

from draftproof.engine.request import TokenLogprob
from draftproof.engine.text import BROKEN

REMEMBERED = 1 << 16  # tokens
LEAST = -9999.0  # for probability 0, which JSON has no number for; as in vLLM
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Likely(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenInfo(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(TypedDict):
    content: list[TokenInfo]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Tokens:
    """Single tokens of a tokenizer; what was asked before is remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text, self.bytes = lru_cache(REMEMBERED)(self._text), lru_cache(REMEMBERED)(self._bytes)

    def name(self, token: int) -> str:
        """Its text; of part of a character its bytes, as in OpenAI's completions: parts of several would be one."""
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token)) if BROKEN in text else text

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _bytes(self, token: int) -> Sequence[int]:
        """The token's own bytes, also where they are only part of a character."""
        text = self.text(token)
        if BROKEN in text:
            raw = str(self.tokenizer.convert_ids_to_tokens(token))
            if found := BYTE.fullmatch(raw):
                return [int(found[1], 16)]
            if all(character in byte_of() for character in raw):
                return [byte_of()[character] for character in raw]
        return list(text.encode())


def chat_logprobs(tokens: Tokens, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    def likely(token: int, logprob: float) -> Likely:
        return {"token": tokens.text(token), "logprob": _finite(logprob), "bytes": list(tokens.bytes(token))}

    content: list[TokenInfo] = [
        {**likely(token, told.logprob), "top_logprobs": [likely(*pair) for pair in told.top]}
        for token, told in zip(ids, logprobs, strict=True)
    ]
    return {"content": content}


def completion_logprobs(
    tokens: Tokens, ids: Sequence[int], logprobs: Sequence[TokenLogprob], offset: int
) -> CompletionLogprobs:
    """offset: characters of the tokens before. The chosen token is always among `top_logprobs`, as in OpenAI's API."""
    told: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, logprob in zip(ids, logprobs, strict=True):
        name = tokens.name(token)
        told["tokens"].append(name)
        told["token_logprobs"].append(_finite(logprob.logprob))
        told["text_offset"].append(offset)
        likeliest: dict[str, float] = {}
        for other, value in logprob.top:
            likeliest.setdefault(tokens.name(other), _finite(value))
        told["top_logprobs"].append(likeliest | {name: _finite(logprob.logprob)})
        offset += len(tokens.text(token))
    return told


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


@cache
def byte_of() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2's): printable bytes are themselves, the
    others follow in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
