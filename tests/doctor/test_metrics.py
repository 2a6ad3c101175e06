"""Counters of the real vLLM before and after requests, edited; SGLang's names; metrics that are off."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.doctor.facts.metrics import difference, fetch_counters, read_counters, why_no_delta

from .servers import Reply, serving

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
BEFORE = (LOGS / "vllm-0.32-metrics-before.txt").read_text()
AFTER = (LOGS / "vllm-0.32-metrics-after.txt").read_text()
OWN = 4  # requests between the two pages


def test_the_real_page() -> None:
    counters = read_counters(AFTER)
    assert counters.drafts and counters.draft_tokens == 7 * counters.drafts and counters.accepted
    assert len(counters.per_position) == 7 and sum(counters.per_position) == counters.accepted
    assert counters.running == 0 and counters.created is not None and counters.gauges == {}
    facts = difference(read_counters(BEFORE), counters, OWN, 2.5)
    assert facts.delta is not None and facts.foreign == 0 and facts.seconds == 2.5
    assert facts.delta.requests == OWN and facts.delta.drafts and facts.delta.drafts < counters.drafts
    assert sum(facts.delta.per_position) == facts.delta.accepted and facts.delta.cache_hits


def test_engines_and_models_are_summed() -> None:
    second = [line.replace('engine="0"', 'engine="1"') for line in AFTER.splitlines() if line.startswith("vllm:")]
    by_family = AFTER
    for line in second:
        name = line.partition("{")[0]
        by_family = re.sub(rf"(?m)^({re.escape(name)}\{{engine=\"0\".*)$", rf"\1\n{line}", by_family, count=1)
    one, two = read_counters(AFTER), read_counters(by_family)
    assert two.drafts == 2 * (one.drafts or 0) and two.accepted == 2 * (one.accepted or 0)
    assert sum(two.per_position) == two.accepted


def test_resets_are_noticed() -> None:
    before, after = read_counters(BEFORE), read_counters(AFTER)
    assert why_no_delta(before, after, OWN) is None
    assert difference(after, before, 0).delta is None, "smaller"
    later = replace(after, created=(after.created or 0) + 60)
    assert "began anew" in (why_no_delta(before, later, OWN) or "") and difference(before, later, OWN).delta is None
    gone = replace(after, drafts=None)
    assert "vanished" in (why_no_delta(before, gone, OWN) or "")
    fewer = replace(after, per_position=(after.per_position[0], *before.per_position[1:-1], -1.0))
    assert "per position" in (why_no_delta(before, fewer, OWN) or "")
    assert "another process" in (why_no_delta(before, after, OWN + 1) or ""), "a load balancer"


def test_other_traffic_is_counted() -> None:
    before, after = read_counters(BEFORE), read_counters(AFTER)
    assert difference(before, after, OWN - 2).foreign == 2
    assert difference(replace(before, running=3.0), after, OWN).foreign == 3
    assert difference(before, replace(after, running=1.0), OWN - 1).foreign == 2
    silent = replace(before, requests=None)
    assert difference(silent, replace(after, requests=None, running=1.0), OWN).foreign == 1


def test_a_server_without_speculation_still_counts_requests() -> None:
    text = "\n".join(line for line in AFTER.splitlines() if "spec_decode" not in line) + "\n"
    counters = read_counters(text)
    assert counters.drafts is None and counters.per_position == () and counters.requests


def test_sglang() -> None:
    counters = read_counters((LOGS / "sglang-metrics.txt").read_text())
    assert (counters.drafts, counters.accepted, counters.requests, counters.running) == (77, None, 6, 1)
    assert (counters.cache_queries, counters.cache_hits) == (1000, 0)
    assert counters.gauges["sglang:spec_accept_length"] == 4.25


def test_llamacpp() -> None:
    """The real pages, the first before any request: positions are not on it yet, which is no restart."""
    before, after = (read_counters((LOGS / f"llamacpp-metrics-{when}.txt").read_text()) for when in ("before", "after"))
    assert (before.drafts, before.per_position, before.cache_queries) == (0, (), 0)
    delta = difference(before, after, 2).delta
    assert delta is not None and (delta.drafts, delta.draft_tokens, delta.accepted) == (45, 300, 48)
    assert delta.per_position == (25, 12, 6, 3, 1, 1, 0) and sum(delta.per_position) == delta.accepted
    assert (delta.cache_queries, delta.cache_hits, after.running, after.requests) == (74, 24, 0, None)
    late = replace(after, drafts=10.0, per_position=())
    assert "per position" in (why_no_delta(late, after, 0) or "")


def test_llamacpp_rounds_large_counters_and_tells_its_start_beside_the_page() -> None:
    page = (LOGS / "llamacpp-metrics-after.txt").read_text()
    large = page.replace("spec_decode_num_draft_tokens_total 300", "spec_decode_num_draft_tokens_total 1.23457e+06")
    counters = read_counters(large, "26698864298")
    assert counters.draft_tokens is None and counters.drafts == 45 and counters.created == 26698864298
    assert read_counters(page, "soon").created is None


@pytest.mark.parametrize(
    ("reply", "engine", "reason"),
    [
        (Reply(404, '{"detail":"Not Found"}'), "sglang", "404 Not Found (start it with --enable-metrics)"),
        (Reply(501, '{"error":{"message":"no metrics endpoint"}}'), "llama.cpp", "no metrics endpoint (start it with"),
        (Reply(200, "python_info 1.0\n"), "vllm", "--disable-log-stats"),
        (Reply(200, "<html>hello</html>\n"), None, "not in the Prometheus text format"),
    ],
)
def test_metrics_that_are_off_have_a_reason(reply: Reply, engine: str | None, reason: str) -> None:
    with serving({"/metrics": reply}) as url:
        counters, why = fetch_counters(url, engine=engine)
    assert counters is None and reason in why


def test_fetch() -> None:
    with serving({"/metrics": Reply(200, AFTER)}) as url:
        assert fetch_counters(url) == (read_counters(AFTER), "")
