"""What a request asks of the engine, apart from its prompt: the same for chats and completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from draftproof.engine.request import Request, SamplingParams
from draftproof.engine.text import TextStream
from draftproof.errors import UserError
from draftproof.serve.answer.choice import Choice
from draftproof.serve.asked.min_tokens import MinTokens
from draftproof.serve.asked.prompts import Prompt
from draftproof.serve.asked.schema import Sampled
from draftproof.serve.errors import ApiError, NotCompiledError, bad, from_user_error
from draftproof.serve.parsers import Parser
from draftproof.serve.served import Served

GRAMMAR_SECONDS = 10.0  # for compiling one
# A thread that only compiles (one: the compiler has threads of its own), so that a form that takes long, and may have
# been given up, keeps no prompt from being tokenised and no form that is known from being used.
COMPILER = ThreadPoolExecutor(1, thread_name_prefix="grammar")
MakeGrammar = Callable[..., Any]  # at_once: NotCompiledError where it has to be compiled first


@dataclass(frozen=True)
class Asked:
    """Requests to the engine and, at the same places, the choices that their results become. prompts: one or more, each
    with `n` choices in a row."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    choices: Sequence[Choice]


@dataclass(frozen=True)
class Manner:
    """How an answer is written and read. grammar: makes a processor, a new one for every choice. most_tokens: as the
    request says; usual_tokens: where neither it nor the server does (None: the rest of the context)."""

    parser: Callable[[], Parser]
    keep_special: bool = False
    parallel: bool = True
    hide_reasoning: bool = False
    grammar: MakeGrammar | None = None
    grammar_from: str = "response_format"  # the field that asks for it
    logprobs: int | None = None
    most_tokens: int | None = None
    usual_tokens: int | None = None


async def ask(served: Served, sent: Sampled, prompts: Sequence[Prompt], manner: Manner) -> Asked:
    sampling = sampling_of(served, sent)
    stop_ids = tuple(sorted({*(() if sent.ignore_eos else served.stop_ids), *sent.stop_token_ids}))
    require_sense(served, sent, manner)
    requests: list[Request] = []
    choices: list[Choice] = []
    form: Any = None
    for prompt in prompts:
        most = tokens_for(served, manner, len(prompt.ids))
        if sent.min_tokens > most:
            raise bad(f"min_tokens {sent.min_tokens} is more than the {most} tokens that may come", "min_tokens")
        for number in range(sent.n):
            if manner.grammar:
                form = form.another() if form else await form_of(manner.grammar, manner.grammar_from)
            processors = (form,) if form else minimum(sent, len(prompt.ids), stop_ids)
            one = replace(sampling, choice=number)
            requests.append(engine_request(sent, manner, prompt, most, one, stop_ids, processors))
            choices.append(choice_of(served, sent, manner, len(choices)))
    return Asked(prompts, requests, choices)


def sampling_of(served: Served, sent: Sampled) -> SamplingParams:
    """Seeded, so that the choices of one request share a seed. What was not asked for is the model's own default, and
    temperature 1 after that, as in OpenAI's API."""
    chosen: dict[str, Any] = {"temperature": 1.0, **served.defaults}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if (value := getattr(sent, name)) is not None:
            chosen[name] = value
    chosen["top_k"] = max(0, int(chosen.get("top_k", 0)))
    try:
        return SamplingParams(
            **chosen,
            seed=sent.seed,
            presence_penalty=sent.presence_penalty,
            frequency_penalty=sent.frequency_penalty,
            logit_bias=biases(served, sent.logit_bias),
        ).seeded()
    except UserError as error:
        raise from_user_error(error) from None


def biases(served: Served, sent: dict[str, float]) -> dict[int, float]:
    made = {}
    for name, bias in sent.items():
        token = int(name) if name.isascii() and name.isdigit() and len(name) < 12 else -1
        if token < 0 or str(token) != name or token >= served.vocab:
            raise bad(f"logit_bias: {name[:40]!r} is no token id below {served.vocab}", "logit_bias")
        made[token] = bias
    return made


def require_sense(served: Served, sent: Sampled, manner: Manner) -> None:
    if manner.grammar and (sent.ignore_eos or sent.min_tokens):
        name = "ignore_eos" if sent.ignore_eos else "min_tokens"
        raise bad(f"{name} contradicts an answer of a given form, which ends where it is complete", name)
    if sent.stop_token_ids and max(sent.stop_token_ids) >= served.vocab:
        raise bad(f"stop_token_ids: {max(sent.stop_token_ids)} is outside the vocabulary", "stop_token_ids")
    if sent.speculation and not served.depth and sent.speculation.budget not in ("none", 0):
        raise bad("speculation: this server has no drafter", "speculation")
    if sent.spec_decode_metrics and not served.depth:
        raise bad("spec_decode_metrics: this server has no drafter", "spec_decode_metrics")


def tokens_for(served: Served, manner: Manner, prompt: int) -> int:
    """New tokens at most; ApiError context_length_exceeded where prompt and what was asked for do not fit."""
    room, asked = served.limits.context - prompt, manner.most_tokens
    if asked is None:
        return min(room, served.limits.answer or manner.usual_tokens or room)
    if asked > room:
        raise served.too_long(f"{prompt} tokens, and {asked} new ones were asked for")
    return asked


def minimum(sent: Sampled, prompt: int, stop_ids: Sequence[int]) -> tuple[MinTokens, ...]:
    return (MinTokens(prompt, sent.min_tokens, stop_ids),) if sent.min_tokens and stop_ids else ()


async def form_of(make: MakeGrammar, param: str) -> Any:
    """ApiError 400 for a form that cannot be enforced, or not soon enough; 429 where others took all the time."""
    try:
        return await asyncio.to_thread(make, at_once=True)
    except NotCompiledError:
        return await compiled(make, param)
    except UserError as error:
        raise from_user_error(error, param) from None


async def compiled(make: Callable[[], Any], param: str) -> Any:
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def work() -> Any:
        loop.call_soon_threadsafe(begun.set)
        return make()

    told = COMPILER.submit(work)
    try:
        await asyncio.wait_for(begun.wait(), GRAMMAR_SECONDS)
        return await asyncio.wait_for(asyncio.wrap_future(told), GRAMMAR_SECONDS)
    except UserError as error:
        raise from_user_error(error, param) from None
    except TimeoutError:
        if begun.is_set():
            raise bad(f"{param} takes longer than {GRAMMAR_SECONDS:g} s to compile: make it simpler", param) from None
        message = "other requests' forms are being compiled: try again later"
        raise ApiError(429, message, param=param, code="busy", retry_after=GRAMMAR_SECONDS) from None
    finally:
        told.cancel()


def engine_request(
    sent: Sampled,
    manner: Manner,
    prompt: Prompt,
    most: int,
    sampling: SamplingParams,
    stop_ids: Sequence[int],
    processors: Sequence[Any],
) -> Request:
    try:
        return Request(
            prompt.ids,
            most,
            sampling,
            stop_ids,
            processors,
            budget=sent.speculation.budget if sent.speculation else None,
            logprobs=manner.logprobs,
            keep_trees=sent.draft_details,
        )
    except UserError as error:
        raise from_user_error(error) from None


def choice_of(served: Served, sent: Sampled, manner: Manner, index: int) -> Choice:
    keep = manner.keep_special or not sent.skip_special_tokens
    text = TextStream(served.tokenizer, sent.stops, keep_special=keep, min_tokens=sent.min_tokens)
    return Choice(
        index,
        text,
        manner.parser(),
        frozenset(sent.stop_token_ids),
        details=sent.draft_details,
        parallel=manner.parallel,
        hide_reasoning=manner.hide_reasoning,
    )
