"""Facts from inside vLLM, without vLLM: how `--prove` changes a plan, how the workers' files become one, and the plugin
beside engines that look different. tests/vllm/test_inside.py has the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

import draftproof.plugins.vllm as plugin
from draftproof.doctor.facts import InsideFacts, LayerInside
from draftproof.doctor.facts.inside import fetch_inside, read_inside
from draftproof.errors import UserError
from draftproof.launch.machine import Local
from draftproof.launch.plan import Plan
from draftproof.launch.prove import METRICS, with_prove
from tests.launch.test_plan import DRAFTER, plan

LAYER = {"name": "model.layers.6.self_attn.attn", "window": 64, "causal": True, "rope_base": 1e4, "neox": True}
SEEN = {"executed_window": 64, "executed_causal": True, "when": "eager"}
UNSEEN = {"executed_window": None, "executed_causal": None, "when": "not observed"}


def written(rank: int = 0, errors: tuple[str, ...] = (), layer: dict[str, Any] | None = None, **facts: Any) -> bytes:
    told = {
        "release": "0.32.0", "runner": "v2", "method": "dflash", "drafter_class": "DFlashSpeculator", "taps": [1, 3, 5],
        "layers": [LAYER | SEEN | (layer or {})], "kv_groups": [["a", "b"], ["c"]], "refused": None,
    }  # fmt: skip
    whole = {"schema": "draftproof.inside/1", "pid": 100 + rank, "rank": rank, "facts": told | facts}
    return json.dumps(whole | {"errors": list(errors), "calls": {}}).encode()


def bare(env: dict[str, str] | None = None, argv: tuple[str, ...] = ("vllm", "serve", "m")) -> Plan:
    return Plan("vllm", argv, env or {}, "127.0.0.1", 8000, ())


# ---- the plan


def test_a_plan_with_the_plugin_beside_it(tmp_path: Path) -> None:
    made = with_prove(bare(), "0.32.0")
    assert made.env == {"PYTHONPATH": "{state}/prove", "DRAFTPROOF_PROVE": "{state}/inside"}
    assert made.argv[-2:] == (METRICS, "detailed")
    assert {reason.what for reason in made.why} == {"PYTHONPATH", "DRAFTPROOF_PROVE", METRICS}
    for name, data in made.files.items():
        path = tmp_path / name.removeprefix("{state}/prove/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (point,) = PathDistribution(tmp_path / "draftproof_prove-1.dist-info").entry_points
    assert point.group == "vllm.general_plugins" and point.value == "draftproof_prove:register"
    code = f"from importlib.metadata import entry_points as e; print(e(group={point.group!r})[{point.name!r}].load()())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("DRAFTPROOF_PROVE", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n", "without DRAFTPROOF_PROVE it does nothing, and needs no vLLM"


def test_the_users_own_values_stay() -> None:
    made = with_prove(bare({"PYTHONPATH": "/mine:/too", "VLLM_PLUGINS": "lora"}), "0.32.0")
    assert made.env["PYTHONPATH"] == "{state}/prove:/mine:/too"
    assert made.env["VLLM_PLUGINS"] == "lora,draftproof_prove"
    assert with_prove(bare({"VLLM_PLUGINS": ""}), None).env["VLLM_PLUGINS"] == "draftproof_prove"
    for flag in ("--per-request-spec-decode-metrics", "--per_request_spec_decode_metrics=summary"):
        argv = ("vllm", "serve", "m", flag)
        assert with_prove(bare(argv=argv), "0.32.0").argv == argv
    assert with_prove(bare(), "0.28.1").argv == with_prove(bare(), None).argv == bare().argv


def test_launch_takes_prove_for_vllm_only() -> None:
    made = plan(prove=True)
    assert "{state}/prove/draftproof_prove.py" in made.files and METRICS in made.argv
    assert "DRAFTPROOF_PROVE" not in plan().env
    for engine in ("sglang", "llama.cpp"):
        with pytest.raises(UserError, match="--prove is for vLLM") as caught:
            plan(engine=engine, prove=True, drafter=str(DRAFTER))
        assert caught.value.code == "bad-option"


# ---- the files


def test_one_worker_is_read_as_it_is() -> None:
    facts = read_inside({"inside-1.json": written(zero_weights=["model.fc.weight"])})
    assert facts == InsideFacts(
        release="0.32.0", runner="v2", method="dflash", drafter_class="DFlashSpeculator", taps=(1, 3, 5),
        layers=(LayerInside(**LAYER, **SEEN),), zero_weights=("model.fc.weight",), kv_groups=(("a", "b"), ("c",)),
    )  # fmt: skip


def test_ranks_that_agree_are_one() -> None:
    whole = {"inside-1.json": written(0, layer=UNSEEN, zero_weights=["a", "b"])}
    whole["inside-2.json"] = written(1, zero_weights=["b"])
    whole["inside-3.json"] = written(2, layer={"when": "capture"}, zero_weights=["b"])
    facts = read_inside(whole)
    assert facts.refused is None and facts.zero_weights == ("b",), "zero on every rank"
    assert facts.layers[0].executed_causal is True and facts.layers[0].when == "eager"


def test_ranks_that_differ_are_told() -> None:
    facts = read_inside({"inside-1.json": written(0), "inside-2.json": written(1, taps=[2, 4, 6])})
    assert facts.refused == "taps differs: rank 0 (pid 100) says (1, 3, 5), rank 1 (pid 101) (2, 4, 6)"
    facts = read_inside({"1": written(0), "2": written(1, layer={"executed_causal": False})})
    assert facts.refused and facts.refused.startswith("layers differs")


def test_a_stage_without_the_drafter_says_nothing_against_it() -> None:
    other = written(0, drafter_class=None, taps=None, layers=None)
    facts = read_inside({"inside-1.json": other, "inside-2.json": written(1)})
    assert facts.refused is None and facts.drafter_class == "DFlashSpeculator"
    assert read_inside({"inside-1.json": other}).refused == "no worker process has a drafter"


def test_what_the_plugin_could_not_see_is_refused_by_its_words() -> None:
    facts = read_inside({"inside-1.json": written(errors=("layers: X has no impl",)), "inside-2.json": b"{"})
    assert facts.refused and facts.refused.startswith("layers: X has no impl; inside-2.json cannot be read")
    assert facts.taps == (1, 3, 5), "and the rest is told"


def test_fetched_through_the_agent(tmp_path: Path) -> None:
    assert fetch_inside(Local(), str(tmp_path)) is None
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "inside-7.json").write_bytes(written())
    (folder / "inside-7.json.part").write_bytes(b"half")
    (folder / "bisect-0.safetensors").write_bytes(b"\0")
    facts = fetch_inside(Local(), str(tmp_path))
    assert facts is not None and facts.refused is None and facts.release == "0.32.0"


# ---- the plugin


def pretend(monkeypatch: pytest.MonkeyPatch, wrapper: type) -> None:
    """An engine that has nothing but this worker wrapper."""
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.worker_base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase = wrapper  # type: ignore[attr-defined]


def test_it_stands_alone() -> None:
    for name in ("vllm", "vllm_bisect"):
        spec = importlib.util.find_spec(f"draftproof.plugins.{name}")
        assert spec and spec.origin and "import draftproof" not in Path(spec.origin).read_text()
    code = (
        "import sys, draftproof.plugins.vllm, draftproof.plugins.vllm_bisect; print({'torch', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_engine_that_looks_different_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Other:
        def init_device(self) -> None: ...

    pretend(monkeypatch, Other)
    monkeypatch.setenv("DRAFTPROOF_PROVE", str(tmp_path))
    before = Other.init_device
    plugin.register()
    assert Other.init_device is before, "nothing is patched"
    facts = read_inside({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert facts.refused == "workers: Other has no initialize_from_config"


def test_a_worker_that_looks_different_starts_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Wrapper:
        worker = types.SimpleNamespace(rank=3)

        def init_device(self) -> str:
            return "ready"

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> str:
            return f"cache {kv_cache_configs}"

    pretend(monkeypatch, Wrapper)
    monkeypatch.setenv("DRAFTPROOF_PROVE", str(tmp_path))
    plugin.register()
    patched = Wrapper.init_device
    plugin.register()
    assert Wrapper.init_device is patched, "once is enough"
    wrapper = Wrapper()
    assert wrapper.init_device() == "ready" and wrapper.initialize_from_config([1]) == "cache [1]"
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["errors"][0] == "model loading: SimpleNamespace has no model_runner"


def test_without_the_variable_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def init_device(self) -> None: ...

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None: ...

    pretend(monkeypatch, Wrapper)
    monkeypatch.delenv("DRAFTPROOF_PROVE", raising=False)
    before = vars(Wrapper).copy()
    plugin.register()
    assert vars(Wrapper) == before


@pytest.mark.parametrize(
    ("given", "keys"),
    [(None, -1), (-1, -1), (64, 64), ((-1, -1), -1), ((63, 0), 64), ((63, 63), 64), ((), -1)],
)
def test_windows_of_all_backends_count_keys(given: Any, keys: int) -> None:
    assert plugin._window(given) == keys


def test_names_of_a_checkpoint_and_the_parameters_they_fill() -> None:
    ways = list(plugin._ways("layers.0.self_attn.q_proj.weight"))
    assert "model.layers.0.self_attn.qkv_proj.weight" in ways and "layers.0.self_attn.q_proj.weight" in ways
    assert "model.fc.weight" in plugin._ways("encoder.fc.weight")
    assert "draft_id_to_target_id" in plugin._ways("d2t")
