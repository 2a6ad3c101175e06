"""Facts made by hand: a server that does everything right, and edits of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftproof.check.check import Pair, read_pair
from draftproof.config.drafter import read_drafter
from draftproof.config.finding import Finding, Severity
from draftproof.config.target import read_target
from draftproof.doctor.chain import diagnose
from draftproof.doctor.facts import (
    Answer,
    Counters,
    Facts,
    FileFacts,
    FileState,
    Fit,
    InsideFacts,
    LayerInside,
    LogFacts,
    MetricsFacts,
    OracleFacts,
    ProbeFacts,
    ProcessFacts,
)
from draftproof.doctor.links import LINKS
from tests.config.cases import CONFIGS, TARGETS

MODULES = {link.CODE.removeprefix("doctor-"): link for link in LINKS}
SOURCES = ("pair", "files", "process", "log", "metrics", "probe", "inside", "server_info", "oracle", "bisect")
START = 1_790_000_000.0
SPECULATIVE = '{"method": "dflash", "model": "/m/drafter", "num_speculative_tokens": 15}'
SENT = ("vllm", "serve", "/m/target", "--speculative-config", SPECULATIVE, "--max-model-len", "32768")
RATES = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def make_pair() -> Pair:
    """A mixed drafter; the doubt that its config leaves about causality is taken as settled."""
    drafter = replace(read_drafter(CONFIGS / "Qwen3.6-27B-DFlash"), path="/m/drafter")
    pair = read_pair(drafter, read_target(TARGETS / "Qwen3.6-27B"))
    return replace(pair, findings=tuple(one for one in pair.findings if one.severity is Severity.NOTE))


def layer(index: int, window: int | None, causal: bool, **changes: Any) -> LayerInside:
    seen = LayerInside(f"model.layers.{64 + index}.self_attn.attn", window, causal, 1e7, True, window, causal, "eager")
    return replace(seen, **changes)


def layers() -> tuple[LayerInside, ...]:
    return (*(layer(i, 2048, True) for i in range(4)), layer(4, -1, False))


def state(path: str, **changes: Any) -> FileState:
    return replace(FileState(path, 2**30, START - 1000, "ab" * 32, START - 900), **changes)


def answer(start: int = 0, seconds: float = 1.0, per_step: tuple[int, ...] = (3, 1, 2, 0) * 10, **more: Any) -> Answer:
    made = Answer(
        prompt_ids=tuple(range(6000)),
        output_ids=tuple(range(start, start + 100)),
        text="",
        finish="length",
        seconds=seconds,
        steps=len(per_step),
        accepted=sum(per_step),
        drafted=15 * len(per_step),
        per_step=per_step,
    )
    return replace(made, **more)


def counters(drafts: float, **changes: Any) -> Counters:
    made = Counters(
        drafts=drafts,
        draft_tokens=15 * drafts,
        accepted=2.48 * drafts,
        per_position=tuple(rate * drafts for rate in RATES),
        cache_queries=10 * drafts,
        cache_hits=5 * drafts,
        requests=drafts / 10,
        running=0.0,
        created=START,
    )
    return replace(made, **changes)


def oracle(**changes: Any) -> OracleFacts:
    made = OracleFacts(
        expected=3.5,
        expected_steps=400,
        interval=(3.2, 3.8),
        per_position=RATES,
        observed=3.48,
        observed_steps=402,
        observed_per_position=RATES[:9],
        fits=(Fit("healthy", 3, 400, 3.5, RATES), Fit("taps-minus-1", 200, 400, 2.1, tuple(r / 2 for r in RATES))),
        leaders=("healthy",),
        kind="steps",
    )
    return replace(made, **changes)


def healthy() -> Facts:
    """Every link is proved."""
    answers = (answer(0), answer(500))
    files = {path: state(path) for path in ("/m/drafter/config.json", "/m/target/config.json")}
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    return Facts(
        url="http://127.0.0.1:8000",
        engine="vllm",
        release="0.33.0",
        pair=make_pair(),
        files=FileFacts(files, files, START, drafter_tensors=("fc.weight", "norm.weight")),
        process=ProcessFacts(1, ("/usr/bin/python3", "/venv/bin/vllm", *SENT[1:]), env, START, SENT, env),
        log=LogFacts(
            runner="v2",
            method="dflash",
            speculative={"method": "dflash", "model": "/m/drafter", "num_speculative_tokens": 15},
            aux_layers=(2, 17, 32, 47, 62),
        ),
        metrics=MetricsFacts(counters(100), counters(500), counters(400), 0, 20.0),
        probe=ProbeFacts(
            answers,
            tuple(replace(one, cached_tokens=5888) for one in answers),
            tuple(replace(one, seconds=3.0, steps=None, accepted=None, per_step=None) for one in answers),
        ),
        inside=InsideFacts(
            runner="v2",
            method="dflash",
            num_speculative_tokens=15,
            taps=(2, 17, 32, 47, 62),
            fc_inputs=5 * 5120,
            layers=layers(),
            mask_id=248070,
            shares_embedding=True,
            shares_head=True,
            kv_groups=(tuple(one.name for one in layers()[:4]), (layers()[4].name,)),
            max_model_len=32768,
            position_rows=40960,
        ),
        oracle=oracle(),
    )


def edit(facts: Facts, source: str, **changes: Any) -> Facts:
    """One source with other fields."""
    return replace(facts, **{source: replace(getattr(facts, source), **changes)})


def without(facts: Facts, *sources: str) -> Facts:
    reasons = dict(facts.missing) | {source: f"no {source} here" for source in sources}
    return replace(facts, **dict.fromkeys(sources), missing=reasons)


def finding(code: str, facts: Facts) -> Finding:
    judged: Finding = MODULES[code].judge(facts)
    return judged


def verdicts(facts: Facts) -> dict[str, str]:
    return {one.code.removeprefix("doctor-"): one.finding.verdict.value for one in diagnose(facts, LINKS).links}
