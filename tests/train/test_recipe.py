"""A recipe is checked as a whole: every mistake is one error that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.errors import UserError
from draftproof.train.recipe import Recipe, load_recipe

SHAPE = "[shape]\ntaps = [1, 4]\nmask_token_id = 3\n"


def load(text: str, tmp_path: Path) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return load_recipe(file)


def test_a_small_recipe_is_read_whole(tmp_path: Path) -> None:
    recipe = load("seed = 5\n" + SHAPE + "window = 8\nblock_size = 8\n[loss]\ntarget = 'ce'\n", tmp_path)
    assert (recipe.seed, recipe.shape.taps, recipe.shape.window, recipe.loss.target) == (5, [1, 4], 8, "ce")


def test_the_shipped_recipes_are_valid() -> None:
    folder = Path(__file__).parents[2] / "draftproof" / "train" / "recipes"
    recipes = [load_recipe(path) for path in folder.glob("*.toml")]
    assert recipes and all(r.shape.mask_token_id >= 0 for r in recipes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SHAPE + "[optimiser]\nlearning_rate = 1\n", ["optimiser.learning_rate", "Extra inputs"]),
        (SHAPE + "[optimizer]\nlr = 1\n", ["optimizer"]),
        (SHAPE + "blocks = 3\n", ["shape.blocks"]),
        (SHAPE.replace("[1, 4]", "[4, 1]"), ["shape", "taps", "ascending"]),
        (SHAPE.replace("[1, 4]", "[1, 1]"), ["shape", "taps", "distinct"]),
        (SHAPE.replace("[1, 4]", "[]"), ["shape.taps"]),
        ("[shape]\nmask_token_id = 3\n", ["shape.taps", "required"]),
        ("[shape]\ntaps = [1]\n", ["shape.mask_token_id", "required"]),
        ("seed = 1\n", ["shape", "required"]),
        (SHAPE + "window = 7\nblock_size = 8\n", ["shape", "window", "block_size"]),
        (SHAPE + "layers = 2\nfull_layers = 3\n", ["shape", "full_layers"]),
        (SHAPE + "block_size = 1\n", ["shape.block_size"]),
        (SHAPE + "[loss]\ntarget = 'mse'\n", ["loss.target"]),
        (SHAPE + "[loss]\nalpha = 1.0\n", ["loss.alpha"]),
        (SHAPE + "[optimiser]\nlr = 0.0\n", ["optimiser.lr"]),
        (SHAPE + "[data]\ngreedy = 1.5\n", ["data.greedy"]),
        ("[shape\n", []),
    ],
)
def test_mistakes_name_the_field(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(text, tmp_path)
    assert caught.value.code == "bad-config"
    assert "recipe.toml" in caught.value.message
    assert [w for w in words if w not in caught.value.message] == []


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError) as caught:
            load_recipe(path)
        assert caught.value.code == "not-found"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert caught.value.code == "bad-config" and "UTF-8" in caught.value.fix
