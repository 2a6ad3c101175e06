"""A completion request -> what the engine is asked: one or more texts to go on with, as they stand."""

from __future__ import annotations

from functools import partial

from draftproof.serve import parsers
from draftproof.serve.asked.ask import Asked, Manner, ask
from draftproof.serve.asked.chat import new_call_id
from draftproof.serve.asked.prompts import from_ids, from_text, require_prompt
from draftproof.serve.asked.schema import CompletionRequest
from draftproof.serve.errors import bad
from draftproof.serve.served import Served

USUAL_TOKENS = 16  # of a completion whose max_tokens nobody names: OpenAI's number, and vLLM's


async def prepare(served: Served, sent: CompletionRequest) -> Asked:
    """ApiError for what cannot be done."""
    served.require_model(sent.model)
    if not sent.add_special_tokens and any(not isinstance(prompt, str) for prompt in sent.prompts):
        raise bad("add_special_tokens means nothing for token ids", "add_special_tokens")
    prompts = []
    for given in sent.prompts:
        prompts.append(
            await from_text(served, given, special=sent.add_special_tokens)
            if isinstance(given, str)
            else from_ids(served, given)
        )
        require_prompt(served, prompts[-1])
    parser = partial(parsers.make, None, None, thinking=False, schemas=None, new_id=new_call_id)
    manner = Manner(parser, logprobs=sent.logprobs, most_tokens=sent.max_tokens, usual_tokens=USUAL_TOKENS)
    return await ask(served, sent, prompts, manner)
