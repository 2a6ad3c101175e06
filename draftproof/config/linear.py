"""What of a target's config only its memory needs: the state of its linear layers, and what its weights look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftproof.config.reading import Fields, an_int

KEYS: Final = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
QUANTIZED: Final = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class LinearSpec:
    """One gated delta-net layer: a state of `key_dim` x `value_dim` a value head, and the last `conv_kernel` - 1
    columns of queries, keys and values. `state_dtype` is that of the state, None when the config states none."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_dtype: str | None = None

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def __str__(self) -> str:
        heads = f"{self.key_heads} x {self.key_dim} key, {self.value_heads} x {self.value_dim} value heads"
        return f"{heads}, convolution of {self.conv_kernel}, state {self.state_dtype or 'dtype not stated'}"


def read_weight_shape(fields: Fields, body: str) -> dict[str, Any]:
    """TargetSpec's `intermediate_size`, `experts`, `linear` and `quantized`. Values of another form than one number
    (a list with an entry a layer) count as not stated: nothing but an estimate depends on them."""
    quantized = next((key for key in _spellings(body, QUANTIZED) if isinstance(fields.raw_value(key), Mapping)), None)
    fields.sources["quantized"] = f"{fields.file}: {quantized}" if quantized else "default: false, none stated"
    return {
        "intermediate_size": _one_number(fields, "intermediate_size", [body + "intermediate_size"]),
        "experts": _one_number(fields, "experts", [body + key for key in EXPERTS]),
        "linear": _linear(fields, body),
        "quantized": quantized is not None,
    }


def _one_number(fields: Fields, field: str, keys: list[str]) -> int | None:
    stated = [key for key in keys if _is_count(fields.raw_value(key))][:1]
    return fields.get(field, stated, an_int(), None, "not stated")


def _linear(fields: Fields, body: str) -> LinearSpec | None:
    values = {name: fields.raw_value(body + key) for name, key in KEYS.items()}
    if not all(map(_is_count, values.values())):
        fields.sources["linear"] = "default: not stated"
        return None
    fields.sources["linear"] = f"{fields.file}: {body}linear_*"
    state = fields.raw_value(body + "mamba_ssm_dtype")
    return LinearSpec(**values, state_dtype=state if isinstance(state, str) else None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _spellings(body: str, names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys([*names, *(body + name for name in names)]))
