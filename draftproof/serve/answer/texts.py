"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from draftproof.serve.answer.shapes import Detokenized, Tokenized
from draftproof.serve.asked.chat import plain
from draftproof.serve.asked.prompts import from_chat, from_ids, from_text
from draftproof.serve.asked.schema import DetokenizeRequest, TokenizeRequest
from draftproof.serve.served import Served


async def tokenize(served: Served, sent: TokenizeRequest) -> Tokenized:
    served.require_model(sent.model)
    if sent.messages is not None:
        tools = [plain(tool) for tool in sent.tools]
        prompt = await from_chat(
            served, sent.messages, tools, sent.chat_template_kwargs,
            generation=sent.add_generation_prompt, special=bool(sent.add_special_tokens),
        )  # fmt: skip
    else:
        special = True if sent.add_special_tokens is None else sent.add_special_tokens
        prompt = await from_text(served, sent.prompt or "", special=special)
    strings = served.tokenizer.convert_ids_to_tokens(prompt.ids) if sent.return_token_strs else None
    return {
        "count": len(prompt.ids),
        "max_model_len": served.limits.context,
        "tokens": prompt.ids,
        "token_strs": strings,
    }


async def detokenize(served: Served, sent: DetokenizeRequest) -> Detokenized:
    served.require_model(sent.model)
    prompt = from_ids(served, sent.tokens, "tokens")
    decode = served.tokenizer.decode
    return {"prompt": str(await asyncio.to_thread(decode, prompt.ids, clean_up_tokenization_spaces=False))}
