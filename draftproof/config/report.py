"""`draftproof inspect`: read a drafter (and its target), collect every finding, show them to a person or as
JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof.config.drafter import DrafterSpec, LayerSpec, read_drafter
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.mtp import Headers, check_mtp
from draftproof.config.pair import check_drafter, check_pair
from draftproof.config.published import compare_published, pattern
from draftproof.config.target import TargetSpec, read_target

SCHEMA: Final = "draftproof.inspect/1"
STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
ORDER: Final = tuple(Severity)
HIDDEN: Final = ("path", "sources", "findings", "layers", "rope", "extras")


@dataclass(frozen=True)
class Inspection:
    """`findings` are sorted, errors first. `exit_code`: 1 when an error-level finding refutes the config,
    else 0."""

    drafter: DrafterSpec | None
    target: TargetSpec | None
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return int(any(finding.severity is Severity.ERROR for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `schema` changes when a key changes its meaning or goes away."""
        return {
            "schema": SCHEMA,
            "drafter": self.drafter and _spec(self.drafter) | {"missing_parts": self.drafter.missing_parts()},
            "target": None if self.target is None else _spec(self.target),
            "findings": [finding.as_dict() for finding in self.findings],
            "counts": {severity.value: n for severity, n in _counts(self.findings).items()},
            "exit_code": self.exit_code,
        }


def inspect(drafter_path: str | Path, target_path: str | Path | None = None) -> Inspection:
    """Everything the configs say. UserError as `read_drafter` and `read_target`."""
    drafter = read_drafter(drafter_path)
    target = None if target_path is None else read_target(target_path)
    findings = [*drafter.findings, *_runnable(drafter)]
    if target is None:
        findings += check_drafter(drafter)
    else:
        findings += [*target.findings, *check_pair(drafter, target, target_path=Path(target.path))]
    findings += compare_published(drafter, target)
    return Inspection(drafter, target, _ranked(findings))


def inspect_mtp(target_path: str | Path, headers: Headers | None) -> Inspection:
    """A target that drafts with its own head. `headers`: its tensors' dtypes and shapes, None where nobody has them."""
    target = read_target(target_path)
    return Inspection(None, target, _ranked([*target.findings, *check_mtp(target, headers)]))


def _ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: ORDER.index(finding.severity)))


def render(inspection: Inspection, console: Console) -> None:
    """Values with their sources, one line a run of equal layers, then the findings."""
    drafter, target = inspection.drafter, inspection.target
    if drafter is not None:
        console.print(Text(f"drafter {plain(drafter.path)}", style="bold"))
        console.print(_value_table(drafter))
        console.print(_layer_table(drafter.layers))
    if target is not None:
        console.print(Text(f"target {plain(target.path)}", style="bold"))
        console.print(_value_table(target))
    for finding in inspection.findings:
        console.print(finding_text(finding))
    counts = _counts(inspection.findings)
    console.print(Text(", ".join(f"{counts[severity]} {severity.value}s" for severity in ORDER), style="bold"))


def plain(text: object) -> str:
    """A checkpoint's strings must not move the cursor or recolour the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def _spec(spec: DrafterSpec | TargetSpec) -> dict[str, Any]:
    values = asdict(spec)
    del values["findings"]  # they stand once, in the inspection's own list
    return values


def _counts(findings: tuple[Finding, ...]) -> dict[Severity, int]:
    found = Counter(finding.severity for finding in findings)
    return {severity: found[severity] for severity in ORDER}


def _runnable(drafter: DrafterSpec) -> list[Finding]:
    missing = drafter.missing_parts()
    if not missing:
        return []
    return [
        Finding(
            code="family-not-runnable",
            severity=Severity.NOTE,
            verdict=Verdict.PROVED,
            message=f"this engine describes the {drafter.family} family but does not run this checkpoint; "
            "it lacks " + "; ".join(missing),
            where=drafter.sources.get("architecture", ""),
        )
    ]


def _value_table(spec: DrafterSpec | TargetSpec) -> Table:
    table = Table("value", "", "from", box=None, pad_edge=False)
    for name, value in _rows(spec).items():
        table.add_row(Text(name), Text(plain(_show(value))), Text(plain(spec.sources.get(name, "")), style="dim"))
    return table


def _rows(spec: DrafterSpec | TargetSpec) -> Mapping[str, Any]:
    rows = {name: value for name, value in vars(spec).items() if name not in HIDDEN}
    if isinstance(spec, DrafterSpec):
        rows |= {"rope.base": spec.rope.base, "rope.rotary_dim": spec.rope.rotary_dim}
        rows |= {"layers": pattern(spec.layers), "causality": _causality(spec.layers)}
        windows = {layer.window for layer in spec.layers if layer.window is not None}
        rows |= {"window": tuple(sorted(windows))} if windows else {}
        rows |= {"rope.scaling": spec.rope.scaling} if spec.rope.scaling else {}
        rows |= {f"extras.{name}": value for name, value in spec.extras.items()}
    else:
        rows["layer_kinds"] = "  ".join(f"{len(list(run))} {kind}" for kind, run in groupby(spec.layer_kinds))
    return rows


def _causality(layers: tuple[LayerSpec, ...]) -> str:
    return " ".join("causal" if layer.causal else "bidirectional" for layer in layers)


def _layer_table(layers: tuple[LayerSpec, ...]) -> Table:
    table = Table("layer", "attention", "window", "inside the block", box=None, pad_edge=False)
    for index, layer in enumerate(layers):
        table.add_row(
            str(index),
            "sliding" if layer.sliding else "full",
            "-" if layer.window is None else str(layer.window),
            "causal" if layer.causal else "bidirectional",
        )
    return table


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def finding_text(finding: Finding) -> Text:
    text = Text()
    text.append(f"{finding.severity.value} [{finding.code}] ", style=STYLES[finding.severity])
    text.append(f"{plain(finding.message)}")
    if finding.severity is not Severity.NOTE:
        text.append(f" ({finding.verdict.value})")
    for label in ("expected", "seen", "where", "fix"):
        if content := getattr(finding, label):
            text.append(f"\n    {label}: ", style="dim")
            text.append(plain(content))
    return text
