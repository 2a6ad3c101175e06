"""Hugging Face folders as GGUF files, by the converter of the llama.cpp that is tested: it is part of the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from draftproof.models.hub import resolve_drafter, resolve_target

from .conftest import HOME

TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash"
# The converter imports this package before it sees that the tokenizer is none of its kind.
STUB = "class SentencePieceProcessor: ...\n"


def shipped_target() -> Path:
    """In float32, as the oracle runs it: any other type would round differently. Converted once."""
    folder = resolve_target(TARGET)
    return to_gguf(folder, HOME / "models" / f"{folder.name}.gguf")


def shipped_drafter() -> Path:
    folder = resolve_drafter(DRAFTER)
    return to_gguf(folder, HOME / "models" / f"{folder.name}.gguf", resolve_target(TARGET))


def to_gguf(folder: Path, file: Path, target: Path | None = None) -> Path:
    """`folder` as `file`, unless it is there; a drafter needs the folder of its `target`. The folder's name keys the
    shipped pair's content, so a file that is there is the right one."""
    if file.exists():
        return file
    (script,) = HOME.glob("llama_cpp_python-*/vendor/llama.cpp/convert_hf_to_gguf.py")
    stubs = HOME / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "sentencepiece.py").write_text(STUB)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    command = [sys.executable, str(script), str(folder), "--outtype", "f32", "--outfile", str(part)]
    command += ["--target-model-dir", str(target)] if target else []
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(stubs)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    part.rename(file)
    return file
