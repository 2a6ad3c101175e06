"""What a server answers to fixed prompts, greedy and one at a time, with the acceptance that the engine itself tells.

vLLM       OpenAI endpoints with return_token_ids; acceptance with --per-request-spec-decode-metrics (0.29 or newer),
           cached tokens with --enable-prompt-tokens-details
SGLang     chat with return_meta_info; token-id prompts through /generate
llama.cpp  its own /apply-template, /tokenize and /completion, streamed: the timings beside every token tell the steps
draftproof as vLLM, but the request itself asks for the steps (`own.py`)
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import httpx

from draftproof.doctor.facts import Answer, EngineName
from draftproof.doctor.facts.http import ask, base_url, json_of, refuse_auth, said
from draftproof.doctor.facts.llamacpp import read_events, read_llamacpp, read_stream, streamed_whole
from draftproof.errors import UserError

Say = Callable[[str], None]
TIMEOUT = 600.0
# Greedy, and nothing of the model's generation_config.json left in it: the oracle knows no penalties.
GREEDY = {"temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Asked:
    """Whom to ask, how long an answer may be, and fields of the request that only this server knows."""

    url: str
    model: str
    max_tokens: int
    api_key: str | None
    engine: EngineName | None
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_prompts() -> tuple[str, ...]:
    """The fixed prompts of doctor/probe_prompts.toml."""
    text = (files("draftproof.doctor") / "probe_prompts.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["prompts"])


def probe(
    url: str,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    api_key: str | None = None,
    say: Say | None = None,
    *,
    engine: EngineName | None = None,
    fields: Mapping[str, Any] | None = None,
) -> tuple[Answer, ...]:
    """Each prompt as one user message; as plain text where the model has no chat template. Token ids are () where the
    server does not tell them. UserError server-unreachable, auth-needed, server-unfit."""
    asked = Asked(base_url(url), model, max_tokens, api_key, engine, fields or {})
    return _each(_chat, asked, prompts, say)


def probe_ids(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    api_key: str | None = None,
    say: Say | None = None,
    *,
    engine: EngineName | None = None,
    fields: Mapping[str, Any] | None = None,
) -> tuple[Answer, ...]:
    """The same with prompts as token ids, so that no template or tokenizer stands between."""
    asked = Asked(base_url(url), model, max_tokens, api_key, engine, fields or {})
    return _each(_from_ids, asked, prompts, say)


def _each(
    send: Callable[[Asked, Any], Answer], asked: Asked, prompts: Sequence[Any], say: Say | None
) -> tuple[Answer, ...]:
    answers = []
    for number, prompt in enumerate(prompts, 1):
        last = send(asked, prompt)
        answers.append(last)
        if say is not None:
            known = last.accepted is not None and last.steps
            tau = f", {1 + (last.accepted or 0) / (last.steps or 1):.2f} tokens a step" if known else ""
            say(f"prompt {number} of {len(prompts)}: {len(last.output_ids)} tokens in {last.seconds:.1f} s{tau}")
    return tuple(answers)


def _chat(asked: Asked, prompt: str) -> Answer:
    messages = [{"role": "user", "content": prompt}]
    if asked.engine == "llama.cpp":
        text = _post(asked, "/apply-template", {"messages": messages})[0]["prompt"]
        tokens = _post(asked, "/tokenize", {"content": text, "add_special": True, "parse_special": True})[0]["tokens"]
        return _from_ids(asked, tokens)
    body: dict[str, Any] = {"messages": messages, **_openai(asked)}
    if asked.engine == "sglang":
        body |= {"return_prompt_token_ids": True, "return_meta_info": True}
    try:
        return read_openai(*_post(asked, "/v1/chat/completions", body))
    except UserError as error:
        if error.code != "server-unfit" or "chat template" not in error.message:
            raise
    return read_openai(*_post(asked, "/v1/completions", {"prompt": prompt, **_openai(asked)}))


def _from_ids(asked: Asked, ids: Sequence[int]) -> Answer:
    if asked.engine == "sglang":
        sampling = {**GREEDY, "max_new_tokens": asked.max_tokens}
        return read_generate(*_post(asked, "/generate", {"input_ids": list(ids), "sampling_params": sampling}), ids)
    if asked.engine == "llama.cpp":
        return _llamacpp(asked, ids)
    return read_openai(*_post(asked, "/v1/completions", {"prompt": list(ids), **_openai(asked)}), ids)


def _llamacpp(asked: Asked, ids: Sequence[int]) -> Answer:
    """Streamed, for the steps. A token that ends inside a character is not streamed: then the ids are asked for again,
    as one answer, and the steps stay unknown. Samplers that a greedy choice could still see are named off."""
    body = {**GREEDY, "prompt": list(ids), "n_predict": asked.max_tokens, "return_tokens": True, "cache_prompt": True}
    body |= {"repeat_penalty": 1.0, "dry_multiplier": 0.0}
    begun = time.monotonic()
    response = _send(asked, "/completion", body | {"stream": True, "timings_per_token": True})
    events = read_events(response.content)
    if response.status_code != 200 or not events or "error" in events[-1] or not events[-1].get("stop"):
        raise _unfit(asked, "/completion", response)
    streamed = read_stream(events, time.monotonic() - begun, ids)
    if streamed_whole(events):
        return streamed
    whole = read_llamacpp(*_post(asked, "/completion", body), ids)
    return replace(streamed, output_ids=whole.output_ids, text=whole.text)


def _openai(asked: Asked) -> dict[str, Any]:
    """vLLM and SGLang take the fields they share; an unknown server gets what OpenAI's own protocol knows."""
    body: dict[str, Any] = {"model": asked.model, "max_tokens": asked.max_tokens, **GREEDY}
    if asked.engine in ("vllm", "sglang", "draftproof"):
        body["return_token_ids"] = True
        body["repetition_penalty"] = 1.0
    return body | dict(asked.fields)


def _post(asked: Asked, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The JSON object and the seconds it took."""
    begun = time.monotonic()
    response = _send(asked, path, body)
    answer = json_of(response)
    if response.status_code != 200 or not isinstance(answer, dict):
        raise _unfit(asked, path, response)
    return answer, time.monotonic() - begun


def _send(asked: Asked, path: str, body: Mapping[str, Any]) -> httpx.Response:
    response = ask(asked.url, path, asked.api_key, body, TIMEOUT)
    refuse_auth(asked.url, path, response, asked.api_key)
    return response


def _unfit(asked: Asked, path: str, response: httpx.Response) -> UserError:
    message = f"{asked.url}{path} answers {response.status_code}: {said(response)}"
    return UserError("server-unfit", message, "mend what it says, or probe with a shorter answer")


# ---- what each engine's answer tells


def read_openai(body: Mapping[str, Any], seconds: float, sent: Sequence[int] = ()) -> Answer:
    """vLLM's and SGLang's completion and chat answers. SGLang names ids of a chat answer response_token_ids."""
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    text = choice["message"].get("content") if "message" in choice else choice["text"]
    prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or sent
    output = choice.get("token_ids") or choice.get("response_token_ids") or ()
    told = (body.get("metrics") or {}).get("speculative_decoding") or {}
    numbers = _meta_info(choice.get("meta_info") or {}) or {
        "steps": told.get("num_spec_steps"),
        "accepted": told.get("num_accepted_draft_tokens"),
        "drafted": told.get("num_draft_tokens"),
        "per_step": _tuple(told.get("per_step_accepted")),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }
    return Answer(tuple(prompt), tuple(output), text or "", choice.get("finish_reason"), seconds, **numbers)


def read_generate(body: Mapping[str, Any], seconds: float, sent: Sequence[int]) -> Answer:
    """SGLang's /generate."""
    meta = body.get("meta_info") or {}
    finish = (meta.get("finish_reason") or {}).get("type")
    output = tuple(body.get("output_ids") or ())
    return Answer(tuple(sent), output, body.get("text") or "", finish, seconds, **_meta_info(meta))


def _meta_info(meta: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's numbers of one request; its accept length counts the prefill's token too, so it is not used."""
    if not meta:
        return {}
    return {
        "steps": meta.get("spec_verify_ct"),
        "accepted": meta.get("spec_num_correct_drafts"),
        "drafted": meta.get("spec_num_proposed_drafts"),
        "cached_tokens": meta.get("cached_tokens"),
    }


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
