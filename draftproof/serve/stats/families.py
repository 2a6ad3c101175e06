"""Every metric of the server, declared once: docs/metrics.md and the test of the dashboard read this list.

`vllm:` names have vLLM's meaning, labels and buckets (v1/metrics/loggers.py of 0.32), so that dashboards and alerts
made for it work here; `draftproof:` names say what vLLM has no word for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Reason = Literal["stop", "length", "abort", "error"]
REASONS: Final[tuple[Reason, ...]] = ("stop", "length", "abort", "error")
LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"

FIRST_TOKEN: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP: Final = (0.001, 0.0025, 0.005, *BETWEEN)
TOKENS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # to half a million
ITERATION: Final = (1, *(2**power for power in range(3, 15)))
CHOICES: Final = (1, 2, 5, 10, 20)
NODES: Final = tuple(2**power for power in range(10))


class Families:
    """The metrics of one model. depth: drafts a pass; with 0 nothing about drafts is declared."""

    def __init__(self, registry: CollectorRegistry, model: str, depth: int) -> None:
        self.registry, self.model = registry, model
        self._parents: dict[str, Counter] = {}
        self._of_the_engine()
        self._of_requests()
        if depth:
            self._of_drafts(depth)

    def _of_the_engine(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests that have a slot.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.")
        self.usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the K/V memory in use; 1 is all of it.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that lost their slot for a while.")
        self.prompt = self._counter(
            "vllm:prompt_tokens", "Tokens of prompts, cached ones included; counted when a prompt has been read."
        )
        self.cached = self._counter("vllm:prompt_tokens_cached", "Of these, taken from the prefix cache.")
        self.generated = self._counter("vllm:generation_tokens", "Generated tokens, the first of an answer included.")
        self.iteration = self._histogram(
            "vllm:iteration_tokens_total", "Prompt tokens run and tokens generated, each engine step.", ITERATION
        )
        self.prompt_run = self._counter(
            "draftproof:prompt_tokens_run", "Prompt tokens that went through the target: cached ones do not, those of "
            "a request that lost its slot do so again.",
        )  # fmt: skip
        self.step_seconds = self._histogram("draftproof:step_seconds", "Duration of each engine step.", STEP)

    def _of_requests(self) -> None:
        self.success = {
            reason: self._counter(
                "vllm:request_success",
                "Requests that ended, by reason: stop (a stop token or string, a tool call), length, abort (the client "
                "left, or the time was up), error.",
                finished_reason=reason,
            )
            for reason in REASONS
        }
        self.refused = self._counter("draftproof:requests_refused", "Requests refused because the queue was full.")
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN
        )
        self.between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two steps of a request that brought tokens. As in vLLM, a step with five accepted drafts is one "
            "observation, not six.",
            BETWEEN,
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Decode time over the tokens behind the first, each request.",
            BETWEEN,
        )
        self.latency = self._request("e2e_request_latency", "From arrival to the end.")
        self.queued = self._request("request_queue_time", "From arrival until the prompt began to run.")
        self.prefill = self._request("request_prefill_time", "From the prompt's beginning to the first token.")
        self.decode = self._request("request_decode_time", "From the first token to the last.")
        self.inference = self._request("request_inference_time", "From the prompt's beginning to the last token.")
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens, each request.", TOKENS)
        self.answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of each answer.", TOKENS)
        self.max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of each request.", TOKENS)
        self.choices = self._histogram("vllm:request_params_n", "Choices asked for, each request.", CHOICES)

    def _of_drafts(self, depth: int) -> None:
        spec = "vllm:spec_decode_num_"
        self.drafts = self._counter(spec + "drafts", "Steps of a request that verified at least one drafted token.")
        self.draft_tokens = self._counter(
            spec + "draft_tokens", "Drafted tokens that the target verified; of a tree all its nodes."
        )
        self.accepted = self._counter(spec + "accepted_tokens", "Drafted tokens that became part of an answer.")
        self.reached = [
            self._counter(
                spec + "accepted_tokens_per_pos",
                "Drafts of which more than `position` tokens were accepted; positions count from 0 to the drafts a "
                "pass less one, in a tree they are depths.",
                position=str(position),
            )
            for position in range(depth)
        ]
        self.steps = self._counter(
            "draftproof:spec_decode_steps", "Decoding steps of a request, those without a draft included."
        )
        self.plain = self._counter(
            "draftproof:plain_steps", "Of these, without a draft: the budget, or the request, chose plain decoding."
        )
        self.nodes = self._histogram(
            "draftproof:tree_nodes", "Drafted nodes of each draft; of a chain its length.", NODES
        )

    # ---- one child of a family, with this model's labels

    def _request(self, name: str, text: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", text, REQUEST)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self.registry).labels(self.model, ENGINE)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(self.model, ENGINE)

    def _counter(self, name: str, text: str, **label: str) -> Counter:
        """Several children of one family differ in one more label."""
        if (known := self._parents.get(name)) is None:
            known = self._parents[name] = Counter(name, text, (*LABELS, *label), registry=self.registry)
        return known.labels(self.model, ENGINE, *label.values())
