"""Tiny random models for fast tests: targets of every supported kind, a DFlash drafter, and a drafter that is often
right.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.config.drafter import DrafterSpec, read_drafter
from draftproof.models.cache import Cache, Slots
from draftproof.models.dflash import DFlash, DFlashDrafter, DraftDist, likeliest
from draftproof.models.target import Target

VOCAB, HIDDEN, LAYERS = 64, 32, 6
KINDS = ("llama", "qwen2", "qwen3", "gemma3")
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # three gated delta nets to one full attention, and one more


def target_config(kind: str) -> Any:
    """A transformers config: 4 query heads, 2 key heads; qwen2 and gemma3 with sliding layers of window 8."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "llama":
        return hf.LlamaConfig(**common, head_dim=8)
    if kind == "qwen2":
        return hf.Qwen2Config(**common, use_sliding_window=True, sliding_window=8, max_window_layers=3)
    if kind == "qwen3":
        return hf.Qwen3Config(**common, head_dim=16)
    if kind == "gemma3":
        return hf.Gemma3TextConfig(
            **common, head_dim=8, sliding_window=8, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        )  # fmt: skip
    if kind in HYBRIDS:
        return hybrid_config(kind, common | {"initializer_range": 0.15})
    raise ValueError(kind)


def hybrid_config(kind: str, common: dict[str, Any], layers: int = LAYERS) -> Any:
    import transformers as hf

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    own: dict[str, Any] = {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "layer_types": [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(layers)],
        "tie_word_embeddings": False,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    if kind == "qwen3_next":
        return hf.Qwen3NextConfig(**common, **own, **experts, rope_parameters=rope, mlp_only_layers=[0, 2])
    own["rope_parameters"] = rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    if kind == "qwen3_5":
        return hf.Qwen3_5TextConfig(**common, **own)
    return hf.Qwen3_5MoeTextConfig(**{k: v for k, v in common.items() if k != "intermediate_size"}, **own, **experts)


@cache
def target_folder(kind: str = "llama", seed: int = 0) -> Path:
    """A saved checkpoint (float32 safetensors and config.json), made once per test process."""
    import transformers as hf

    torch.manual_seed(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"draftproof-tiny-{kind}-"))
    model = hf.AutoModelForCausalLM.from_config(target_config(kind))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """Words w4 ... w63 and the special tokens; no chat template, so prompts are taken as they stand."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCAB))])}
    raw = Tokenizer(models.WordLevel(words, unk_token="w4"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", mask_token="<mask>"
    )


@cache
def target(kind: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0) -> Target:
    loaded = Target.load(target_folder(kind, seed), dtype=dtype)
    if dtype == torch.float64 and kind in HYBRIDS:
        in_double(loaded.model)
    return loaded


def in_double(model: Any) -> None:
    """Norms of a loaded model without their detour over float32, so that a wholly float64 path can be compared."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNormGated"):
            module.forward = partial(_gated_norm, module)
        elif name.endswith("RMSNorm") and name.startswith("Qwen3"):
            module.forward = partial(_norm, module, 1.0 if hasattr(module, "eps") else 0.0)


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(module: Any, offset: float, x: Tensor) -> Tensor:
    return _unit(x, module.eps if offset else module.variance_epsilon) * (offset + module.weight)


def _gated_norm(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    return _unit(x, module.variance_epsilon) * module.weight * torch.nn.functional.silu(gate)


@cache
def plain_model(kind: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The same weights as a plain transformers model with its own sdpa attention."""
    import transformers as hf

    model: Any = hf.AutoModelForCausalLM.from_pretrained(
        target_folder(kind, seed), dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )
    if dtype == torch.float64 and kind in HYBRIDS:
        in_double(model)
    return model.eval()


def drafter_config(**changes: Any) -> dict[str, Any]:
    """z-lab config of a drafter for a tiny target: 2 sliding layers (window 6) and 1 full, block 4, taps 0 2 4."""
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4]} | changes.pop("dflash_config", {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": 4,
        "num_target_layers": LAYERS,
        "is_causal": False,
        "dflash_config": nested,
    }
    return config | changes


def drafter_spec(**changes: Any) -> DrafterSpec:
    folder = Path(tempfile.mkdtemp(prefix="draftproof-tiny-drafter-"))
    (folder / "config.json").write_text(json.dumps(drafter_config(**changes)))
    return read_drafter(folder)


def drafter(owner: Target, *, seed: int = 1, **changes: Any) -> DFlashDrafter:
    """A DFlash drafter with random weights: it runs every code path, its drafts are rarely right."""
    model = DFlash(drafter_spec(**changes))
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=draw) * 0.3
        weight.data.copy_(1 + noise if weight.ndim == 1 else noise)
    return DFlashDrafter(model.to(device=owner.device, dtype=owner.dtype), owner)


def drafter_folder(folder: Path, **changes: Any) -> Path:
    """A saved z-lab checkpoint with random weights."""
    from draftproof.train.export import export

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafter_config(**changes)))
    export(drafter(target("llama", torch.float32), **changes).model, folder)
    return folder


class KnowingDrafter:
    """Drafts a known text and errs at a given rate, so that steps accept anything from none to all of a block.

    It keeps the text's position by counting committed rows, exactly as a real drafter's cache does.
    """

    def __init__(
        self, owner: Target, texts: list[list[int]], *, depth: int = 3, wrong: float = 0.3, seed: int = 0
    ) -> None:
        self.taps: tuple[int, ...] = (1, 3)
        self.depth, self.owner, self.texts, self.wrong = depth, owner, texts, wrong
        self.draw = torch.Generator().manual_seed(seed)
        self.cache: Cache | None = None
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.at: list[int] = []  # slot -> text; texts come in their order, again and again
        self.entered = 0

    @property
    def stores(self) -> list[KnowingDrafter]:
        return [self]

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        self.lengths, self.at = torch.zeros(slots, dtype=torch.long), list(range(slots))

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        self.lengths[slots] += counts

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        rows = self._slots(slots)
        ids = torch.zeros(len(anchors), self.depth, width, dtype=torch.long)
        for i, row in enumerate(rows):
            at = int(self.lengths[row]) + 1
            known = (self.texts[self.at[row]][at : at + self.depth] + [0] * self.depth)[: self.depth]
            ids[i, :, 0] = torch.tensor(known)
        flip = torch.rand(ids.shape, generator=self.draw) < self.wrong
        return DraftDist(torch.where(flip, (ids + 5) % VOCAB, ids), torch.zeros(ids.shape))

    def drop(self, slots: Slots) -> None:
        self.lengths[slots] = 0
        for slot in self._slots(slots):
            self.at[slot], self.entered = self.entered % len(self.texts), self.entered + 1

    def _slots(self, slots: Slots) -> list[int]:
        return list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots.tolist()

    # What it keeps of a request is a length.
    stateful = False

    def fork(self, source: int, slots: Slots, reach: int | None = None) -> None:
        self.lengths[slots] = self.lengths[source]
        for slot in self._slots(slots):
            self.at[slot] = self.at[source]

    def swap(self, one: int, other: int, reach: int) -> None:
        self.lengths[[one, other]] = self.lengths[[other, one]]
        self.at[one], self.at[other] = self.at[other], self.at[one]

    def resize(self, slots: int, capacity: int) -> None:
        kept = min(slots, len(self.at))
        lengths = torch.zeros(slots, dtype=torch.long)
        lengths[:kept] = self.lengths[:kept]
        self.lengths, self.at = lengths, (self.at + list(range(len(self.at), slots)))[:slots]

    def bytes_a_slot(self, capacity: int) -> int:
        return 0

    def save(self, slot: int, begin: int, end: int) -> list[Tensor]:
        return []

    def load(self, slot: int, begin: int, saved: Any) -> None: ...

    def state(self, slot: int) -> list[Tensor]:
        return []

    def restore(self, slot: int, length: int, state: Any) -> None:
        self.lengths[slot] = length


class KnowingTree(KnowingDrafter):
    """Knows the text, but ranks its token behind up to three others: paths leave the spine, of every length.

    What it says at a place of the text depends on the place alone, and rescored candidates are rescored logits.
    beside: how often the right token is not the best; wrong: how often it stands anywhere.
    """

    def __init__(self, owner: Target, texts: list[list[int]], *, beside: float = 0.4, **settings: Any) -> None:
        super().__init__(owner, texts, **settings)
        self.beside, self.seed = beside, settings.get("seed", 0)

    def logits(self, row: int, at: int) -> Tensor:
        """float32 [D, V] about the tokens from place `at` of the text on."""
        vocab = self.owner.spec.vocab_size
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + row * 10_007 + at)
        values = -torch.rand(self.depth, vocab, generator=draw).cumsum(1)
        ids = torch.rand(self.depth, vocab, generator=draw).argsort(1)
        chance, place = torch.rand(2, self.depth, generator=draw)
        for depth, token in enumerate(self.texts[row][at : at + self.depth]):
            if chance[depth] < 1 - self.wrong:
                rank = 1 + int(3 * place[depth]) if chance[depth] < (1 - self.wrong) * self.beside else 0
                old = int((ids[depth] == token).nonzero())
                ids[depth, old], ids[depth, rank] = ids[depth, rank].clone(), token
        return torch.zeros_like(values).scatter_(1, ids, values)

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        rows = self._slots(slots)
        return likeliest(torch.stack([self.logits(self.at[r], int(self.lengths[r]) + 1) for r in rows]), width, rescore)
