"""The order of the links, what explains what, and the exit codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftproof.doctor.chain import diagnose
from draftproof.doctor.facts import Facts
from draftproof.doctor.links import LINKS
from tests.doctor.made import SOURCES, edit, healthy, layer, layers, oracle, verdicts, without

ORDER = [
    "files", "current", "pair", "argv", "release", "config", "taps", "windows", "causality", "rope", "heads", "block",
    "acceptance", "cache", "output", "speed",
]  # fmt: skip


def test_the_order_of_the_links() -> None:
    assert [link.CODE for link in LINKS] == [f"doctor-{name}" for name in ORDER]


def test_every_module_says_what_the_chain_and_the_page_need() -> None:
    codes = [link.CODE for link in LINKS]
    assert len({link.TITLE for link in LINKS}) == len(LINKS)
    for place, link in enumerate(LINKS):
        assert link.__doc__ and link.PROVES and link.REFUTES and link.NEEDS
        assert all(codes.index(code) > place for code in link.EXPLAINS), f"{link.CODE} explains an earlier link"


def test_a_healthy_server_ends_with_0_and_no_facts_with_3() -> None:
    assert diagnose(healthy(), LINKS).exit_code == 0
    assert diagnose(Facts("http://h", None, None), LINKS).exit_code == 3
    assert set(verdicts(without(healthy(), *SOURCES)).values()) == {"cannot tell"}


@pytest.mark.parametrize("source", ["pair", "files", "process", "inside", "oracle"])
def test_a_missing_source_of_a_required_link_ends_with_3(source: str) -> None:
    assert diagnose(without(healthy(), source), LINKS).exit_code == 3


def test_optional_links_may_stay_open() -> None:
    facts = edit(healthy(), "probe", baseline=None)
    facts = edit(facts, "process", sent_argv=None, sent_env=None)
    told = verdicts(facts)
    assert {name for name, verdict in told.items() if verdict == "cannot tell"} == {"argv", "output", "speed"}
    assert diagnose(facts, LINKS).exit_code == 0


def test_a_break_explains_what_comes_of_it() -> None:
    facts = edit(healthy(), "inside", layers=(*layers()[:4], layer(4, -1, True)))
    facts = replace(facts, oracle=oracle(leaders=("all-causal",), observed=2.4))
    diagnosis = diagnose(facts, LINKS)
    told = {link.code: link for link in diagnosis.links}
    assert diagnosis.exit_code == 1
    assert told["doctor-causality"].explained_by is None
    assert told["doctor-acceptance"].explained_by == told["doctor-causality"].title
    assert told["doctor-speed"].explained_by is None, "it is proved all the same"
