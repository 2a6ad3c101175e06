"""Memory on each GPU before anything runs: what configs and file sizes tell, part by part, and what they do not.

Engines measure activations when they start and give what is left to K/V rows. Those, and the padding of a cache's
blocks and groups, are not counted: what is too much here is too much there, the reverse is not shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from draftproof.check.deployment import Deployment
from draftproof.check.memory_parts import (
    TARGET,
    Part,
    context_length,
    draft_rows,
    drafter_weights,
    gib,
    sequence_count,
    states,
    target_rows,
    target_weights,
)
from draftproof.config.finding import Finding, error, note, warning

UTILISATION: Final = 0.92  # vLLM 0.32's own default of --gpu-memory-utilization


@dataclass(frozen=True)
class Memory:
    """`gpu_bytes` is one GPU's memory, of which the engine takes `utilisation`. `context` is None when unknown."""

    parts: tuple[Part, ...]
    gpu_bytes: int | None
    utilisation: float
    context: int | None
    sequences: int

    @property
    def known_bytes(self) -> int | None:
        """What one GPU holds at least: weights, and one sequence of full length. None without the target's weights."""
        weights = [part for part in self.parts if part.name == TARGET]
        return None if any(part.bytes is None for part in weights) else self.floor_bytes

    @property
    def floor_bytes(self) -> int:
        """The same from what is known, the target's weights or not."""
        return sum((p.bytes or 0) // (self.sequences if p.a_sequence else 1) for p in self.parts)

    @property
    def total_bytes(self) -> int:
        """All known parts, every sequence at full length."""
        return sum(part.bytes or 0 for part in self.parts)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.gpu_bytes is None else int(self.gpu_bytes * self.utilisation)

    @property
    def rows_bytes(self) -> int | None:
        """What is left for K/V rows that grow with the context, every sequence's states and windows set aside."""
        if self.limit_bytes is None or self.known_bytes is None:
            return None
        return max(0, self.limit_bytes - sum(part.bytes or 0 for part in self.parts if not part.a_token))

    @property
    def rows_fit(self) -> int | None:
        """Tokens of all sequences together whose K/V rows fit."""
        cost = sum(part.a_token for part in self.parts)
        return self.rows_bytes // cost if self.rows_bytes is not None and cost else None

    def as_dict(self) -> dict[str, Any]:
        computed = ("known_bytes", "total_bytes", "limit_bytes", "rows_bytes", "rows_fit")
        return {**asdict(self), **{name: getattr(self, name) for name in computed}}


def estimate(
    deployment: Deployment,
    *,
    target_bytes: int | None = None,
    gpu_bytes: int | None = None,
    utilisation: float = UTILISATION,
) -> Memory:
    """`target_bytes`: the size of the target's weights when it is known better than from its folder (a GGUF, a
    quantisation made at loading). `gpu_bytes`: the memory of one GPU."""
    parts = [
        target_weights(deployment, target_bytes),
        *drafter_weights(deployment),
        *target_rows(deployment),
        *draft_rows(deployment),
        *states(deployment),
        Part("activations, CUDA context and graphs", None, "not estimated: the engine measures them when it starts"),
    ]
    return Memory(tuple(parts), gpu_bytes, utilisation, context_length(deployment), sequence_count(deployment))


def memory_findings(memory: Memory) -> list[Finding]:
    """What the estimate says; sizes are compared only when the GPU's is known."""
    found, limit = [], memory.limit_bytes
    if limit is not None and memory.floor_bytes > limit:
        message = "weights and K/V rows of one sequence alone do not fit on a GPU"
        fix = "lower the context, quantise K/V or weights, or spread the target over more GPUs (tensor parallel)"
        seen = f"{gib(memory.floor_bytes)} of {gib(limit)}"
        found.append(error("memory-exceeds-gpu", message, f"at most {gib(limit)}", seen, "memory estimate", fix))
    elif limit is not None and memory.known_bytes is None:
        how = next(part.how for part in memory.parts if part.name == TARGET)
        message = "the size of the target's weights cannot be told, so nobody knows here whether they fit"
        fix = "name the target's folder with its weights, or the size of its weights"
        found.append(warning("memory-unknown", message, "a size", how, "memory estimate", fix))
    else:
        found.append(note("memory-estimate", _summary(memory), where="memory estimate"))
    return found


def _summary(memory: Memory) -> str:
    known = memory.floor_bytes
    text = f"at least {gib(known)} on each GPU for weights and one sequence of {memory.context or 'unknown'} tokens"
    if memory.rows_bytes is None:
        return text + "; activations are not in it"
    beside = f"; beside weights and what {memory.sequences} sequences hold whatever their length, "
    text += f"{beside}{gib(memory.rows_bytes)} stay for K/V rows and activations"
    if memory.rows_fit is not None:
        text += f", at most {memory.rows_fit} tokens in all"
        if memory.context and memory.rows_fit < memory.context * memory.sequences:
            text += f", fewer than {memory.sequences} x {memory.context}: then requests wait or are preempted"
    return text
