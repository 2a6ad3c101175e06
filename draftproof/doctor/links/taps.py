"""Do the drafter's features come from the target layers it was trained on?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftproof.config.finding import Finding
from draftproof.doctor import own
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import tap_offset
from draftproof.doctor.evidence import drafter_of, has_drafter, lack, no_drafter, seen_inside
from draftproof.doctor.facts import Facts

CODE = "doctor-taps"
TITLE = "features come from the trained layers"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside", "log", "server_info")
PROVES = (
    "The layer indices that the target captures (from inside, the log's auxiliary layers, or /server_info of "
    "`draftproof serve`) are the drafter's taps in the engine's own count, in the same order."
)
REFUTES = "They differ: another layer, all of them shifted, another number, or sorted where the drafter's are not."


def required(facts: Facts) -> bool:
    return has_drafter(facts)


def judge(facts: Facts) -> Finding:
    drafter, offset = drafter_of(facts), tap_offset(facts)
    if drafter is None:
        return lack(CODE, facts, "pair") if facts.pair is None else no_drafter(CODE)
    if offset is None:
        return cannot_tell(CODE, "how this engine counts layers is not known", "engines.toml", "name the engine")
    wanted = tuple(tap + offset for tap in drafter.taps)
    told = list(_seen(facts))
    if not told:
        return lack(CODE, facts, *(("server_info",) if own.is_own(facts) else ("inside", "log")))
    expected = f"{_show(wanted)} (after layers {_show(drafter.taps)})"
    for where, seen in told:
        if seen != wanted:
            return refuted(CODE, _cause(wanted, seen), expected, _show(seen), where, _fix(wanted, seen))
    width = len(wanted) * drafter.target_hidden_size
    inside = seen_inside(facts)
    if inside is not None and inside.fc_inputs not in (None, width):
        message = "the drafter's first matrix takes another number of features"
        fix = "load the drafter that belongs to this target"
        return refuted(CODE, message, width, inside.fc_inputs, "inside: fc", fix)
    where, seen = told[0]
    return proved(CODE, "the captured layers are those of the training", expected, _show(seen), where)


def _seen(facts: Facts) -> Iterator[tuple[str, tuple[int, ...]]]:
    inside = seen_inside(facts)
    if inside is not None and inside.taps is not None:
        yield "inside: aux_hidden_state_layers", inside.taps
    if facts.log is not None and facts.log.aux_layers is not None:
        yield "log: auxiliary layers", facts.log.aux_layers
    if (server := own.told(facts.server_info)) is not None and server.taps is not None:
        yield "server_info: taps", server.taps


def _cause(wanted: tuple[int, ...], seen: tuple[int, ...]) -> str:
    if seen == tuple(sorted(wanted)):
        return "the engine sorts the layers, and the drafter's columns are in another order"
    shifts = {one - other for one, other in zip(seen, wanted, strict=False)}
    if len(seen) == len(wanted) and len(shifts) == 1:
        shift = shifts.pop()
        layers, way = "layers" if abs(shift) > 1 else "layer", "late" if shift > 0 else "early"
        return f"every feature comes {abs(shift)} {layers} too {way}"
    return "the features come from other layers than the drafter was trained on"


def _fix(wanted: tuple[int, ...], seen: tuple[int, ...]) -> str:
    if seen == tuple(sorted(wanted)):
        return "permute the columns of fc to ascending layers, and write target_layer_ids ascending"
    return "use a release that counts as the drafter does (vLLM 0.22 or newer), and one spelling of target_layer_ids"


def _show(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers))
