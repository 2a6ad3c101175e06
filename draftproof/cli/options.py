"""Options about an engine that `check` and `launch` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Method(StrEnum):
    DFLASH = "dflash"
    MTP = "mtp"


class RunnerName(StrEnum):
    V1 = "v1"
    V2 = "v2"


class Platform(StrEnum):
    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


EngineMethod = Annotated[Method | None, typer.Option(help="dflash, or mtp: the target's own head drafts")]
Drafts = Annotated[int | None, typer.Option(min=1, help="drafted tokens a pass; SGLang's own number is one more")]
TensorParallel = Annotated[int | None, typer.Option(min=1)]
PipelineParallel = Annotated[int | None, typer.Option(min=1)]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="tokens of context a request may have")]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="requests at once")]
MaxBatchedTokens = Annotated[int | None, typer.Option(min=1, help="tokens of one engine step")]
KvDtype = Annotated[str | None, typer.Option(help="dtype of the K/V cache, in the engine's words")]
NoPrefixCaching = Annotated[bool, typer.Option("--no-prefix-caching", help="switch the prefix cache off")]
Runner = Annotated[RunnerName | None, typer.Option(help="vLLM's model runner, forced; default: as the release chooses")]
PlatformName = Annotated[Platform | None, typer.Option(help="what the engine runs on (default: cuda)")]
Venv = Annotated[Path | None, typer.Option(help="environment where the engine is installed (default: this one)")]
