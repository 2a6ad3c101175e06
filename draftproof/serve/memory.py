"""How much memory the caches of a server get."""

from __future__ import annotations

import math
from pathlib import Path

GIB = 2**30
GPU_SHARE, CPU_SHARE = 0.8, 0.25  # of what is free when the models are loaded; a CPU's memory is others' too
# Of control groups, as /proc/self/cgroup tells them apart: folder, files of limit and use, the line of memory.stat.
VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
PREFIX_SHARE = 0.25  # of that, for what earlier requests left


def cache_memory(device: str, kv: float | None, prefix: float | None) -> tuple[int, int, str]:
    """(bytes of running requests, bytes of prefixes, the reason), from GiB; None is automatic."""
    if kv is not None and prefix is not None:
        return int(kv * GIB), int(prefix * GIB), "asked for"
    free, share, where = free_memory(device)
    room = free * share
    if kv is None:
        kv = (room - (prefix * GIB if prefix is not None else room * PREFIX_SHARE)) / GIB
    if prefix is None:
        prefix = room * PREFIX_SHARE / GIB
    return int(max(kv, 0) * GIB), int(prefix * GIB), f"auto: of {share:.0%} of the {free / GIB:.1f} GiB free {where}"


def free_memory(device: str) -> tuple[float, float, str]:
    """(bytes, the share that caches may take, where)."""
    import torch

    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return free, GPU_SHARE, f"on {device}"
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = {name: value for name, _, value in (line.partition(":") for line in lines)}
    machine = float(told["MemAvailable"].split()[0]) * 1024
    own = Path("/proc/self/cgroup")
    container = free_in_container(own.read_text(), Path("/sys/fs/cgroup")) if own.exists() else math.inf
    if container < machine:
        return container, CPU_SHARE, "within the container's limit"
    return machine, CPU_SHARE, "in main memory"


def free_in_container(told: str, root: Path) -> float:
    """Bytes that the limits of control groups leave; infinity without a limit. told: /proc/self/cgroup, whose paths may
    be those outside of a container (its own group then lies at the root); root: /sys/fs/cgroup."""
    left = [math.inf]
    for line in told.splitlines():
        _, kinds, path = line.split(":", 2)
        for kind in VERSIONS.keys() & kinds.split(","):
            folder, *names = VERSIONS[kind]
            own = root / folder / path.lstrip("/")
            left += [_left(group, *names) for group in (own, *own.parents) if group.is_relative_to(root)]
    return min(left)


def _left(group: Path, most: str, used: str, cached: str) -> float:
    """Pages of files that could go do not count as used."""
    try:
        limit, taken = ((group / name).read_text().strip() for name in (most, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return math.inf if limit == "max" else float(max(0, int(limit) - int(taken) + int(stat.get(cached, 0))))
    except (OSError, ValueError):  # no such group here
        return math.inf
