"""The command line: one function a command, imports inside, errors as one message and exit code 2."""

from __future__ import annotations

import sys

from draftproof.cli import choose, configs, doctor, generate, launch, profile, serve, training  # noqa: F401  (they register their commands)
from draftproof.cli.app import app
from draftproof.errors import UserError

ENGINE_PARTS = ("torch", "transformers", "safetensors", "numpy", "accelerate", "gguf")


def main() -> None:
    """Entry point: a UserError becomes one message on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_PARTS:
            raise
        _fail(UserError("dependency-missing", f"{error.name} is not installed", 'pip install "draftproof[engine]"'))


def _fail(error: UserError) -> None:
    print(f"draftproof: {error}", file=sys.stderr)
    raise SystemExit(2) from None
