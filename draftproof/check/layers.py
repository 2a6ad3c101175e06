"""What each draft layer is asked to see and what the release lets it see."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from draftproof.check.deployment import Deployment
from draftproof.check.rules import Applied


@dataclass(frozen=True)
class LayerView:
    """`window` in rows, None for the whole context; `causal` inside the block. `runs_causal` is None where the
    data cannot say."""

    layer: int
    window: int | None
    causal: bool
    runs_window: int | None
    runs_causal: bool | None

    @property
    def window_agrees(self) -> bool:
        return self.window == self.runs_window


def layer_views(deployment: Deployment, applied: Applied) -> tuple[LayerView, ...]:
    """One view a draft layer. A window that covers the whole context is as good as none."""
    if deployment.drafter is None:
        return ()
    context = deployment.options.max_model_len
    dropped, causal = applied.effect("window") == "none", applied.effect("causal")
    views = []
    for index, layer in enumerate(deployment.drafter.layers):
        window = None if layer.window is None or (context and context <= layer.window) else layer.window
        runs = {"all": True, "none": False, "unknown": None}.get(causal, layer.causal)
        views.append(LayerView(index, window, layer.causal, None if dropped else window, runs))
    return tuple(views)


def show_windows(windows: list[int | None]) -> str:
    """`4 x 2048, full`: runs of equal layers."""
    runs = [(len(list(run)), "full" if value is None else str(value)) for value, run in groupby(windows)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for count, text in runs)


def show_causal(flags: list[bool | None]) -> str:
    words = {True: "causal", False: "bidirectional", None: "not known"}
    runs = [(len(list(run)), words[value]) for value, run in groupby(flags)]
    return ", ".join(text if count == 1 else f"{count} x {text}" for count, text in runs)


def tap_indices(deployment: Deployment, applied: Applied) -> tuple[int, ...]:
    """The captured points as the engine counts them, its shift included."""
    if deployment.drafter is None:
        return ()
    shift = deployment.engine.tap_offset + (applied.effect("tap_shift") or 0)
    return tuple(tap + shift for tap in deployment.drafter.taps)
