"""The toy target from corpus to shipped form, at a size that trains in seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftproof.config.target import read_target
from draftproof.errors import UserError
from draftproof.models import embedded, hub, pack
from draftproof.train.data import Example, save_examples
from draftproof.train.toy import corpus
from draftproof.train.toy.depths import draft_rows
from draftproof.train.toy.export import export
from draftproof.train.toy.loop import begin, pick_rows, resume, save_run, train
from draftproof.train.toy.loss import targets
from draftproof.train.toy.run import Settings, run_toy
from draftproof.train.toy.shape import Size, ToyModel
from draftproof.train.toy.tokenizer import encode, load_stream, save_stream, train_tokenizer

SIZE = Size(
    vocabulary=320, hidden=32, intermediate=48, layers=4, heads=2, kv_heads=1, head_dim=32,
    linear_key_heads=1, linear_value_heads=2, linear_head_dim=16, positions=128,
)  # fmt: skip
LENGTH = 32


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chats() -> list[list[dict[str, str]]]:
    words = ["one", "two", "three", "four", "five"]
    return [
        [{"role": "user", "content": f"Count {n} {w}."}, {"role": "assistant", "content": f"{w} " * (3 + n % 3)}]
        for n, w in enumerate(words * 24)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats()))
    return path


@pytest.fixture(scope="module")
def stream(texts: Path) -> dict[str, Tensor]:
    documents = list(corpus.written_texts(texts, lambda: None))
    return encode(train_tokenizer(documents, SIZE.vocabulary), documents)


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read."""
    ticks = count()
    return lambda: float(next(ticks))


def go(run: Any, stream: dict[str, Tensor], budget: float) -> None:
    train(
        run, stream, budget=budget, sequences=4, length=LENGTH, report=lambda _: None, save=lambda: None,
        report_every=1, clock=ticking(),
    )  # fmt: skip


# --- corpus and tokenizer ---------------------------------------------------------------------------


def test_texts_of_a_run_and_chats_of_a_file_read_the_same(tmp_path: Path, texts: Path) -> None:
    tokenizer = train_tokenizer([corpus.chatml(chat) for chat in chats()], 400)
    system = {"role": "system", "content": "Be kind."}

    def ids(chat: list[dict[str, str]]) -> list[int]:
        return list(tokenizer(corpus.chatml(chat), add_special_tokens=False)["input_ids"])

    examples = [Example(ids([system, chat[0]]), ids([chat[1]])[:-1]) for chat in chats()]
    cut = Example(ids([chats()[0][0]]), ids([chats()[0][1]])[:-3])
    save_examples(tmp_path / "texts.safetensors", [*examples, cut])
    *whole, last = corpus.written_texts(tmp_path / "texts.safetensors", lambda: tokenizer)
    expected = [[chat[0], {**chat[1], "content": chat[1]["content"].strip()}] for chat in chats()]
    assert whole == [corpus.chatml(chat) for chat in expected]
    assert not last.endswith(f"{corpus.CLOSE}\n") and last.startswith(corpus.chatml([chats()[0][0]]))
    assert list(corpus.written_texts(texts, lambda: None)) == [corpus.chatml(chat) for chat in chats()]


def test_prompts_without_answers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    with pytest.raises(UserError) as caught:
        list(corpus.written_texts(tmp_path / "prompts.jsonl", lambda: None))
    assert caught.value.code == "bad-texts"


def test_documented_functions_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "source_files", lambda: [Path(json.__file__), Path(shutil.__file__)])
    first, again = list(corpus.documented_functions(5, 1)), list(corpus.documented_functions(5, 1))
    assert first == again and len(first) == 5
    assert first[0].startswith(corpus.OPEN) and first[1].startswith("def ") and '"""' in first[1]
    assert corpus.shuffled([*first, *first], 3) == corpus.shuffled(first, 3) != first


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    train_tokenizer([corpus.chatml(chat) for chat in chats()], 400).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = corpus.chatml([{"role": "user", "content": "  def f(x):\n\treturn 'ünï 漢字 🙂' # 123"}])
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[0] == 1 and 2 in ids
    special = tokenizer.convert_ids_to_tokens([0, 1, 2, 3])
    assert special == [corpus.END, corpus.OPEN, corpus.CLOSE, corpus.MASK]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (2, 0, 3)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == corpus.chatml(chat)
    begun = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert begun == corpus.chatml(chat[:1]) + f"{corpus.OPEN}assistant\n"


def test_stream(stream: dict[str, Tensor], tmp_path: Path) -> None:
    assert (stream["train"][stream["starts"]] == 1).all()  # every document is a chat
    assert (stream["train"][stream["starts"][1:] - 1] == 0).all() and stream["train"][-1] == 0
    save_stream(tmp_path / "s", stream)
    assert all(torch.equal(stream[name], tensor) for name, tensor in load_stream(tmp_path / "s", LENGTH).items())
    with pytest.raises(UserError, match="tokens to"):
        load_stream(tmp_path / "s", 10**6)
    rows = pick_rows(len(stream["train"]), stream["starts"], 6, LENGTH, seed=1, step=7)
    assert torch.equal(rows, pick_rows(len(stream["train"]), stream["starts"], 6, LENGTH, seed=1, step=7))
    assert rows.shape == (6, LENGTH) and rows.min() >= 0 and rows.max() < len(stream["train"])


# --- the head's rows --------------------------------------------------------------------------------


@torch.no_grad()
def test_draft_rows_see_what_drafting_sees() -> None:
    """Second drafts one by one, behind first-pass rows, are those of the one pass; and no row looks ahead."""
    model = ToyModel(SIZE, 0).double().eval()
    decoder, tokens = model.lm.model, torch.randint(4, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    first, second = draft_rows(model.mtp, decoder, tokens, hidden)
    for row in (1, 4, 7):
        embedded = decoder.embed_tokens(tokens[:, 1 : row + 2])
        mixed = torch.cat([hidden[:, :row], first[:, row - 1 : row]], 1)
        rope = decoder.rotary_emb(mixed, torch.arange(row + 1).expand(3, 2, -1))
        causal = torch.ones(row + 1, row + 1, dtype=torch.bool).tril()[None, None]
        alone = model.mtp(embedded, mixed, rope, visible=causal)
        torch.testing.assert_close(alone[:, -1], second[:, row], rtol=0, atol=1e-6)  # rope is made in float32
        torch.testing.assert_close(alone[:, :row], first[:, :row], rtol=0, atol=1e-6)
    changed = tokens.clone()
    changed[:, 6] += 1
    again = draft_rows(model.mtp, decoder, changed, decoder(input_ids=changed, use_cache=False).last_hidden_state)
    for before, after in zip((first, second), again, strict=True):
        assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5], after[:, 5])


def test_targets() -> None:
    assert targets(torch.tensor([[5, 6, 7, 8]]), 2, skip=1).tolist() == [[-100, 8, -100, -100]]


def test_mtp_gradients_end_at_the_target() -> None:
    model, tokens = ToyModel(SIZE, 0), torch.arange(4, 20)[None]
    hidden = model.lm.model(input_ids=tokens, use_cache=False).last_hidden_state
    sum(rows.sum() for rows in draft_rows(model.mtp, model.lm.model, tokens, hidden)).backward()  # type: ignore[union-attr]
    assert all(p.grad is None for p in model.lm.parameters())
    assert all(p.grad is not None for p in model.mtp.parameters())


# --- the loop ---------------------------------------------------------------------------------------


def test_training_lowers_all_losses_and_resumes(stream: dict[str, Tensor], tmp_path: Path) -> None:
    run = begin(ToyModel(SIZE, 0), lr=1e-2, seed=0)
    go(run, stream, budget=60)
    first, last = run.log[0], run.log[-1]
    assert run.step >= 25 and run.seconds >= 60
    for depth, (before, after) in enumerate(zip(first["held"], last["held"], strict=True)):
        assert after < before - 1, (depth, run.log)
    save_run(run, tmp_path / "run.pt")
    other = begin(ToyModel(SIZE, 5), lr=1e-2, seed=0)
    resume(other, tmp_path / "run.pt")
    assert (other.step, other.seconds, other.log) == (run.step, run.seconds, run.log)
    for each in (run, other):
        go(each, stream, budget=70)
    assert other.step == run.step > last["step"]
    for (name, mine), theirs in zip(run.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


# --- the whole run, its files, and what ships -------------------------------------------------------


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "run"
    said: list[str] = []
    base = {"sequences": 2, "length": LENGTH, "functions": 0, "seed": 1, "size": SIZE}
    assert not run_toy(out, texts, Settings(0, **base), torch.device("cpu"), said.append, lambda: None)  # type: ignore[arg-type]
    assert not (out / "run.pt").exists()
    assert run_toy(out, texts, Settings(0.2, **base), torch.device("cpu"), said.append, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="another seed"):
        run_toy(out, texts, Settings(1, **{**base, "seed": 2}), torch.device("cpu"), said.append, lambda: None)  # type: ignore[arg-type]
    assert run_toy(out, texts, Settings(9, **base), torch.device("cpu"), said.append, lambda: None)  # type: ignore[arg-type]
    assert "is finished" in said[-1]
    return out


def test_the_checkpoint_loads_in_transformers_with_the_modules_logits(finished: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = finished / "target"
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.generation_config.eos_token_id == [2, 0]
    model = ToyModel(SIZE, 3)
    state = torch.load(finished / "run.pt", weights_only=True)["model"]
    model.load_state_dict(state)
    tokens = torch.arange(4, 40)[None]
    ours, theirs = model.lm(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    assert (ours - theirs).abs().max() < 0.02 * ours.abs().max()  # int8 rows
    from draftproof.train.toy.export import load_rounded

    load_rounded(model, folder)
    assert torch.equal(model.lm(input_ids=tokens).logits, theirs)


def test_tensor_names_and_config(finished: Path) -> None:
    tensors = load_file(finished / "target" / "model.safetensors")
    names = {name for name in tensors if name.startswith("mtp.")}
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    others = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    assert names == {f"mtp.{name}.weight" for name in (*others, *(f"layers.0.{part}" for part in layer))}
    assert "lm_head.weight" not in tensors and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    spec = read_target(finished / "target")
    assert spec.mtp_layers == 1 and spec.layer_kinds == ("linear", "linear", "linear", "full")
    assert spec.partial_rotary_factor == 0.25 and spec.tie_word_embeddings and spec.rope_base == 1e6
    assert not spec.findings


def test_packing_the_checkpoint_again_gives_the_same_numbers(finished: Path, tmp_path: Path) -> None:
    again = pack.pack(finished / "target", tmp_path / "again", {})
    pack.unpack(again, tmp_path / "plain")
    for path in sorted((finished / "target").iterdir()):
        assert (tmp_path / "plain" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_shipped_toy(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "installed" / "embedded.py"))
    for resolve in (hub.resolve_target, hub.resolve_config):
        with pytest.raises(UserError, match="this installation lacks"):
            resolve(hub.TOY_TARGET)
    with pytest.raises(UserError, match="this installation lacks"):
        hub.resolve_drafter(hub.TOY_DRAFTER)
    shutil.copytree(finished / "packed", tmp_path / "installed" / "shipped" / hub.TOY_TARGET)
    folder = hub.resolve_target(hub.TOY_TARGET)
    assert hub.resolve_config(hub.TOY_TARGET) == folder
    for path in sorted((finished / "target").iterdir()):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_real_size_fits_the_package(tmp_path: Path) -> None:
    train_tokenizer([corpus.chatml(chat) for chat in chats()], 400).save_pretrained(tmp_path / "tokenizer")
    model = ToyModel(Size(), 0)
    assert 8e6 < sum(p.numel() for p in model.parameters()) < 9.2e6
    card = {"name": "toy", "parameters": 1, "seconds": 1}
    export(model, tmp_path / "tokenizer", tmp_path / "packed", tmp_path / "target", card)
    assert (tmp_path / "packed" / "weights.safetensors").stat().st_size < 9.3e6
