"""How much memory the caches of a server get."""

from __future__ import annotations

from pathlib import Path

GIB = 2**30
GPU_SHARE, CPU_SHARE = 0.8, 0.25  # of what is free when the models are loaded; a CPU's memory is others' too
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
    return float(told["MemAvailable"].split()[0]) * 1024, CPU_SHARE, "in main memory"
