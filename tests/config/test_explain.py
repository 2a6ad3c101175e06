"""The texts of findings, engine rules and errors: complete, one a code, and what `draftproof explain` says of them."""

from __future__ import annotations

import json
import sys

import pytest

from draftproof.cli import main
from draftproof.config.engines import engines
from draftproof.config.explain import (
    Area,
    FindingText,
    all_codes,
    explain,
    finding_texts,
    render_explained,
)
from draftproof.docs import findings_page
from draftproof.errors import CODES, UserError

RULES = [rule.code for engine in engines().values() for rule in engine.rules]
# A code that is a finding about a target or a report and, where the command cannot go on, an error.
BOTH = {"unknown-key", "family-not-runnable"}


def test_no_code_is_in_two_places() -> None:
    assert len(RULES) == len(set(RULES))
    assert not set(RULES) & (set(finding_texts()) | set(CODES))
    assert set(finding_texts()) & set(CODES) == BOTH
    assert len(all_codes()) == len(set(all_codes())) == len(finding_texts()) + len(RULES) + len(CODES) - len(BOTH)


@pytest.mark.parametrize("code", all_codes())
def test_every_code_is_explained_in_full(code: str) -> None:
    explained = explain(code)
    assert explained.code == code
    texts = [explained.means, explained.why, explained.fix, *explained.facts.values()]
    assert all(text.strip() == text and text for text in texts)
    json.dumps(explained.as_dict())
    shown = " ".join(render_explained(explained).split())
    assert all(" ".join(text.split()) in shown for text in texts)


@pytest.mark.parametrize("code", list(finding_texts()))
def test_texts_are_sentences_and_short(code: str) -> None:
    text = finding_texts()[code]
    for field in (text.means, text.why, text.fix):
        assert field.endswith(".") and field.count("`") % 2 == 0
        assert len(field) < 400, f"{code}: an engineer reads this in a hurry"


def test_every_area_has_findings_and_the_page_holds_every_text() -> None:
    assert {text.area for text in finding_texts().values()} == set(Area)
    page = findings_page()
    assert [code for code in (*finding_texts(), *RULES) if page.count(f"### `{code}`\n") != 1] == []


def test_the_three_kinds() -> None:
    finding = explain("taps-unusual")
    assert finding.kind == "finding" and finding.facts["about"] == "drafter config"
    assert "vllm#40727" in finding.facts["see"]
    engine, rule = next((engine, engine.rules[0]) for engine in engines().values() if engine.rules)
    known = explain(rule.code)
    assert known.kind == "engine rule" and (known.means, known.why) == (rule.does, rule.consequence)
    assert known.facts["engine"] == engine.name and known.facts["link"] == rule.link.value
    assert known.facts["evidence"] == ", ".join(rule.evidence)
    assert explain("bad-json").kind == "error" and explain("bad-json").means == CODES["bad-json"]
    assert explain("unknown-key").facts["as error"].startswith(CODES["unknown-key"])


def test_a_code_may_be_copied_with_its_brackets() -> None:
    assert explain("[K-Not-Block] ") == explain("k-not-block")


def test_an_unknown_code_names_its_neighbours() -> None:
    with pytest.raises(UserError) as refused:
        explain("mask-id-in-us")
    assert refused.value.code == "code-unknown" and "mask-id-in-use" in refused.value.fix
    with pytest.raises(UserError) as refused:
        explain("0")
    assert refused.value.code == "code-unknown" and "nearest" not in refused.value.fix


def test_a_text_without_a_field_or_with_another_is_refused() -> None:
    whole = {"area": "pair", "means": "It means something.", "why": "It matters much.", "fix": "Mend it well."}
    FindingText.model_validate(whole)
    for wrong in ({"why": ""}, {"area": "elsewhere"}, {"see": ["no number"]}, {"notes": "A further field."}):
        with pytest.raises(ValueError):
            FindingText.model_validate({**whole, **wrong})


def test_the_text_wraps_and_breaks_no_flag() -> None:
    lines = render_explained(explain("k-not-block"), width=60).splitlines()
    assert max(map(len, lines)) <= 60 and any("--speculative-num-draft-tokens" in line for line in lines)


def test_the_command_prints_text_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftproof", "explain", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return int(stop.value.code or 0), out.out, out.err

    assert run("rope-base") == (0, render_explained(explain("rope-base")) + "\n", "")
    code, out, _ = run("rope-base", "--json")
    assert code == 0 and json.loads(out) == explain("rope-base").as_dict()
    code, out, err = run("rope-bass")
    assert (code, out) == (2, "") and err.startswith("draftproof: [code-unknown]") and "rope-base" in err
