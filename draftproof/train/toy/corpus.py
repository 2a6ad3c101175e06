"""What the toy target reads: chats that another model wrote, and documented functions of installed Python packages.

A document is one string: a chat in ChatML, or a function's source below its docstring. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from draftproof.errors import UserError
from draftproof.train.docstrings import WRITE, Function, functions_of, source_files
from draftproof.train.prompts_file import read_chats

END, OPEN, CLOSE, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
MAX_CODE = 2400  # characters of a function
DECODED = 2000  # texts decoded at a time

Chat = Sequence[dict[str, str]]


def chatml(chat: Chat, closed: bool = True) -> str:
    """A chat as the tokenizer's template writes it. Not `closed`: the last turn was cut off and has no end."""
    text = "".join(f"{OPEN}{turn['role']}\n{turn['content']}{CLOSE}\n" for turn in chat)
    return text if closed else text.removesuffix(f"{CLOSE}\n")


def written_texts(path: Path, tokenizer: Callable[[], Any]) -> Iterator[str]:
    """Documents of a `texts.safetensors` of a training run (ids of `tokenizer`) or of a JSONL file of whole chats.

    System prompts are left out, as are chats without an answer. UserError: not-found, bad-texts.
    """
    found = 0
    for chat, closed in _decoded(path, tokenizer()) if path.suffix == ".safetensors" else _chats(path):
        told = [turn for turn in chat if turn["role"] != "system"]
        if told and told[-1]["role"] == "assistant" and not any("<|" in turn["content"] for turn in told):
            found += 1
            yield chatml(told, closed)
    if not found:
        raise UserError(
            "bad-texts",
            f"{path} holds no chat that ends with an answer",
            "name the texts.safetensors of a `draftproof train` run, or a JSONL file of chats with answers",
        )


def _chats(path: Path) -> Iterator[tuple[Chat, bool]]:
    return ((chat, True) for chat in read_chats(path))


def _decoded(path: Path, tokenizer: Any) -> Iterator[tuple[Chat, bool]]:
    from draftproof.train.data import load_examples

    if not path.is_file():
        raise UserError("not-found", f"{path} is no file", "name the texts.safetensors of a `draftproof train` run")
    examples = iter(load_examples(path))
    while batch := list(islice(examples, DECODED)):
        for text in tokenizer.batch_decode(
            [e.prompt_ids + e.response_ids for e in batch],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        ):
            turns = [{"role": role, "content": content.strip()} for role, content in TURN.findall(text)]
            yield turns, text.rstrip().endswith(CLOSE)


def documented_functions(count: int, seed: int) -> Iterator[str]:
    """Up to `count` documents; of every third one the words ask for the function, as a chat."""
    rng = Random(f"{seed}-functions")
    files = source_files()
    rng.shuffle(files)
    found = (function for file in files for function in functions_of(file) if _plain(function))
    for number, function in enumerate(islice(found, count)):
        whole = _whole(function)
        if number % 3:
            yield f"{whole}\n"
        else:
            ask = rng.choice(WRITE).format(**vars(function))
            answer = f"```python\n{whole}\n```"
            yield chatml([{"role": "user", "content": ask}, {"role": "assistant", "content": answer}])


def _plain(function: Function) -> bool:
    return len(function.stub) + len(function.source) <= MAX_CODE and "<|" not in function.stub + function.source


def _whole(function: Function) -> str:
    """Signature and docstring, then the body. The source's signature is one line, whatever it was in its file."""
    body = function.source.partition("\n")[2]
    return f"{function.stub}\n{body}".rstrip()


def shuffled(documents: Iterable[str], seed: int) -> list[str]:
    """Each document once, in an order that the seed decides."""
    unique = list(dict.fromkeys(documents))
    Random(f"{seed}-order").shuffle(unique)
    return unique
