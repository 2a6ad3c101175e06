"""A byte-level BPE tokenizer with ChatML's special tokens, and the token stream that the loop reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.train.toy.corpus import CLOSE, END, MASK, OPEN

SPECIAL = (END, OPEN, CLOSE, MASK)  # ids 0 to 3
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELD_EVERY = 50  # one document in so many is kept from training


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Any:
    """-> PreTrainedTokenizerFast of at most `vocabulary` tokens; every byte has a token, digits stand alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(documents, trainer, length=len(documents))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=CLOSE,
        pad_token=END,
        mask_token=MASK,
        additional_special_tokens=[OPEN],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, documents: Sequence[str]) -> dict[str, Tensor]:
    """Documents -> streams of ids, each behind the end token: `train` and `held` int32, `starts` int64 into `train`."""
    end = tokenizer.convert_tokens_to_ids(END)
    streams: dict[str, list[int]] = {"train": [], "held": []}
    starts = []
    for number, encoding in enumerate(tokenizer.backend_tokenizer.encode_batch(list(documents))):
        name = "held" if number % HELD_EVERY == 0 else "train"
        if name == "train":
            starts.append(len(streams[name]))
        streams[name] += [*encoding.ids, end]
    tensors = {name: torch.tensor(ids, dtype=torch.int32) for name, ids in streams.items()}
    return {**tensors, "starts": torch.tensor(starts, dtype=torch.int64)}


def save_stream(path: Path, stream: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    write_atomically(path, iter([save(stream)]))


def load_stream(path: Path, length: int) -> dict[str, Tensor]:
    """The streams of `save_stream`; rows of `length` tokens must fit. UserError: bad-texts."""
    from safetensors.torch import load_file

    stream = load_file(path)
    for name in ("train", "held"):
        if len(stream[name]) < length:
            raise UserError(
                "bad-texts",
                f"{path}: {len(stream[name])} tokens to {name}, a row has {length}",
                "give more texts",
            )
    return stream
