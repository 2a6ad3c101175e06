"""What /metrics shows and what the log says, from reports made by hand; numbers are checked against hand-made sums."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

import draftproof.serve
from draftproof.docs import METRICS_PAGE, metrics_page
from draftproof.doctor.facts.log import read_log
from draftproof.doctor.facts.metrics import difference, read_counters
from draftproof.doctor.facts.spec_lines import spec_line
from draftproof.doctor.watch import tick
from draftproof.engine.request import EngineState, Request, StepResult
from draftproof.serve.stats.counts import grown
from draftproof.serve.stats.log_line import LogLine
from draftproof.serve.stats.metrics import TEXT, Metrics
from draftproof.serve.worker import Report, Ticket

DEPTH = 7
SPEC = "vllm:spec_decode_num_"


def ticket(prompt: int = 5, max_tokens: int = 20, arrived: float = 100.0) -> Ticket:
    asked = Request(list(range(1, prompt + 1)), max_tokens)
    return Ticket(None, asked, arrived)  # type: ignore[arg-type]  # nothing here asks the worker


def first(**more: Any) -> StepResult:
    return StepResult(0, [1], 0, None, prefill=True, **more)


def drafted(accepted: int, nodes: int, finish: str | None = None) -> StepResult:
    return StepResult(0, [1] * (accepted + 1), accepted, finish, nodes)


def report(
    *told: tuple[Ticket, StepResult], at: float = 100.0, seconds: float = 0.5, state: EngineState | None = None
) -> Report:
    return Report(list(told), seconds, at, state or EngineState())


def page(metrics: Metrics) -> str:
    app = FastAPI()
    app.include_router(metrics.router)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and answer.headers["content-type"] == TEXT
    return answer.text


def samples(metrics: Metrics) -> dict[str, float]:
    """`name` or `name{label}` of what is no label of every metric -> value."""
    found = {}
    for family in text_string_to_metric_families(page(metrics)):
        for sample in family.samples:
            more = [v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")]
            found[sample.name + (f"{{{','.join(more)}}}" if more else "")] = sample.value
    return found


def test_a_request_from_arrival_to_end() -> None:
    """Arrived at 100, waited 2 s, first token at 103, one step at 104 and one at 106."""
    metrics, one = Metrics("m", DEPTH), ticket(prompt=5, max_tokens=20, arrived=100.0)
    metrics.request(1)
    metrics.step(report((one, first(waited=2.0, cached=4)), at=103.0))
    metrics.step(report((one, drafted(3, 7)), at=104.0))
    metrics.step(report((one, drafted(1, 7, "stop")), at=106.0))
    seen = samples(metrics)
    sums = {
        "vllm:time_to_first_token_seconds": (1, 3.0),
        "vllm:inter_token_latency_seconds": (2, 1.0 + 2.0),
        "vllm:e2e_request_latency_seconds": (1, 6.0),
        "vllm:request_queue_time_seconds": (1, 2.0),
        "vllm:request_prefill_time_seconds": (1, 1.0),
        "vllm:request_decode_time_seconds": (1, 3.0),
        "vllm:request_inference_time_seconds": (1, 4.0),
        "vllm:request_time_per_output_token_seconds": (1, 3.0 / 6),  # 1 + 4 + 2 tokens, six behind the first
        "vllm:request_prompt_tokens": (1, 5),
        "vllm:request_generation_tokens": (1, 7),
        "vllm:request_params_max_tokens": (1, 20),
        "vllm:request_params_n": (1, 1),
        "draftproof:step_seconds": (3, 1.5),
    }
    assert {name: (seen[f"{name}_count"], seen[f"{name}_sum"]) for name in sums} == sums
    assert seen["vllm:prompt_tokens_total"] == 5 and seen["vllm:prompt_tokens_cached_total"] == 4
    assert seen["vllm:generation_tokens_total"] == 7
    assert seen["vllm:request_success_total{stop}"] == 1 and seen["vllm:request_success_total{length}"] == 0
    assert seen["vllm:time_to_first_token_seconds_bucket{2.5}"] == 0
    assert seen["vllm:time_to_first_token_seconds_bucket{5.0}"] == 1


def test_drafts_of_chains_obey_vllms_identities() -> None:
    metrics, one = Metrics("m", DEPTH), ticket()
    metrics.step(report((one, first())))
    for accepted in (0, 1, 3, 7, 2):
        metrics.step(report((one, drafted(accepted, 7))))
    seen = samples(metrics)
    assert (seen[SPEC + "drafts_total"], seen[SPEC + "draft_tokens_total"]) == (5, 35)
    assert seen[SPEC + "accepted_tokens_total"] == 13
    by_position = [seen[f"{SPEC}accepted_tokens_per_pos_total{{{i}}}"] for i in range(DEPTH)]
    assert by_position == [4, 3, 2, 1, 1, 1, 1] and sum(by_position) == 13
    assert f"{SPEC}accepted_tokens_per_pos_total{{{DEPTH}}}" not in seen


def test_trees_count_nodes_and_plain_steps_are_no_drafts() -> None:
    metrics, one = Metrics("m", DEPTH), ticket()
    metrics.step(report((one, first())))
    for result in (drafted(2, 24), drafted(0, 0), drafted(4, 10), drafted(0, 0), drafted(0, 1)):
        metrics.step(report((one, result)))
    seen = samples(metrics)
    assert (seen[SPEC + "drafts_total"], seen[SPEC + "draft_tokens_total"]) == (3, 35)
    assert seen[SPEC + "accepted_tokens_total"] == 6
    assert (seen["draftproof:spec_decode_steps_total"], seen["draftproof:plain_steps_total"]) == (5, 2)
    assert (seen["draftproof:tree_nodes_count"], seen["draftproof:tree_nodes_sum"]) == (3, 35)
    assert seen["draftproof:tree_nodes_bucket{16.0}"] == 2, "1 and 10"


def test_without_a_drafter_nothing_is_said_of_drafts() -> None:
    metrics, one = Metrics("m", 0), ticket()
    metrics.step(report((one, first())))
    metrics.step(report((one, drafted(0, 0, "length"))))
    seen = samples(metrics)
    assert not [name for name in seen if "spec_decode" in name or "tree" in name or "plain" in name]
    assert seen["vllm:generation_tokens_total"] == 2


def test_the_first_word_on_an_end_counts() -> None:
    metrics = Metrics("m", DEPTH)
    by_engine, by_server, never_ran, failed = (ticket() for _ in range(4))
    metrics.step(report((by_engine, first()), (by_server, first()), at=101.0))
    metrics.step(report((by_engine, drafted(1, 7, "length")), at=102.0))
    metrics.finished(by_engine, "abort")
    metrics.finished(by_server, "stop", 103.0)
    metrics.finished(by_server, "abort", 104.0)
    metrics.finished(never_ran, "abort", 110.0)
    metrics.step(report((failed, StepResult(-1, [], 0, "error", error="it broke"))))
    seen = samples(metrics)
    ends = {reason: seen[f"vllm:request_success_total{{{reason}}}"] for reason in ("stop", "length", "abort", "error")}
    assert ends == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert seen["vllm:e2e_request_latency_seconds_count"] == 4 and seen["vllm:e2e_request_latency_seconds_sum"] == 15.0
    assert seen["vllm:request_decode_time_seconds_count"] == 2, "the others never had a token"
    assert seen["draftproof:spec_decode_steps_total"] == 1, "a failure is no step"


def test_a_prompt_that_is_read_again_is_no_new_prompt() -> None:
    """After a preemption the engine runs the prompt, and what was generated, once more."""
    metrics, one = Metrics("m", DEPTH), ticket(prompt=5)
    metrics.step(report((one, first(waited=0.5)), at=101.0))
    metrics.step(report((one, first(waited=9.0, cached=3)), at=120.0))
    seen = samples(metrics)
    assert (seen["vllm:prompt_tokens_total"], seen["vllm:prompt_tokens_cached_total"]) == (5, 0)
    assert seen["vllm:time_to_first_token_seconds_count"] == 1
    assert seen["vllm:inter_token_latency_seconds_sum"] == 19.0
    assert seen["draftproof:spec_decode_steps_total"] == 0


def test_the_engines_own_counts() -> None:
    metrics = Metrics("m", DEPTH)
    metrics.step(report(state=EngineState(3, 2, 0.25, queries=100, hits=40, prompt_tokens=60, preemptions=1)))
    metrics.step(report(state=EngineState(2, 0, 0.5, queries=150, hits=40, prompt_tokens=110, preemptions=1)))
    metrics.step(report(state=EngineState(0, 0, 0.0, queries=150, hits=40, prompt_tokens=110, preemptions=1)))
    seen = samples(metrics)
    assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (0, 0)
    assert (seen["vllm:prefix_cache_queries_total"], seen["vllm:prefix_cache_hits_total"]) == (150, 40)
    assert seen["draftproof:prompt_tokens_run_total"] == 110 and seen["vllm:num_preemptions_total"] == 1
    assert (seen["vllm:iteration_tokens_total_count"], seen["vllm:iteration_tokens_total_sum"]) == (2, 110)
    assert seen["draftproof:step_seconds_count"] == 2, "the third report is of no step"
    again = EngineState(1, 0, 0.1, queries=10, hits=0, prompt_tokens=5, preemptions=0)
    assert grown(EngineState(queries=150, prompt_tokens=110, preemptions=1), again) == again, "the engine began anew"


def test_no_request_makes_a_new_series() -> None:
    metrics = Metrics("m", DEPTH)
    before = set(samples(metrics))
    for number in range(200):
        one = ticket(prompt=1 + number, max_tokens=1 + 7 * number, arrived=float(number))
        metrics.request(1 + number % 9)
        metrics.step(report((one, first()), at=number + 0.1 * number))
        metrics.step(report((one, drafted(number % 8, 7 + number, "length")), at=2.0 * number + 1))
        metrics.refused()
    assert set(samples(metrics)) == before
    assert len(metrics._courses) <= 1, "requests that are gone are forgotten"


def test_the_doctor_and_watch_read_it() -> None:
    metrics, one = Metrics("m", DEPTH), ticket()
    before = read_counters(page(metrics))
    assert before.created is not None and before.drafts == 0 and before.per_position == (0.0,) * DEPTH
    metrics.step(report((one, first()), state=EngineState(1, 0, 0.1, queries=5)))
    for accepted in (3, 1):
        metrics.step(report((one, drafted(accepted, 7)), state=EngineState(1, 0, 0.1, queries=5)))
    metrics.step(report((one, drafted(2, 7, "stop")), state=EngineState(queries=5)))
    after = read_counters(page(metrics))
    facts = difference(before, after, 1)
    assert facts.delta is not None and facts.foreign == 0 and facts.delta.requests == 1
    assert (facts.delta.drafts, facts.delta.draft_tokens, facts.delta.accepted) == (3, 21, 6)
    reading = tick(before, after, 2.0)
    assert reading.state == "drafting" and reading.tau == 3.0 and reading.per_position[:3] == (1.0, 2 / 3, 1 / 3)


# ---- the log


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def logged(line: LogLine, clock: Clock, caplog: pytest.LogCaptureFixture, seconds: float = 10.0) -> list[str]:
    caplog.clear()
    clock.now += seconds
    line.log()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


def feed(line: LogLine, results: Iterable[StepResult], state: EngineState) -> None:
    for result in results:
        line.step(report((ticket(), result), state=state))


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.DEBUG, "draftproof")
    return Clock()


def test_vllms_lines_by_hand(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """20 chains of 3 in 10 s: 17, 12 and 8 of them accept one, two and three tokens at least."""
    line = LogLine(3, clock=clock)
    state = EngineState(2, 1, 0.125, queries=40, hits=10, prompt_tokens=30)
    counts = [0] * 3 + [1] * 5 + [2] * 4 + [3] * 8
    feed(line, [first(), *(drafted(accepted, 3) for accepted in counts)], state)
    told, spec = logged(line, clock, caplog)
    assert told == (
        "Engine 000: Avg prompt throughput: 3.0 tokens/s, Avg generation throughput: 5.8 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    assert spec == (
        "SpecDecoding metrics: Mean acceptance length: 2.85, Accepted throughput: 3.70 tokens/s, Drafted throughput: "
        "6.00 tokens/s, Accepted: 37 tokens, Drafted: 60 tokens, Per-position acceptance rate: 0.850, 0.600, 0.400, "
        "Avg Draft acceptance rate: 61.7%"
    )
    facts = read_log(f"(EngineCore pid=7) INFO 11-30 10:00:00 [log_line.py:100] {told}\n{spec}\n")
    assert len(facts.lines) == 1 and not facts.truncated and facts.lines[0].problems == ()
    assert (facts.lines[0].mean_length, facts.lines[0].accepted, facts.lines[0].drafted) == (2.85, 37, 60)
    assert facts.lines[0].per_position == (0.85, 0.6, 0.4)


def test_trees_name_their_largest_so_that_the_sums_are_not_doubted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    line = LogLine(3, clock=clock)
    feed(line, [drafted(3, 24), drafted(3, 12), drafted(0, 0), drafted(2, 24)], EngineState())
    _, spec = logged(line, clock, caplog)
    assert "Accepted: 8 tokens, Drafted: 60 tokens" in spec and spec.endswith(", Largest draft: 24 nodes")
    read = spec_line(spec)
    assert (
        read is not None and read.problems == () and (read.mean_length, read.per_position) == (3.67, (1.0, 1.0, 0.667))
    )
    bare = spec_line(spec.removesuffix(", Largest draft: 24 nodes"))
    assert bare is not None and "in at least 20 drafts" in bare.problems[0], "as chains of 3 the numbers are wrong"
    edited = spec_line(spec.replace("Accepted: 8 ", "Accepted: 9 "))
    assert edited is not None and edited.problems, "an edited line is found out all the same"


@pytest.mark.parametrize("shape", ["chains", "trees"])
def test_every_printed_line_survives_the_doctors_sums(
    shape: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    line = LogLine(DEPTH, clock=clock)
    for number in range(1, 60):
        for step in range(number):
            accepted = (step * step + number) % (DEPTH + 1)
            nodes = DEPTH if shape == "chains" else accepted + 1 + (11 * step) % 40
            feed(line, [drafted(accepted, nodes)], EngineState())
        read = spec_line(logged(line, clock, caplog, seconds=0.1 * number)[-1])
        assert read is not None and read.problems == (), read.text


def test_an_idle_server_is_silent(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    line = LogLine(3, device="cpu", clock=clock)
    assert logged(line, clock, caplog) == [], "before the first request"
    feed(line, [first(), drafted(1, 3)], EngineState(1, prompt_tokens=5))
    assert len(logged(line, clock, caplog)) == 2
    (quiet,) = logged(line, clock, caplog)
    assert "Avg generation throughput: 0.0 tokens/s" in quiet and "CPU KV cache" in quiet and "hit rate" not in quiet
    assert logged(line, clock, caplog) == [] and len(caplog.records) == 1, "and at DEBUG from then on"
    feed(line, [drafted(0, 0)], EngineState(1, prompt_tokens=5, preemptions=2))
    (plain,) = logged(line, clock, caplog)
    assert "Preemptions: 2" in plain, "and no second line without a draft"


def test_the_task_tells_once_an_interval_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "draftproof")

    async def serve() -> None:
        line = LogLine(3, interval=0.05)
        task = asyncio.create_task(line.run())
        feed(line, [drafted(1, 3)], EngineState())
        await asyncio.sleep(0.08)
        assert len(caplog.records) == 2
        feed(line, [drafted(3, 3)], EngineState())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(serve())
    lengths = [one.mean_length for one in read_log("\n".join(r.getMessage() for r in caplog.records)).lines]
    assert lengths == [2.0, 4.0]


# ---- what is said about them


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert METRICS_PAGE.read_text(encoding="utf-8") == metrics_page(), "run `make docs`"


def exposed(metrics: Metrics) -> tuple[set[str], set[str]]:
    """Names of samples, and of labels."""
    families = list(text_string_to_metric_families(page(metrics)))
    told = [sample for family in families for sample in family.samples]
    return {sample.name for sample in told}, {label for sample in told for label in sample.labels}


def dashboard() -> dict[str, Any]:
    path = Path(draftproof.serve.__file__).parent / "stats" / "grafana.json"
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    names, labels = exposed(Metrics("m", DEPTH))
    board = dashboard()
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [one["definition"] for one in board["templating"]["list"] if one["type"] == "query"]
    used = {name for expr in asked for name in re.findall(r"\b(?:vllm|draftproof|process)[:_]\w+", expr)}
    assert len(asked) > 30 and used <= names, used - names
    said = {
        label for expr in asked for label in re.findall(r"by \((\w+)\)|[{,](\w+)=|, (\w+)\)", expr) for label in label
    }
    assert said - {""} == {"model_name", "le", "position", "finished_reason"} <= labels
    legends = {
        label
        for p in board["panels"]
        for t in p.get("targets", [])
        for label in re.findall(r"{{(\w+)}}", t["legendFormat"])
    }
    assert legends == {"position", "finished_reason"}


def test_the_dashboard_shows_what_operators_look_for() -> None:
    board = dashboard()
    used = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", []))
    for name in (
        SPEC + "drafts_total", SPEC + "accepted_tokens_per_pos_total", "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
    ):  # fmt: skip
        assert name in used
    assert board["schemaVersion"] >= 39 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) and all(
        x + p["gridPos"]["w"] <= 24 for (x, _), p in zip(places, board["panels"], strict=True)
    )


@pytest.mark.vllm
def test_the_names_are_those_of_the_real_vllm() -> None:
    venv = Path(os.environ.get("DRAFTPROOF_VLLM_VENV", "~/venvs/vllm-cpu")).expanduser()
    if (root := next(venv.glob("lib/python3*/site-packages/vllm/v1"), None)) is None:
        pytest.skip(f"no vLLM in {venv}; `make test-vllm` installs it from ../shared/vllm-cpu")
    source = (root / "metrics/loggers.py").read_text() + (root / "spec_decode/metrics.py").read_text()
    theirs = set(re.findall(r'"(vllm:\w+)"', source))
    ours = {one.name for one in Metrics("m", DEPTH).registry.collect() if one.name.startswith("vllm:")}
    assert len(ours) > 20 and ours <= theirs, ours - theirs
