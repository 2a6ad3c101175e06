"""The deployment that the facts describe: what the server's own command line asked for, and what it resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.check.deployment import Deployment
from draftproof.check.flags import FLAGS, method, option_fields, read_flags
from draftproof.check.merge import merge_options
from draftproof.check.options import Options
from draftproof.config.engines import Engine, engines
from draftproof.doctor import own
from draftproof.doctor.evidence import seen_inside
from draftproof.doctor.facts import Facts
from draftproof.errors import UserError

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
NOTHING = "none"  # the method of a server that says that it does not speculate
GGUF = ".gguf"


@dataclass(frozen=True)
class Spec:
    """Speculation as asked or as resolved; None where `where` does not tell. `drafts` is the number of drafted tokens
    a pass, in every engine; `budget` that of draftproof's trees."""

    where: str
    method: str | None = None
    drafts: int | None = None
    model: str | None = None
    runner: str | None = None
    budget: str | None = None


def engine_data(facts: Facts) -> Engine | None:
    return engines().get(facts.engine or "")


def tap_offset(facts: Facts) -> int | None:
    """What the engine's own layer index adds to "after layer i"."""
    if own.is_own(facts):
        return 0
    engine = engine_data(facts)
    return None if engine is None else engine.tap_offset


def drafts_unit(facts: Facts) -> int:
    """What the engine's count of speculative tokens adds to the number of drafts: 1 where it counts the anchor."""
    engine = engine_data(facts)
    return 1 if engine is not None and engine.drafts_are == "block_size" else 0


def asked(facts: Facts) -> Spec | None:
    """From the process's arguments and environment; None without them or where they cannot be read. A GGUF file is not
    named as the model: it holds no config that could be read or compared, so the user names the folder it is from."""
    if own.is_own(facts):
        return _own_asked(facts)
    if facts.process is None or facts.engine is None or facts.engine not in FLAGS:
        return None
    try:
        fields = option_fields(facts.engine, facts.process.argv)
        flags = read_flags(FLAGS[facts.engine], facts.process.argv)
    except UserError:
        return None
    speculative = flags.get("speculative", ("", {}))[1]
    model = speculative.get("model") or fields.get("spec_model")
    if str(model).endswith(GGUF):
        model = None
    forced = {"0": "v1", "1": "v2"}.get(facts.process.env.get(RUNNER_VARIABLE, ""))
    named = fields.get("method")
    return Spec("process: arguments", method(str(named)) if named else None, fields.get("drafts"), model, forced)


def _own_asked(facts: Facts) -> Spec | None:
    """The drafter is left out where only one of the two names is a place: then they cannot be compared."""
    wanted, server = own.asked_of(facts), own.told(facts.server_info)
    if wanted is None:
        return None
    drafter = wanted.drafter
    if drafter and server and server.drafter and drafter.startswith("/") != server.drafter.startswith("/"):
        drafter = None
    return Spec("process: arguments", wanted.method, wanted.drafts, drafter, None, wanted.budget)


def options(facts: Facts) -> Options | None:
    """Options of the running server; None where its arguments are not known or contradict each other."""
    if facts.process is None or facts.engine is None or facts.engine not in FLAGS:
        return None
    named = {"platform": _platform(facts)} if facts.engine == "vllm" else {}
    try:
        return merge_options(facts.engine, named, facts.process.argv, facts.process.env)
    except UserError:
        return None


def deployment(facts: Facts) -> Deployment | None:
    """For the rules of engines.toml. None without the pair, the engine's data or the arguments."""
    engine, chosen = engine_data(facts), options(facts)
    if engine is None or chosen is None or facts.pair is None:
        return None
    return Deployment(engine, facts.release, facts.pair.drafter, facts.pair.target, chosen)


def resolved(facts: Facts) -> tuple[Spec, ...]:
    """What the server says it runs, one Spec a source that tells anything."""
    return tuple(spec for spec in _resolved(facts) if (spec.method, spec.drafts, spec.model) != (None, None, None))


def _resolved(facts: Facts) -> Iterator[Spec]:
    if (inside := seen_inside(facts)) is not None:
        yield _spec("inside", inside.method, inside.num_speculative_tokens, None, inside.runner)
    if facts.log is not None:
        told = facts.log.speculative or {}
        name = NOTHING if facts.log.speculative == {} else told.get("method") or facts.log.method
        count = told.get("num_speculative_tokens")
        yield _spec("log: speculative config", name, count, told.get("model"), facts.log.runner)
    if (server := own.told(facts.server_info)) is not None:
        yield Spec("server_info", server.method, server.drafts, server.drafter, None, server.budget)
    elif facts.server_info is not None:
        yield _server_info(facts.server_info)


def _server_info(info: Mapping[str, Any]) -> Spec:
    """vLLM nests its speculative config; SGLang names everything at the top and counts the anchor. llama.cpp's /props
    is no source: its speculative.types is that of a bare request, "none" beside a server that drafts."""
    inner = info.get("vllm_config", info)
    told = inner.get("speculative_config") if isinstance(inner, Mapping) else None
    if isinstance(told, Mapping):
        count = told.get("num_speculative_tokens")
        return _spec("server_info: speculative_config", told.get("method"), count, told.get("model"), None)
    if isinstance(inner, Mapping) and inner.get("speculative_config", "") is None:
        return Spec("server_info: speculative_config", NOTHING)
    count, name = info.get("speculative_num_draft_tokens"), info.get("speculative_algorithm", "")
    drafts = count - 1 if isinstance(count, int) else None
    return _spec(
        "server_info", NOTHING if name is None else name, drafts, info.get("speculative_draft_model_path"), None
    )


def _spec(where: str, name: object, drafts: object, model: object, runner: str | None) -> Spec:
    return Spec(
        where,
        method(str(name)) if name else None,
        drafts if isinstance(drafts, int) else None,
        str(model) if model else None,
        runner.lower() if runner else None,
    )


def _platform(facts: Facts) -> str:
    backends = " ".join(facts.log.backends if facts.log else ()).upper()
    if (facts.release or "").endswith("+cpu") or "CPU_ATTN" in backends:
        return "cpu"
    return "rocm" if "ROCM" in backends or "rocm" in (facts.release or "") else "cuda"
