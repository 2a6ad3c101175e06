"""What one step, or an interval of steps, did: drafts and their fate, and how far the engine's own counts went."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from draftproof.engine.request import EngineState, StepResult

GAUGES = ("running", "waiting", "usage")  # of EngineState: they go up and down


@dataclass
class Drafts:
    """A draft is a request's step that verified at least one drafted node. reached[i]: drafts of which i + 1 tokens or
    more were accepted; as long as `depth`, the drafts a pass. widest: nodes of the largest draft.

    In a chain every node has a position of its own, so `nodes` are draft tokens in vLLM's sense; in a tree several
    nodes share a position, and `accepted / nodes` is no acceptance rate.
    """

    depth: int
    steps: int = 0
    plain: int = 0
    drafts: int = 0
    nodes: int = 0
    accepted: int = 0
    widest: int = 0
    reached: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.depth

    def add(self, result: StepResult) -> None:
        """The prompt's own token is no step of drafting, nor is a failure."""
        if result.prefill or result.finish == "error":
            return
        self.steps += 1
        if not result.nodes:
            self.plain += 1
            return
        self.drafts += 1
        self.nodes += result.nodes
        self.accepted += result.accepted
        self.widest = max(self.widest, result.nodes)
        for position in range(result.accepted):
            self.reached[position] += 1


def grown(before: EngineState, after: EngineState) -> EngineState:
    """`after` with its totals as what was added since `before`; a total that fell began anew."""
    added = {}
    for name in (one.name for one in fields(EngineState) if one.name not in GAUGES):
        early, late = getattr(before, name), getattr(after, name)
        added[name] = late - early if late >= early else late
    return EngineState(after.running, after.waiting, after.usage, **added)
