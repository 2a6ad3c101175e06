"""Coding prompts from the docstrings of installed Python sources. The sources are read, never run."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

# Permissively licensed; a package that is not installed is passed over. No evaluation set is among them.
PACKAGES = (
    "accelerate",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "mpmath",
    "networkx",
    "numpy",
    "packaging",
    "pydantic",
    "rich",
    "scipy",
    "sympy",
    "torch",
    "tqdm",
    "transformers",
    "typer",
)
SKIPPED_PARTS = frozenset(
    (
        "_vendor",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "models",
        "site-packages",
        "test",
        "testing",
        "tests",
        "turtledemo",
    )
)
MAX_CHARS = 520

WRITE = (
    "Write a Python function `{call}` that does the following: {doc}",
    "Write a Python function `{call}`. {doc}",
    "Implement `{call}` in Python. {doc} Include an example call.",
    "I need a Python function named `{name}`. {doc}",
    "How would you write `{call}` in Python? {doc}",
)
COMPLETE = (
    "Complete the following Python function.\n```python\n{stub}\n```",
    "Finish this Python function:\n```python\n{stub}\n```",
    "Fill in the body of this function.\n```python\n{stub}\n```",
    "{stub}",
)
READ = (
    "Explain what the following Python function does.\n```python\n{source}\n```",
    "What does this code do?\n```python\n{source}\n```",
    "Write a docstring for this function.\n```python\n{source}\n```",
    "Review this function and suggest improvements.\n```python\n{source}\n```",
    "Write unit tests for this function.\n```python\n{source}\n```",
    "Translate this Python function to JavaScript.\n```python\n{source}\n```",
    "Add type hints and comments to this function.\n```python\n{source}\n```",
)


@dataclass(frozen=True)
class Function:
    """`call`: name and parameters; `stub`: signature and docstring; `source`: all but the docstring."""

    name: str
    call: str
    doc: str
    stub: str
    source: str


def coding_prompts(rng: Random) -> Iterator[str]:
    """Up to three prompts a function, files in an order drawn from `rng`; ends with the sources."""
    files = source_files()
    rng.shuffle(files)
    for file in files:
        for function in functions_of(file):
            prompts = [rng.choice(forms).format(**vars(function)) for forms in (WRITE, COMPLETE, READ)]
            yield from (prompt for prompt in rng.sample(prompts, 3) if len(prompt) <= MAX_CHARS)


def source_files() -> list[Path]:
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / name for name in PACKAGES)]
    found = (path for root in roots for path in sorted(root.rglob("*.py")) if _wanted(path.relative_to(root)))
    return sorted(set(found))


def _wanted(path: Path) -> bool:
    return SKIPPED_PARTS.isdisjoint(path.parts) and not path.name.startswith(("test_", "_pydecimal"))


def functions_of(path: Path) -> list[Function]:
    """The module's own functions with a usable docstring; methods would need their class and are left out."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(text)
    except (SyntaxError, ValueError, OSError):
        return []
    found = (_function(node) for node in tree.body if isinstance(node, ast.FunctionDef))
    return [function for function in found if function is not None]


def _function(node: ast.FunctionDef) -> Function | None:
    doc = ast.get_docstring(node)
    if doc is None or not _usable(node.name, doc):
        return None
    summary = " ".join(doc.split("\n\n")[0].split())
    call = f"{node.name}({ast.unparse(node.args)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    quoted = "\n".join(f"    {line}".rstrip() for line in doc.strip().split("\n"))
    stub = f'def {call}{returns}:\n    """{quoted.strip()}\n    """'
    bare = ast.FunctionDef(**{**vars(node), "body": node.body[1:] or [ast.Pass()], "decorator_list": []})
    return Function(node.name, call, _sentence(summary), stub, ast.unparse(bare))


def _usable(name: str, doc: str) -> bool:
    plain = doc.isascii() and not name.startswith(("_", "test")) and '"""' not in doc
    return plain and 40 <= len(doc) <= 1500 and len(doc.split()) >= 8


def _sentence(text: str) -> str:
    return text if text.endswith((".", ":", "!", "?")) else f"{text}."
