"""The trained toy target in its two forms: packed int8 as it ships, and the plain checkpoint that this gives.

The checkpoint is made from the packed form, so that every machine that unpacks it has the very numbers that were
measured.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from draftproof.fetch import write_atomically
from draftproof.models.pack import pack, unpack
from draftproof.train.toy.corpus import CLOSE, END
from draftproof.train.toy.shape import ToyModel, text_config
from draftproof.train.toy.tokenizer import SPECIAL

README = """# {name}

A toy of {parameters:,} parameters with the architecture of Qwen3.5 (gated delta net and attention 3:1, one MTP layer),
trained from scratch in {seconds} s on texts that SmolLM2-135M-Instruct wrote and on documented functions of
permissively licensed Python packages. It writes text that looks like text and knows nothing: it is there to run and
test every kind of drafting on a hybrid target without a download. Weights are int8 rows times a scale,
rounded to bfloat16.
"""


def tensors_of(model: ToyModel) -> dict[str, Tensor]:
    """Names as in Qwen3.5 text checkpoints: `model.*` and `mtp.*`; the head is the embedding and not repeated.

    Matrices stay float32 for `pack` to round; the rest is bfloat16, as it is stored.
    """
    found = {name: w for name, w in model.lm.state_dict().items() if name != "lm_head.weight"}
    found |= {f"mtp.{name}": w for name, w in model.mtp.state_dict().items()}
    return {
        name: w.detach().to("cpu", torch.float32 if w.dim() == 2 else torch.bfloat16).contiguous().clone()
        for name, w in found.items()
    }


def export(model: ToyModel, tokenizer: Path, packed: Path, folder: Path, card: dict[str, Any]) -> None:
    """Write the package files to `packed` and the Hugging Face checkpoint made of them to `folder`.

    `tokenizer`: the folder of a saved one, with SPECIAL as its first ids; `card`: fields of the model card.
    """
    from safetensors.torch import save

    with TemporaryDirectory(prefix="draftproof-") as scratch:
        raw = Path(scratch)
        shutil.copytree(tokenizer, raw, dirs_exist_ok=True)
        (raw / "model.safetensors").write_bytes(save(tensors_of(model), metadata={"format": "pt"}))
        (raw / "config.json").write_bytes(_json(text_config(model.size)))
        ends = [SPECIAL.index(token) for token in (CLOSE, END)]
        (raw / "generation_config.json").write_bytes(_json({"eos_token_id": ends, "pad_token_id": ends[1]}))
        (raw / "README.md").write_text(README.format(**card), encoding="utf-8")
        pack(raw, packed, card)
    unpack(packed, folder)


def load_rounded(model: ToyModel, folder: Path) -> None:
    """The checkpoint's weights back into the module: what was measured before rounding can be measured again."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    model.mtp.load_state_dict({n.removeprefix("mtp."): w for n, w in stored.items() if n.startswith("mtp.")})
    rest = {n: w for n, w in stored.items() if not n.startswith("mtp.")}
    model.lm.load_state_dict({**rest, "lm_head.weight": rest["model.embed_tokens.weight"]})


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, iter([_json(value)]))


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
