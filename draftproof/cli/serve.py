"""`draftproof serve`: the OpenAI API on a pair."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import (
    TARGET,
    Budget,
    BuilderName,
    Device,
    DrafterName,
    Drafts,
    Dtype,
    Method,
    NoNoise,
    TargetName,
    app,
    drafting,
)
from draftproof.errors import UserError


class SpecMetrics(StrEnum):
    summary = "summary"
    detailed = "detailed"


@app.command()
def serve(
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    method: Method = "ddtree",
    drafts: Drafts = None,
    budget: Budget = None,
    builder: BuilderName = None,
    no_noise_aware: NoNoise = False,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="name of the model in the API; may be repeated (default: the target)")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="requests that run at once")] = 8,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="tokens of prompt and answer (default: all)")] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="requests that may wait; more get 429")] = 128,
    kv_memory: Annotated[
        float | None, typer.Option(min=0.0, help="GiB for running requests (default: by size)")
    ] = None,
    prefix_cache: Annotated[
        float | None, typer.Option(min=0.0, help="GiB for beginnings of texts; 0: off (default: by size)")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="prompt tokens run between two steps (default: 256, on a GPU 2048)")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="DRAFTPROOF_API_KEY", help="wanted from clients; may be repeated")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="web origin that may ask from a browser; may be repeated")
    ] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="qwen3")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="qwen3_coder or hermes")] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="the model may decide to call tools")
    ] = False,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file instead of the tokenizer's own")] = None,
    default_max_tokens: Annotated[
        int | None, typer.Option(min=1, help="of requests that name no number (default: the rest of the context)")
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(min=0.1, help="seconds (default: no limit)")] = None,
    drain_timeout: Annotated[float, typer.Option(min=0.0, help="seconds for what runs when the server stops")] = 30.0,
    max_body_mib: Annotated[float, typer.Option(min=0.001, help="larger requests get 413")] = 8.0,
    per_request_spec_decode_metrics: Annotated[
        SpecMetrics | None, typer.Option(help="acceptance of each request in its answer")
    ] = None,
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="no statistics in the log, no /metrics")
    ] = False,
    log_stats_interval: Annotated[float, typer.Option(min=0.1, help="seconds between statistics in the log")] = 10.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve a pair over the OpenAI API, with a chat page at /."""
    asked = drafting(target, drafter, method, drafts, budget=budget, builder=builder, no_noise=no_noise_aware)
    try:
        from draftproof.serve.served import Parsers
        from draftproof.serve.start import Options
        from draftproof.serve.start import serve as start
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "xgrammar"):
            raise
        raise UserError(
            "dependency-missing", f"{error.name} is not installed", 'pip install "draftproof[serve]"'
        ) from None
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(asctime)s %(message)s")
    logging.getLogger("draftproof").setLevel(logging.INFO)
    start(
        Options(
            target=target,
            drafting=asked,
            method=method,
            host=host,
            port=port,
            names=served_model_name or (),
            slots=max_num_seqs,
            context=max_model_len,
            queue=max_queue,
            kv_memory=kv_memory,
            prefix_cache=prefix_cache,
            batched_tokens=max_num_batched_tokens,
            api_keys=[key for key in api_key or () if key],
            origins=allowed_origin or (),
            parsers=Parsers(reasoning_parser, tool_call_parser, enable_auto_tool_choice),
            chat_template=chat_template,
            answer=default_max_tokens,
            seconds=request_timeout,
            drain=drain_timeout,
            body_mib=max_body_mib,
            spec_metrics=per_request_spec_decode_metrics.value if per_request_spec_decode_metrics else None,
            log_stats=not disable_log_stats,
            log_interval=log_stats_interval,
            device=device,
            dtype=dtype,
        )
    )
