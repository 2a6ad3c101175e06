"""`draftproof doctor` on real servers that `draftproof launch` started: a healthy pair, and one fault at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.config.finding import Verdict
from draftproof.doctor.chain import Diagnosis, diagnose
from draftproof.doctor.consulting import counted
from draftproof.doctor.facts import Answer, Facts, OracleFacts
from draftproof.doctor.facts.probe import read_prompts
from draftproof.doctor.follow import Evidence, features_by_tap, follow
from draftproof.doctor.hypotheses import Hypothesis, hypotheses
from draftproof.doctor.links import LINKS
from draftproof.doctor.oracle import all_anchors, oracle_facts
from draftproof.doctor.rank import HEALTHY, Prediction
from draftproof.doctor.session import DoctorAsk, examine
from draftproof.doctor.told import told_steps
from draftproof.engine.pair import load_pair
from draftproof.engine.text import encode_chat
from draftproof.launch.machine import Local
from draftproof.launch.names import Checkpoint
from draftproof.models.hub import resolve_config, resolve_target

from .conftest import VENV
from .faults import DRAFTER, FAULTS, SOUND, WINDOW, Planted, edit, lay_plugin, shipped
from .pair import BLOCK, LAYERS, make_pair
from .test_launch import draftproof, port  # noqa: F401  (fixtures)

pytestmark = pytest.mark.vllm
full_only = pytest.mark.skipif(os.environ.get("DRAFTPROOF_FULL") != "1", reason="minutes a server: DRAFTPROOF_FULL=1")
CONFIGURATION = ("files", "current", "argv", "config", "taps", "windows", "causality", "rope", "heads", "block")
DRAFT_LAYERS = [f"model.layers.{LAYERS + layer}.self_attn.attn" for layer in range(3)]
EVEN = {"target_layer_ids": [1, 2, 3]}  # as the authors' formula spaces them
STEPS = ("--per-request-spec-decode-metrics", "detailed")
UNLIKE = ("published-difference",)  # a copy of the shipped drafter whose config was changed
HEADER = """
| fault (runner) | links refuted by step | leaders by step | by totals | tau | expected | misses, by step; by totals |
|---|---|---|---|---|---|---|"""


class Report(NamedTuple):
    told: dict[str, Any]

    def verdict(self, name: str) -> str:
        return str(self.link(name)["verdict"])

    def link(self, name: str) -> dict[str, Any]:
        return next(link for link in self.told["links"] if link["code"] == f"doctor-{name}")

    @property
    def refuted(self) -> set[str]:
        return {link["code"].removeprefix("doctor-") for link in self.told["links"] if link["verdict"] == "refuted"}

    def unproved(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: self.link(name)["message"] for name in names if self.verdict(name) != "proved"}


class Served:
    """A server of one pair, and the doctor for it."""

    def __init__(self, call: Any, at: int, runner: str) -> None:
        self.call, self.port, self.runner = call, at, runner

    def launch(
        self, target: Path | str, drafter: Path, *words: object, accept: tuple[str, ...] = (),
        engine: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        ask: list[object] = ["launch", "vllm", "--target", target, "--drafter", drafter, "--runner", self.runner]
        ask += ["--venv", VENV]
        ask += ["--max-num-seqs", 4, "--port", self.port, "--gpu-memory-utilization", 0.3, "--json", *words]
        for code in ("vllm-cpu-context-keys", *accept):
            ask += ["--accept", code]
        done = self.call(*ask, "--", "--enforce-eager", "--dtype", "float32", *engine, runner=self.runner)
        assert done.returncode == 0, done.stderr

    def doctor(self, *words: object) -> Report:
        done = self.call("doctor", f"http://127.0.0.1:{self.port}", "--json", *words)
        assert done.returncode in (0, 1, 3), done.stderr
        told = json.loads(done.stdout)
        assert told["exit_code"] == done.returncode
        return Report(told)

    def stop(self) -> None:
        assert self.call("launch", "stop", f"vllm-{self.port}").returncode == 0


@pytest.fixture
def v1(draftproof: Any, port: int) -> Served:  # noqa: F811
    return Served(draftproof, port, "v1")


@pytest.fixture
def v2(draftproof: Any, port: int) -> Served:  # noqa: F811
    return Served(draftproof, port, "v2")


def test_a_healthy_pair_is_proved_until_a_file_changes(v2: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "mixed", is_causal=False, dflash_config=EVEN)
    v2.launch(target, drafter, "--prove", "--max-model-len", 512)
    report = v2.doctor("--prompts", 8, "--max-tokens", 64)
    assert report.unproved((*CONFIGURATION, "pair", "release", "acceptance", "cache")) == {}
    assert not report.refuted and report.told["exit_code"] == 0
    assert report.told["acceptance"]["kind"] == "steps" and report.told["acceptance"]["observed"] == BLOCK
    assert report.link("windows")["seen"] == report.link("windows")["expected"]

    edit(drafter, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2, 4]})
    report = v2.doctor("--prompts", 1, "--max-tokens", 8, "--no-oracle")
    assert report.verdict("current") == "refuted" and report.link("current")["where"] == str(drafter / "config.json")
    assert report.verdict("taps") == "refuted" and report.link("taps")["explained_by"], "and what follows from it"


def test_one_kv_group_overrides_causality(v2: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "mixed")
    accept, engine = ("vllm-causal-per-group",), ("--disable-hybrid-kv-cache-manager",)
    v2.launch(target, drafter, "--prove", "--max-model-len", 512, accept=accept, engine=engine)
    report = v2.doctor("--prompts", 2, "--max-tokens", 16, "--no-oracle")
    found = report.link("causality")
    assert found["verdict"] == "refuted" and found["seen"] != found["expected"]
    assert "KV cache group" in found["message"] and "ran the other one" in found["message"]
    assert "--disable-hybrid-kv-cache-manager" in found["fix"] and DRAFT_LAYERS[0] in found["where"]
    assert report.verdict("windows") == "proved", "windows hold all the same"


def test_weights_of_zeros_and_a_block_too_long(v1: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "full")
    path = drafter / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"fc.weight": torch.zeros_like(weights["fc.weight"])}, path, metadata={"format": "pt"})
    words = ("--prove", "--max-model-len", 512, "--num-speculative-tokens", 12)
    v1.launch(target, drafter, *words, accept=("k-not-block", "vllm-k-above-block"))
    report = v1.doctor("--prompts", 2, "--max-tokens", 32, "--no-oracle")
    assert report.verdict("heads") == "refuted" and "fc.weight" in report.link("heads")["seen"]
    found = report.link("block")
    assert (found["verdict"], found["expected"], found["seen"]) == ("refuted", f"7 for a block of {BLOCK}", "12")
    assert report.unproved(("files", "current", "argv", "config", "taps", "windows", "causality", "rope")) == {}


def test_synthetic_acceptance_is_no_acceptance(v2: Served, tmp_path: Path) -> None:
    """On V2: V1's CPU kernel asserts "Synthetic acceptance not supported with CPU sampling"."""
    target, drafter = make_pair(tmp_path, "full")
    made_up = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
    engine = ("--speculative-config", json.dumps(made_up))
    v2.launch(target, drafter, "--prove", "--max-model-len", 512, accept=("vllm-rejection-synthetic",), engine=engine)
    report = v2.doctor("--prompts", 2, "--max-tokens", 24, "--no-oracle")
    assert report.verdict("release") == "refuted" and "vllm-rejection-synthetic" in report.link("release")["message"]
    assert report.verdict("acceptance") == "cannot tell" and "synthetic" in report.link("acceptance")["message"]


def test_the_fault_of_the_cpu_backend_is_named(v1: Served, tmp_path: Path) -> None:
    drafter = shipped(tmp_path / "drafter-dflash", full=True)
    v1.launch("smollm2-135m", drafter, "--prove", "--bisect", "--max-model-len", 1024, accept=UNLIKE)
    report = v1.doctor("--prompts", 4, "--max-tokens", 40, "--bisect")
    changed = report.unproved(CONFIGURATION)
    assert changed.keys() == {"windows"} and "the engine does what the config says" in changed["windows"]
    check_the_backend(report)


@full_only
def test_the_fault_of_the_cpu_backend_is_named_on_v2(v2: Served, tmp_path: Path) -> None:
    drafter = shipped(tmp_path / "drafter-dflash", full=False)
    v2.launch("smollm2-135m", drafter, "--prove", "--bisect", "--max-model-len", 1024)
    report = v2.doctor("--prompts", 4, "--max-tokens", 40, "--bisect")
    assert report.unproved(CONFIGURATION) == {}
    check_the_backend(report)


def check_the_backend(report: Report) -> None:
    found, oracle = report.link("acceptance"), report.told["acceptance"]
    assert found["verdict"] == "refuted" and "context.1.k" in found["message"]
    assert "context-keys-layer-0" in oracle["leaders"] and "healthy" not in oracle["leaders"]
    assert oracle["observed"] < oracle["expected"]
    assert report.told["bisect"]["first"]["stage"] == "context.1.k"
    print({fit["name"]: f"{fit['misses']:g} of {fit['compared']}" for fit in oracle["fits"][:4]}, oracle["leaders"])


class Judged(NamedTuple):
    refuted: set[str]
    oracle: OracleFacts

    @staticmethod
    def of(diagnosis: Diagnosis) -> Judged:
        assert diagnosis.facts.oracle is not None, diagnosis.facts.missing
        links = [link for link in diagnosis.links if link.finding.verdict is Verdict.REFUTED]
        return Judged({link.code.removeprefix("doctor-") for link in links}, diagnosis.facts.oracle)


class SharedOracle:
    """The doctor's oracle, for many servers of one pair. A sound or faulty drafter changes nothing in a greedy text, so
    all servers write the same one: what a hypothesis says of each anchor is computed once. Only hypotheses that depend
    on where the server's own steps ended are followed anew."""

    def __init__(self) -> None:
        self.known: dict[Any, list[Prediction]] = {}

    def __call__(self, facts: Facts, target: Checkpoint, drafter: Checkpoint) -> OracleFacts:
        assert facts.probe is not None
        answers = facts.probe.answers
        pair = load_pair(str(target.configs), str(drafter.configs), dtype="float32", plain=True)
        sound: Any = pair.drafter
        key = (sound.spec.layers, *((answer.prompt_ids, answer.output_ids) for answer in answers))
        if key not in self.known:
            self.known[key] = all_anchors(pair.target, sound, answers)
        listed = [h for h in hypotheses(sound.spec, len(pair.target.layers)) if h.by_step]
        followed = [self._followed(pair.target, h, h.make(sound), answers) for h in listed]
        return oracle_facts(answers, [*self.known[key], *followed], counted(facts))

    def _followed(self, target: Any, h: Hypothesis, drafter: Any, answers: tuple[Answer, ...]) -> Prediction:
        told = [told_steps(answer) for answer in answers]
        routes = [None if steps is None else [accepted + 1 for _, accepted in steps] for steps in told]
        evidence = Evidence(answers, features_by_tap(target, answers, h.taps))
        return Prediction(h.name, drafter.depth, tuple(follow(target, drafter, evidence, routes)))


@pytest.fixture(scope="module")
def oracle() -> SharedOracle:
    print(HEADER)
    return SharedOracle()


@pytest.fixture
def numbers(
    draftproof: Any, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: SharedOracle  # noqa: F811
) -> Callable[[Planted], tuple[Judged, Judged]]:  # fmt: skip
    """Serve a planted fault and judge by every step, then by the same answers' totals alone; prints the table's row."""

    def serve(planted: Planted) -> tuple[Judged, Judged]:
        full = planted.runner == "v1"
        honest = shipped(tmp_path / "honest" / DRAFTER, full=planted.all_full)
        served = shipped(tmp_path / "served" / DRAFTER, full=full, **planted.config)
        words = ("--max-model-len", 1024, "--env", f"PYTHONPATH={lay_plugin(tmp_path / 'plugin', planted.patches)}")
        server = Served(draftproof, port, planted.runner)
        server.launch("smollm2-135m", served, *words, accept=UNLIKE if full else (), engine=STEPS)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # where the launch is recorded
        texts = long_texts() if planted.long else ()
        ask = DoctorAsk(f"http://127.0.0.1:{port}", Local(), drafter=str(honest), prompts=6, max_tokens=48, texts=texts)
        found = judged(ask, oracle)
        print(row(planted, *found), flush=True)
        return found

    return serve


@full_only
@pytest.mark.parametrize("planted", FAULTS, ids=lambda one: one.name)
def test_a_planted_fault_is_named_by_numbers_alone(numbers: Any, planted: Planted) -> None:
    """The server reads an edited config or is patched, the doctor has the honest one. Without --prove it sees the
    server's numbers and its log. From totals, a fault that costs nothing on this text is named but not refuted."""
    by_step, by_totals = numbers(planted)
    assert "acceptance" in by_step.refuted
    for seen in (by_step, by_totals):
        assert planted.name in seen.oracle.leaders and len(seen.oracle.leaders) <= 2


@full_only
@pytest.mark.parametrize("planted", SOUND, ids=lambda one: f"{one.name}-{one.runner}")
def test_a_sound_server_is_healthy_by_numbers_alone(numbers: Any, planted: Planted) -> None:
    for seen in numbers(planted):
        assert "acceptance" not in seen.refuted and seen.oracle.leaders[0] == HEALTHY


def judged(ask: DoctorAsk, consulted: SharedOracle) -> tuple[Judged, Judged]:
    """One probe, judged twice. Between them nothing differs but what the server is taken to have told."""
    untold: list[Facts] = []

    def twice(facts: Facts, target: Checkpoint, drafter: Checkpoint) -> OracleFacts:
        less = without_steps(facts)
        untold.append(replace(less, oracle=consulted(less, target, drafter)))
        return consulted(facts, target, drafter)

    by_step = examine(ask, resolve_config, twice, print)
    return Judged.of(by_step), Judged.of(diagnose(untold[0], LINKS))


def without_steps(facts: Facts) -> Facts:
    """As a server that tells of each request how many steps it took, and no more."""
    assert facts.probe is not None
    answers = tuple(replace(answer, per_step=None) for answer in facts.probe.answers)
    return replace(facts, probe=replace(facts.probe, answers=answers))


def row(planted: Planted, steps: Judged, totals: Judged) -> str:
    """A line of the table in Markdown: fault, refuted links, who leads by steps and by totals, tau, misses."""
    fits = [next((f for f in one.oracle.fits if f.name == planted.name), None) for one in (steps, totals)]
    misses = [f"{fit.misses:g} of {fit.compared}" if fit else "not listed" for fit in fits]
    told = [", ".join(sorted(steps.refuted)), *(", ".join(one.oracle.leaders) for one in (steps, totals))]
    tau = f"{steps.oracle.observed:.2f} | {steps.oracle.expected:.2f}"
    return f"| {planted.name} ({planted.runner}) | {' | '.join(told)} | {tau} | {misses[0]}; {misses[1]} |"


def long_texts() -> list[list[int]]:
    """The doctor's own prompts that are longer than the drafter's window of 128 tokens."""
    import transformers as hf

    tokenizer = hf.AutoTokenizer.from_pretrained(resolve_target("smollm2-135m"))
    asked = [encode_chat(tokenizer, [{"role": "user", "content": prompt}]) for prompt in read_prompts()]
    return [ids for ids in asked if len(ids) > WINDOW]
