"""Prometheus metrics of the server, fed by the worker's reports; `families.py` says what each of them means.

Everything here runs in the event loop, the page too, so a scrape sees no step half counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from draftproof.engine.request import EngineState, StepResult
from draftproof.serve.stats.counts import Drafts, grown
from draftproof.serve.stats.families import Families, Reason
from draftproof.serve.worker import Report, Ticket

# Every Prometheus reads it. Not OpenMetrics: there prometheus_client 0.26 writes `_` for the `:` of a sample's name.
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Course:
    """One request by time.monotonic(): its prompt began to run, its first token and its last one came."""

    began: float = 0.0
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    ended: bool = False


class Metrics:
    """model: the label of every metric. depth: drafts a pass, 0 without a drafter.

    `step` goes to Worker(report=...). The API says what the reports cannot know: `request` for every request it takes,
    `finished` for one that it ends itself, `refused` for one that found the queue full.
    """

    def __init__(self, model: str, depth: int, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_start_time_seconds, memory, files
        self.families, self.depth = Families(self.registry, model, depth), depth
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._page, include_in_schema=False)
        self._state = EngineState()
        self._courses: WeakKeyDictionary[Ticket, Course] = WeakKeyDictionary()

    def step(self, report: Report) -> None:
        """Count one step of the engine. What the engine finished is finished here, too."""
        run = self._engine(report.state)
        drafts, generated = Drafts(self.depth), 0
        for ticket, result in report.results:
            generated += len(result.tokens)
            if self.depth:
                drafts.add(result)
                self._nodes(result)
            self._follow(ticket, result, report.stepped)
            if result.finish is not None:
                self.finished(ticket, cast(Reason, result.finish), report.stepped)
        self.families.generated.inc(generated)
        if run or generated:
            self.families.iteration.observe(run + generated)
            self.families.step_seconds.observe(report.seconds)
        if drafts.steps:
            self._drafts(drafts)

    def request(self, n: int) -> None:
        """A request of the API was taken, for `n` choices."""
        self.families.choices.observe(n)

    def refused(self) -> None:
        """A request of the API found the queue full."""
        self.families.refused.inc()

    def finished(self, ticket: Ticket, reason: Reason, at: float | None = None) -> None:
        """Call it with "stop" where a stop string ends the answer, "abort" where the client has gone or the time is up,
        "error" where the server breaks it off. The first call for a ticket counts, an engine's own end included.

        A request that never got a token has no times of prefill and decode. at: time.monotonic(), default now.
        """
        course = self._courses.setdefault(ticket, Course())
        if course.ended:
            return
        course.ended = True
        families = self.families
        families.success[reason].inc()
        families.latency.observe((time.monotonic() if at is None else at) - ticket.arrived)
        families.prompt_length.observe(len(ticket.request.prompt_ids))
        families.answer_length.observe(course.tokens)
        families.max_tokens.observe(ticket.request.max_tokens)
        if course.first is not None:
            decode = course.last - course.first
            families.queued.observe(course.began - ticket.arrived)
            families.prefill.observe(course.first - course.began)
            families.decode.observe(decode)
            families.inference.observe(course.last - course.began)
            families.per_token.observe(decode / (course.tokens - 1) if course.tokens > 1 else 0.0)

    # ---- parts of a step

    def _engine(self, state: EngineState) -> int:
        """The engine's own counts; returns the prompt tokens that were run."""
        families, more = self.families, grown(self._state, state)
        self._state = state
        families.running.set(state.running)
        families.waiting.set(state.waiting)
        families.usage.set(state.usage)
        families.queries.inc(more.queries)
        families.hits.inc(more.hits)
        families.preemptions.inc(more.preemptions)
        families.prompt_run.inc(more.prompt_tokens)
        return more.prompt_tokens

    def _follow(self, ticket: Ticket, result: StepResult, now: float) -> None:
        """Tokens of one request. Only its first prefill is one: after a preemption the engine runs it again."""
        if not result.tokens:
            return
        course = self._courses.setdefault(ticket, Course())
        if course.first is None:
            course.began, course.first = ticket.arrived + result.waited, now
            self.families.first_token.observe(now - ticket.arrived)
            self.families.prompt.inc(len(ticket.request.prompt_ids))
            self.families.cached.inc(result.cached)
        else:
            self.families.between.observe(now - course.last)
        course.last = now
        course.tokens += len(result.tokens)

    def _nodes(self, result: StepResult) -> None:
        if result.nodes and not result.prefill:
            self.families.nodes.observe(result.nodes)

    def _drafts(self, drafts: Drafts) -> None:
        families = self.families
        families.steps.inc(drafts.steps)
        families.plain.inc(drafts.plain)
        families.drafts.inc(drafts.drafts)
        families.draft_tokens.inc(drafts.nodes)
        families.accepted.inc(drafts.accepted)
        for counter, count in zip(families.reached, drafts.reached, strict=True):
            counter.inc(count)

    async def _page(self) -> Response:
        return Response(generate_latest(self.registry), headers={"Content-Type": TEXT})
