"""What the server tells of itself: /v1/models, /health, /version, /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from draftproof.serve.answer.shapes import ModelCard, ModelList, Version
from draftproof.serve.errors import responses
from draftproof.serve.served import DEFAULT_NAME, Served


def version() -> str:
    try:
        return installed("draftproof")
    except PackageNotFoundError:
        return "unknown"


def open_routes(served: Served) -> APIRouter:
    """What anybody may ask, as in vLLM."""
    router = APIRouter()

    @router.get("/health", responses=responses(503), response_class=Response)
    async def health() -> Response:
        """200 while requests are taken; 503 when the engine has ended or the server is stopping."""
        served.check()
        return Response()

    @router.get("/version")
    async def release() -> Version:
        return {"version": version()}

    return router


def guarded_routes(served: Served) -> APIRouter:
    router = APIRouter(responses=responses(401))

    @router.get("/v1/models")
    async def models() -> ModelList:
        return {"object": "list", "data": [card(served, name) for name in served.names]}

    @router.get("/v1/models/{name:path}", responses=responses(404))
    async def model(name: str) -> ModelCard:
        served.require_model(name)
        return card(served, served.names[0] if name == DEFAULT_NAME else name)

    @router.get("/server_info")
    async def info() -> dict[str, Any]:
        """The pair that runs here and the limits of a request."""
        return dict(server_info(served))

    return router


def card(served: Served, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "draftproof",
        "root": served.root,
        "max_model_len": served.limits.context,
    }


def server_info(served: Served) -> Mapping[str, Any]:
    limits = served.limits
    return {
        "engine": "draftproof",
        "version": version(),
        "model": served.names[0],
        "target": served.root,
        "max_model_len": limits.context,
        "default_max_tokens": limits.answer,
        "request_timeout": limits.seconds,
        "max_body_bytes": limits.body,
        "max_num_seqs": served.worker.engine.slots,
        "max_queue": served.worker.queue,
        "reasoning_parser": served.parsers.reasoning,
        "tool_call_parser": served.parsers.tools,
        "enable_auto_tool_choice": served.parsers.auto_tools,
        "sampling_defaults": dict(served.defaults),
        **served.about,
    }
