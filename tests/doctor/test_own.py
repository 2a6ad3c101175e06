"""The doctor on a server of `draftproof serve`: what is compared there, and what is left open on purpose."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from typer.main import get_command

from draftproof.check.flags import FLAGS
from draftproof.cli.app import app, drafting
from draftproof.cli.serve import serve
from draftproof.doctor import own
from draftproof.doctor.chain import Diagnosis, diagnose
from draftproof.doctor.deployed import asked, options, resolved
from draftproof.doctor.facts import Facts, FileFacts, ProbeFacts, ProcessFacts
from draftproof.doctor.facts.server import identify
from draftproof.doctor.links import LINKS
from draftproof.doctor.session import DoctorAsk, examine
from draftproof.errors import UserError
from draftproof.launch.machine import Local
from tests.doctor.made import (
    START,
    answer,
    counters,
    edit,
    finding,
    healthy,
    make_pair,
    oracle,
    state,
    verdicts,
    without,
)

from .servers import Reply, serving
from .test_commands import Call, call  # noqa: F401  (fixture)

PAIR = make_pair()
assert PAIR.drafter is not None
INFO: dict[str, Any] = {
    "engine": "draftproof",
    "version": "0.1.0",
    "target": "/m/target",
    "drafter": "/m/drafter",
    "method": "ddtree",
    "budget": "auto",
    "num_speculative_tokens": 15,
    "block_size": 16,
    "taps": list(PAIR.drafter.taps),
    "mask_token_id": PAIR.drafter.mask_token_id,
    "max_model_len": 32768,
}
INSIDE_ONLY = {"windows", "causality", "rope", "heads"}
OPEN = INSIDE_ONLY | {"release", "argv"}


def process(*words: str) -> ProcessFacts:
    return ProcessFacts(1, ("/usr/bin/python3", "/venv/bin/draftproof", "serve", *words), {}, START)


def sound() -> Facts:
    files = {path: state(path) for path in ("/m/drafter/config.json", "/m/target/config.json")}
    facts = replace(
        healthy(),
        engine="draftproof",
        release="0.1.0",
        server_info=INFO,
        process=process("--target", "/m/target", "--drafter", "/m/drafter"),
        files=FileFacts(files, None, START),
    )
    return without(facts, "inside", "log")


def told(**changes: object) -> Facts:
    return replace(sound(), server_info=INFO | changes)


def judged(facts: Facts) -> Diagnosis:
    return diagnose(facts, LINKS)


def test_a_sound_server_is_proved_without_a_look_inside() -> None:
    facts = sound()
    verdict = verdicts(facts)
    assert {name for name, one in verdict.items() if one != "proved"} == OPEN
    assert {verdict[name] for name in OPEN} == {"cannot tell"} and judged(facts).exit_code == 0
    required = {link.code.removeprefix("doctor-") for link in judged(facts).links if link.required}
    assert required == {"files", "current", "pair", "config", "taps", "block", "acceptance", "cache", "output"}
    for name in INSIDE_ONLY:
        assert "prove nothing" in finding(name, facts).message


@pytest.mark.parametrize("source", ["pair", "files", "process", "server_info", "oracle", "probe"])
def test_what_is_missing_proves_nothing(source: str) -> None:
    assert judged(without(sound(), source)).exit_code == 3


@pytest.mark.parametrize("field", ["taps", "method"])
def test_what_the_server_does_not_say_is_left_open(field: str) -> None:
    assert judged(told(**{field: None})).exit_code == 3
    assert judged(told(**{field: 5})).exit_code == 3, "a value of another type is not said"


@pytest.mark.parametrize(
    ("changes", "link"),
    [
        ({"taps": [tap - 1 for tap in INFO["taps"]]}, "taps"),
        ({"taps": INFO["taps"][::-1]}, "taps"),
        ({"num_speculative_tokens": 16}, "block"),
        ({"mask_token_id": 3}, "block"),
        ({"method": "dflash", "budget": None}, "config"),
        ({"budget": "32"}, "config"),
        ({"budget": 32}, "config"),
        ({"drafter": "/m/another"}, "config"),
    ],
)
def test_what_differs_is_refuted(changes: dict[str, object], link: str) -> None:
    diagnosis = judged(told(**changes))
    refuted = {one.code for one in diagnosis.links if one.finding.verdict.value == "refuted"}
    assert refuted == {f"doctor-{link}"} and diagnosis.exit_code == 1


def test_a_steps_fault_is_found_here_too() -> None:
    facts = replace(sound(), oracle=oracle(leaders=("taps-minus-1",), observed=2.1))
    assert finding("acceptance", facts).verdict.value == "refuted"


def test_nodes_of_trees_are_no_drafts_a_pass() -> None:
    facts = edit(sound(), "metrics", delta=counters(400, draft_tokens=400 * 24.0))
    assert finding("block", facts).verdict.value == "proved"
    wide = edit(sound(), "metrics", delta=counters(400, per_position=(400.0,) * 20))
    assert "5 of 20 drafts a pass" in finding("block", wide).message
    silent = replace(wide, server_info=INFO | {"num_speculative_tokens": None})
    assert finding("block", silent).verdict.value == "refuted", "the counters alone tell it"


Words = tuple[str, ...]


def test_what_stands_for_what_was_not_said() -> None:
    defaults = {name: one.default for name, one in inspect.signature(serve).parameters.items()}
    assert (defaults["method"], defaults["budget"], defaults["drafter"]) == (own.METHOD, None, None)
    for method, budget in own.BUDGETS.items():
        assert str(drafting("smollm2-135m", None, method, None).how.budget) == budget
    options = {word for one in get_command(app).commands["serve"].params for word in one.opts}  # type: ignore[attr-defined]
    assert set(FLAGS["draftproof"]) <= options


@pytest.mark.parametrize(
    ("words", "method", "budget", "drafter"),
    [
        ((), "ddtree", "auto", None),
        (("--method", "dflash"), "dflash", "chain", None),
        (("--method=ddtree", "--budget", "chain"), "ddtree", "chain", None),
        (("--drafter", "smollm2-135m-dflash"), "ddtree", "auto", None),  # a name against a place
        (("--drafter=/m/other",), "ddtree", "auto", "/m/other"),
        (("--method", "mtp", "-k", "3"), "mtp", None, None),
    ],
)
def test_what_was_asked_for(words: Words, method: str, budget: str | None, drafter: str | None) -> None:
    facts = replace(sound(), process=process(*words))
    spec = asked(facts)
    assert spec is not None and (spec.method, spec.budget, spec.model) == (method, budget, drafter)


def test_a_cache_that_was_switched_off_is_not_asked_for() -> None:
    no_hits = tuple(replace(one, cached_tokens=0) for one in (answer(0), answer(500)))
    facts = replace(sound(), probe=ProbeFacts((answer(0), answer(500)), no_hits))
    assert finding("cache", facts).verdict.value == "refuted"
    for word in ("0", "0.0"):
        off = replace(facts, process=process("--prefix-cache", word))
        chosen = options(off)
        assert chosen is not None and not chosen.prefix_caching
        assert finding("cache", off).message == "prefix caching is off"
        assert not next(one for one in judged(off).links if one.code == "doctor-cache").required
    chosen = options(replace(facts, process=process("--prefix-cache", "0.5")))
    assert chosen is not None and chosen.prefix_caching


@pytest.mark.parametrize(
    ("written", "loaded", "verdict"),
    [
        (START - 5, START + 60, "proved"),
        (START + 30, START + 60, "cannot tell"),  # the embedded pair, made at the first start
        (START + 90, START + 60, "refuted"),
        (START + 30, None, "refuted"),
    ],
)
def test_files_that_a_server_makes_while_it_starts(written: float, loaded: float | None, verdict: str) -> None:
    path = "/m/drafter/config.json"
    files = FileFacts({path: state(path, mtime=written, ctime=written)}, None, START, loaded=loaded)
    assert finding("current", replace(sound(), files=files)).verdict.value == verdict


def test_others_server_info_is_not_ours() -> None:
    assert own.told({"version": "0.5.23"}) is None and own.told(None) is None
    spec = resolved(Facts("http://h", "sglang", None, server_info={"speculative_algorithm": None}))
    assert [one.method for one in spec] == ["none"]


def test_the_probe_asks_for_steps_and_chains() -> None:
    chains = {"spec_decode_metrics": "detailed", "speculation": {"budget": "chain"}}
    assert own.probe_fields(INFO) == chains == own.probe_fields(INFO | {"method": "dflash"})
    assert own.probe_fields(INFO | {"method": "mtp"}) == {"spec_decode_metrics": "detailed"}
    assert own.probe_fields(INFO | {"method": "none"}) == own.probe_fields(None) == {}


# ---- over HTTP


def replies(info: Mapping[str, Any]) -> dict[str, Reply]:
    card = {"id": "m", "object": "model", "owned_by": "draftproof", "root": "/m/target", "max_model_len": 512}
    spec = {"num_spec_steps": 2, "num_accepted_draft_tokens": 4, "num_draft_tokens": 30, "per_step_accepted": [3, 1]}
    chat = {
        "choices": [{"message": {"content": "x"}, "token_ids": [5, 6, 7, 8, 9, 10, 11], "finish_reason": "length"}],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
        "metrics": {"speculative_decoding": spec},
    }
    names = ("drafts", "draft_tokens", "accepted_tokens")
    page = "".join(f'vllm:spec_decode_num_{name}_total{{model_name="m",engine="0"}} 7\n' for name in names)
    return {
        "/health": Reply(200, ""),
        "/v1/models": Reply(200, json.dumps({"object": "list", "data": [card]})),
        "/version": Reply(200, '{"version": "0.1.0"}'),
        "/server_info": Reply(200, json.dumps(info)),
        "/metrics": Reply(200, page),
        "/v1/chat/completions": Reply(200, json.dumps(chat)),
    }


def test_it_is_known_by_its_models() -> None:
    with serving(replies(INFO)) as url:
        server = identify(url)
    assert (server.engine, server.release, server.health) == ("draftproof", "0.1.0", 200)
    assert server.details == INFO


def examined(info: Mapping[str, Any]) -> tuple[Facts, list[tuple[str, Any]]]:
    """What the doctor collects from such a server; the checkpoints' names lead nowhere."""
    posted: list[tuple[str, Any]] = []

    def resolve(name: str) -> Any:
        raise UserError("not-found", f"there is no folder {name!r}", "")

    with serving(replies(info), posted) as url:
        ask = DoctorAsk(url, Local(), prompts=1, max_tokens=8)
        return examine(ask, resolve, None, lambda _: None).facts, posted


@pytest.mark.parametrize("method", ["ddtree", "none"])
def test_the_requests_as_they_are_sent(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    info = INFO | {"method": method, "drafter": None}
    facts, posted = examined(info)
    assert len(posted) == 2 and {path for path, _ in posted} == {"/v1/chat/completions"}
    body = posted[0][1]
    assert body["return_token_ids"] is True and body["temperature"] == 0.0 and body["repetition_penalty"] == 1.0
    assert (body.get("speculation"), body.get("spec_decode_metrics")) == (
        ({"budget": "chain"}, "detailed") if method == "ddtree" else (None, None)
    )
    assert facts.probe is not None and facts.probe.answers[0].per_step == (3, 1)
    assert facts.process is not None and facts.process.pid == os.getpid()
    alone = "it serves the target alone, without a drafter"
    assert (facts.missing["pair"] == alone) is (method == "none")
    assert "inside" not in facts.missing or "prove" in facts.missing["inside"]


def test_watch(call: Callable[..., tuple[int, str, str]]) -> None:  # noqa: F811
    with serving(replies(INFO)) as url:
        assert call("watch", url, "--ticks", 1, "--every", 0.2) == (0, "idle\n", "")
