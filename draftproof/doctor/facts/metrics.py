"""The engine's counters at two moments, and what the probe added in between.

vLLM       vllm:spec_decode_*, summed over engines and models; a mean length is 1 + accepted / drafts
SGLang     verify calls as drafts; its own averages, over the last interval only, are gauges
llama.cpp  llamacpp:spec_decode_*, in vLLM's meaning (builds of autumn 2026; older ones count nothing about drafts).
           A request is counted when it ends. Numbers are printed with six digits, so a million and more is rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from draftproof.doctor.facts import Counters, MetricsFacts
from draftproof.doctor.facts.http import ask, refuse_auth, said

SPEC = "vllm:spec_decode_num_"
LLAMA_SPEC = "llamacpp:spec_decode_num_"
PER_POSITION = "accepted_tokens_per_pos_total"
# field of Counters -> names, summed; the first engine's that is there
VLLM = {
    "drafts": (SPEC + "drafts_total",),
    "draft_tokens": (SPEC + "draft_tokens_total",),
    "accepted": (SPEC + "accepted_tokens_total",),
    "cache_queries": ("vllm:prefix_cache_queries_total",),
    "cache_hits": ("vllm:prefix_cache_hits_total",),
    "requests": ("vllm:request_success_total",),
    "running": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
}
SGLANG = {
    "drafts": ("sglang:spec_verify_calls_total",),
    "cache_queries": ("sglang:prompt_tokens_total",),
    "cache_hits": ("sglang:cached_tokens_total",),
    "requests": ("sglang:num_requests_total",),
    "running": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
LLAMACPP = {
    "drafts": (LLAMA_SPEC + "drafts_total",),
    "draft_tokens": (LLAMA_SPEC + "draft_tokens_total",),
    "accepted": (LLAMA_SPEC + "accepted_tokens_total",),
    "cache_queries": ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    "cache_hits": ("llamacpp:prompt_tokens_cached_total",),
    "running": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
}
LLAMACPP_EXACT = 1e6  # from here on it prints 1.23457e+06
LLAMACPP_BEGAN = "Process-Start-Time-Unix"  # a header of the answer
# in the order of preference: the counters' own beginning, the process's
CREATED = (SPEC + "drafts_created", "vllm:request_success_created", "process_start_time_seconds")
GAUGES = (
    "sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:spec_cap_length",
    "sglang:spec_block_accept_length", "sglang:spec_num_draft_tokens", "sglang:cache_hit_rate",
    "llamacpp:tokens_predicted_total", "llamacpp:n_decode_total", "llamacpp:prompt_tokens_total",
)  # fmt: skip
OFF = {
    "vllm": "started with --disable-log-stats",
    "sglang": "start it with --enable-metrics",
    "llama.cpp": "start it with --metrics",
    "draftproof": "started with --disable-log-stats",
}


class Row(NamedTuple):
    labels: Mapping[str, str]
    value: float


def fetch_counters(url: str, api_key: str | None = None, engine: str | None = None) -> tuple[Counters | None, str]:
    """The counters now, or None and the reason. UserError server-unreachable, auth-needed."""
    response = ask(url, "/metrics", api_key)
    refuse_auth(url, "/metrics", response, api_key)
    hint = f" ({OFF[engine]})" if engine in OFF else ""
    if response.status_code != 200:
        return None, f"/metrics answers {response.status_code} {said(response)}".rstrip() + hint
    try:
        counters = read_counters(response.text, response.headers.get(LLAMACPP_BEGAN))
    except ValueError as error:
        return None, f"/metrics is not in the Prometheus text format: {error}"
    if counters.drafts is None and counters.requests is None and counters.running is None:
        return None, "/metrics holds none of the counters known here" + hint
    return counters, ""


def read_counters(text: str, began: str | None = None) -> Counters:
    """Of one /metrics page. A counter that is not on it is None; `began` is a start time that came beside the page.
    ValueError when the page cannot be parsed."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rows[sample.name].append(Row(sample.labels, sample.value))
    names = next((one for one in (VLLM, SGLANG, LLAMACPP) if any(_known(rows, one))), VLLM)
    total = {key: _sum(rows, wanted) for key, wanted in names.items()}
    if names is LLAMACPP:
        total = {key: _unrounded(value) for key, value in total.items()}
    created = next((max(row.value for row in rows[name]) for name in CREATED if name in rows), None)
    if created is None and began is not None and began.isdigit():
        created = float(began)
    return Counters(
        drafts=total.get("drafts"),
        draft_tokens=total.get("draft_tokens"),
        accepted=total.get("accepted"),
        per_position=_by_position(rows.get((LLAMA_SPEC if names is LLAMACPP else SPEC) + PER_POSITION, [])),
        cache_queries=total.get("cache_queries"),
        # SGLang shows no cached tokens before there are any
        cache_hits=0.0 if names is SGLANG and total["cache_hits"] is None else total.get("cache_hits"),
        requests=total.get("requests"),
        running=total.get("running"),
        created=created,
        gauges={name: _mean(rows[name]) for name in GAUGES if name in rows},
    )


def difference(before: Counters, after: Counters, own_requests: int, seconds: float = 0.0) -> MetricsFacts:
    """What was added. `delta` is None where `why_no_delta` gives a reason; its gauges and `running` are those after."""
    delta = None
    if why_no_delta(before, after, own_requests) is None:
        delta = Counters(
            drafts=_minus(after.drafts, before.drafts),
            draft_tokens=_minus(after.draft_tokens, before.draft_tokens),
            accepted=_minus(after.accepted, before.accepted),
            per_position=_pairwise(after.per_position, before.per_position),
            cache_queries=_minus(after.cache_queries, before.cache_queries),
            cache_hits=_minus(after.cache_hits, before.cache_hits),
            requests=_minus(after.requests, before.requests),
            running=after.running,
            created=after.created,
            gauges=after.gauges,
        )
    return MetricsFacts(before, after, delta, _foreign(before, after, own_requests), seconds)


def why_no_delta(before: Counters, after: Counters, own_requests: int) -> str | None:
    """The counters began anew in between, or another process than the one that answered counts."""
    if before.created is not None and after.created is not None and before.created != after.created:
        return "the counters began anew: the engine was restarted"
    for name in ("drafts", "draft_tokens", "accepted", "cache_queries", "cache_hits", "requests"):
        early, late = getattr(before, name), getattr(after, name)
        if (early is None) != (late is None):
            return f"the counter of {name} appeared or vanished: the engine was restarted, or others answer as well"
        if early is not None and late < early:
            return f"the counter of {name} fell from {early:.0f} to {late:.0f}: the engine was restarted"
    unborn = not before.drafts and not before.per_position  # llama.cpp shows no position before the first draft
    if (len(before.per_position) != len(after.per_position) and not unborn) or min(
        _pairwise(after.per_position, before.per_position), default=0.0
    ) < 0:
        return "the counters per position fell or changed in number: the engine was restarted"
    ended = _minus(after.requests, before.requests)
    if ended is not None and ended < own_requests:
        return (
            f"only {ended:.0f} of {own_requests} requests were counted: another process answered some of them "
            "(a load balancer, or several API servers)"
        )
    return None


def _foreign(before: Counters, after: Counters, own: int) -> int:
    """Requests of others: finished beyond our own, or running while none of ours was."""
    ended = _minus(after.requests, before.requests)
    beyond = max(0.0, ended - own) if ended is not None else 0.0
    return round(max(before.running or 0.0, beyond + (after.running or 0.0)))


def _known(rows: Mapping[str, list[Row]], names: Mapping[str, tuple[str, ...]]) -> Iterable[bool]:
    return (name in rows for wanted in names.values() for name in wanted)


def _sum(rows: Mapping[str, list[Row]], names: tuple[str, ...]) -> float | None:
    found = [row.value for name in names for row in rows.get(name, [])]
    return sum(found) if found else None


def _unrounded(value: float | None) -> float | None:
    """A sum that was printed with all its digits; a rounded one cannot be subtracted from."""
    return None if value is None or value >= LLAMACPP_EXACT else value


def _mean(rows: list[Row]) -> float:
    """Of the ranks of a server that shows an average each."""
    return sum(row.value for row in rows) / len(rows)


def _by_position(rows: list[Row]) -> tuple[float, ...]:
    found: dict[int, float] = defaultdict(float)
    for row in rows:
        found[int(row.labels["position"])] += row.value
    return tuple(found[position] for position in range(max(found, default=-1) + 1))


def _minus(late: float | None, early: float | None) -> float | None:
    return None if late is None or early is None else late - early


def _pairwise(late: tuple[float, ...], early: tuple[float, ...]) -> tuple[float, ...]:
    """What is not there yet counts as zeros."""
    return tuple(b - a for a, b in zip(early or (0.0,) * len(late), late, strict=False))
