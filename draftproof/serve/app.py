"""The HTTP server. Each route: who asks, what is asked, the answer; the work is in the files it calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from draftproof.serve.about import guarded_routes, open_routes, version
from draftproof.serve.answer import texts
from draftproof.serve.answer.objects import Answer, ChatAnswer, TextAnswer
from draftproof.serve.answer.shapes import ChatCompletion, Detokenized, TextCompletion, Tokenized
from draftproof.serve.answer.stream import EventStream
from draftproof.serve.asked import chat, completions
from draftproof.serve.asked.ask import Asked
from draftproof.serve.asked.body import read
from draftproof.serve.asked.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest
from draftproof.serve.auth import authorised
from draftproof.serve.documents import describe, streams, takes
from draftproof.serve.errors import ApiError, responses
from draftproof.serve.page_files import page_routes
from draftproof.serve.parsers.base import dumps
from draftproof.serve.running import ClientGoneError, Run, while_connected
from draftproof.serve.served import Served

log = logging.getLogger("draftproof")
MANY_LOGPROBS = 2000  # from which an answer is put together in a thread
ANY_FAILURE = responses(400, 404, 413, 415, 429, 500, 503, 504)
Sent = TypeVar("Sent", bound=Sampled)


def create_app(served: Served) -> FastAPI:
    """Starts the worker with the app, and drains it when the app ends."""
    app = FastAPI(title="draftproof", version=version(), lifespan=lifespan_of(served), docs_url=None, redoc_url=None)
    guarded = [Depends(authorised(served.api_keys))]
    app.include_router(generating_routes(served), dependencies=guarded)
    app.include_router(guarded_routes(served), dependencies=guarded)
    app.include_router(open_routes(served))
    app.include_router(page_routes())
    if served.metrics is not None:
        app.include_router(served.metrics.router)
    if served.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(served.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    answer_errors(app)
    describe(app)
    return app


def lifespan_of(served: Served) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.worker.start()
        tasks = [asyncio.create_task(work()) for work in served.tasks]
        yield
        for task in tasks:
            task.cancel()
        if not served.worker.draining:
            await served.worker.drain(served.limits.drain)

    return lifespan


def generating_routes(served: Served) -> APIRouter:
    router = APIRouter(responses=responses(401))

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={**ANY_FAILURE, 200: streams("ChatChunk")},
        openapi_extra=takes(ChatRequest),
    )
    async def chats(request: Request) -> Response:
        sent = await read(request, ChatRequest, served.limits.body)
        return await generate(served, request, sent, chat.prepare, ChatAnswer)

    @router.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses={**ANY_FAILURE, 200: streams("TextCompletion")},
        openapi_extra=takes(CompletionRequest),
    )
    async def completion(request: Request) -> Response:
        sent = await read(request, CompletionRequest, served.limits.body)
        return await generate(served, request, sent, completions.prepare, TextAnswer)

    @router.post("/tokenize", responses=responses(400, 404, 413, 415), openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Tokenized:
        return await texts.tokenize(served, await read(request, TokenizeRequest, served.limits.body))

    @router.post("/detokenize", responses=responses(400, 404, 413, 415), openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Detokenized:
        return await texts.detokenize(served, await read(request, DetokenizeRequest, served.limits.body))

    return router


async def generate(
    served: Served,
    request: Request,
    sent: Sent,
    prepare: Callable[[Served, Sent], Awaitable[Asked]],
    kind: type[Answer],
) -> Response:
    """The way of a request: checked, tokenised, submitted, and answered whole or as events."""
    served.check()
    seconds = served.limits.seconds
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def begin() -> tuple[Run, Answer]:
        asked = await prepare(served, sent)
        return Run(served, asked, deadline), kind(served, sent, asked)

    async def finish() -> Response:
        run, answer = await begin()
        parts = [part async for part in run.parts()]
        told = sum(1 + len(token.top) for part in parts for token in part.logprobs or ())

        def whole() -> Response:
            return json_response(answer.whole(parts))

        return await asyncio.to_thread(whole) if told > MANY_LOGPROBS else whole()

    if sent.stream:
        return EventStream(*await begin())
    return await while_connected(request, finish())


def json_response(value: Mapping[str, Any]) -> Response:
    return Response(dumps(value).encode(), media_type="application/json")


def answer_errors(app: FastAPI) -> None:
    """Whatever goes wrong, the client gets OpenAI's error object."""

    @app.exception_handler(ApiError)
    async def told(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        answer = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None).body()
        return JSONResponse(answer, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return ApiError(500, "an error of the server's own; its log says more", code="internal_error").response()
