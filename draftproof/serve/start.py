"""`draftproof serve`: options -> a loaded pair -> an engine -> a server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftproof.engine.calibrate import autos_for, remember
from draftproof.engine.engine import PREFILL_CHUNK, Engine
from draftproof.engine.pair import Pair, load_pair
from draftproof.engine.propose import Drafting, Speculation
from draftproof.errors import UserError
from draftproof.serve.app import create_app
from draftproof.serve.listen import bind, listen
from draftproof.serve.memory import GIB, cache_memory
from draftproof.serve.one_thread import OneThread
from draftproof.serve.parsers import make
from draftproof.serve.served import Limits, Parsers, Served, generation_defaults
from draftproof.serve.stats.log_line import LogLine
from draftproof.serve.stats.metrics import Metrics
from draftproof.serve.worker import Report, Worker

if TYPE_CHECKING:
    from draftproof.models.dflash import DFlashDrafter

log = logging.getLogger("draftproof")
BATCHED = {"cpu": 256, "cuda": 2048}  # prompt tokens between two steps: a fraction of a second
MEASURED = {
    "cpu": 256,
    "cuda": 16384,
}  # longest context whose rounds are measured at the first start; longer ones take its numbers
UNKNOWN_CONTEXT = 8192  # of a model that names no length


@dataclass(frozen=True)
class Options:
    """As on the command line. GiB of caches: None is automatic; seconds of a request: None is no limit."""

    target: str
    drafting: Drafting
    method: str
    host: str = "127.0.0.1"
    port: int = 8000
    names: Sequence[str] = ()
    slots: int = 8
    context: int | None = None
    queue: int = 128
    kv_memory: float | None = None
    prefix_cache: float | None = None
    batched_tokens: int | None = None
    api_keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    parsers: Parsers = field(default_factory=Parsers)
    chat_template: Path | None = None
    answer: int | None = None
    seconds: float | None = None
    drain: float = 30.0
    body_mib: float = 8.0
    spec_metrics: Literal["summary", "detailed"] | None = None
    log_stats: bool = True
    log_interval: float = 10.0
    device: str = "auto"
    dtype: str = "auto"


def serve(options: Options) -> None:
    """UserError before anything is loaded where that can be known."""
    require_parsers(options.parsers)
    template = read_template(options.chat_template)
    taken = bind(options.host, options.port)
    asked, thread = options.drafting, OneThread()
    pair = thread.call(
        lambda: load_pair(options.target, asked.drafter, mtp=asked.mtp, dtype=options.dtype, device=options.device)
    )
    if template is not None:
        pair.tokenizer.chat_template = template
    require_chats(options.parsers, pair.tokenizer)
    engine = thread.call(lambda: make_engine(pair, options))
    served = make_served(pair, engine, options, thread)
    for what, choice in (("device", pair.device), ("dtype", pair.dtype)):
        log.info("%s %s (%s)", what, choice.value, choice.reason)
    listen(create_app(served), served, taken)
    learned(pair, engine)


def learned(pair: Pair, engine: Engine) -> None:
    """What the budget "auto" learned of acceptance stays for the next start."""
    if pair.drafter and engine.proposer and engine.proposer.autos:
        for (_, sampled), auto in engine.proposer.autos.choices.items():
            remember(auto, pair.drafter, sampled)


def place(name: str) -> str:
    """A folder by its full path, for whoever reads it elsewhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def make_engine(pair: Pair, options: Options) -> Engine:
    """Caches that grow within their memory, and for the budget "auto" what rounds cost with one request and with
    many."""
    how: Speculation = options.drafting.how
    context = options.context or pair.target.spec.max_positions or UNKNOWN_CONTEXT
    memory, prefix, reason = cache_memory(pair.device.value, options.kv_memory, options.prefix_cache)
    log.info("caches: %.2f GiB for requests, %.2f GiB for prefixes (%s)", memory / GIB, prefix / GIB, reason)
    batched = options.batched_tokens or BATCHED["cpu" if pair.device.value == "cpu" else "cuda"]
    auto = None
    if pair.drafter and how.budget == "auto":
        measured = min(context, MEASURED["cpu" if pair.device.value == "cpu" else "cuda"])
        auto = autos_for(pair.target, pair.drafter, how, context=measured, slots=options.slots)
    return Engine(
        pair.target,
        pair.drafter,
        slots=options.slots,
        context=context,
        how=how,
        auto=auto,
        chunk=min(PREFILL_CHUNK, batched),
        prefill_rows=batched,
        memory=memory,
        prefix=prefix,
        isolate=True,
    )


def make_served(pair: Pair, engine: Engine, options: Options, thread: OneThread) -> Served:
    names = tuple(options.names) or (pair.name,)
    depth = pair.drafter.depth if pair.drafter else 0
    metrics = Metrics(names[0], depth) if options.log_stats else None
    line = LogLine(depth, options.log_interval, pair.device.value) if options.log_stats else None

    def report(one: Report) -> None:
        if metrics and line:
            metrics.step(one)
            line.step(one)

    limits = Limits(engine.context, options.answer, options.seconds, int(options.body_mib * 2**20), options.drain)
    return Served(
        tokenizer=pair.tokenizer,
        worker=Worker(engine, queue=options.queue, report=report, thread=thread),
        names=names,
        root=place(pair.name),
        vocab=pair.target.spec.vocab_size,
        stop_ids=pair.stop_ids,
        limits=limits,
        depth=depth,
        parsers=options.parsers,
        defaults=generation_defaults(pair.target.model.generation_config),
        about=about(pair, options),
        metrics=metrics,
        spec_metrics=options.spec_metrics,
        api_keys=options.api_keys,
        origins=options.origins,
        tasks=(line.run,) if line else (),
    )


def about(pair: Pair, options: Options) -> dict[str, Any]:
    """The pair and how it drafts, for /server_info. Block size counts the anchor."""
    how = options.drafting.how
    told: dict[str, Any] = {
        "drafter": place(options.drafting.drafter) if options.drafting.drafter else None,
        "method": options.method,
        "budget": how.budget if pair.drafter else None,
        "builder": how.builder.name if options.method == "ddtree" else None,
        "noise_aware": how.noise_aware if pair.drafter else None,
        "num_speculative_tokens": pair.drafter.depth if pair.drafter else None,
        "device": pair.device.value,
        "dtype": pair.dtype.value,
    }
    if options.drafting.drafter:
        drafter: DFlashDrafter = pair.drafter  # type: ignore[assignment]
        spec = drafter.spec
        told |= {
            "block_size": spec.block_size,
            "taps": list(spec.taps),
            "mask_token_id": spec.mask_token_id,
            "windows": [layer.window for layer in spec.layers],
        }
    return told


def read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("not-found", f"--chat-template {path}: {error}", "name a Jinja file in UTF-8") from None


def require_parsers(parsers: Parsers) -> None:
    """Wrong names and missing partners are told at the start, not by the first request."""
    make(parsers.reasoning, parsers.tools, thinking=False, schemas=None, new_id=str)
    if parsers.auto_tools and not parsers.tools:
        fix = "add --tool-call-parser qwen3_coder or hermes"
        raise UserError("bad-option", "--enable-auto-tool-choice alone reads no calls", fix)


def require_chats(parsers: Parsers, tokenizer: Any) -> None:
    if (parsers.tools or parsers.reasoning) and not tokenizer.chat_template:
        fix = "leave the parsers out, or add --chat-template"
        raise UserError("bad-option", "the model has no chat template, so there are no chats to parse", fix)
