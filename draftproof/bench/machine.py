"""The machine that numbers come from: `provenance` and the peak of resident memory."""

from __future__ import annotations

from pathlib import Path

from draftproof.provenance import provenance as provenance


def peak_rss() -> int:
    """Most resident bytes of this process so far (0 where the system does not say)."""
    try:
        lines = Path("/proc/self/status").read_text().split("\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def reset_peak_rss() -> None:
    """Start a new peak where Linux lets us; elsewhere the peak stays that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
