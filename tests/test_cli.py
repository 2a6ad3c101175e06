"""The commands on a tiny pair, and every kind of bad input: one message with its code, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = shutil.copytree(tiny.target_folder("llama"), tmp_path / "target")
    return target, tiny.drafter_folder(tmp_path / "drafter")


def refused(result: tuple[int, str, str], code: str, *names: str) -> None:
    status, out, err = result
    assert status == 2, (status, out, err)
    assert f"draftproof: [{code}]" in err and "next step:" in err, err
    assert "Traceback" not in err + out
    for name in names:
        assert name in err, f"{name!r} is not named: {err}"


PROMPT = "w5 w9 w30 w41 w7"


def ask(pair: tuple[Path, Path], *extra: object, prompt: str = PROMPT) -> list[object]:
    return ["run", prompt, "--target", pair[0], "--drafter", pair[1], "--dtype", "float32", *extra]


def test_run_is_the_same_with_and_without_drafter(call, pair) -> None:
    plain = call(
        "run", PROMPT, "--target", pair[0], "--dtype", "float32", "--method", "none", "--max-tokens", 20, "--json"
    )
    drafted = call(*ask(pair, "--max-tokens", 20, "--json", "--compare"))
    assert plain[0] == drafted[0] == 0, plain[2] + drafted[2]
    one, two = json.loads(plain[1]), json.loads(drafted[1])
    assert one["text"] == two["text"] and two["plain"]["same_tokens"] and one["tokens"] == two["tokens"] == 20
    assert two["acceptance"]["emitted"] == 19 and "acceptance" not in one


def test_a_seed_repeats_a_text_and_a_missing_seed_is_reported(call, pair) -> None:
    def text(*extra: object) -> dict:
        status, out, err = call(*ask(pair, "--temperature", 1.0, "--max-tokens", 12, "--json", *extra))
        assert status == 0, err
        return json.loads(out)

    first = text()
    assert text("--seed", first["seed"])["text"] == first["text"]
    assert text("--seed", first["seed"] + 1)["text"] != first["text"]


def test_a_pipe_gets_plain_text(call, pair) -> None:
    status, out, err = call(*ask(pair, "--max-tokens", 6))
    assert status == 0 and "\x1b" not in out and out.strip() and not err


def test_stop_string_ends_the_text_before_it(call, pair) -> None:
    whole = json.loads(call(*ask(pair, "--max-tokens", 20, "--json"))[1])["text"]
    stop = whole[10:14]
    cut = json.loads(call(*ask(pair, "--max-tokens", 20, "--json", "--stop", stop))[1])
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish"] == "stop string"


def test_stdin_is_the_prompt_when_none_is_given(call, pair, monkeypatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    args = ask(pair, "--max-tokens", 6, "--json")
    direct = call(*args)[1]
    piped = call("run", *args[2:])[1]
    assert json.loads(piped)["text"] == json.loads(direct)["text"]


def test_replay_and_inspect_speak_json(call, pair, tmp_path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps({"prompt_ids": [[5, 9], [7, 8, 9]], "continuation_ids": [[4, 5, 6, 7], [9, 8, 7]]}))
    status, out, err = call("replay", "--texts", texts, "--target", pair[0], "--drafter", pair[1], "--json")
    assert status == 0, err
    assert {"tau", "steps", "accepted", "per_position"} <= json.loads(out).keys()
    status, out, err = call("inspect", pair[1], "--target", pair[0], "--json")
    assert status == 0 and json.loads(out)["schema"], err


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (["--temperature", "-1"], "bad-option"),
        (["--temperature", "nan"], "bad-option"),
        (["--top-p", "0"], "bad-option"),
        (["--max-tokens", "0"], "bad-option"),
        (["--max-tokens", "600"], "prompt-too-long"),
        (["--method", "eagle"], "bad-option"),
        (["--method", "none"], "bad-option"),  # the drafter that is named would be ignored
        (["--method", "mtp"], "bad-option"),
        (["-k", "3"], "bad-option"),
        (["--dtype", "int3"], "bad-option"),
        (["--device", "tpu"], "bad-option"),
        (["--target", "/no/such/folder"], "not-found"),
        (["--drafter", "some-org/some-drafter"], "hub-unreachable"),
    ],
)
def test_bad_options(call, pair, extra, code) -> None:
    refused(call(*ask(pair, *extra)), code)


def test_empty_prompt(call, pair) -> None:
    refused(call(*ask(pair, prompt="  ")), "prompt-empty")


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        ({"dflash_config": {"mask_token_id": None}}, "mask-id-missing", "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": None}}, "taps-missing", "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 9]}}, "pair-mismatch", "9"),
        ({"slidng_window": 6}, "unknown-key", "sliding_window"),
        ({"hidden_size": 64, "head_dim": 16}, "pair-mismatch", "64"),
        ({"architectures": ["DFlash2DraftModel"]}, "family-not-runnable", "DFlash2"),
    ],
)
def test_bad_drafter_config(call, pair, change, code, name) -> None:
    config = tiny.drafter_config(**change)
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
    (pair[1] / "config.json").write_text(json.dumps(config))
    refused(call(*ask(pair)), code, name)


def test_not_a_model(call, pair, tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(call(*ask(pair, "--target", empty)), "not-a-model")
    (pair[0] / "config.json").write_text("{ not json")
    refused(call(*ask(pair)), "bad-json")


@pytest.mark.parametrize("which", [0, 1])
def test_truncated_weights(call, pair, which) -> None:
    file = pair[which] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(call(*ask(pair)), "weights-truncated", "model.safetensors")


@pytest.mark.parametrize(("which", "name"), [(0, "model.layers.0.mlp.up_proj.weight"), (1, "fc.weight")])
def test_nan_weights(call, pair, which, name) -> None:
    file = pair[which] / "model.safetensors"
    tensors = load_file(file)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    refused(call(*ask(pair)), "weights-invalid", name)


@pytest.mark.parametrize("which", [0, 1])
def test_pickle_weights_are_never_loaded(call, pair, which, tmp_path) -> None:
    """Unpickling this file would create a file; it must not."""
    mark = tmp_path / "executed"

    class Bomb:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    (pair[which] / "model.safetensors").unlink()
    torch.save({"fc.weight": Bomb()}, pair[which] / "pytorch_model.bin")
    refused(call(*ask(pair)), "weights-unsafe")
    assert not mark.exists()


@pytest.mark.parametrize("which", [0, 1])
def test_remote_code_is_never_run(call, pair, which, tmp_path) -> None:
    mark = tmp_path / "executed"
    config = json.loads((pair[which] / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (pair[which] / "config.json").write_text(json.dumps(config))
    (pair[which] / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nModel = Config = object\n")
    call(*ask(pair, "--max-tokens", 3))
    assert not mark.exists()


def test_index_that_points_outside_the_folder(call, pair) -> None:
    index = {"metadata": {}, "weight_map": {"fc.weight": "../target/model.safetensors"}}
    (pair[1] / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(call(*ask(pair)), "weights-unsafe", "../target")


def test_without_the_engine_extra_the_command_says_what_to_install(tmp_path) -> None:
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['run', 'hi']; from draftproof.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "[dependency-missing]" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["bench", "--part", "acceptance", "--skip", "3"], "--skip"),
        (["bench", "--part", "speed", "--against", "x"], "--against"),
        (["bench", "--part", "memory", "--limit", "3"], "--limit"),
        (["bench", "--part", "colour"], "colour"),
    ],
)
def test_options_that_would_be_ignored_are_refused(call, args, name) -> None:
    refused(call(*args), "bad-option", name)


def test_more_prompts_than_there_are(call, pair, tmp_path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "w5 w6"}\n')
    args = ["--workload", few, "--target", pair[0], "--drafter", pair[1]]
    refused(call("lossless", "--prompts", 5, *args), "bad-option", "only 1")


def test_lossless_says_identical_on_a_tiny_pair(call, pair, tmp_path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "w5 w6 w9"}\n{"prompt": "w40 w11"}\n')
    args = ["--workload", few, "--target", pair[0], "--drafter", pair[1], "--dtype", "float64", "--max-tokens", 24]
    status, out, err = call("lossless", "--prompts", 2, "--json", *args)
    report = json.loads(out)
    assert status == 0 and report["identical"] == report["compared"] == 8 and not report["bugs"], err


def test_lossless_calls_a_wrong_token_a_bug(call, pair, tmp_path, monkeypatch) -> None:
    """Control: an engine that alters a token of the drafted run must be found out."""
    from draftproof.bench import bridge

    right = bridge.runners

    def altered(*args):
        run = right(*args)
        good = run["drafted"]
        run["drafted"] = lambda ids, seed: bridge.Timed(
            [t ^ 1 if i == 5 else t for i, t in enumerate(good(ids, seed).ids)], 1.0, 1
        )
        return run

    monkeypatch.setattr(bridge, "runners", altered)
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "w5 w6 w9"}\n')
    args = ["--workload", few, "--target", pair[0], "--drafter", pair[1], "--dtype", "float64", "--max-tokens", 24]
    status, out, _ = call("lossless", "--prompts", 1, "--json", *args)
    assert status == 1 and json.loads(out)["bugs"]


def test_damaged_tokenizer(call, pair) -> None:
    (pair[0] / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(call(*ask(pair)), "not-a-model", "tokenizer")


def test_model_type_that_transformers_does_not_know(call, pair) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    refused(call(*ask(pair)), "target-unsupported")


@pytest.mark.parametrize("extra", [["--top-k", str(2**70)], ["--stop", ""]])
def test_more_bad_options(call, pair, extra) -> None:
    refused(call(*ask(pair, *extra)), "bad-option")


def test_bytes_that_are_no_text(call, pair) -> None:
    refused(call(*ask(pair, prompt="w5 \udcff")), "bad-option", "UTF-8")


def test_json_has_no_nan(call, pair) -> None:
    status, out, err = call(*ask(pair, "--max-tokens", 1, "--json"))
    assert status == 0 and "NaN" not in out and json.loads(out)["acceptance"]["tau"] is None, err
