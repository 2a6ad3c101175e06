"""A server of a tiny random pair for the tests: the real engine, worker, app and socket; only the weights mean nothing.

What the model says can be chosen: a prompt that ends with "say: TEXT" is answered with TEXT, by a logits processor at
every node, and with the end of the turn.
"""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import EngineState, Request, StepResult
from draftproof.models.target import Target
from draftproof.serve.app import create_app
from draftproof.serve.listen import Server, bind
from draftproof.serve.served import Limits, Parsers, Served
from draftproof.serve.worker import Worker
from tests.tiny import drafter, target_config

SPECIAL = ("<pad>", "<bos>", "<|im_end|>", "<mask>", "<|im_start|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # tokens, but not special ones, as Qwen's are
VOCAB = 256 + len(SPECIAL) + len(TAGS) + 3  # some rows of the logits belong to no token
STOP = SPECIAL.index("<|im_end|>")
CONTEXT = 2048
HEADER = r"<\|im_end\|>\n<\|im_start\|>assistant\n(?:<think>(?:</think>)?)?"
SAID = re.compile(rf"say: ((?:(?!say: ).)*?)(?:{HEADER})?$", re.DOTALL)
NAME = "tiny"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.items() | list }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}{% endif %}"
)


@cache
def tokenizer() -> Any:
    """One token a byte, and the special ones."""
    import transformers as hf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate([*SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    raw.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>", mask_token="<mask>",
        extra_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


@cache
def target() -> Target:
    import transformers as hf

    config = target_config("llama")
    config.vocab_size, config.max_position_embeddings = VOCAB, CONTEXT
    config.eos_token_id, config.num_hidden_layers = STOP, 5  # as many as the taps need
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="draftproof-tiny-served-"))
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Target.load(folder, dtype=torch.float32)


class Says:
    """Only the tokens of a text may come, in their order."""

    stateful = False

    def __init__(self, prompt: int, tokens: Sequence[int]) -> None:
        self.prompt, self.tokens = prompt, tokens

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        token = self.tokens[min(len(ids) - self.prompt, len(self.tokens) - 1)]
        kept = scores[token].clone()
        scores.fill_(-math.inf)
        scores[token] = kept
        return scores


class Spoken:
    """The engine as it is, with the processor for what shall be said. pause: seconds that a step takes longer; fault: a
    prompt that holds this text makes its step fail."""

    def __init__(self, engine: Engine, pause: float = 0.0, fault: str | None = None) -> None:
        self.engine, self.slots, self.pause, self.fault = engine, engine.slots, pause, fault
        self.added: list[Request] = []
        self.cancelled = 0

    def add(self, request: Request, arrived: float | None = None) -> int:
        text = str(tokenizer().decode(request.prompt_ids))
        if self.fault and self.fault in text:
            raise RuntimeError("planted")
        if said := SAID.search(text):
            says = Says(len(request.prompt_ids), [*ids_of(said[1]), STOP])
            request = replace(request, processors=(*request.processors, says))
        self.added.append(request)
        return self.engine.add(request)

    def cancel(self, index: int) -> None:
        self.cancelled += 1
        self.engine.cancel(index)

    def step(self) -> list[StepResult]:
        time.sleep(self.pause)
        return self.engine.step()

    def reset(self) -> None:
        self.engine.reset()

    @property
    def state(self) -> EngineState:
        return self.engine.state


def served(
    *,
    slots: int = 4,
    queue: int = 32,
    pause: float = 0.0,
    fault: str | None = None,
    how: Speculation | None = None,
    limits: Limits = Limits(CONTEXT, drain=5.0),  # noqa: B008
    **changes: Any,
) -> Served:
    """A tiny pair; changes: of `Served`."""
    draft = drafter(target(), vocab_size=VOCAB)
    engine = Engine(
        target(), draft, slots=slots, context=limits.context, how=how or Speculation(8), prefix=2**20, isolate=True
    )
    about = {"drafter": "tiny-dflash", "method": "ddtree", "budget": 8}
    values: dict[str, Any] = {
        "tokenizer": tokenizer(),
        "names": (NAME,),
        "root": "tiny-llama",
        "vocab": VOCAB,
        "stop_ids": (STOP,),
        "depth": draft.depth,
        "parsers": Parsers(),
        "about": about,
    }
    worker = Worker(Spoken(engine, pause, fault), queue=queue)
    return Served(worker=worker, limits=limits, **{**values, **changes})


@contextmanager
def running(what: Served) -> Iterator[str]:
    """A server on a free port, in a thread of its own; gives its address."""
    taken = bind("127.0.0.1", 0)
    server = Server(create_app(what), what)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([taken])), daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    server.should_exit = True  # as the first signal does
    thread.join(30)
    assert not thread.is_alive()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def eventually(true: Any, seconds: float = 5.0) -> bool:
    """Whether a condition comes to hold in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.01)
    return bool(true())
