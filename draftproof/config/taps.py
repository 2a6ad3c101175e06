"""Checks of the target layer ids: range, order and spacing."""

from __future__ import annotations

from collections.abc import Iterator

from draftproof.config.drafter import DrafterSpec
from draftproof.config.finding import Finding, error, warning


def usual_taps(layers: int, count: int, start: int = 1) -> tuple[int, ...]:
    """`count` taps spaced evenly from `start` to the third-last of `layers` (z-lab starts at 1, DFlash2 at
    5)."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(start + i * (layers - 3 - start) / (count - 1)) for i in range(count))


def check_order(drafter: DrafterSpec) -> Iterator[Finding]:
    if list(drafter.taps) != sorted(drafter.taps):
        yield warning(
            "taps-not-ascending",
            "the target layer ids are not in ascending order; vLLM sorts them, so its features arrive in another order",
            " ".join(map(str, sorted(drafter.taps))),
            " ".join(map(str, drafter.taps)),
            drafter.sources.get("taps", "taps"),
            "check the order against the drafter's own repository",
        )


def check_taps(drafter: DrafterSpec, layers: int, why: str) -> Iterator[Finding]:
    seen = " ".join(map(str, drafter.taps))
    where = drafter.sources.get("taps", "taps")
    outside = [tap for tap in drafter.taps if not -1 <= tap < layers]
    if outside:
        yield error(
            "taps-out-of-range",
            f"target layer ids {outside} do not exist: {why}",
            f"0 to {layers - 1}",
            seen,
            where,
            "use the target this drafter was made for, or take the list from the drafter's own repository",
        )
        return
    late = [tap for tap in drafter.taps if tap > layers - 3]
    if late:
        yield warning(
            "taps-late",
            f"target layer ids {late} lie beyond the third-last layer, where published lists usually end",
            f"at most {layers - 3}",
            seen,
            where,
            "check the list, and whether it counts layers from 0",
        )
    yield from _spacing(drafter, layers, seen, where)


def _spacing(drafter: DrafterSpec, layers: int, seen: str, where: str) -> Iterator[Finding]:
    count = len(drafter.taps)
    if layers < count + 3:
        return
    usual = [usual_taps(layers, count), usual_taps(layers, count, start=5)]
    ordered = tuple(sorted(drafter.taps))
    if ordered in usual:
        return
    message = "the target layer ids are off the usual even spacing"
    for shift, whose in ((1, "counted from 1, as speculators and vLLM do"), (-1, "each one too low")):
        if tuple(tap - shift for tap in ordered) in usual:
            message += f"; they are the usual list {whose}"
    yield warning(
        "taps-unusual",
        message,
        " or ".join(" ".join(map(str, taps)) for taps in dict.fromkeys(usual)),
        seen,
        where,
        "check the list against the drafter's own repository; unusual lists exist",
    )
