"""Structured output: answers that are JSON of a schema, or tool calls, as logits processors.

Grammars (one a server)  schema -> rules (schemas/) -> xgrammar's compiled grammar, cached
GrammarProcessor (one a choice)  walks the grammar along the draft tree, and forbids what does not go on with it
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import xgrammar
from torch import Tensor

from draftproof.errors import DraftproofError
from draftproof.serve.errors import NotCompiledError
from draftproof.serve.schemas.calls import calls
from draftproof.serve.schemas.ebnf import refuse
from draftproof.serve.schemas.rules import Rules
from draftproof.serve.schemas.writer import Writer

CACHED = 64  # compiled grammars
BYTES = frozenset(range(0x20, 0x7F))  # what JSON is written in; characters that a tokenizer lacks are not begun
MARGIN = 512  # texts of one request differ in their last tokens only: no draft tree is deeper


class Grammars:
    """vocab_size: of the logits, at least the tokenizer's. stop_ids: tokens that end an answer.

    Every method gives a new processor; compiling may take seconds, and is safe in several threads. after: the token
    behind which the grammar begins (the end of reasoning), where the prompt does not hold it already; None: at once.
    at_once: NotCompiledError where it has to be compiled first.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise ValueError("without a stop token no grammar can end")
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(set(stop_ids))
        self._cache: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # of the cache
        self._compiling = threading.Lock()  # one at a time: each uses several threads

    def json_object(self, after: int | None = None, *, at_once: bool = False) -> GrammarProcessor:
        return self._processor("object", Rules(), after, at_once)

    def json_schema(
        self, schema: Mapping[str, Any], *, strict: bool = True, after: int | None = None, at_once: bool = False
    ) -> GrammarProcessor:
        """strict: objects that declare properties have no others, unless they say so. UserError bad-schema."""
        rules = Rules()
        return self._processor(Writer(schema, rules, strict=strict).write(schema), rules, after, at_once)

    def tool_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        parser: str,
        name: str | None,
        *,
        parallel: bool = True,
        after: int | None = None,
        at_once: bool = False,
    ) -> GrammarProcessor:
        """tools as in a chat request. One call of `name` or (None) of any of them, or with `parallel` one or more, in
        the form that `parser` reads, and nothing else. UserError bad-schema."""
        rules, root = calls(tools, parser, name, parallel=parallel)
        return self._processor(root, rules, after, at_once)

    def _processor(self, root: str, rules: Rules, after: int | None, at_once: bool) -> GrammarProcessor:
        grammar = rules.grammar(root if after is None else f'"\\n"{{0,2}} {root}')
        return GrammarProcessor(self._compiled(grammar, at_once), self._vocab_size, self._stop_ids, after)

    def _compiled(self, grammar: str, at_once: bool) -> xgrammar.CompiledGrammar:
        if (known := self._cached(grammar)) is not None:
            return known
        if at_once:
            raise NotCompiledError
        with self._compiling:
            if (known := self._cached(grammar)) is not None:  # another request compiled it meanwhile
                return known
            try:
                compiled = self._compiler.compile_grammar(grammar)
            except RuntimeError as error:
                raise refuse(
                    f"the schema cannot be compiled: {str(error)[-200:].strip()}", "make it simpler"
                ) from error
        with self._lock:
            self._cache[grammar] = compiled
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _cached(self, grammar: str) -> xgrammar.CompiledGrammar | None:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        info = vocabulary(self._tokenizer, self._vocab_size, self._stop_ids)
        threads = min(8, os.cpu_count() or 1)
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)


class GrammarProcessor:
    """Scores of tokens that do not go on with the grammar become -inf: `spec/processors.py`'s Processor.

    A function of the text, so it is asked at every node of a draft tree. The matcher stands at the text it was asked
    about last, and moves to the next one by going back to what both share. A text that leaves the grammar, a draft
    that the target can never choose, keeps its scores.
    """

    stateful = False

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocab_size: int, stop_ids: Sequence[int], after: int | None
    ) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._stops, self._after = list(stop_ids), after
        self._prompt: int | None = None  # tokens; known from the first call
        self._looked = 0  # the text in front has been looked through for `after`
        self._path: list[int] = []  # tokens the matcher has taken

    def another(self) -> GrammarProcessor:
        """A new one of the same grammar, for another choice."""
        return GrammarProcessor(self._compiled, self._vocab_size, self._stops, self._after)

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        if self._prompt is None:
            self._prompt = self._looked = len(ids)
        begin = self._begin(ids)
        if begin is not None and self._walk(list(ids[begin:])):
            self._forbid(scores)
        return scores

    def _begin(self, ids: Sequence[int]) -> int | None:
        """Where the grammar's text begins; None: not yet. What is settled is looked through once."""
        if self._after is None:
            return self._prompt
        try:
            found = ids.index(self._after, self._looked)
        except ValueError:
            found = len(ids)
        self._looked = max(self._looked, min(found, len(ids) - MARGIN))
        return found + 1 if found < len(ids) else None

    def _walk(self, text: list[int]) -> bool:
        """Move to a text; False where it leaves the grammar: the matcher then stands where it left."""
        shared = common(self._path, text)
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in text[shared:]:
            if not self._matcher.accept_token(token):
                return False
            self._path.append(token)
        return True

    def _forbid(self, scores: Tensor) -> None:
        if self._matcher.is_terminated():  # behind a stop token
            kept = scores[self._stops]
            scores.fill_(-torch.inf)
            scores[self._stops] = kept
            return
        self._matcher.fill_next_token_bitmask(self._mask)
        if not self._mask.any():
            raise DraftproofError("the grammar leads to a text that nothing can follow")
        mask = self._mask if scores.device.type == "cpu" else self._mask.to(scores.device)
        xgrammar.apply_token_bitmask_inplace(scores[None], mask, vocab_size=scores.shape[-1])


def common(one: list[int], other: list[int]) -> int:
    """Length of the longest common beginning; most texts share all but their last few tokens."""
    most = min(len(one), len(other))
    sure = max(0, most - 32)
    if one[:sure] != other[:sure]:
        sure = 0
    return next((at for at in range(sure, most) if one[at] != other[at]), most)


def vocabulary(tokenizer: Any, size: int, stop_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """The bytes of every token. Special tokens have none: the text of an answer leaves them out."""
    try:
        told = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=list(stop_ids))
    except ValueError as error:
        raise refuse(f"this model's tokenizer cannot be held to a grammar: {error}", "use another model") from error
    words = list(told.decoded_vocab)
    added = tokenizer.added_tokens_decoder.items()
    for token in {*tokenizer.all_special_ids, *(token for token, word in added if word.special)}:
        if token < size:
            words[token] = b""
    missing = BYTES - {word[0] for word in words if len(word) == 1}
    if missing:
        raise refuse(
            f"this model's tokenizer has no token for {len(missing)} of the characters of JSON", "use another model"
        )
    return xgrammar.TokenizerInfo(
        words, vocab_size=size, stop_token_ids=list(stop_ids), add_prefix_space=told.add_prefix_space
    )
