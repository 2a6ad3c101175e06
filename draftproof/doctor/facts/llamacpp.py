"""llama.cpp's own /completion. In one piece it tells accepted and drafted tokens, whose ratio is no acceptance length:
the steps are missing. Streamed, with the timings beside each token, it tells every step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof.doctor.facts import Answer


def read_llamacpp(body: Mapping[str, Any], seconds: float, sent: Sequence[int]) -> Answer:
    """llama.cpp's /completion in one piece. It tells accepted and drafted tokens, and no number of steps."""
    timings = body.get("timings") or {}
    finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(body.get("stop_type", ""))
    return Answer(
        tuple(sent),
        tuple(body.get("tokens") or ()),
        body.get("content") or "",
        finish,
        seconds,
        accepted=timings.get("draft_n_accepted"),
        drafted=timings.get("draft_n"),
        cached_tokens=timings.get("cache_n"),
    )


def read_events(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; [] when it is none."""
    lines = [line for line in content.split(b"\n") if line.startswith((b"data:", b"error:"))]
    try:
        found = [json.loads(line.partition(b":")[2]) for line in lines]
    except ValueError:
        return []
    return [event for event in found if isinstance(event, dict)]


def streamed_whole(events: Sequence[Mapping[str, Any]]) -> bool:
    """A token that ends inside a character is counted by the last event, but is not streamed."""
    *rows, last = events
    return sum(len(row.get("tokens") or ()) for row in rows) == last.get("tokens_predicted")


@dataclass(frozen=True)
class Step:
    """One verification: drafted and accepted tokens. A step without drafts is (0, 0)."""

    drafted: int
    accepted: int


def read_stream(events: Sequence[Mapping[str, Any]], seconds: float, sent: Sequence[int]) -> Answer:
    """The same, streamed with timings_per_token. The last event closes the answer and holds no token. The steps stay
    unknown where a token was not streamed, and where nothing was drafted."""
    *rows, last = events
    ids = tuple(token for row in rows for token in row.get("tokens") or ())
    content = "".join(row.get("content") or "" for row in rows)
    whole = read_llamacpp({**last, "tokens": ids, "content": content}, seconds, sent)
    if not whole.drafted or not streamed_whole(events) or not all("timings" in row for row in rows):
        return whole
    steps = steps_of([row["timings"] for row in rows])
    full = _before_the_limit(steps)
    return replace(
        whole,
        steps=len(full),
        accepted=sum(step.accepted for step in full),
        drafted=sum(step.drafted for step in full),
        per_step=tuple(step.accepted for step in steps),
    )


def steps_of(timings: Sequence[Mapping[str, Any]]) -> list[Step]:
    """From the counts beside each token: they grow with a step's first token, then stay for its accepted drafts. The
    first token comes from the prompt's own forward; one beyond a step's accepted drafts is a step without drafts."""
    found = list[Step]()
    drafted = accepted = left = 0
    for told in timings[1:]:
        now, good = told.get("draft_n", 0), told.get("draft_n_accepted", 0)
        if now != drafted:
            found.append(Step(now - drafted, good - accepted))
            left = good - accepted
        elif left:
            left -= 1
        else:
            found.append(Step(0, 0))
        drafted, accepted = now, good
    return found


def _before_the_limit(steps: Sequence[Step]) -> Sequence[Step]:
    """Without the last steps, which drafted less because no more tokens were asked for: they say less of a drafter."""
    widest = max((step.drafted for step in steps), default=0)
    count = len(steps)
    while count and steps[count - 1].drafted < widest:
        count -= 1
    return steps[:count]
