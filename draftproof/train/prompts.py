"""Prompts for the target to answer; the drafter is trained on what it answers.

A mix of four sources with a clean licence, the same for the same seed and installation. The evaluation
sets (MT-bench, GSM8K, HumanEval, IFEval, Arena-Hard, AlpacaEval) are not among them, nor is anything made
from their questions.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count as numbers
from pathlib import Path
from random import Random
from typing import Any

from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.train import topics
from draftproof.train.docstrings import coding_prompts
from draftproof.train.puzzles import extraction_task, logic_puzzle, small_function, word_problem

MIX = {"python": 0.35, "maths": 0.25, "codeio": 0.10, "chat": 0.30}
MAX_TOKENS = 180  # by `rough_tokens`
CODE_CHARS = 560

# reasoning-gym generators whose questions are words, short, and not made from an evaluation set. Not
# gsm_symbolic: its templates are GSM8K test questions.
GENERATORS = topics.items("""
aiw, base_conversion, basic_arithmetic, calendar_arithmetic, chain_sum, coin_flip, complex_arithmetic,
count_bits, count_primes, family_relationships, fraction_simplification, gcd, knights_knaves, lcm,
leg_counting, letter_counting, number_filtering, number_sequence, prime_factorization, products,
sentence_reordering, simple_equations, simple_geometry, spell_backward, syllogism, time_intervals,
word_sequence_reversal
""")

CODEIO = (
    "Write a Python function for this task. {task}",
    "{task} Write a Python function that solves this.",
    "{task} Explain how you would solve this, then give the code.",
    "{task} Think step by step.",
    "Solve this problem: {task}",
)
CODEIO_READ = "What does this Python code compute?\n```python\n{code}\n```"


def build_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different prompts as {"messages": [...], "source": name}, shuffled, in the shares of MIX."""
    if count < 1:
        raise UserError("bad-option", f"{count} prompts were asked for", "ask for at least one")
    _require_reasoning_gym()
    sources: dict[str, Callable[[Random], Iterator[str]]] = {
        "python": _python,
        "codeio": _codeio,
        "maths": _maths,
        "chat": _chat,
    }
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for name, source in sources.items():
        rows += _take(source(Random(f"{seed}-{name}")), name, round(count * MIX[name]), seen)
    # a finite source may run dry, and shares are rounded: chat has no end
    rows += _take(_chat(Random(f"{seed}-rest")), "chat", count - len(rows), seen)
    Random(f"{seed}-order").shuffle(rows)
    return rows[:count]


def write_prompts(path: Path, count: int, seed: int) -> None:
    """The prompts as JSONL, written atomically."""
    rows = build_prompts(count, seed)
    write_atomically(path, (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows))


def rough_tokens(text: str) -> int:
    """About what SmolLM2's tokenizer counts, without it: it splits digits, signs and long or rare words."""
    return len(re.findall(r"[A-Za-z]{1,6}|\n *|[^\sA-Za-z]", text))


def _take(prompts: Iterator[str], source: str, wanted: int, seen: set[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(rows) < wanted and (text := next(prompts, None)) is not None:
        text = text.strip()
        if rough_tokens(text) <= MAX_TOKENS and text not in seen:
            seen.add(text)
            rows.append({"messages": [{"role": "user", "content": text}], "source": source})
    return rows


def _python(rng: Random) -> Iterator[str]:
    """One small function of our own to six prompts made of docstrings."""
    for number, prompt in enumerate(coding_prompts(rng)):
        yield prompt
        if number % 6 == 0:
            yield small_function(rng)


def _maths(rng: Random) -> Iterator[str]:
    """Half word problems of our own, half reasoning-gym."""
    gym = _reasoning_gym(rng)
    while True:
        yield word_problem(rng)
        yield next(gym)


def _reasoning_gym(rng: Random) -> Iterator[str]:
    _require_reasoning_gym()
    import reasoning_gym

    size = 200
    for _ in numbers():
        batches = [
            [row["question"] for row in reasoning_gym.create_dataset(name, size=size, seed=rng.getrandbits(31))]
            for name in GENERATORS
        ]
        for questions in zip(*batches, strict=True):
            yield from questions


def _require_reasoning_gym() -> Path:
    spec = find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise UserError(
            "dependency-missing",
            "training prompts need the package reasoning-gym, which is not installed",
            'pip install "draftproof[train]"',
        )
    return Path(spec.origin).parent


def _codeio(rng: Random) -> Iterator[str]:
    """CodeI/O tasks of reasoning-gym: as a problem to solve, or as code to read."""
    data = _require_reasoning_gym() / "data"
    with gzip.open(data / "codeio-hq.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = json.load(file)  # one array, whatever its name says
    with gzip.open(data / "codeio.jsonl.gz", "rt", encoding="utf-8") as file:
        rows += [json.loads(line) for line in file]
    rows = [row for row in rows if row["task_description"].isascii()]
    rng.shuffle(rows)
    for form in range(2):
        for row in rows:
            code = row["code_sample"].strip()
            if form == 1 and len(code) < CODE_CHARS:
                yield CODEIO_READ.format(code=code)
            else:
                yield rng.choice(CODEIO).format(task=" ".join(row["task_description"].split()))


def _chat(rng: Random) -> Iterator[str]:
    """The kinds of request people make: explain, write, advise, play a role, extract, reason."""
    makers: tuple[Callable[[], str], ...] = (
        lambda: _ask(rng, topics.ASK_KNOWLEDGE, topics.STEM + topics.HUMANITIES),
        lambda: _ask(rng, topics.ASK_KNOWLEDGE, topics.STEM),
        lambda: _ask(rng, topics.ASK_HUMANITIES, topics.HUMANITIES),
        lambda: _ask(rng, topics.ASK_CODING, topics.COMPUTING),
        lambda: _ask(rng, topics.ASK_DAILY, topics.DAILY),
        lambda: _ask(rng, topics.ASK_WRITING, topics.DAILY + topics.STEM),
        lambda: _ask(rng, topics.ASK_ROLEPLAY, topics.STEM + topics.HUMANITIES + topics.COMPUTING),
        lambda: extraction_task(rng) if rng.random() < 0.6 else logic_puzzle(rng),
    )
    while True:
        for make in makers:
            yield make()


def _ask(rng: Random, forms: tuple[str, ...], subjects: tuple[str, ...]) -> str:
    first, second = rng.sample(subjects, 2)
    one, other = rng.sample(topics.CHARACTERS, 2)
    persona = rng.choice(topics.PERSONAS)
    return rng.choice(forms).format(t=first, u=second, c=one, d=other, p=persona) + rng.choice(topics.STYLES)
