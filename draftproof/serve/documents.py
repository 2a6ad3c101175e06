"""The OpenAPI document. Routes read their bodies themselves, so what they take is described here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from draftproof.serve.answer.shapes import ChatChunk
from draftproof.serve.asked.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
PLACE = "#/components/schemas/{model}"


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with this body."""
    schema = {"$ref": PLACE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streams(chunk: str) -> dict[str, Any]:
    """The 200 of a route that may answer with events. chunk: the name of what they hold; [DONE] ends them, and an error
    may come before it."""
    kinds = [{"$ref": PLACE.format(model=name)} for name in (chunk, "ErrorAnswer")]
    held = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, held]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        "description": f"one JSON object; with `stream`, events of {chunk}, then [DONE]",
        "content": {"text/event-stream": {"schema": event}},
    }


def describe(app: FastAPI) -> None:
    """Make `app.openapi` know the bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=PLACE)
            chunk = TypeAdapter(ChatChunk).json_schema(ref_template=PLACE, mode="serialization")
            made["components"]["schemas"] |= bodies["$defs"] | chunk.pop("$defs") | {"ChatChunk": chunk}
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{}, {"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
