"""`draftproof doctor` for a person: the links, what is wrong with its fix, acceptance by position, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof.config.finding import Verdict
from draftproof.config.report import finding_text, plain
from draftproof.doctor.chain import Diagnosis, LinkResult
from draftproof.doctor.evidence import GET
from draftproof.doctor.facts import Facts, Fit, OracleFacts
from draftproof.doctor.own import is_own
from draftproof.doctor.rank import HEALTHY

STYLES: Final = {Verdict.PROVED: "green", Verdict.REFUTED: "bold red", Verdict.CANNOT_TELL: "yellow"}
CLOSING: Final[Mapping[int, str]] = {
    0: "every required link is proved",
    1: "a link is refuted: the server does not do what the drafter demands",
    3: "nothing is refuted, but required links cannot be told",
}


def render(diagnosis: Diagnosis, console: Console) -> None:
    """The whole report."""
    console.print(Text(title(diagnosis.facts), "bold"))
    console.print(_links(diagnosis.links))
    for link in diagnosis.links:
        if link.finding.verdict is not Verdict.PROVED:
            console.print(_detail(link))
    if diagnosis.facts.oracle is not None:
        _acceptance(diagnosis.facts, diagnosis.facts.oracle, console)
    for source, reason in diagnosis.facts.missing.items():
        console.print(Text(f"missing: {plain(source)}: {plain(reason)}{_way(source, diagnosis.facts)}", "dim"))
    console.print(Text(closing(diagnosis), "bold"))


def title(facts: Facts) -> str:
    engine = f"{facts.engine or 'unknown engine'} {facts.release or '(release not known)'}"
    drafter = facts.pair.drafter.path if facts.pair and facts.pair.drafter else "not known"
    return f"{plain(facts.url)}: {plain(engine)}, drafter {plain(drafter)}"


def closing(diagnosis: Diagnosis) -> str:
    return f"exit code {diagnosis.exit_code}: {CLOSING[diagnosis.exit_code]}"


def best_fault(oracle: OracleFacts) -> Fit | None:
    """The known fault that explains the steps best."""
    return next((fit for fit in oracle.fits if fit.name != HEALTHY), None)


def per_position(oracle: OracleFacts) -> list[tuple[int, float | None, float | None, float | None]]:
    """(position from 1, observed, expected, best-fitting fault). Observed rates end where nothing was accepted."""
    fault = best_fault(oracle)
    seen = oracle.observed_per_position
    seen = (*seen, *[0.0] * (len(oracle.per_position) - len(seen))) if seen else ()
    columns = (seen, oracle.per_position, fault.per_position if fault else ())
    count = max(map(len, columns))
    observed, expected, other = ([*values, *[None] * (count - len(values))] for values in columns)
    return list(zip(range(1, count + 1), observed, expected, other, strict=True))


def _links(links: Sequence[LinkResult]) -> Table:
    table = Table("", "link", "verdict", "expected", "seen", "evidence", box=None, pad_edge=False)
    for number, link in enumerate(links, 1):
        finding = link.finding
        name = link.title if link.required else f"{link.title} (optional)"
        cells = (Text(plain(text)) for text in (finding.expected, finding.seen, finding.where))
        table.add_row(str(number), name, Text(finding.verdict.value, STYLES[finding.verdict]), *cells)
    return table


def _detail(link: LinkResult) -> Text:
    text = finding_text(link.finding)
    if link.explained_by is not None:
        text.append("\n    explained by the break above: ", "dim")
        text.append(plain(link.explained_by))
    return text


def _acceptance(facts: Facts, oracle: OracleFacts, console: Console) -> None:
    console.print(Text(f"\nacceptance: observed {oracle.observed:.2f}, expected {_range(oracle)}", "bold"))
    fault = best_fault(oracle)
    heads = ("position", "observed", "expected", f"as {plain(fault.name)}" if fault else "best fault")
    table = Table(*heads, box=None, pad_edge=False)
    for position, *rates in per_position(oracle):
        table.add_row(str(position), *("-" if rate is None else f"{rate:.3f}" for rate in rates))
    console.print(table)
    for fit in oracle.fits[:5]:
        share = f"{fit.misses:g} of {fit.compared} differ"
        lead = "  explains the steps" if fit.name in oracle.leaders else ""
        console.print(Text(plain(f"  {fit.name}: {share}, {fit.predicted:.2f} tokens a step{lead}")))
    stage = facts.bisect.first if facts.bisect else None
    if stage is not None:
        layer = "" if stage.layer is None else f" of layer {stage.layer}"
        by = f"{stage.difference:.3g} where {stage.allowed:.3g} is allowed"
        console.print(Text(plain(f"first stage that differs: {stage.stage}{layer}, by {by}")))


def _range(oracle: OracleFacts) -> str:
    if oracle.interval is None:
        return f"{oracle.expected:.2f}"
    return f"{oracle.expected:.2f} ({oracle.interval[0]:.2f} to {oracle.interval[1]:.2f})"


def _way(source: str, facts: Facts) -> str:
    """Nothing looks inside our own engine."""
    return f"; {GET[source]}" if source in GET and not (source == "inside" and is_own(facts)) else ""
