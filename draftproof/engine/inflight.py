"""One request inside the engine: what the host knows of it. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftproof.engine.request import Request, SamplingParams


@dataclass(eq=False)
class InFlight:
    """rows: committed in the caches. ids: the text so far. A request that lost its slot starts again with rows 0: its
    text is run once more as if it were a prompt, and goes on where it was."""

    number: int
    request: Request
    arrived: float  # time.monotonic()
    params: SamplingParams = field(init=False)  # with a seed
    ids: list[int] = field(init=False)
    prompt: tuple[str, int] = field(init=False)  # the same for the same prompt
    slot: int = -1
    rows: int = 0
    kept: int = 0  # rows that the prefix cache was given
    stated: int = 0  # where it was given a state last
    started: float | None = None
    cached: int = 0  # prompt rows that came from the prefix cache, at the first start
    running: bool = True
    alone: bool = False  # something failed while it was in a batch: by itself it shows whose fault that is
    turn: int = 0  # when a stretch of its prompt was run last, or when it came into its slot
    looked: bool = False  # for what earlier requests left, since it is in its slot

    def __post_init__(self) -> None:
        self.params, self.ids = self.request.sampling.seeded(), list(self.request.prompt_ids)
        self.prompt = ("prompt", hash(tuple(self.ids)))

    @property
    def emitted(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def goal(self) -> int:
        """Rows to run before it can decode: all of a prompt; of a text that goes on, all but the last token."""
        return len(self.ids) - (self.emitted > 0)

    @property
    def decoding(self) -> bool:
        return self.emitted > 0 and self.rows == self.goal

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_tokens - self.emitted if self.running else 0

    def take(self, tokens: list[int]) -> str | None:
        """Add the tokens; the finish reason if they end the request."""
        self.ids += tokens
        self.rows = self.goal
        stopped = tokens[-1] in self.request.stop_ids
        finish = "stop" if stopped else "length" if self.left == 0 else None
        self.running = finish is None
        return finish
