"""The multi-token-prediction head of a Qwen3-Next / Qwen3.5 checkpoint, as a module.

Row j joins the embedding of token j + 1 with the target's hidden state of token j (behind the final norm: what its head
reads) and predicts token j + 2; further drafts feed the row's own output back in place of the target's hidden state.
Tensor names are the checkpoints' own below `mtp.`; layer and norm classes are the target's, so `(1 + w)` norms, partial
rotation and gated attention are as the target has them. Read in vLLM 0.32 (`qwen3_5_mtp.py`) and in the checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.models.cache import Cache, LayerShape, Slots, take_rows
from draftproof.models.dflash import DraftDist, Rescore, likeliest
from draftproof.models.prepacked import prepack
from draftproof.models.target import EMBEDDING, FINAL, Target, causal_plan, decoder_of


class MTPHead(nn.Module):
    """Shapes: R requests, N rows, H the target's hidden size. Embedding and head are the target's."""

    def __init__(self, decoder: Any, layers: int) -> None:
        """`decoder`: the target's module that owns `layers`, `norm` and `config`; `layers`: `mtp_num_hidden_layers`."""
        super().__init__()
        full = next(layer for layer in decoder.layers if hasattr(layer, "self_attn"))
        config = copy.deepcopy(decoder.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"] * layers, layers
        norm, hidden, eps = type(decoder.norm), config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.layers = nn.ModuleList(type(full)(config, index) for index in range(layers))
        self.norm = norm(hidden, eps=eps)
        for layer in cast(list[Any], self.layers):
            layer.self_attn.layer_idx = 0  # in service each layer has a cache of its own

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], step: int = 0, **attention: Any
    ) -> Tensor:
        """embedded, hidden [R, N, H] and the target's rotary (cos, sin) of the rows -> [R, N, H] for the target's head.

        Draft step s runs layer s modulo their count, as vLLM does. `attention` goes to the layer as it is.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        out = self.layers[step % len(self.layers)](
            self.fc(joined), position_embeddings=rope, attention_mask=None, **attention
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)


@dataclass
class Lane:
    """One layer's rows in service: its K/V, and per slot the stream's last row, which waits for its next token.

    Layer s stands `late` = s + 1 rows behind the target's.
    """

    cache: Cache
    pending: Tensor  # [slots, H]
    late: int = 1
    held: Tensor = field(init=False)  # bool [slots]: pending is there
    stateful: bool = field(default=True, init=False)  # the row that waits is a state: it cannot be cut out of a text

    def __post_init__(self) -> None:
        self.held = torch.zeros(self.pending.shape[0], dtype=torch.bool, device=self.pending.device)

    def drop(self, slots: Slots) -> None:
        self.cache.drop(slots)
        self.held[slots] = False

    def fork(self, source: int, slots: Slots, reach: int | None = None) -> None:
        self.cache.fork(source, slots, reach)
        for store in (self.pending, self.held):
            store[slots] = store[source]

    def swap(self, one: int, other: int, reach: int) -> None:
        self.cache.swap(one, other, reach)
        for store in (self.pending, self.held):
            store[[one, other]] = store[[other, one]]

    def resize(self, slots: int, capacity: int) -> None:
        kept = min(slots, self.cache.slots, len(self.pending))  # they differ where the last call found no memory
        self.cache.resize(slots, capacity)
        pending, held = self.pending.new_zeros(slots, self.pending.shape[1]), self.held.new_zeros(slots)
        pending[:kept], held[:kept] = self.pending[:kept], self.held[:kept]
        self.pending, self.held = pending, held

    def bytes_a_slot(self, capacity: int) -> int:
        return self.cache.bytes_a_slot(capacity) + self.pending[:1].nbytes

    def save(self, slot: int, begin: int, end: int) -> list[Tensor]:
        """One row a token of [begin, end); the first tokens of a text have none yet, and copies of another one."""
        rows = torch.arange(begin - self.late, end - self.late, device=self.pending.device).clamp(min=0)
        return [store[slot][:, rows] for store in (self.cache.keys[0], self.cache.values[0])]

    def load(self, slot: int, begin: int, saved: Sequence[Tensor]) -> None:
        missing = max(0, self.late - begin)
        self.cache.load(slot, max(0, begin - self.late), [piece[:, missing:] for piece in saved])

    def state(self, slot: int) -> list[Tensor]:
        return [self.pending[slot].clone(), self.held[slot].clone()]

    def restore(self, slot: int, length: int, state: Sequence[Tensor]) -> None:
        self.cache.restore(slot, max(0, length - self.late), ())
        self.pending[slot], self.held[slot] = state

    def join(self, slots: Slots, stream: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shift the stream [R, N, H] by one row: row j of the stream meets token j + 1.

        Returns the joined rows' stream [R, N, H], the index of the token that each meets, and how many rows there are;
        the last row waits. A slot that held nothing has one row less.
        """
        begun, some = self.held[slots].clone(), counts > 0
        shifted = torch.cat([self.pending[slots][:, None], stream], dim=1)
        row = torch.arange(stream.shape[1], device=stream.device) + (~begun)[:, None]
        joined = take_rows(shifted, row)
        last = take_rows(stream, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self.pending[slots] = torch.where(some[:, None], last, self.pending[slots])
        self.held[slots] = begun | some
        return joined, row.clamp(max=stream.shape[1] - 1), counts - (some & ~begun).long()


class MTPDrafter:
    """The head in service: the drafter contract of `engine/step.py`, k greedy drafts a pass.

    Committed rows are run with the target's own hidden states (`extend`); the drafts of a pass are rows of one's own,
    taken back when it ends. The layer of draft step s sees the stream that step s - 1 left, s rows further on.
    """

    taps = (EMBEDDING, FINAL)

    def __init__(self, head: MTPHead, target: Target, drafts: int) -> None:
        self.model, self.target, self.depth = head.eval().requires_grad_(False), target, drafts
        self.lanes: list[Lane] = []
        self.cache: Cache | None = None  # of the first layer

    @classmethod
    def load(cls, folder: str | Path, target: Target, drafts: int) -> MTPDrafter:
        """Read `mtp.*` from the target's own safetensors; transformers leaves them out when it loads a target."""
        from draftproof.models.mtp_weights import load_head, require_head

        require_head(target.spec)
        with torch.device(target.device):
            head = MTPHead(decoder_of(target.model), target.spec.mtp_layers).to(target.dtype)
        load_head(head, Path(folder))
        return cls(head, target, drafts)

    def prepack(self) -> None:
        """See `Target.prepack`."""
        prepack(self.model)

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        spec, device, dtype = self.target.spec, self.target.device, self.target.dtype
        shapes = [LayerShape(spec.num_kv_heads, spec.head_dim)]
        pending = torch.zeros(slots, spec.hidden_size, dtype=dtype, device=device)
        room = capacity + self.depth
        self.lanes = [
            Lane(
                Cache(shapes, slots=slots, capacity=room, chunk=chunk, dtype=dtype, device=device),
                pending.clone(),
                late,
            )
            for late in range(1, len(self.model.layers) + 1)
        ]
        self.cache = self.lanes[0].cache

    @torch.no_grad()
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        """Append the first counts [R] of N committed rows: features [R, N, 2 H], embedding and final hidden state."""
        tokens, stream = features.chunk(2, dim=-1)
        for step, lane in enumerate(self.lanes):
            stream, met, counts = lane.join(slots, stream, counts)
            tokens = take_rows(tokens, met)
            stream = self._run(lane, slots, step, tokens, stream, reach)
            lane.cache.commit(slots, counts)

    @torch.no_grad()
    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist:
        """anchors int64 [R] -> the `width` best of each of `depth` steps; the best one leads to the next step."""
        committed = [lane.cache.lengths[slots].clone() for lane in self.lanes]
        waiting = [(lane.pending[slots], lane.held[slots]) for lane in self.lanes]
        token, made = anchors, []
        for step in range(self.depth):
            row = self._advance(slots, step, token, waiting, reach + step)
            made.append(likeliest(self.target.head(row)[:, None], width, rescore, step))
            token = made[-1].ids[:, 0, 0]
        for lane, lengths in zip(self.lanes, committed, strict=True):
            lane.cache.rewind(slots, lengths)
        return DraftDist(torch.cat([d.ids for d in made], 1), torch.cat([d.logp for d in made], 1))

    def _advance(
        self, slots: Slots, step: int, token: Tensor, waiting: list[tuple[Tensor, Tensor]], reach: int
    ) -> Tensor:
        """Let the token [R] meet the row that waits in this step's layer: the row [R, H] that predicts the next one.

        Layers of later steps take the token in as well, as `extend` would; behind the last layer they begin again.
        """
        count = len(self.lanes)
        embedded = self.target.embedding(token)[:, None]
        lanes = range(step, count) if step < count else [step % count]
        made: list[tuple[Tensor, Tensor]] = []
        for index in lanes:
            row, held = waiting[index]
            out = self._run(self.lanes[index], slots, index, embedded, row[:, None], reach)[:, 0]
            self.lanes[index].cache.commit(slots, held.long())
            if made:
                waiting[index] = made[-1]
            made.append((out, held))
        waiting[(step + 1) % count] = made[0]
        return made[0][0]

    def drop(self, slots: Slots) -> None:
        for lane in self.lanes:
            lane.drop(slots)

    @property
    def stores(self) -> list[Lane]:
        """What it keeps of every request."""
        return self.lanes

    def _run(self, lane: Lane, slots: Slots, layer: int, tokens: Tensor, stream: Tensor, reach: int) -> Tensor:
        """One layer over N rows a slot, written behind the lane's rows; layer s begins s positions into the text."""
        plan = causal_plan(lane.cache, slots, stream.shape[1], reach)
        rope = self.target.rope(plan.positions + layer)
        return self.model(tokens, stream, rope, layer, draftproof=plan)
