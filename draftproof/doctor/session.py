"""`draftproof doctor` from a URL to a diagnosis: collect each source of facts, or the reason why it is missing."""

from __future__ import annotations

import base64
import posixpath
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from draftproof.check.check import Pair, read_pair
from draftproof.config.drafter import read_drafter
from draftproof.config.target import read_target
from draftproof.doctor import own
from draftproof.doctor.bisect import REQUEST, ask_for
from draftproof.doctor.chain import Diagnosis, diagnose
from draftproof.doctor.deployed import asked
from draftproof.doctor.facts import Answer, BisectFacts, Counters, Facts, OracleFacts, ProbeFacts
from draftproof.doctor.facts.files import file_facts
from draftproof.doctor.facts.inside import fetch_inside
from draftproof.doctor.facts.log import read_log
from draftproof.doctor.facts.metrics import difference, fetch_counters, why_no_delta
from draftproof.doctor.facts.probe import probe, probe_ids, read_prompts
from draftproof.doctor.facts.process import find_record, process_facts
from draftproof.doctor.facts.server import Server, identify
from draftproof.doctor.links import LINKS
from draftproof.errors import UserError
from draftproof.launch.machine import Machine
from draftproof.launch.names import Checkpoint, Resolve, locate

LOG_BYTES = 16 << 20  # of the end of a server's log
Say = Callable[[str], None]


@dataclass(frozen=True)
class DoctorAsk:
    """`machine` is where the server runs, None when nothing but HTTP reaches it. `target` and `drafter` as `launch`
    takes them, None: as the server's own command line says. `texts` replaces the fixed prompts by token ids."""

    url: str
    machine: Machine | None
    target: str | None = None
    drafter: str | None = None
    api_key: str | None = None
    log: Path | None = None
    baseline: str | None = None
    prompts: int = 8
    max_tokens: int = 64
    texts: Sequence[Sequence[int]] = ()
    hashes: bool = True


Oracle = Callable[[Facts, Checkpoint, Checkpoint], OracleFacts]
Bisection = Callable[[Sequence[bytes], Answer, Checkpoint, Checkpoint], BisectFacts]
STEPS = (0, 3, 6)  # draft steps of one answer whose tensors are compared


@dataclass
class Collection:
    """Facts in the making."""

    facts: Facts
    missing: dict[str, str] = field(default_factory=dict)

    def put(self, source: str, value: Any, reason: str = "") -> None:
        if value is None:
            self.missing[source] = reason
        self.facts = replace(self.facts, **{source: value}, missing=dict(self.missing))


def examine(
    ask: DoctorAsk, resolve: Resolve, oracle: Oracle | None, say: Say, bisection: Bisection | None = None
) -> Diagnosis:
    """Every source in turn, then the links. `oracle` runs the pair itself on the server's text, `bisection` compares
    stage by stage; None leaves them out. UserError for a server that cannot be examined at all."""
    server = identify(ask.url, ask.api_key)
    made = Collection(Facts(server.url, server.engine, server.release, server_info=server.details))
    record = _from_machine(made, ask, server)
    with tempfile.TemporaryDirectory() as scratch:
        found = _pair(made, ask, Path(scratch), resolve)
        _files(made, ask, record, found, say)
        _probe(made, ask, server, say)
        _inside(made, ask, record)
        _oracle(made, oracle, found)
        if bisection is not None:
            _bisect(made, ask, server, record, found, bisection, say)
        return diagnose(made.facts, LINKS)


def _from_machine(made: Collection, ask: DoctorAsk, server: Server) -> dict[str, Any] | None:
    """Process and log: what only the server's own machine tells. Returns the launch record, if it has one."""
    machine, port = ask.machine, urlsplit(server.url).port
    if ask.log is not None:
        made.put("log", read_log(_local_log(ask.log)))
    if machine is None or port is None:
        reason = f"nothing here reaches the machine of {server.url}: name it with --host"
        for source in ("process", "inside", *([] if ask.log else ["log"])):
            made.put(source, None, reason)
        return None
    record = find_record(machine, port)
    made.put("process", *process_facts(machine, port, record))
    if ask.log is None:
        text = _launch_log(machine, record) if record else None
        made.put(
            "log", read_log(text) if text is not None else None, "draftproof did not launch it; name it with --log"
        )
    return record


def _inside(made: Collection, ask: DoctorAsk, record: dict[str, Any] | None) -> None:
    """After the probe: attention calls are told when the first drafts are made."""
    if own.is_own(made.facts):
        made.put("inside", None, own.SAME_CODE)
    elif ask.machine is not None:
        inside = fetch_inside(ask.machine, _folder(ask.machine, record)) if record else None
        made.put("inside", inside, "no plugin reported: it was not started with launch vllm --prove")


def _folder(machine: Machine, record: dict[str, Any]) -> str:
    return str(machine.call("status", name=record["name"])["launches"][0]["folder"])


def _local_log(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError("not-found", f"{path} cannot be read: {error.strerror}", "name the server's log") from error


def _launch_log(machine: Machine, record: dict[str, Any]) -> str:
    parts, offset = [], 0
    while offset < LOG_BYTES:
        told = machine.call("log", name=record["name"], offset=offset)
        parts.append(base64.b64decode(told["data"]))
        if told["offset"] == offset:
            break
        offset = told["offset"]
    return b"".join(parts).decode(errors="replace")


@dataclass(frozen=True)
class Checkpoints:
    target: Checkpoint
    drafter: Checkpoint | None


def _pair(made: Collection, ask: DoctorAsk, scratch: Path, resolve: Resolve) -> Checkpoints | None:
    """Both configs, from the names given or from the server's own command line."""
    names = _names(made.facts, ask)
    if names is None:
        server = own.told(made.facts.server_info)
        alone = "it serves the target alone, without a drafter"
        unknown = "which checkpoints it serves is not known: name them with --target and --drafter"
        made.put("pair", None, alone if server and server.method == "none" else unknown)
        return None
    target, drafter = names
    if ask.machine is None:
        found = Checkpoints(Checkpoint(target, resolve(target)), _here(drafter, resolve))
    else:
        located = locate(ask.machine, drafter, scratch, resolve) if drafter else None
        found = Checkpoints(locate(ask.machine, target, scratch, resolve), located)
    made.put("pair", _read(found))
    return found


def _here(name: str | None, resolve: Resolve) -> Checkpoint | None:
    return Checkpoint(name, resolve(name)) if name else None


def _read(found: Checkpoints) -> Pair:
    return read_pair(read_drafter(found.drafter.configs) if found.drafter else None, read_target(found.target.configs))


def _names(facts: Facts, ask: DoctorAsk) -> tuple[str, str | None] | None:
    told = asked(facts)
    if (server := own.told(facts.server_info)) is not None:
        target, drafter = ask.target or server.target, ask.drafter or server.drafter
        return (target, drafter) if target and (drafter or server.method == "mtp") else None
    target = ask.target or (_served(facts.process.argv) if facts.process else None)
    drafter = ask.drafter or (told.model if told else None)
    if target is None or (drafter is None and (told is None or told.method != "mtp")):
        return None
    return target, drafter


def _served(argv: Sequence[str]) -> str | None:
    """The model of a server's command line: vllm serve MODEL, or --model-path MODEL."""
    words = list(argv)
    for flag in ("serve", "--model-path", "--model", "-m"):
        if flag in words[:-1] and (word := words[words.index(flag) + 1]) and not word.startswith("-"):
            if flag == "-m" and word.startswith(("sglang", "vllm")):
                continue
            return word
    return None


def _files(
    made: Collection, ask: DoctorAsk, record: dict[str, Any] | None, found: Checkpoints | None, say: Say
) -> None:
    if ask.machine is None or (record is None and found is None):
        made.put("files", None, "the checkpoints' place is not known or not reached")
        return
    names = [c.engine_name for c in (found.target, found.drafter) if c] if found else []
    folders = [name for name in names if name.startswith("/")]
    drafter = found.drafter.engine_name if found and found.drafter else None
    say("files: hashing the checkpoints")
    process = made.facts.process
    began = fetch_counters(made.facts.url, ask.api_key)[0] if own.is_own(made.facts) else None
    facts = file_facts(
        ask.machine, record, folders,
        drafter=drafter if drafter and drafter.startswith("/") else None,
        digests=ask.hashes, started=process.started if process else None,
        loaded=began.created if began else None,  # our server begins to count when its models are loaded
    )  # fmt: skip
    made.put("files", facts)


def _probe(made: Collection, ask: DoctorAsk, server: Server, say: Say) -> None:
    """The prompts once, again for the prefix cache, and, with a baseline, there too; counters around the first pass."""
    before, reason = fetch_counters(server.url, ask.api_key, server.engine)
    begun = time.monotonic()
    say(f"probe: {len(ask.texts) or ask.prompts} prompts of at most {ask.max_tokens} tokens")
    answers = _ask(ask, server, server.url)
    after, _ = fetch_counters(server.url, ask.api_key, server.engine)
    _metrics(made, before, after, len(answers), time.monotonic() - begun, reason)
    say("probe: the same prompts again, for the prefix cache")
    again = _ask(ask, server, server.url)
    again = _with_hits(again, after, fetch_counters(server.url, ask.api_key, server.engine)[0])
    baseline = None
    if ask.baseline:
        say("probe: the baseline")
        other = identify(ask.baseline, ask.api_key)
        baseline = _ask(ask, other, other.url)
    made.put("probe", ProbeFacts(answers, again, baseline))


def _ask(ask: DoctorAsk, server: Server, url: str) -> tuple[Answer, ...]:
    model, fields = server.models[0], own.probe_fields(server.details)
    if ask.texts:
        return probe_ids(url, model, ask.texts, ask.max_tokens, ask.api_key, engine=server.engine, fields=fields)
    listed = read_prompts()
    chosen = (*listed[: ask.prompts - 1], listed[-1])  # the last is longer than a cache block
    return probe(url, model, chosen, ask.max_tokens, ask.api_key, engine=server.engine, fields=fields)


def _metrics(
    made: Collection, before: Counters | None, after: Counters | None, own: int, seconds: float, reason: str
) -> None:
    if before is None or after is None:
        made.put("metrics", None, reason or "the counters went away while the probe ran")
        return
    made.put("metrics", difference(before, after, own, seconds))
    if why := why_no_delta(before, after, own):
        made.missing["metrics"] = why


def _with_hits(again: tuple[Answer, ...], before: Counters | None, after: Counters | None) -> tuple[Answer, ...]:
    """Cache hits of the second pass, from the counters where the answers do not tell them."""
    if not again or again[0].cached_tokens is not None or before is None or after is None:
        return again
    if before.cache_hits is None or after.cache_hits is None or after.cache_hits < before.cache_hits:
        return again
    return (replace(again[0], cached_tokens=int(after.cache_hits - before.cache_hits)), *again[1:])


def _oracle(made: Collection, oracle: Oracle | None, found: Checkpoints | None) -> None:
    if oracle is None:
        made.put("oracle", None, "left out by --no-oracle")
    elif found is None or found.drafter is None or made.facts.pair is None:
        made.put("oracle", None, "the pair is not known")
    else:
        try:
            made.put("oracle", oracle(made.facts, found.target, found.drafter))
        except UserError as error:  # everything else can still be judged
            made.put("oracle", None, f"[{error.code}] {error.message}")


def _bisect(
    made: Collection,
    ask: DoctorAsk,
    server: Server,
    record: dict[str, Any] | None,
    found: Checkpoints | None,
    bisection: Bisection,
    say: Say,
) -> None:
    """Ask the plugin for the tensors of some draft steps of one more answer, and compare."""
    if ask.machine is None or record is None or found is None or found.drafter is None:
        made.put("bisect", None, "only a server that draftproof launched with --prove --bisect hands out its tensors")
        return
    say("bisect: one more answer, its draft steps handed out")
    request = base64.b64encode(ask_for(STEPS)).decode()
    ask.machine.call(
        "put_file", name=record["name"], path=f"inside/{REQUEST}", data=request, clear="bisect-*.safetensors"
    )
    (answer,) = _ask(replace(ask, prompts=1, texts=ask.texts[:1]), server, server.url)
    folder = posixpath.join(_folder(ask.machine, record), "inside")
    told = ask.machine.call("read_files", folder=folder, pattern="bisect-?.safetensors")
    dumps = [zlib.decompress(base64.b64decode(data)) for data in told["contents"].values()]
    if not dumps:
        big = f"; too large: {', '.join(told['too_large'])}" if told["too_large"] else ""
        made.put("bisect", None, f"the plugin handed out nothing: launch with --prove --bisect{big}")
        return
    made.put("bisect", bisection(dumps, answer, found.target, found.drafter))
