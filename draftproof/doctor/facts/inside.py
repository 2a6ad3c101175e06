"""What the plugin of `launch --prove` wrote in vLLM's worker processes: one file each, put together."""

from __future__ import annotations

import base64
import json
import posixpath
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from draftproof.doctor.facts import InsideFacts, LayerInside
from draftproof.launch.machine import Machine

SCHEMA: Final = "draftproof.inside/1"
PATTERN: Final = "inside-*.json"
NAMES: Final = tuple(field.name for field in fields(InsideFacts) if field.name not in ("refused", "layers"))
OWN: Final = ("zero_weights", "skipped_weights")  # a rank holds its part only: true where true on every rank


def fetch_inside(machine: Machine, folder: str) -> InsideFacts | None:
    """From a launch's folder on its machine; None where the plugin wrote nothing."""
    answer = machine.call("read_files", folder=posixpath.join(folder, "inside"), pattern=PATTERN)
    texts = {name: zlib.decompress(base64.b64decode(data)) for name, data in answer["contents"].items()}
    return read_inside(texts) if texts else None


def read_inside(texts: Mapping[str, bytes]) -> InsideFacts:
    """`texts` by file name. Ranks with the drafter must agree; what is wrong with a file, or what the plugin could
    not see, is in `refused`."""
    workers, wrong = [], []
    for name, text in sorted(texts.items()):
        try:
            whole = json.loads(text)
            if whole["schema"] != SCHEMA:
                raise ValueError(f"its schema is {whole['schema']}")
            workers.append((_who(whole), _facts(whole["facts"])))
            wrong += whole["errors"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wrong.append(f"{name} cannot be read: {type(error).__name__}: {error}")
    drafting = [worker for worker in workers if worker[1].drafter_class is not None]
    if not drafting:
        found = workers[0][1] if workers else InsideFacts()
        return replace(found, refused=_joined(wrong or ["no worker process has a drafter"]))
    merged = drafting[0][1]
    for who, facts in drafting[1:]:
        wrong += _differences(drafting[0][0], merged, who, facts)
        merged = _merge(merged, facts)
    return replace(merged, refused=_joined(wrong))


def _joined(wrong: Iterable[str]) -> str | None:
    return "; ".join(dict.fromkeys(wrong)) or None


def _who(whole: Mapping[str, Any]) -> str:
    return f"rank {whole['rank']} (pid {whole['pid']})"


def _facts(told: Mapping[str, Any]) -> InsideFacts:
    """Lists become tuples, what is not told keeps its default."""
    given = {name: _frozen(told[name]) for name in NAMES if told.get(name) is not None}
    layers = tuple(LayerInside(**layer) for layer in told.get("layers") or ())
    return InsideFacts(layers=layers, **given)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _differences(first: str, one: InsideFacts, second: str, other: InsideFacts) -> list[str]:
    """`one` is what the ranks up to here say together, `first` the first of them."""
    found = []
    for name in (*NAMES, "layers"):
        pair = [getattr(facts, name) for facts in (one, other)]
        if name == "layers":
            pair = _comparable(*pair)
        if name not in OWN and pair[0] != pair[1]:
            found.append(f"{name} differs: {first} says {pair[0]}, {second} {pair[1]}")
    return found


def _comparable(one: Sequence[LayerInside], other: Sequence[LayerInside]) -> list[Any]:
    """One rank may have written before its first call, and one may show a capture where another was eager."""
    if len(one) != len(other):
        return [len(one), len(other)]
    pairs = [(a, b) if _seen(a) and _seen(b) else (_declared(a), _declared(b)) for a, b in zip(one, other, strict=True)]
    return [tuple(replace(pair[side], when="") for pair in pairs) for side in (0, 1)]


def _seen(layer: LayerInside) -> bool:
    return layer.when != "not observed"


def _declared(layer: LayerInside) -> LayerInside:
    return replace(layer, executed_window=None, executed_causal=None)


def _merge(one: InsideFacts, other: InsideFacts) -> InsideFacts:
    layers = one.layers
    if len(layers) == len(other.layers):
        layers = tuple(a if _seen(a) else _with_calls(a, b) for a, b in zip(layers, other.layers, strict=True))
    zero, skipped = (tuple(x for x in getattr(one, name) if x in getattr(other, name)) for name in OWN)
    return replace(one, layers=layers, zero_weights=zero, skipped_weights=skipped)


def _with_calls(layer: LayerInside, other: LayerInside) -> LayerInside:
    window, causal = other.executed_window, other.executed_causal
    return replace(layer, executed_window=window, executed_causal=causal, when=other.when)
