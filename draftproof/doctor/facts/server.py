"""Which engine answers at a URL? Asked with the endpoints that each engine is known for; nothing is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftproof.doctor.facts import EngineName
from draftproof.doctor.facts.http import ask, base_url, json_of, refuse_auth, said
from draftproof.errors import UserError

OWNERS: dict[str, EngineName] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "draftproof": "draftproof",
}
# asked when the engine may be this one, in this order; the first that answers gives the release
DETAILS: dict[EngineName, tuple[str, ...]] = {
    "vllm": ("/version", "/server_info?config_format=json"),
    "sglang": ("/server_info", "/get_server_info"),
    "llama.cpp": ("/props",),
    "draftproof": ("/version", "/server_info"),
}
SECRET = re.compile(r"api_?key|password|secret|launch_command", re.IGNORECASE)


@dataclass(frozen=True)
class Server:
    """`url` without `/v1`. `engine` is None for a server of the OpenAI protocol that is none of ours. `info` maps an
    endpoint to its JSON, for those that answered; `health` is the HTTP status of /health, None where there is none."""

    url: str
    engine: EngineName | None
    release: str | None
    models: tuple[str, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    health: int | None = None

    @property
    def cards(self) -> tuple[Mapping[str, Any], ...]:
        """The models as /v1/models lists them; vLLM's hold `root`, the checkpoint, and `max_model_len`."""
        return tuple(self.info["/v1/models"]["data"])

    @property
    def details(self) -> Mapping[str, Any] | None:
        """What the engine itself tells of its configuration: /server_info, or llama.cpp's /props."""
        names = ("/server_info", "/get_server_info", "/props")
        return next((self.info[name] for name in names if name in self.info), None)


def identify(url: str, api_key: str | None = None) -> Server:
    """UserError server-unreachable, not-an-llm-server, auth-needed, server-unfit."""
    url = base_url(url)
    health = ask(url, "/health", api_key).status_code
    listed = _models(url, api_key)
    models = tuple(str(card["id"]) for card in listed["data"])
    info: dict[str, Any] = {"/v1/models": listed}
    engine = next((OWNERS[card["owned_by"]] for card in listed["data"] if card.get("owned_by") in OWNERS), None)
    for guess in (engine,) if engine else ("vllm", "sglang", "llama.cpp"):
        found = _details(url, guess, api_key)
        info |= found
        if engine is None and _release(guess, found) and (guess != "vllm" or _is_vllm(listed["data"])):
            engine = guess
    release = _release(engine, info) if engine else None
    return Server(url, engine, release, models, info, None if health == 404 else health)


def _models(url: str, api_key: str | None) -> dict[str, Any]:
    response = ask(url, "/v1/models", api_key)
    refuse_auth(url, "/v1/models", response, api_key)
    if response.status_code >= 500:
        message = f"{url}/v1/models answers {response.status_code}: {said(response)}"
        raise UserError("server-unfit", message, "wait until it has loaded its model, or look at its log")
    listed = json_of(response)
    if response.status_code != 200 or not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
        raise UserError("not-an-llm-server", f"{url} {_instead(response)}", "give the address of the LLM server itself")
    cards = listed["data"]
    if not cards or not all(isinstance(card, dict) and "id" in card for card in cards):
        raise UserError("server-unfit", f"{url}/v1/models lists no model", "start the server with a model")
    return listed


def _instead(response: httpx.Response) -> str:
    if response.is_redirect:
        return f"answers /v1/models with a redirect to {response.headers.get('location', 'nowhere')}"
    if response.status_code != 200:
        return f"answers, but has no /v1/models (HTTP {response.status_code})"
    return "answers /v1/models, but not with a list of models"


def _details(url: str, engine: EngineName, api_key: str | None) -> dict[str, Any]:
    """The engine's own endpoints that answer with a JSON object; of two names for one, the first."""
    found: dict[str, Any] = {}
    for path in DETAILS[engine]:
        try:
            response = ask(url, path, api_key)
        except UserError:
            continue
        body = json_of(response)
        if response.status_code == 200 and isinstance(body, dict):
            found[path.partition("?")[0]] = _without_secrets(body)
            if engine == "sglang":
                break
    return found


def _without_secrets(body: dict[str, Any]) -> dict[str, Any]:
    """SGLang's /server_info shows its API keys and its command line; a report must not."""
    return {
        key: _without_secrets(value) if isinstance(value, dict) else value
        for key, value in body.items()
        if not SECRET.search(key)
    }


def _is_vllm(cards: list[dict[str, Any]]) -> bool:
    """A /version alone says little; vLLM's cards tell the checkpoint and its length."""
    return all({"root", "max_model_len"} <= card.keys() for card in cards)


def _release(engine: EngineName, info: Mapping[str, Any]) -> str | None:
    if engine == "sglang":
        body = info.get("/server_info") or info.get("/get_server_info") or {}
        return _text(body.get("version"))
    if engine == "llama.cpp":  # b9235-abcdef
        found = re.match(r"b?(\d+)-", _text(info.get("/props", {}).get("build_info")) or "")
        return llamacpp_build(found[1]) if found else None
    return _text(info.get("/version", {}).get("version"))


def llamacpp_build(number: str) -> str | None:
    """Builds count the commits. One from an archive or a shallow clone has the number 0 or 1, which says nothing."""
    return number if int(number) > 1 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
