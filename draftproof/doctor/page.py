"""`draftproof doctor --html`: one page that needs nothing else, no network and no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from draftproof.config.finding import Verdict
from draftproof.config.report import plain
from draftproof.doctor.chain import Diagnosis, LinkResult
from draftproof.doctor.facts import Facts, OracleFacts
from draftproof.doctor.report import best_fault, closing, per_position, title

COLOURS: Final = {Verdict.PROVED: "#1a7f37", Verdict.REFUTED: "#cf222e", Verdict.CANNOT_TELL: "#9a6700"}
SIGNS: Final = {Verdict.PROVED: "✓", Verdict.REFUTED: "✗", Verdict.CANNOT_TELL: "?"}
CURVES: Final = (  # name, column of per_position, colour, width, dashes; the later is drawn over the earlier
    ("expected", 2, "#7fc98f", 7, ""),
    ("fault", 3, "#6639ba", 2.5, "5 4"),
    ("observed", 1, "#cf222e", 2, ""),
)
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { max-width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: #1f2328; }
details { border-left: 5px solid var(--verdict); background: #f6f8fa; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } summary b { color: var(--verdict); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dt { color: #59636e; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: .15rem .8rem; } th { border-bottom: 1px solid; }
.end { font-weight: bold; margin-top: 2rem; }
"""


def render_page(diagnosis: Diagnosis) -> str:
    """A whole HTML document."""
    facts = diagnosis.facts
    name = text(title(facts))
    body = [
        f"<h1>{name}</h1>",
        f'<p class="end">{text(closing(diagnosis))}</p>',
        "<h2>Links</h2>",
        chain_svg(diagnosis.links),
        *(_details(number, link) for number, link in enumerate(diagnosis.links, 1)),
        *(_acceptance(facts, facts.oracle) if facts.oracle is not None else []),
        *_missing(facts),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>draftproof doctor: {name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Escaped, without control characters."""
    return escape(plain(value))


def chain_svg(links: Sequence[LinkResult]) -> str:
    """The chain as circles on a line, each leading to its details."""
    step, radius = 66, 17
    width = step * len(links)
    dots = []
    for i, link in enumerate(links):
        x, verdict = step * i + step // 2, link.finding.verdict
        about = text(f"{link.title}: {verdict.value}")
        dots.append(
            f'<a href="#{text(link.code)}"><title>{about}</title>'
            f'<circle cx="{x}" cy="22" r="{radius}" fill="{COLOURS[verdict]}"/>'
            f'<text x="{x}" y="27" text-anchor="middle" style="fill:#fff;font-weight:bold">{SIGNS[verdict]}</text>'
            f'<text x="{x}" y="58" text-anchor="middle">{text(link.code.removeprefix("doctor-"))}</text></a>'
        )
    line = f'<line x1="{step // 2}" y1="22" x2="{width - step // 2}" y2="22" stroke="#8c959f" stroke-width="3"/>'
    size = f'viewBox="0 0 {width} 66" width="{width}"'
    return f'<svg {size} role="img" aria-label="chain of links">{line}{"".join(dots)}</svg>'


def _details(number: int, link: LinkResult) -> str:
    finding, verdict = link.finding, link.finding.verdict
    fields = {
        "finding": finding.message,
        "expected": finding.expected,
        "seen": finding.seen,
        "evidence": finding.where,
        "fix": finding.fix,
        "explained by": link.explained_by or "",
        "code": link.code,
    }
    rows = "".join(f"<dt>{name}</dt><dd>{text(value)}</dd>" for name, value in fields.items() if value)
    open_ = " open" if verdict is Verdict.REFUTED else ""
    optional = "" if link.required else " (optional)"
    return (
        f'<details id="{text(link.code)}"{open_} style="--verdict:{COLOURS[verdict]}"><summary>{number}. '
        f"{text(link.title)}{optional}: <b>{verdict.value}</b></summary><dl>{rows}</dl></details>"
    )


def _acceptance(facts: Facts, oracle: OracleFacts) -> list[str]:
    fault = best_fault(oracle)
    names = ["position", "observed", "expected", f"as {fault.name}" if fault else "best fault"]
    heads = "".join(f"<th>{text(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{position}</td>" + "".join(f"<td>{_rate(rate)}</td>" for rate in rates) + "</tr>"
        for position, *rates in per_position(oracle)
    )
    told = f"Observed {oracle.observed:.2f} tokens a step, expected {oracle.expected:.2f}"
    told += f" ({oracle.interval[0]:.2f} to {oracle.interval[1]:.2f})" if oracle.interval else ""
    leaders = ", ".join(oracle.leaders) or "nothing compared"
    return [
        "<h2>Acceptance by position</h2>",
        f"<p>{text(told)}. Explains the observed steps: {text(leaders)}.</p>",
        curves_svg(oracle),
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>",
        *_bisect(facts),
    ]


def curves_svg(oracle: OracleFacts) -> str:
    """Share of steps that reach each position: observed, expected and the best-fitting fault."""
    left, top, width, height = 60, 14, 560, 240
    points = per_position(oracle)
    count, fault = max(len(points), 2), best_fault(oracle)

    def x(position: int) -> float:
        return left + (position - 1) * width / (count - 1)

    def y(rate: float) -> float:
        return top + (1 - rate) * height

    parts = [
        f'<line x1="{left}" y1="{y(r):.1f}" x2="{left + width}" y2="{y(r):.1f}" stroke="#d1d9e0"/>'
        f'<text x="{left - 8}" y="{y(r) + 4:.1f}" text-anchor="end">{r:g}</text>'
        for r in (0, 0.25, 0.5, 0.75, 1)
    ]
    parts += [f'<text x="{x(p):.1f}" y="{top + height + 18}" text-anchor="middle">{p}</text>' for p, *_ in points]
    for place, (name, column, colour, thick, dash) in enumerate(CURVES, 1):
        known = [(row[0], rate) for row in points if (rate := row[column]) is not None and math.isfinite(rate)]
        if not known:
            continue
        path = " ".join(f"{x(p):.1f},{y(rate):.1f}" for p, rate in known)
        label = f"as {fault.name}" if name == "fault" and fault else name
        pen = f'stroke="{colour}" stroke-width="{thick}" stroke-dasharray="{dash}"'
        parts.append(
            f'<polyline points="{path}" fill="none" {pen}/>'
            + "".join(f'<circle cx="{x(p):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}"/>' for p, rate in known)
            + f'<line x1="{left + width + 20}" y1="{top + 22 * place}" x2="{left + width + 48}" '
            f'y2="{top + 22 * place}" {pen}/>'
            f'<text x="{left + width + 54}" y="{top + 22 * place + 4}">{text(label)}</text>'
        )
    middle = top + height / 2
    return (
        f'<svg viewBox="0 0 {left + width + 230} {top + height + 48}" width="{left + width + 230}" role="img" '
        f'aria-label="acceptance by position">{"".join(parts)}'
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">position in the block</text>'
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "share of steps that accept it</text></svg>"
    )


def _bisect(facts: Facts) -> list[str]:
    stage = facts.bisect.first if facts.bisect else None
    if stage is None:
        return []
    layer = "" if stage.layer is None else f" of layer {stage.layer}"
    return [f"<p>First stage that differs: {text(stage.stage)}{layer}, by {stage.difference:.3g} where "
            f"{stage.allowed:.3g} is allowed.</p>"]  # fmt: skip


def _missing(facts: Facts) -> list[str]:
    if not facts.missing:
        return []
    rows = "".join(f"<dt>{text(source)}</dt><dd>{text(reason)}</dd>" for source, reason in facts.missing.items())
    return ["<h2>Missing sources</h2>", f"<dl>{rows}</dl>"]


def _rate(rate: float | None) -> str:
    return "-" if rate is None or not math.isfinite(rate) else f"{rate:.3f}"
