"""The packagings drafters come in: which key names which thing, and how target layers are counted.

z-lab is the common form; ModelOpt exports it with its own window keys; TorchSpec writes it flat;
speculators nests the body and counts target layers from one. Sources: the published configs and the readers
of vLLM, SGLang and speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftproof.errors import UserError

NESTED: Final = "dflash_config."
MODELOPT_TRAINING: Final = ("dflash_block_size", "dflash_mask_token_id", "dflash_architecture_config")
MIMO: Final = ("backbone_rotary_base", "attention_value_scale", "attention_sink_bias")


@dataclass(frozen=True)
class Dialect:
    """`body` prefixes the transformer's own keys, `own` the drafter's, in order of precedence; `tap_shift`
    is what the packaging adds to "after decoder layer i, counted from 0"."""

    name: str
    body: str
    own: tuple[str, ...]
    taps: tuple[str, ...]
    tap_shift: int = 0

    def keys(self, name: str) -> list[str]:
        """Where a drafter's own value may stand, most binding first."""
        return [prefix + name for prefix in self.own]


ZLAB: Final = Dialect("z-lab", "", (NESTED, ""), (NESTED + "target_layer_ids", "target_layer_ids"))
MODELOPT: Final = Dialect("modelopt", "", (NESTED, "", "dflash_"), ZLAB.taps)
TORCHSPEC: Final = Dialect("torchspec", "", ("",), ("target_layer_ids",))
SPECULATORS: Final = Dialect(
    "speculators", "transformer_layer_config.", ("",), ("aux_hidden_state_layer_ids",), tap_shift=1
)


def find_dialect(raw: Mapping[str, Any], file: str, folder: str) -> Dialect:
    """UserError: not-a-model for an object that describes no network, dialect-unknown for one that is no
    drafter."""
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return _speculators(raw, file)
    nested = raw.get("dflash_config")
    inner = nested if isinstance(nested, Mapping) else {}
    if any(key in raw for key in MODELOPT_TRAINING) or (
        ("use_swa" in inner or "swa_window_size" in inner) and not any(key in inner for key in MIMO)
    ):
        return MODELOPT
    if "dflash_config" in raw:
        return ZLAB
    if "target_layer_ids" in raw or "mask_token_id" in raw:
        return TORCHSPEC
    names = raw.get("architectures")
    if isinstance(names, list) and any("dflash" in str(name).lower() for name in names):
        return ZLAB
    raise _no_drafter(raw, file, folder)


def _speculators(raw: Mapping[str, Any], file: str) -> Dialect:
    kind = raw.get("speculators_model_type")
    if kind is not None and not str(kind).lower().startswith(("dflash", "dspark", "domino")):
        raise UserError(
            "dialect-unknown",
            f"{file}: speculators_model_type is {kind!r}, which is no block-diffusion drafter",
            "give a drafter of type dflash",
        )
    return SPECULATORS


def _no_drafter(raw: Mapping[str, Any], file: str, folder: str) -> UserError:
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type", ""))
    if not name and "hidden_size" not in raw:
        return UserError(
            "not-a-model", f"{folder}/{file} describes no model", "name the folder of a drafter's checkpoint"
        )
    return UserError(
        "dialect-unknown",
        f"{folder}/{file} describes {name or 'a model'} but holds no drafter keys (dflash_config, "
        "speculators_model_type, or target_layer_ids and mask_token_id)",
        "if this is the target, give it as --target and the drafter's folder as DRAFTER",
    )
