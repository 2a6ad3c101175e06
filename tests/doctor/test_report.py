"""The three forms of a diagnosis: text, JSON, and one HTML page that stands alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from draftproof.doctor.as_json import report_dict
from draftproof.doctor.chain import Diagnosis, diagnose
from draftproof.doctor.facts import BisectFacts, Facts, StageDifference
from draftproof.doctor.links import LINKS
from draftproof.doctor.page import render_page
from draftproof.doctor.report import per_position, render
from tests.doctor.made import edit, healthy, layer, layers, oracle, without

VOID = {"meta", "line", "circle", "polyline", "br"}
EVIL = "/m/<script>alert('x')</script>&\x1b[31m"


def broken() -> Facts:
    facts = edit(without(healthy(), "files"), "inside", layers=(*layers()[:4], layer(4, -1, True)))
    found = oracle(leaders=("taps-minus-1",), observed=2.1, observed_per_position=(0.5, 0.2))
    stage = BisectFacts(("features", "attention"), StageDifference("attention", 4, 0.3, 0.01, 2))
    return replace(facts, oracle=found, bisect=stage)


def evil() -> Facts:
    facts = healthy()
    pair = replace(facts.pair, drafter=replace(facts.pair.drafter, path=EVIL))
    return replace(edit(facts, "inside", zero_weights=(EVIL,)), pair=pair, missing={EVIL: EVIL}, url=EVIL)


def text_of(diagnosis: Diagnosis, width: int = 200) -> str:
    out = StringIO()
    render(diagnosis, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def test_the_text_names_every_link_the_cause_and_what_is_missing() -> None:
    diagnosis = diagnose(broken(), LINKS)
    told = text_of(diagnosis)
    assert all(link.TITLE[:20] in told for link in LINKS)
    assert "error [doctor-causality]" in told and "explained by the break above: each draft layer looks" in told
    assert "acceptance: observed 2.10, expected 3.50 (3.20 to 3.80)" in told
    assert "taps-minus-1: 200 of 400 differ, 2.10 tokens a step  explains the steps" in told
    assert "first stage that differs: attention of layer 4" in told
    assert "missing: files: no files here; run doctor on the machine" in told
    assert told.rstrip().endswith("exit code 1: a link is refuted: the server does not do what the drafter demands")


def test_positions_of_different_length_stand_side_by_side() -> None:
    rows = per_position(oracle(observed_per_position=(0.5,)))
    assert rows[0] == (1, 0.5, 0.8, 0.4) and rows[1][1] == 0.0 and len(rows) == 15
    assert per_position(oracle(observed_per_position=()))[0][1] is None


def test_a_terminal_is_not_steered_by_a_path() -> None:
    told = text_of(diagnose(evil(), LINKS))
    assert "\x1b" not in told and "\\x1b" in told


@pytest.mark.parametrize("facts", [healthy(), broken(), evil(), Facts("http://h", None, None)])
def test_json_is_complete_and_strict(facts: Facts) -> None:
    diagnosis = diagnose(facts, LINKS)
    told = json.loads(json.dumps(report_dict(diagnosis), allow_nan=False))
    assert told["schema"] == "draftproof.doctor/1" and told["exit_code"] == diagnosis.exit_code
    assert set(told) == {
        "schema", "url", "engine", "release", "drafter", "target", "links", "acceptance", "bisect", "missing",
        "exit_code",
    }  # fmt: skip
    assert len(told["links"]) == len(LINKS)
    for link in told["links"]:
        assert set(link) == {
            "title", "required", "explained_by", "code", "severity", "verdict", "message", "expected", "seen", "where",
            "fix",
        }  # fmt: skip


def test_json_of_acceptance_has_no_nan() -> None:
    facts = replace(healthy(), oracle=oracle(observed=float("nan"), observed_steps=0))
    told = report_dict(diagnose(facts, LINKS))
    assert told["acceptance"]["observed"] is None and told["acceptance"]["best_fault"] == "taps-minus-1"
    assert told["acceptance"]["positions"][0] == {"position": 1, "observed": 0.8, "expected": 0.8, "fault": 0.4}


class Page(HTMLParser):
    """Checks nesting; collects tags, ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.links += [named[key] or "" for key in ("href", "src") if key in named]
        assert not any(key.startswith("on") for key in named), f"{tag} has a handler"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


@pytest.mark.parametrize("facts", [healthy(), broken(), evil(), Facts("http://h", None, None)])
def test_the_page_is_well_formed_and_stands_alone(facts: Facts) -> None:
    text = render_page(diagnose(facts, LINKS))
    page = Page()
    page.feed(text)
    assert not page.open and page.tags.count("html") == 1 and text.startswith("<!DOCTYPE html>")
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert len(page.ids) == len(set(page.ids)) == len(LINKS)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"url\(|@import|https?://(?!h\b|127)", text)
    assert "\x1b" not in text and "<script" not in text


def test_the_page_shows_verdicts_and_curves_with_axes() -> None:
    text = render_page(diagnose(broken(), LINKS))
    assert text.count("<details") == len(LINKS) and text.count("<polyline") == 3
    assert "position in the block" in text and "share of steps that accept it" in text and ">as taps-minus-1<" in text
    assert "First stage that differs: attention of layer 4" in text and "<h2>Missing sources</h2>" in text
    assert "&lt;script&gt;" in render_page(diagnose(evil(), LINKS))
