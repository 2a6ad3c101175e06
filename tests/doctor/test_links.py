"""Every link: what proves it, what refutes it, what leaves it open; and missing facts never prove anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.check.check import read_pair
from draftproof.config.drafter import read_drafter
from draftproof.config.target import read_target
from draftproof.doctor.evidence import GET
from draftproof.doctor.facts import Facts, FileFacts, MetricsFacts, SpecLine
from draftproof.doctor.links import LINKS
from draftproof.doctor.shapes import shape
from tests.config.cases import CONFIGS, TARGETS
from tests.doctor.made import (
    MODULES,
    RATES,
    SENT,
    SOURCES,
    SPECULATIVE,
    START,
    answer,
    counters,
    edit,
    finding,
    healthy,
    layer,
    layers,
    oracle,
    state,
    verdicts,
    without,
)

Change = Callable[[Facts], Facts]
HEALTHY = healthy()
DRAFTER = "/m/drafter/config.json"


def inside(**changes: object) -> Change:
    return lambda facts: edit(facts, "inside", **changes)


def process(**changes: object) -> Change:
    return lambda facts: edit(facts, "process", **changes)


def probe(**changes: object) -> Change:
    return lambda facts: edit(facts, "probe", **changes)


def chain(*changes: Change) -> Change:
    def apply(facts: Facts) -> Facts:
        for change in changes:
            facts = change(facts)
        return facts

    return apply


def gone(*sources: str) -> Change:
    return lambda facts: without(facts, *sources)


def argv(*words: str) -> Change:
    return process(argv=("python3", "/venv/bin/vllm", *words), sent_argv=("vllm", *words))


def file(**changes: object) -> Change:
    return lambda facts: edit(facts, "files", now=dict(facts.files.now) | {DRAFTER: state(DRAFTER, **changes)})


def files(**changes: object) -> Change:
    return lambda facts: edit(facts, "files", **changes)


def pair(**changes: object) -> Change:
    """Of the drafter's spec."""
    return lambda facts: replace(facts, pair=replace(facts.pair, drafter=replace(facts.pair.drafter, **changes)))


def found(folder: str, target: str) -> Change:
    read = read_pair(read_drafter(CONFIGS / folder), read_target(TARGETS / target))
    return lambda facts: replace(facts, pair=read)


def judged(**changes: object) -> Change:
    return lambda facts: replace(facts, oracle=oracle(**changes))


def counted(**changes: object) -> Change:
    return lambda facts: replace(without(facts, "oracle", "probe"), metrics=metrics(**changes))


def metrics(**changes: object) -> MetricsFacts:
    delta = counters(400, **changes)
    return MetricsFacts(counters(100), counters(500), delta, 0, 20.0)


def informed(answer: dict[str, object]) -> Change:
    return lambda facts: replace(facts, server_info=answer)


def short(*windows: int | None) -> tuple:
    return tuple(replace(one, executed_window=w, window=w) for one, w in zip(layers(), windows, strict=True))


ONE_GROUP = inside(
    layers=tuple(replace(one, executed_causal=False) for one in layers()),
    kv_groups=(tuple(one.name for one in layers()),),
    hybrid_manager=False,
)
UNSEEN = inside(
    layers=tuple(replace(o, when="not observed", executed_window=None, executed_causal=None) for o in layers())
)
QUOTED = ("serve", "/m/target", "--speculative-config", "'" + SPECULATIVE + "'")
SHORT = {"prompt_ids": tuple(range(2000))}

# link, what was changed, words of the finding
REFUTED: list[tuple[str, Change, str]] = [
    ("acceptance", judged(leaders=("taps-minus-1",), observed=3.6, kind="steps"), "taps-minus-1"),
    ("files", files(unreadable={DRAFTER: "cut short"}), "cannot be read"),
    ("current", file(sha256="cd" * 32), "not what it was at the launch"),
    ("current", files(now={DRAFTER: state(DRAFTER)}), "not what it was"),
    ("current", chain(files(recorded=None), file(mtime=START + 60)), "written after the server started"),
    ("pair", found("Qwen3-8B-DFlash-b16", "Qwen3.6-27B"), "[target-width]"),
    ("argv", process(argv=("vllm", *SENT[1:4], SPECULATIVE.replace(" ", ""), *SENT[5:])), "--speculative-config"),
    ("argv", process(argv=("vllm", *SENT[1:5])), "the number of arguments"),
    ("argv", process(env={}), "VLLM_USE_V2_MODEL_RUNNER did not arrive"),
    ("argv", process(argv=("vllm", *QUOTED), sent_argv=None), "quote character"),
    ("release", lambda facts: replace(facts, release="0.24.0"), "vllm-windows-ignored"),
    ("release", lambda facts: replace(facts, release="0.21.0+cpu", probe=None), "[vllm-"),
    ("config", inside(num_speculative_tokens=7), "another number"),
    ("config", inside(method="eagle3"), "another method"),
    ("config", inside(runner="v1"), "another runner"),
    ("config", lambda facts: edit(facts, "log", speculative={}), "another method"),
    ("config", chain(gone("inside", "log"), informed({"vllm_config": {"speculative_config": None}})), "another method"),
    ("config", lambda facts: edit(facts, "log", speculative={"model": "/m/other"}), "another drafter"),
    ("taps", inside(taps=(1, 16, 31, 46, 61)), "1 layer too early"),
    ("taps", inside(taps=(4, 19, 34, 49, 64)), "2 layers too late"),
    ("taps", inside(taps=(2, 17, 32, 47)), "other layers"),
    ("taps", pair(taps=(16, 1, 31, 46, 61)), "sorts"),
    ("taps", inside(fc_inputs=5120), "another number of features"),
    ("taps", chain(gone("inside"), lambda f: edit(f, "log", aux_layers=(1, 16, 31, 46, 61))), "too early"),
    ("windows", inside(layers=short(-1, -1, -1, -1, -1)), "4 of 5 draft layers ran with another window"),
    ("windows", inside(layers=short(2048, 2048, 2048, 2048, 2048)), "1 of 5"),
    ("windows", inside(layers=(*layers()[:4], layer(4, 2048, False, when="not observed"))), "was loaded"),
    ("causality", ONE_GROUP, "the last layer of the group decided"),
    ("causality", inside(layers=(*layers()[:4], layer(4, -1, True))), "ran in the other direction"),
    ("causality", inside(layers=(*layers()[:4], layer(4, -1, True, when="not observed"))), "declare the other"),
    ("rope", inside(layers=(*layers()[:4], layer(4, -1, False, rope_base=1e6))), "rotary base"),
    ("rope", inside(layers=(*layers()[:4], layer(4, -1, False, neox=False))), "rotary pairing"),
    ("rope", inside(layers=(*layers()[:4], layer(4, -1, False, rotary_dim=32))), "rotary width"),
    ("rope", inside(position_rows=8192), "ends before"),
    ("heads", inside(zero_weights=("lm_head.weight",)), "all zero"),
    ("heads", inside(skipped_weights=("a", "b", "c", "d")), "not loaded"),
    ("heads", inside(shares_head=False), "ships none"),
    ("block", chain(inside(num_speculative_tokens=20), gone("log")), "never trained"),
    ("block", inside(mask_id=0), "another mask token"),
    ("block", chain(gone("inside", "log"), lambda f: replace(f, metrics=metrics(draft_tokens=8e3))), "never trained"),
    ("acceptance", judged(leaders=("taps-minus-1",), observed=2.1), "one layer too early"),
    ("acceptance", judged(leaders=("none",), observed=2.1), "no known fault"),
    ("acceptance", counted(accepted=0.0, per_position=(0.0,) * 15), "no draft is ever accepted"),
    ("acceptance", chain(gone("oracle"), probe(answers=(answer(per_step=(0,) * 120),))), "no draft is ever accepted"),
    ("cache", probe(again=(answer(cached_tokens=0),)), "hit nothing"),
    ("cache", probe(again=(answer(cached_tokens=64, per_step=(0, 1) * 20),)), "acceptance falls"),
    ("output", probe(baseline=(answer(3), answer(503))), "not the target's"),
    ("speed", probe(baseline=(answer(0, 0.5), answer(500, 0.5))), "slower"),
]  # fmt: skip

OPEN: list[tuple[str, Change, str]] = [
    ("files", gone("files"), "no files here"),
    ("files", files(now={}), "no checkpoint file"),
    ("files", files(now={DRAFTER: state(DRAFTER)}), "only one folder"),
    ("current", files(recorded=None, started=None), "neither a launch record"),
    ("current", chain(files(recorded=None), file(ctime=None)), "old time kept"),
    ("current", file(sha256=None), "no hash"),
    ("pair", gone("pair"), "no pair here"),
    ("pair", found("Qwen3.6-27B-DFlash", "Qwen3.6-27B"), "causality"),
    ("pair", found("Qwen3.6-27B-DFlash-guessed", "Qwen3.6-27B"), "if these weights are the published ones"),
    ("argv", process(sent_argv=None), "no launch record"),
    ("argv", process(argv=("VLLM::APIServer",)), "a title"),
    ("argv", process(sent_env=None), "no environment"),
    ("release", gone("process"), "no process here"),
    ("release", lambda facts: replace(facts, release="0.99"), "outside the releases"),
    ("release", lambda facts: replace(facts, release=None), "not known"),
    ("release", lambda facts: replace(facts, engine="draftproof"), "no dated data"),
    ("release", chain(lambda facts: replace(facts, release="0.19.1")), "yet the server answers"),
    ("config", gone("inside", "log", "server_info"), "inside (no inside here) or log"),
    ("config", chain(gone("log"), inside(num_speculative_tokens=None)), "not compared: number"),
    ("config", pair(path="/m/another"), "another folder"),
    ("taps", gone("inside", "log"), "nothing is known"),
    ("taps", lambda facts: replace(facts, engine=None), "counts layers"),
    ("windows", inside(refused="the hook looks different"), "the hook looks different"),
    ("windows", UNSEEN, "no attention call"),
    ("windows", inside(layers=layers()[:3]), "3 draft layers, the drafter has 5"),
    ("causality", UNSEEN, "no attention call"),
    ("rope", inside(layers=(*layers()[:4], layer(4, -1, False, rope_base=None))), "base"),
    ("rope", lambda facts: pair(rope=replace(facts.pair.drafter.rope, rotary_dim=32))(facts), "rotated width"),
    ("heads", inside(shares_head=None), "not seen"),
    ("heads", chain(gone("files"), inside(shares_head=False)), "not seen"),
    ("block", chain(inside(num_speculative_tokens=7), gone("log")), "shorter than trained"),
    ("block", lambda facts: edit(facts, "log", speculative={"num_speculative_tokens": 7}), "shorter than trained"),
    ("block", gone("inside", "log", "metrics"), "nothing is known"),
    ("acceptance", gone("oracle"), "is not known"),
    ("acceptance", judged(observed_steps=20), "too few"),
    ("acceptance", judged(leaders=()), "too few"),
    ("acceptance", judged(observed=4.5), "outside"),
    (
        "acceptance",
        judged(leaders=("drafts-sampled",), observed=3.6, kind="totals"),
        "not those of the healthy pair",
    ),
    ("acceptance", argv(*SENT[1:4], SPECULATIVE[:-1] + ', "rejection_sample_method": "synthetic"}'), "synthetic"),
    ("acceptance", lambda facts: edit(facts, "log", warnings=("synthetic_acceptance_rate=0.8",)), "made up"),
    ("acceptance", process(env={"SGLANG_SIMULATE_ACC_LEN": "4"}), "simulated"),
    ("acceptance", chain(judged(kind="rates"), lambda f: edit(f, "metrics", foreign=3)), "3 requests of others"),
    ("acceptance", chain(judged(kind="rates"), lambda f: edit(f, "metrics", delta=None)), "reset"),
    ("acceptance", counted(per_position=tuple(400 * r for r in (0.3, 0.01, 0.0)), accepted=124.0), "only the first"),
    ("cache", probe(again=()), "nothing is known"),
    ("cache", argv(*SENT[1:], "--no-enable-prefix-caching"), "off"),
    ("cache", probe(again=(answer(cached_tokens=0, **SHORT),)), "the longest has 2000"),
    ("cache", probe(again=(answer(cached_tokens=64, steps=None),)), "not told by request"),
    ("cache", probe(again=(answer(),)), "neither answers nor counters"),
    ("output", probe(baseline=None), "without the drafter"),
    ("output", probe(baseline=(answer(0, output_ids=(*range(90), 7, 8)), answer(500))), "late in the text"),
    ("output", probe(baseline=(answer(0, output_ids=(*range(90), 7)), answer(500, output_ids=(*range(500, 590), 7)))),
     "2 of 2 answers differ, late in the text"),
    ("output", probe(baseline=(answer(0, output_ids=(9,)), answer(500))), "1 of 2"),
    ("output", probe(baseline=(answer(0, prompt_ids=(1,)), answer(500))), "other tokens"),
    ("speed", probe(baseline=None), "without the drafter"),
    ("speed", probe(baseline=(answer(0), answer(500))), "beyond noise"),
    ("speed", probe(baseline=(answer(0, 0.97), answer(500, 0.97))), "beyond noise"),
]  # fmt: skip

# Facts that look different and are as good.
PROVED: list[tuple[str, Change]] = [
    ("files", files(now={path: state(path) for path in ("/m/target.gguf", "/m/drafter.gguf")})),
    ("current", chain(files(recorded=None))),
    ("taps", gone("log")),
    ("taps", gone("inside")),
    ("windows", inside(layers=short(2047, 2047, 2047, 2047, None))),
    ("windows", inside(layers=short(-1, -1, -1, -1, -1), max_model_len=1024)),
    ("causality", inside(layers=tuple(replace(one, causal=None) for one in layers()))),
    ("rope", lambda facts: chain(
        pair(rope=replace(facts.pair.drafter.rope, rotary_dim=32)),
        inside(layers=tuple(replace(one, rotary_dim=32) for one in layers())))(facts)),
    ("heads", chain(inside(shares_head=False), files(drafter_tensors=("lm_head.weight",)))),
    ("block", gone("inside", "log")),
    ("acceptance", judged(leaders=("healthy", "window-ignored"))),
    ("acceptance", judged(interval=None)),
    ("acceptance", lambda facts: edit(facts, "metrics", foreign=3)),
    ("config", gone("inside")),
    ("config", pair(path="/tmp/copied/drafter")),
    ("config", chain(gone("inside", "log"), informed({"speculative_config": json.loads(SPECULATIVE)}))),
]  # fmt: skip


def ids(cases: list) -> list[str]:
    return [f"{number}-{case[0]}" for number, case in enumerate(cases)]


@pytest.mark.parametrize("code", MODULES)
def test_a_healthy_server_proves_every_link_with_evidence(code: str) -> None:
    told = finding(code, HEALTHY)
    assert told.verdict == "proved" and told.code == f"doctor-{code}"
    assert told.expected and told.seen and told.where


@pytest.mark.parametrize(("code", "change", "words"), REFUTED, ids=ids(REFUTED))
def test_refuted(code: str, change: Change, words: str) -> None:
    told = finding(code, change(HEALTHY))
    assert told.verdict == "refuted", told
    assert words in told.message and told.expected and told.seen and told.where and told.fix


@pytest.mark.parametrize(("code", "change", "words"), OPEN, ids=ids(OPEN))
def test_cannot_tell(code: str, change: Change, words: str) -> None:
    told = finding(code, change(HEALTHY))
    assert told.verdict == "cannot tell", told
    assert words in told.message and told.where and told.fix


@pytest.mark.parametrize(("code", "change"), PROVED, ids=ids(PROVED))
def test_proved_otherwise(code: str, change: Change) -> None:
    told = finding(code, change(HEALTHY))
    assert told.verdict == "proved", told


def test_every_link_has_a_case_of_each_kind() -> None:
    assert {code for code, *_ in REFUTED} == {code for code, *_ in OPEN} == set(MODULES)


@given(st.sets(st.sampled_from(SOURCES)))
@settings(max_examples=80, deadline=None)
def test_missing_sources_never_refute_a_healthy_server(sources: set[str]) -> None:
    assert "refuted" not in verdicts(without(HEALTHY, *sources)).values()


@given(st.sets(st.sampled_from(SOURCES)), st.sampled_from(REFUTED))
@settings(max_examples=150, deadline=None)
def test_missing_sources_never_prove_a_broken_link(sources: set[str], case: tuple[str, Change, str]) -> None:
    """As long as the evidence of the break is there, whatever else is or is not."""
    code, change, _ = case
    broken = change(HEALTHY)
    evidence = {source for source in SOURCES if getattr(broken, source) != getattr(HEALTHY, source)}
    assert finding(code, without(broken, *(sources - evidence))).verdict != "proved"


@pytest.mark.parametrize("code", MODULES)
def test_without_what_it_reads_a_link_cannot_be_told(code: str) -> None:
    told = finding(code, without(HEALTHY, *MODULES[code].NEEDS))
    assert told.verdict == "cannot tell" and told.fix
    assert finding(code, Facts("http://h", None, None)).verdict == "cannot tell"


def test_the_kv_group_is_blamed_only_where_both_kinds_share_one() -> None:
    changed = inside(layers=tuple(replace(one, executed_causal=False) for one in layers()))
    assert "KV cache group" not in finding("causality", changed(HEALTHY)).message
    assert "hybrid KV cache manager" in finding("causality", ONE_GROUP(HEALTHY)).fix


def test_links_read_only_sources_that_exist() -> None:
    assert all(set(link.NEEDS) <= set(SOURCES) & set(GET) for link in LINKS)


def test_secrets_are_not_shown() -> None:
    sent = (*SENT, "--api-key", "sk-sent")
    told = finding("argv", process(argv=(*SENT, "--api-key", "sk-came"), sent_argv=sent)(HEALTHY))
    assert told.verdict == "refuted" and "sk-" not in str(told)
    told = finding("argv", process(sent_env={"HF_TOKEN": "hf_x"}, env={"HF_TOKEN": "hf_y"})(HEALTHY))
    assert told.verdict == "refuted" and "hf_" not in str(told)


def test_the_first_matching_shape_is_named() -> None:
    assert shape((0.0, 0.0)).startswith("no draft")
    assert shape((0.01, 0.0)).startswith("next to nothing")
    assert shape((0.3, 0.02, 0.0)).startswith("only the first")
    assert "from position 7" in shape((*RATES[:7], 0.0, 0.0), 8)
    assert shape((0.8, 0.6, 0.4), 16) == shape(()) == ""


def test_an_mtp_target_leaves_the_drafter_links_out() -> None:
    facts = replace(HEALTHY, pair=replace(HEALTHY.pair, drafter=None))
    for code in ("taps", "windows", "causality", "rope", "heads", "block"):
        assert finding(code, facts).verdict == "cannot tell" and not MODULES[code].required(facts)


def test_a_log_alone_tells_acceptance_but_not_what_to_expect() -> None:
    line = SpecLine("x", 1.9, 90, 1500, (0.6, 0.3))
    facts = edit(without(HEALTHY, "oracle", "probe", "metrics"), "log", lines=(line,))
    assert "observed 1.90" in finding("acceptance", facts).message


def test_sglang_counts_the_anchor() -> None:
    info = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}
    facts = replace(without(HEALTHY, "inside", "log", "process"), engine="sglang", server_info=info)
    told = finding("block", facts)
    assert told.verdict == "proved" and told.expected == "16 for a block of 16" and told.seen == "16"


def test_files_without_hashes_but_with_another_size() -> None:
    recorded = {DRAFTER: state(DRAFTER, sha256=None)}
    facts = replace(HEALTHY, files=FileFacts({DRAFTER: state(DRAFTER, size=5)}, recorded, START))
    assert finding("current", facts).verdict == "refuted"
