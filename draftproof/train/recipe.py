"""The recipe: everything that decides a training run, as one checked TOML file. Nothing here imports torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftproof.errors import UserError


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(Part):
    """The drafter. Widths that are not given here are the target's own."""

    layers: int = Field(5, ge=1)
    full_layers: int = Field(1, ge=0)  # the last ones attend to the whole context, the others slide
    window: int = Field(128, ge=2)
    block_size: int = Field(8, ge=2)
    taps: list[int] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    causal: bool = False

    @model_validator(mode="after")
    def _fit(self) -> Shape:
        if self.full_layers > self.layers:
            raise ValueError("full_layers is larger than layers")
        if self.window < self.block_size:
            raise ValueError("window is smaller than block_size")
        if sorted(set(self.taps)) != self.taps:
            raise ValueError("taps must be ascending and distinct")
        return self


class Data(Part):
    """Texts that the target writes. `self_prompts` of them answer prompts that it wrote from the bare chat header."""

    self_prompts: float = Field(0.5, ge=0, le=1)
    greedy: float = Field(0.5, ge=0, le=1)  # share answered greedily, the rest at `temperature`
    temperature: float = Field(0.7, gt=0)
    max_prompt: int = Field(224, ge=8)
    max_response: int = Field(320, ge=8)
    drop_loops: float = Field(0.5, gt=0, le=1)  # drop texts with more than this share of repeated 4-grams


class Optimiser(Part):
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup: float = Field(0.04, ge=0, lt=1)  # share of the run
    clip: float = Field(1.0, gt=0)
    sequences: int = Field(64, ge=1)  # per step
    anchors: int = Field(64, ge=1)  # per sequence


class Loss(Part):
    """Cross-entropy on the text, or on the target's own distribution (`kd`), weighted along the block."""

    target: Literal["ce", "kd"] = "kd"
    temperature: float = Field(0.7, gt=0)  # of the target's distribution under kd
    weights: Literal["decay", "dpace"] = "dpace"
    gamma: float = Field(4.0, gt=0)  # decay: exp(-(k - 1) / gamma)
    alpha: float = Field(0.5, ge=0, lt=1)  # dpace smoothing


class Recipe(Part):
    seed: int = 0
    shape: Shape
    data: Data = Data()
    loss: Loss = Loss()
    optimiser: Optimiser = Optimiser()


def load_recipe(path: str | Path) -> Recipe:
    try:
        with Path(path).open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:  # absent, a folder, not readable
        raise UserError("not-found", f"{path} cannot be read: {error.strerror}", "name a TOML recipe") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise UserError("bad-config", f"{path}: {error}", "mend the TOML syntax, and save it as UTF-8") from None
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError("bad-config", f"{path}: {lines}", "see draftproof/train/recipe.py for every field") from None
