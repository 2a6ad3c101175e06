"""What is known about one deployment, as plain values. Each source fills its part or leaves it None and says why in
`missing`; a link without its facts is "cannot tell", never "proved".

    files     checkpoints on disk now, beside what `launch` recorded          facts/files.py
    process   the server's arguments, environment and start                   facts/process.py
    log       its start-up lines and metrics lines                            facts/log.py
    metrics   counters before and after the probe                             facts/metrics.py
    probe     what it answered to a fixed set of prompts                      facts/probe.py
    inside    what a plugin saw in the engine's own process (vLLM)            facts/inside.py
    oracle    what acceptance this pair should have on that very text         doctor/oracle.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftproof.check.check import Pair

EngineName = Literal["vllm", "sglang", "llama.cpp", "draftproof"]


@dataclass(frozen=True)
class FileState:
    """One checkpoint file. Times in seconds since 1970; `ctime` is that of the inode, which no copy keeps."""

    path: str
    size: int
    mtime: float
    sha256: str | None
    ctime: float | None = None


@dataclass(frozen=True)
class FileFacts:
    """`now` and `recorded` by path; `recorded` is None when `launch` did not start the server. `started` is the
    process's start; `loaded` a moment by which it had read them all, where that is known. `unreadable` maps a path to
    the reason. `drafter_tensors` are the names in the drafter's own checkpoint."""

    now: Mapping[str, FileState]
    recorded: Mapping[str, FileState] | None
    started: float | None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    drafter_tensors: tuple[str, ...] | None = None
    loaded: float | None = None


@dataclass(frozen=True)
class ProcessFacts:
    """`sent_argv` and `sent_env` are what the launch record says was sent, None without one."""

    pid: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    started: float
    sent_argv: tuple[str, ...] | None = None
    sent_env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class SpecLine:
    """One metrics line of a log in the engine's own numbers; `problems` name identities it breaks (engines.md 2.1)."""

    text: str
    mean_length: float
    accepted: int | None
    drafted: int | None
    per_position: tuple[float, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFacts:
    """`release` and the rest as the log prints them, None where it says nothing. `speculative` is the resolved
    speculative config as printed; `pids` are the process ids in its prefixes (whose run is it?). `warnings` are lines
    that matter (page sizes, hybrid manager, V1 fallback, position table)."""

    release: str | None = None
    runner: str | None = None
    method: str | None = None
    speculative: Mapping[str, Any] | None = None
    aux_layers: tuple[int, ...] | None = None
    backends: tuple[str, ...] = ()
    architecture: str | None = None
    pids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    lines: tuple[SpecLine, ...] = ()
    truncated: bool = False


@dataclass(frozen=True)
class Counters:
    """Speculation and prefix-cache counters at one moment, in vLLM's meaning; SGLang's gauges are in `gauges`."""

    drafts: float | None
    draft_tokens: float | None
    accepted: float | None
    per_position: tuple[float, ...]
    cache_queries: float | None
    cache_hits: float | None
    requests: float | None  # finished requests, to notice other traffic
    running: float | None  # requests running or waiting now
    created: float | None  # when the counters began, to notice a reset
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsFacts:
    """`delta` is what the probe added; None when counters were reset in between. `foreign` counts requests of others
    that ended or ran meanwhile."""

    before: Counters
    after: Counters
    delta: Counters | None
    foreign: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """One probe request: prompt and completion as token ids (and text), and the engine's own acceptance for it.
    `per_step` are accepted drafts a step; `steps`, `accepted` and `drafted` totals, of steps that drafted a whole block
    where the steps are known; None where the engine does not tell."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish: str | None
    seconds: float
    steps: int | None = None
    accepted: int | None = None
    drafted: int | None = None
    per_step: tuple[int, ...] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class ProbeFacts:
    """`answers` to the fixed prompts, greedy; `again` the same prompts a second time, for the prefix cache;
    `baseline` the same prompts from a server without the drafter."""

    answers: tuple[Answer, ...]
    again: tuple[Answer, ...] = ()
    baseline: tuple[Answer, ...] | None = None


@dataclass(frozen=True)
class LayerInside:
    """One draft layer. Declared: as the engine's module says. Executed: as the attention call received it; None where
    no call was observed. `when`: "eager", "capture" or "not observed". A window of -1 or None is the whole context."""

    name: str
    window: int | None
    causal: bool | None
    rope_base: float | None
    neox: bool | None
    executed_window: int | None = None
    executed_causal: bool | None = None
    when: str = "not observed"
    rotary_dim: int | None = None


@dataclass(frozen=True)
class InsideFacts:
    """From the plugin in the engine's process. `refused` says why it saw nothing (a hook looks different)."""

    refused: str | None = None
    release: str | None = None
    runner: str | None = None  # v1 or v2
    method: str | None = None
    drafter_class: str | None = None
    num_speculative_tokens: int | None = None
    taps: tuple[int, ...] | None = None  # the engine's own indices on the target
    fc_inputs: int | None = None
    layers: tuple[LayerInside, ...] = ()
    mask_id: int | None = None
    shares_embedding: bool | None = None  # by pointer
    shares_head: bool | None = None
    zero_weights: tuple[str, ...] = ()  # parameters that are all zero after loading
    skipped_weights: tuple[str, ...] = ()  # tensors of the checkpoint that no parameter took
    kv_groups: tuple[tuple[str, ...], ...] = ()
    max_model_len: int | None = None
    position_rows: int | None = None  # rows of the drafter's rotary table
    hybrid_manager: bool | None = None


@dataclass(frozen=True)
class Fit:
    """How well one hypothesis explains the observed steps: `misses` of `compared` numbers differ; `predicted` is its
    tau on the text; `per_position` its rates."""

    name: str
    misses: float
    compared: int
    predicted: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class OracleFacts:
    """`expected` is the healthy pair's acceptance on the server's own text. `fits`: best first, ties named together
    in `leaders`. `kind`: "steps" (sequences compared), "totals" (per request) or "rates" (sums only)."""

    expected: float
    expected_steps: int
    interval: tuple[float, float] | None
    per_position: tuple[float, ...]
    observed: float
    observed_steps: int
    observed_per_position: tuple[float, ...]
    fits: tuple[Fit, ...]
    leaders: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class StageDifference:
    """Bisection: the first tensor that differs from the oracle's own beyond rounding."""

    stage: str
    layer: int | None
    difference: float
    allowed: float
    step: int


@dataclass(frozen=True)
class BisectFacts:
    compared: tuple[str, ...]  # stages that were compared, in order
    first: StageDifference | None


@dataclass(frozen=True)
class Facts:
    """`pair` needs both checkpoints' configs. `missing` maps a source to the reason it gave nothing."""

    url: str
    engine: EngineName | None
    release: str | None
    pair: Pair | None = None
    files: FileFacts | None = None
    process: ProcessFacts | None = None
    log: LogFacts | None = None
    metrics: MetricsFacts | None = None
    probe: ProbeFacts | None = None
    inside: InsideFacts | None = None
    server_info: Mapping[str, Any] | None = None
    oracle: OracleFacts | None = None
    bisect: BisectFacts | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
