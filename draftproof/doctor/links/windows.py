"""Does each draft layer see as much of the context as it was trained to see?"""

from __future__ import annotations

from draftproof.check.layers import show_windows
from draftproof.config.drafter import LayerSpec
from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import options
from draftproof.doctor.evidence import draft_layers, lack_of_layers, seen_inside, seen_layers_required
from draftproof.doctor.facts import Facts, LayerInside

CODE = "doctor-windows"
TITLE = "each draft layer runs with its trained window"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside")
PROVES = "The window that each layer's attention call was seen to run with is the trained one."
REFUTES = "A call ran with another window, or, where no call was seen, the loaded module holds another one."
FIX = "use a release and runner that keep the window of each layer (vLLM 0.26 or newer, V2), and state layer_types"


def required(facts: Facts) -> bool:
    return seen_layers_required(facts)


def judge(facts: Facts) -> Finding:
    layers = draft_layers(facts)
    if not layers:
        return lack_of_layers(CODE, facts)
    context = _context(facts)
    expected = show_windows([demand.window for demand, _ in layers])
    seen = show_windows([_plain(_window(layer)) for _, layer in layers])
    wrong = [layer for demand, layer in layers if not _agrees(demand, _window(layer), context)]
    if wrong:
        how = "ran" if wrong[0].when != "not observed" else "was loaded"
        message = f"{len(wrong)} of {len(layers)} draft layers {how} with another window than trained"
        return refuted(CODE, message, expected, seen, f"inside: {wrong[0].name} ({wrong[0].when})", FIX)
    unseen = [layer.name for _, layer in layers if layer.when == "not observed"]
    if unseen:
        message = f"the loaded windows agree, but no attention call of {len(unseen)} layers was seen"
        return cannot_tell(CODE, message, f"inside: {unseen[0]}", "let the probe run after the start, with --prove")
    when = ", ".join(sorted({layer.when for _, layer in layers}))
    return proved(CODE, "every layer ran with its window", expected, seen, f"inside: attention calls ({when})")


def _window(layer: LayerInside) -> int | None:
    return layer.window if layer.when == "not observed" else layer.executed_window


def _plain(window: int | None) -> int | None:
    return None if window is None or window < 0 else window


def _agrees(demand: LayerSpec, window: int | None, context: int | None) -> bool:
    """Kernels hold a window of W rows as W, or as W - 1 rows to the left. One that covers the context is as good as
    none."""
    runs = _plain(window)
    if context is not None and (runs is None or runs >= context - 1) and (demand.window or context) >= context:
        return True
    return runs == demand.window or (demand.window is not None and runs == demand.window - 1)


def _context(facts: Facts) -> int | None:
    inside, chosen = seen_inside(facts), options(facts)
    return (inside.max_model_len if inside else None) or (chosen.max_model_len if chosen else None)
