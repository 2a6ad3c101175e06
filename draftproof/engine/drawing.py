"""A draft tree on the terminal: which tokens were drafted under which, how likely, and which the target took."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from rich.text import Text
from rich.tree import Tree

from draftproof.engine.request import StepTree

TAKEN, LEFT = "bold green", "dim"


def draw(tree: StepTree, word: Callable[[int], str], title: str) -> Tree:
    """Nodes with the chance of their path, as the drafter has it (noise included when sampling);
    accepted ones are marked, so that a pipe shows them too."""
    taken = set(tree.path)
    root = Tree(Text.assemble((word(tree.token[0]), "bold"), f"  {title}"))
    branches = [root]
    for node in range(1, len(tree.token)):
        mark, style = ("* ", TAKEN) if node in taken else ("", LEFT)
        label = Text(f"{mark}{word(tree.token[node])}  {exp(tree.logw[node]):.3f}", style=style)
        branches.append(branches[tree.parent[node]].add(label))
    return root
