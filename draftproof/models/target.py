"""A Hugging Face causal LM as target: the transformers module as it is, on our cache, with tapped features.

forward -> logits of the rows asked for, and the residual stream after each tapped layer, captured by forward hooks.
This file holds the only table from "after decoder layer i" to a hook; transformers' +1 shifted `hidden_states` is not
used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.config.target import TargetSpec, read_target
from draftproof.errors import UserError
from draftproof.models import attention, gdn
from draftproof.models.cache import Cache, LayerShape
from draftproof.models.deltanet import DeltaNet, drive, released
from draftproof.models.plan import Plan
from draftproof.models.prepacked import prepack
from draftproof.models.recurrent import StateShape

Tap = int | str  # after decoder layer i (0-based), or one of the next two
EMBEDDING = "embedding"  # the tokens' embedding rows
FINAL = "final"  # after the final norm: what the head reads
KINDS = ("full", "sliding", "linear")  # of layers that run here
SELF_CHECK_ROWS = 24  # rows of the start-up comparison, on top of the window if there is one
SELF_CHECK_LIMIT = {torch.float64: 1e-9, torch.float32: 2e-3}  # relative to the largest logit; else 6e-2


@dataclass(frozen=True)
class TargetOut:
    """logits [R, rows, V]; features [R, N, taps * H], the taps side by side in listed order, or None without taps."""

    logits: Tensor
    features: Tensor | None


class Target:
    """Wraps a loaded transformers model; `forward` is the only way through it."""

    def __init__(self, model: Any, spec: TargetSpec) -> None:
        self.model, self.spec = model.eval().requires_grad_(False), spec
        self.layers: nn.ModuleList = decoder_of(model).layers
        self.final_norm: nn.Module = decoder_of(model).norm
        self.embedding: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        self.dtype: torch.dtype = self.embedding.weight.dtype
        self.device: torch.device = self.embedding.weight.device
        require_supported(spec, len(self.layers))
        self.deltas: dict[int, DeltaNet] = drive(self.layers)
        require_kinds(spec, self.deltas)

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype, device: str = "cpu") -> Target:
        """Load safetensors weights from a folder; refuse NaN weights and models that our attention gets wrong."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from draftproof.models.checkpoint import check_weights

        logging.disable_progress_bar()

        spec = read_target(folder)
        require_supported(spec, spec.num_layers)
        check_weights(Path(folder))
        attention.register()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention.NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (ValueError, OSError, KeyError, AttributeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                "target-unsupported", f"{folder}: transformers cannot load it: {reason}", "use a model type it knows"
            ) from None
        model, report = loaded
        model.to(device)
        if dtype == torch.float64 and spec.experts:
            model.set_experts_implementation("eager")  # grouped products know no float64
        require_loaded(model, report, folder)
        require_finite(model, folder)
        target = cls(model, spec)
        target.self_check()
        return target

    def prepack(self) -> None:
        """Make products with few rows cheap on a CPU (`prepacked.py`); no gradients pass the target any more."""
        prepack(self.model)
        self.head = self.model.get_output_embeddings()

    def new_cache(self, *, slots: int, capacity: int, chunk: int) -> Cache:
        spec, windows = self.spec, layer_windows(self.spec)
        shapes: list[LayerShape | StateShape] = [
            self.deltas[layer].shape if layer in self.deltas else LayerShape(spec.num_kv_heads, spec.head_dim, window)
            for layer, window in enumerate(windows)
        ]
        return Cache(shapes, slots=slots, capacity=capacity, chunk=chunk, dtype=self.dtype, device=self.device)

    def forward(self, tokens: Tensor, plan: Plan, *, taps: Sequence[Tap] = (), rows: int | Tensor = 0) -> TargetOut:
        """Run N nodes a slot: tokens [R, N]. Keys and values stay uncommitted until the cache's `commit`.

        rows: 0 for logits of all nodes, k for the last k, a LongTensor for those columns.
        """
        with torch.no_grad(), self._tapped(taps) as tapped:
            out = self.model(
                input_ids=tokens,
                position_ids=plan.positions,
                use_cache=False,
                logits_to_keep=rows,
                draftproof=plan,
            )
        if len(plan.written) != len(self.layers):
            raise UserError(
                "target-unsupported",
                f"{self.spec.model_type}: {len(plan.written)} of {len(self.layers)} layers went through our cache",
                "the model does not use transformers' attention interface in every layer; it cannot run here",
            )
        features = torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
        return TargetOut(out.logits, features)

    @contextlib.contextmanager
    def _tapped(self, taps: Sequence[Tap]) -> Iterator[dict[Tap, Tensor]]:
        """Collect the stream at each tapped point while the block runs. The one table from a tap to its hook."""
        seen: dict[Tap, Tensor] = {}

        def keep(tap: Tap) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                seen[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        named = {EMBEDDING: self.embedding, FINAL: self.final_norm}
        points = {tap: named[tap] if isinstance(tap, str) else self.layers[tap] for tap in taps}
        handles = [point.register_forward_hook(keep(tap)) for tap, point in points.items()]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own rotation (cos, sin) of text positions [R, N], for a head that runs its kind of layer."""
        rotary: Any = decoder_of(self.model).rotary_emb
        if hasattr(rotary, "mrope_section"):  # time, height and width of text are the same
            positions = positions.expand(3, *positions.shape)
        return rotary(self.embedding.weight[:1, None], positions)

    def self_check(self) -> None:
        """One forward, longer than the window and than a chunk, against the model's own path; refuse on mismatch."""
        window = max((w for w in layer_windows(self.spec) if w), default=gdn.CHUNK if self.deltas else 0)
        rows = min(window + SELF_CHECK_ROWS, self.spec.max_positions or window + SELF_CHECK_ROWS)
        tokens = (torch.arange(rows, device=self.device) * 7 + 11)[None] % self.spec.vocab_size
        cache = self.new_cache(slots=1, capacity=rows, chunk=rows)
        plan = causal_plan(cache, slice(0, 1), rows, rows)
        ours = self.forward(tokens, plan, rows=SELF_CHECK_ROWS // 2).logits.double()
        self.model.set_attn_implementation("sdpa")
        try:
            with torch.no_grad(), released(self.deltas), quiet():
                theirs = self.model(
                    input_ids=tokens, use_cache=False, logits_to_keep=SELF_CHECK_ROWS // 2
                ).logits.double()
        finally:
            self.model.set_attn_implementation(attention.NAME)
        # Rounding grows through recurrent layers, so in 16 bits their sharp check is module by module.
        loose = self.deltas and self.dtype in (torch.bfloat16, torch.float16)
        limit = 0.25 if loose else None
        self._require_close("our layers", "logit", ours, theirs, limit)
        self._require_close("the text in two parts", "logit", self._in_parts(tokens), theirs, limit)
        if self.deltas:
            self._check_modules(causal_plan(cache, slice(0, 1), rows, rows), rows)

    def _in_parts(self, tokens: Tensor) -> Tensor:
        """The last logits again, behind a first part that is committed: what a layer keeps must be in our cache."""
        rows, last = tokens.shape[1], SELF_CHECK_ROWS // 2
        cache = self.new_cache(slots=1, capacity=rows, chunk=rows)
        self.forward(tokens[:, :-last], causal_plan(cache, slice(0, 1), rows - last, rows), rows=1)
        cache.commit(slice(0, 1), torch.tensor([rows - last], device=self.device))
        return self.forward(tokens[:, -last:], causal_plan(cache, slice(0, 1), last, rows)).logits.double()

    def _check_modules(self, plan: Plan, rows: int) -> None:
        """Every recurrent module on random rows, against its own forward."""
        draw = torch.Generator(device=self.device).manual_seed(0)
        hidden = torch.randn(1, rows, self.spec.hidden_size, generator=draw, device=self.device).to(self.dtype)
        for layer, driver in self.deltas.items():
            with torch.no_grad():
                ours = driver.module(hidden, draftproof=plan)
                with released({layer: driver}), quiet():
                    theirs = driver.module(hidden)
            self._require_close(f"layer {layer}", "value", ours.double(), theirs.double())

    def _require_close(self, what: str, of: str, ours: Tensor, theirs: Tensor, limit: float | None = None) -> None:
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        # their recurrent layers compute in float32 whatever the weights are
        exact = torch.float32 if self.deltas and self.dtype == torch.float64 else self.dtype
        if not error <= (limit or SELF_CHECK_LIMIT.get(exact, 6e-2)):
            raise UserError(
                "target-mismatch",
                f"{self.spec.model_type}: {what}: {error:.2e} of the largest {of} off the model's own",
                "this model type needs a feature that is not implemented; please report it with its config.json",
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of slow paths that are taken here once, for the comparison."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def causal_plan(cache: Cache, slots: Any, rows: int, reach: int) -> Plan:
    """Plan of a plain causal forward over `rows` new tokens a slot."""
    count = cache.lengths[slots].shape[0]
    order = torch.arange(rows, device=cache.lengths.device)
    visible = (order[:, None] >= order).expand(count, rows, rows)
    return cache.plan(slots, order.expand(count, rows), visible, reach, causal=True)


def decoder_of(model: Any) -> Any:
    """The module that owns `layers`, below a causal-LM head and possibly below a multimodal wrapper."""
    decoder = model.get_decoder()
    decoder = decoder if hasattr(decoder, "layers") else getattr(decoder, "language_model", decoder)
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise UserError(
            "target-unsupported",
            f"{type(model).__name__} keeps no `layers` and `norm` in its decoder",
            "use a target of the Llama kind of layout (Llama, Mistral, Qwen, Gemma, SmolLM, ...)",
        )
    return decoder


def layer_windows(spec: TargetSpec) -> list[int | None]:
    return [spec.sliding_window if kind == "sliding" else None for kind in spec.layer_kinds]


def require_supported(spec: TargetSpec, layers: int) -> None:
    foreign = sorted({kind for kind in spec.layer_kinds if kind not in KINDS})
    if foreign:
        raise UserError(
            "target-unsupported",
            f"{spec.model_type} has layers of kind {', '.join(foreign)}; only full attention, sliding attention and "
            "gated delta nets run here",
            "serve this target with vLLM or SGLang",
        )
    if layers != spec.num_layers:
        raise UserError(
            "target-mismatch",
            f"the config promises {spec.num_layers} layers, the model has {layers}",
            "check that config.json and weights belong together",
        )


def require_kinds(spec: TargetSpec, deltas: dict[int, DeltaNet]) -> None:
    """The config's linear layers are the modules that were taken over: no layer runs on another path unseen."""
    promised = {layer for layer, kind in enumerate(spec.layer_kinds) if kind == "linear"}
    if promised != set(deltas):
        raise UserError(
            "target-unsupported",
            f"{spec.model_type}: the config has recurrent layers {sorted(promised)}, the model {sorted(deltas)}",
            "serve this target with vLLM or SGLang; its recurrent layers are of a kind that does not run here",
        )


def require_loaded(model: nn.Module, report: dict[str, Any], folder: str | Path) -> None:
    """transformers fills what the weights lack with random numbers, and only logs it."""
    # Heads and towers this engine does not run (MTP, vision) may be left over; decoder layers may not.
    own = {name.split(".layers.")[0] + ".layers." for name, _ in model.named_parameters() if ".layers." in name}
    left_over = {name for name in report["unexpected_keys"] if name.startswith(tuple(own))}
    parts = {
        "missing": sorted(report["missing_keys"]),
        "misshapen": sorted(str(entry[0]) for entry in report["mismatched_keys"]),
        "unexpected": sorted(left_over),
    }
    found = "; ".join(f"{kind} {', '.join(names[:4])}" for kind, names in parts.items() if names)
    if found:
        raise UserError("weights-invalid", f"{folder}: {found}", "check that config.json and weights belong together")


def require_finite(model: nn.Module, folder: str | Path) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise UserError(
                "weights-invalid",
                f"{folder}: {name} holds NaN or infinity",
                "the checkpoint is damaged or was exported wrongly; fetch or export it again",
            )
