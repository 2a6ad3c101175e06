"""Promises about the package as a whole: cold start, documented error codes, options that are read."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.docs import PAGE, errors_page
from draftproof.errors import CODES, UserError

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "draftproof").rglob("*.py"))


def test_every_error_code_is_documented() -> None:
    assert PAGE.read_text() == errors_page(), "run `make docs`"


def test_every_error_code_is_raised_somewhere_and_no_other() -> None:
    text = {path: path.read_text() for path in SOURCES if path.name != "errors.py"}
    unused = [code for code in CODES if not any(f'"{code}"' in body for body in text.values())]
    assert not unused, f"codes that nothing raises: {unused}"
    with pytest.raises(AssertionError):
        UserError("no-such-code", "", "")


@pytest.mark.parametrize(
    "module", ["draftproof.cli", "draftproof.config.report", "draftproof.bench.suite", "draftproof.engine.request"]
)
def test_import_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_cli_parameter_is_read() -> None:
    """An option that its command never mentions would be accepted and ignored."""
    tree = ast.parse((ROOT / "draftproof" / "cli.py").read_text())
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        ignored = [arg.arg for arg in function.args.args if arg.arg not in names]
        assert not ignored, f"{function.name} ignores {ignored}"


def test_help_is_quick_and_bad_input_is_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftproof.cli", "run", "hi", "--temperature", "-1"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("draftproof: [bad-option]") and "Traceback" not in done.stderr
