"""Metrics lines of engines' logs, and the identities that a line nobody edited obeys (engines.md 2.1).

`mean_length` is always tokens a verify step, the bonus token included:

    vLLM       as printed                      rates per position over drafts, counts of the interval
    draftproof vLLM's line; after trees        "Largest draft: 24 nodes" ends it: more than there are positions
    SGLang     "accept len" as printed         no counts
    llama.cpp  "mean len" as printed           counts of one request; "draft acceptance" is accepted / drafted tokens
               "statistics" line (-lv 4)       1 + accepted tokens / drafts, counts since the start, rates per position
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from draftproof.doctor.facts import SpecLine

NUMBER = r"(-?[\d.]+|nan)"
VLLM_START = re.compile(r"(?<!\w)SpecDecoding metrics:")  # not DiffusionDecoding metrics, the same data in other terms
MEAN = re.compile(rf"Mean acceptance length: {NUMBER}")
VLLM = re.compile(
    rf"Mean acceptance length: {NUMBER}, Accepted throughput: {NUMBER} tokens/s, "
    rf"Drafted throughput: {NUMBER} tokens/s, Accepted: (-?\d+) tokens, Drafted: (-?\d+) tokens, "
    rf"Per-position acceptance rate: ([-\d., ]*), Avg Draft acceptance rate: {NUMBER}%"
    r"(?:, Largest draft: (\d+) nodes)?"
)
SGLANG = re.compile(rf"Decode batch.*?\baccept len: {NUMBER}, accept rate: {NUMBER}")
SGLANG_START = re.compile(r"Decode batch.*\baccept len: [\d.]*(?:, accept rate: [\d.]*)?$")
LLAMA = re.compile(
    rf"draft acceptance(?: rate)?\s*=\s*{NUMBER}\s*\(\s*(\d+) accepted\s*/\s*(\d+) generated\)"
    rf"(?:, mean len =\s*{NUMBER})?"
)
STATISTICS = re.compile(
    r"statistics\s+(\S+?):?\s.*#gen drafts\s*=\s*(\d+), #acc drafts\s*=\s*(\d+), #gen tokens\s*=\s*(\d+), "
    r"#acc tokens\s*=\s*(\d+)(?:.*#acc rate/pos = \(([\d., ]*)\))?"
)
MEAN_UNIT, RATE_UNIT, PERCENT_UNIT, SPEED_UNIT = 0.005, 0.0005, 0.05, 0.005  # half of the last digit printed
EPSILON = 1e-9
SEARCH = 20_000


def spec_line(message: str, block_size: int | None = None) -> SpecLine | None:
    """One line as a SpecLine; None when it is no metrics line, or holds no mean length. `block_size` is SGLang's, as
    its start-up lines tell it."""
    if VLLM_START.search(message):
        return _vllm(message)
    if found := SGLANG.search(message):
        mean, rate = float(found[1]), float(found[2])
        return SpecLine(message, mean, None, None, (), tuple(_sglang_problems(mean, rate, block_size, message)))
    if found := LLAMA.search(message):
        return _llama(message, found)
    if (found := STATISTICS.search(message)) and int(found[2]):
        drafts, accepted_drafts, drafted, accepted = (int(found[n]) for n in (2, 3, 4, 5))
        wrong = accepted > drafted or accepted_drafts > drafts
        problems = ("more was accepted than drafted",) if wrong else ()
        rates = tuple(float(text) for text in (found[6] or "").split(",") if text.strip())
        return SpecLine(message, 1 + accepted / drafts, accepted, drafted, rates, problems)
    return None


def is_cut(message: str) -> bool:
    """A metrics line whose end is missing."""
    if VLLM_START.search(message):
        return VLLM.search(message) is None
    return SGLANG_START.search(message) is not None and SGLANG.search(message) is None


def without_mean(message: str) -> bool:
    """A line of older llama.cpp and of ik_llama.cpp, whose counts do not tell the number of steps."""
    found = LLAMA.search(message)
    return found is not None and found[4] is None


def _vllm(message: str) -> SpecLine | None:
    if (found := VLLM.search(message)) is None:
        start = MEAN.search(message)
        return start and SpecLine(message, float(start[1]), None, None, (), ("the line is cut or was edited",))
    mean, rate = float(found[1]), float(found[7])
    accepted, drafted = int(found[4]), int(found[5])
    try:
        rates = tuple(float(text) for text in found[6].split(",") if text.strip())
    except ValueError:
        return SpecLine(message, mean, accepted, drafted, (), ("the rates per position are no numbers",))
    problems = [
        *_rate_problems(rates, mean),
        *_count_problems(accepted, drafted, mean, rate, rates, int(found[8] or len(rates))),
        *_speed_problems(accepted, drafted, float(found[2]), float(found[3])),
    ]
    return SpecLine(message, mean, accepted, drafted, rates, tuple(problems))


def _rate_problems(rates: tuple[float, ...], mean: float) -> Iterator[str]:
    if any(not 0 <= rate <= 1 for rate in rates):
        yield "a rate per position is outside 0 and 1"
    if any(late > early for early, late in pairwise(rates)):
        yield "the rates per position rise, but a position is only reached over the one before"
    if abs(sum(rates) - (mean - 1)) > MEAN_UNIT + RATE_UNIT * len(rates) + EPSILON:
        yield f"the rates per position add up to {sum(rates):.3f}, the mean length less one is {mean - 1:.2f}"


def _count_problems(
    accepted: int, drafted: int, mean: float, rate: float, rates: tuple[float, ...], widest: int
) -> Iterator[str]:
    """widest: drafted tokens of one draft at most, the number of positions unless drafts are trees."""
    if not 0 <= accepted <= drafted:
        yield f"{accepted} accepted of {drafted} drafted tokens"
        return
    if drafted == 0:
        return
    if math.isnan(rate) or abs(100 * accepted / drafted - rate) > PERCENT_UNIT + EPSILON:
        yield f"the acceptance rate is {rate}%, the counts give {100 * accepted / drafted:.1f}%"
    # Drafts are at least drafted / K; more where a grammar took drafts back or K changes.
    if not rates or not widest:
        return
    least = math.ceil(drafted / widest)
    if accepted / least < mean - 1 - MEAN_UNIT - EPSILON:
        yield f"{accepted} accepted tokens in at least {least} drafts give less than a mean length of {mean:.2f}"
    elif not _any_number_of_drafts(accepted, least, drafted, mean, rates):
        yield "no number of drafts gives both the counts and the rates per position"


def _any_number_of_drafts(accepted: int, least: int, most: int, mean: float, rates: tuple[float, ...]) -> bool:
    """Is there a number of drafts for which the mean length and every rate is a count over it, adding up?"""
    gain = mean - 1
    low = max(least, math.ceil(accepted / (gain + MEAN_UNIT) - EPSILON) if gain > -MEAN_UNIT else most)
    high = most if gain <= MEAN_UNIT else min(most, math.floor(accepted / (gain - MEAN_UNIT) + EPSILON))
    if high - low > SEARCH:  # so many drafts that rounding hides any fault
        return True
    return any(_fits(drafts, accepted, rates) for drafts in range(low, high + 1))


def _fits(drafts: int, accepted: int, rates: tuple[float, ...]) -> bool:
    lowest = [math.ceil((rate - RATE_UNIT) * drafts - EPSILON) for rate in rates]
    highest = [math.floor((rate + RATE_UNIT) * drafts + EPSILON) for rate in rates]
    each = all(low <= high for low, high in zip(lowest, highest, strict=True))
    return each and sum(lowest) <= accepted <= sum(highest)


def _speed_problems(accepted: int, drafted: int, accepted_speed: float, drafted_speed: float) -> Iterator[str]:
    """Both throughputs are over the same seconds."""
    seconds = [_seconds(accepted, accepted_speed), _seconds(drafted, drafted_speed)]
    if max(low for low, _ in seconds) > min(high for _, high in seconds) + EPSILON:
        yield "the two throughputs are not over the same time"


def _seconds(count: int, speed: float) -> tuple[float, float]:
    low = count / (speed + SPEED_UNIT)
    return low, count / (speed - SPEED_UNIT) if speed > SPEED_UNIT else math.inf


def _sglang_problems(mean: float, rate: float, block_size: int | None, message: str) -> Iterator[str]:
    if mean < 1 or not 0 <= rate <= 1:
        yield f"an accept length of {mean} with an accept rate of {rate}"
    elif block_size and block_size > 1 and "cap len" not in message:
        width = block_size - 1
        if abs((mean - 1) / width - rate) > MEAN_UNIT + MEAN_UNIT / width + EPSILON:
            yield f"an accept length of {mean} at block size {block_size} is a rate of {(mean - 1) / width:.2f}"


def _llama(message: str, found: re.Match[str]) -> SpecLine | None:
    if found[4] is None:
        return None
    rate, accepted, drafted, mean = float(found[1]), int(found[2]), int(found[3]), float(found[4])
    problems = []
    if accepted > drafted:
        problems.append("more was accepted than drafted")
    elif drafted and abs(accepted / drafted - rate) > 5e-6 + EPSILON:
        problems.append(f"the acceptance is {rate}, the counts give {accepted / drafted:.5f}")
    return SpecLine(message, mean, accepted, drafted, (), tuple(problems))
