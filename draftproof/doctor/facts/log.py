"""What an engine's log tells about speculation: start-up and metrics lines of vLLM 0.20 to 0.33, SGLang, llama.cpp and
ik_llama.cpp. Colours and what stands before a line (docker, journald) do not matter. Of several runs in one log the
last is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from draftproof.doctor.facts import LogFacts
from draftproof.doctor.facts.server import llamacpp_build
from draftproof.doctor.facts.spec_lines import is_cut, spec_line, without_mean

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PID = re.compile(r"\(([A-Z][\w-]*) pid=(\d+)\)|Started server process \[(\d+)\]")
# time and place before the message: vLLM "[core.py:133] ", SGLang "[2026-11-29 17:00:00 TP0] "
PREFIX = re.compile(r"^.*?\[(?:[\w./-]+\.py:\d+|\d{4}-\d\d-\d\d[^\]]*)\]\s+")
LLAMA_BUILD = r"\bbuild(?:_info)?:? b?(\d+)[ -]\(?[0-9a-f]{7}"
BEGINS = re.compile(
    r"█.*\bversion \d+\.\d|vLLM (?:API )?server version|\bserver_args=ServerArgs\("
    rf"|{LLAMA_BUILD}|\bllama_server: initializing"  # at its default verbosity llama.cpp names no build
)
RELEASES = (  # the first that is there
    re.compile(r"Initializing a V\d LLM engine \(v([^)\s]+)\)"),
    re.compile(r"vLLM (?:API )?server version ([^\s,]+)"),
    re.compile(r"█.*\bversion (\d\S*)"),
    re.compile(LLAMA_BUILD),
)
RUNNERS = (  # the first that is there
    ("v2", re.compile(r"Using V2 Model Runner|Using Eagle3 auxiliary layers from")),
    ("v1", re.compile(r"using the V1 model\b|\[(?:gpu|cpu)_model_runner\.py:\d+\]|\[llm_base_proposer\.py:\d+\]")),
)
QUOTED = r"""(None|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
RESOLVED = re.compile(
    rf"speculative_config=SpeculativeConfig\(method={QUOTED}, model={QUOTED}, num_spec_tokens=(\d+)\)"
)
NONE_RESOLVED = re.compile(r"Initializing a V\d LLM engine .*\bspeculative_config=None\b")
RESOLVED_KEYS = ("method", "model", "num_speculative_tokens")
SENT = "'speculative_config': "  # in the line "non-default args: {...}"
AUX_LAYERS = re.compile(
    r"[Uu]sing (?:Eagle3 )?auxiliary layers from (?:speculative )?(?:config|model): \(([\d, ]*)\)"
    r"|DFlash extract_layers = \[([\d, ]*)\]"
)
BACKEND = re.compile(
    r"Using (\w+) attention backend out of"
    r"|Using (?:AttentionBackendEnum\.)?(\w*(?:ATTN|FLASH|FLEX|MLA|TRITON|SDPA)\w*) backend\.$"
    r"|Attention backend\(s\) (\w+)"
)
ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
SGLANG_RUNNER = re.compile(r"Initialized DFLASH draft runner\. (.*)")
SGLANG_READY = re.compile(r"DFLASH draft runner ready\. (.*)")
LLAMA_DFLASH = re.compile(r"common_speculative_impl_draft_dflash: - (.*)")
LLAMA_CLAMPED = re.compile(r"requested draft size .* clamping to (\d+)")
IK_DFLASH = re.compile(r"DFlash context ready \((.*)\)")
PAIR = re.compile(r"(\w+)=([^,\s]+)")
# Lines that change what is drafted, cached or kept; engines.md 1.10. The two of "model" mean: no ids from the config.
WARNINGS = re.compile(
    r"using the V1 model|page sizes cannot be unified|Hybrid KV cache manager is disabled|padding layers, may waste"
    r"|no KV cache group|Overriding draft model max|draft pass needs \d+ query tokens"
    r"|DFlash buffer initialization was skipped|block dropping is disabled|auxiliary layers from model"
    r"|Detected EAGLE model|synthetic_acceptance|DFLASH block size mismatch|num_target_layers"
    r"|DFLASH .*[Ff]alling back|falling back to greedy argmax verification"
    r"|requested draft size .* clamping to|did not run on every prefill ubatch"
)


def read_log(text: str) -> LogFacts:
    """Facts of the last run in `text`. Lines that are cut off are told by `truncated` and in their `problems`."""
    lines = _last_run([COLOUR.sub("", line).rstrip() for line in text.splitlines()])
    messages = [PREFIX.sub("", line) for line in lines]
    speculative = _speculative(messages)
    block_size = speculative.get("block_size") if speculative else None
    spec = [one for one in (spec_line(message, block_size) for message in messages) if one]
    architectures = _all(ARCHITECTURE, messages) or _values(speculative, "architecture")
    aux = _all(AUX_LAYERS, messages)
    return LogFacts(
        release=_release(messages),
        runner=next((name for name, sign in RUNNERS if any(sign.search(line) for line in lines)), None),
        method=speculative.get("method") if speculative else None,
        speculative=speculative,
        aux_layers=tuple(int(part) for part in aux[-1].split(",") if part.strip()) if aux else None,
        backends=(*_all(BACKEND, messages), *_values(speculative, "attention_backend")),
        architecture=architectures[-1] if architectures else None,
        pids=tuple(dict.fromkeys(int(found[2] or found[3]) for line in lines for found in PID.finditer(line))),
        warnings=tuple(dict.fromkeys(_warnings(messages))),
        lines=tuple(spec),
        truncated=any(is_cut(message) or _engine_line_cut(message) for message in messages),
    )


def _last_run(lines: list[str]) -> list[str]:
    """From the last line that a starting server prints; a few lines before it belong to it too, but say nothing."""
    begins = [number for number, line in enumerate(lines) if BEGINS.search(PREFIX.sub("", line))]
    return lines[begins[-1] :] if begins else lines


def _release(messages: list[str]) -> str | None:
    for pattern in RELEASES:
        if found := _all(pattern, messages):
            return llamacpp_build(found[-1]) if pattern is RELEASES[-1] else found[-1].removesuffix(",")
    return None


def _speculative(messages: list[str]) -> dict[str, Any] | None:
    """The resolved config, with the names of vLLM's option; {} when the log says that there is none. What the engine
    does not print of it comes from the options as sent."""
    found: dict[str, Any] | None = None
    for message in messages:
        if told := RESOLVED.search(message):
            method, model = ast.literal_eval(told[1]), ast.literal_eval(told[2])
            found = (found or {}) | {"method": method, "model": model, "num_speculative_tokens": int(told[3])}
        elif NONE_RESOLVED.search(message):
            found = {}
        elif SENT in message:
            sent = _sent(message)
            found = (found or {}) | {key: sent[key] for key in sent if key not in RESOLVED_KEYS} or None
        elif (other := _other_engine(message)) is not None:
            found = (found or {}) | other
    return found


def _sent(message: str) -> dict[str, Any]:
    """The value of 'speculative_config' in a printed dict: the shortest text from its brace that is a Python dict."""
    start = message.index(SENT) + len(SENT)
    ends = (place + 1 for place in range(start, len(message)) if message[place] == "}")
    for end in ends:
        try:
            value = ast.literal_eval(message[start:end])
        except (SyntaxError, ValueError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _other_engine(message: str) -> dict[str, Any] | None:
    """SGLang's block size counts the anchor, so there is one draft less."""
    if told := SGLANG_RUNNER.search(message):
        values = _pairs(told[1])
        found = {"method": "DFLASH", "architecture": values.pop("model", None), **values}
        if isinstance(size := values.get("block_size"), int):
            found["num_speculative_tokens"] = size - 1
        return found
    if told := SGLANG_READY.search(message):
        return _pairs(told[1])
    if told := LLAMA_DFLASH.search(message):
        values = _pairs(told[1])
        count = {"num_speculative_tokens": values["n_max"]} if "n_max" in values else {}
        return {"method": "draft-dflash", **values, **count}
    if told := LLAMA_CLAMPED.search(message):
        return {"num_speculative_tokens": int(told[1])}
    if told := IK_DFLASH.search(message):
        return {"method": "dflash", **_pairs(told[1])}
    return None


def _pairs(text: str) -> dict[str, Any]:
    return {name: _value(value.rstrip(".")) for name, value in PAIR.findall(text)}


def _value(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _warnings(messages: list[str]) -> Iterator[str]:
    lost = sum(without_mean(message) for message in messages)
    yield from (message for message in messages if WARNINGS.search(message) and "non-default args" not in message)
    if lost and not any("statistics" in message for message in messages):
        yield f"{lost} lines tell accepted and generated drafts but no mean length"


def _engine_line_cut(message: str) -> bool:
    """The line of the engine's start ends before or inside its speculative config."""
    if "Initializing a V" not in message or "LLM engine" not in message:
        return False
    return not RESOLVED.search(message) and not NONE_RESOLVED.search(message)


def _all(pattern: re.Pattern[str], messages: list[str]) -> list[str]:
    found = (pattern.search(message) for message in messages)
    return [next(group for group in one.groups() if group is not None) for one in found if one]


def _values(speculative: dict[str, Any] | None, key: str) -> list[str]:
    return [str(speculative[key])] if speculative and speculative.get(key) else []
