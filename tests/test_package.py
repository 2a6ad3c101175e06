"""Promises about the package as a whole: cold start, documented error codes, options that are read."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.config.explain import finding_texts
from draftproof.docs import FINDINGS_PAGE, LINKS_PAGE, PAGE, errors_page, findings_page, links_page
from draftproof.doctor.links import LINKS
from draftproof.errors import CODES, UserError

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "draftproof").rglob("*.py"))
MAKERS = ("Finding", "error", "warning", "note", "proved", "refuted", "cannot_tell")
FINDING_MAKERS = dict.fromkeys(MAKERS, 0)  # the place of the code among the arguments
MAKE_FINDINGS = ("draftproof.config.finding", "draftproof.doctor.chain")  # where they come from


def test_every_error_code_is_documented() -> None:
    assert PAGE.read_text() == errors_page(), "run `make docs`"


def test_every_error_code_is_raised_somewhere_and_no_other() -> None:
    text = {path: path.read_text() for path in SOURCES if path.name != "errors.py"}
    unused = [code for code in CODES if not any(f'"{code}"' in body for body in text.values())]
    assert not unused, f"codes that nothing raises: {unused}"
    with pytest.raises(AssertionError):
        UserError("no-such-code", "", "")


def test_every_finding_is_documented() -> None:
    assert FINDINGS_PAGE.read_text(encoding="utf-8") == findings_page(), "run `make docs`"


def test_every_link_is_documented() -> None:
    assert LINKS_PAGE.read_text(encoding="utf-8") == links_page(), "run `make docs`"
    assert {link.CODE for link in LINKS} == {code for code in finding_texts() if code.startswith("doctor-")}


def test_every_finding_code_has_a_text() -> None:
    emitted, unreadable = finding_codes(SOURCES)
    assert not unreadable, f"a code that is no constant cannot be checked here: {unreadable}"
    silent = {code: places for code, places in emitted.items() if code not in finding_texts()}
    assert not silent, f"write a table in config/findings.toml and run `make docs`: {silent}"


def test_every_finding_text_has_a_code() -> None:
    unused = sorted(set(finding_texts()) - set(finding_codes(SOURCES)[0]))
    assert not unused, f"texts of codes that nothing emits: {unused}"


def test_the_scan_for_finding_codes_sees_every_way_to_write_one(tmp_path: Path) -> None:
    source = tmp_path / "some.py"
    source.write_text(
        "from draftproof.config.finding import Finding, error, note, warning\n"
        "def run(rule, size, text):\n"
        "    make = error if size else warning\n"
        "    yield make('by-alias', text)\n"
        "    yield note('one' if size else 'other', text)\n"
        "    name, more = 'by-name', []\n"
        "    yield Finding(code=name, message=text)\n"
        "    yield wrap(text, 'by-wrapper')\n"
        "    yield Finding(code=rule.code, message=text)\n"
        "    yield note(text + '-x', text)\n"
        "def wrap(text, code):\n"
        "    return note(code, text)\n"
    )
    link = tmp_path / "link.py"
    link.write_text(
        "from draftproof.doctor.chain import cannot_tell, proved, refuted\n"
        "CODE = 'a-link'\n"
        "def judge(facts):\n"
        "    if facts:\n"
        "        return proved(CODE, 'text')\n"
        "    return refuted('another-link', 'text') if facts is None else cannot_tell(CODE, 'text')\n"
    )
    emitted, unreadable = finding_codes([source])
    assert set(emitted) == {"by-alias", "one", "other", "by-name", "by-wrapper"}
    assert unreadable == ["some.py:10"]
    assert set(finding_codes([link])[0]) == {"a-link", "another-link"}


def finding_codes(sources: list[Path]) -> tuple[dict[str, list[str]], list[str]]:
    """(code -> places in the source where a finding with it is made, places whose code cannot be read off). A code
    that is passed on, such as `rule.code` or a parameter, is none of its own."""
    emitted: dict[str, list[str]] = {}
    unreadable = []
    texts = {path: path.read_text(encoding="utf-8") for path in sources if path.name != "finding.py"}
    trees = {path: ast.parse(text) for path, text in texts.items() if any(name in text for name in MAKE_FINDINGS)}
    makers = finding_makers(list(trees.values()))
    for path, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if (argument := code_argument(call, makers)) is None:
                continue
            codes = constants(argument, tree)
            place = f"{path.name}:{call.lineno}"
            unreadable += [place] if codes is None else []
            for code in codes or ():
                emitted.setdefault(code, []).append(place)
    return emitted, unreadable


def finding_makers(trees: list[ast.Module]) -> dict[str, int]:
    """The makers of findings, other names for them, and functions that hand one of their parameters on as the code."""
    makers: dict[str, int] = {}
    found = dict(FINDING_MAKERS)
    while found != makers:
        makers = dict(found)
        for node in (node for tree in trees for node in ast.walk(tree)):
            for name, value in assignments(node):
                chosen = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                known = [makers[part.id] for part in chosen if isinstance(part, ast.Name) and part.id in makers]
                found |= dict.fromkeys([name], known[0]) if known else {}
            if isinstance(node, ast.FunctionDef):
                names = [arg.arg for arg in node.args.args if arg.arg != "self"]
                codes = [code_argument(call, makers) for call in ast.walk(node) if isinstance(call, ast.Call)]
                passed = [code.id for code in codes if isinstance(code, ast.Name) and code.id in names]
                found |= dict.fromkeys([node.name], names.index(passed[0])) if passed else {}
    return makers


def code_argument(call: ast.Call, makers: dict[str, int]) -> ast.expr | None:
    """The argument that is the code, of a call `maker(...)` or `self.maker(...)`."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        name = function.attr
    else:
        name = function.id if isinstance(function, ast.Name) else ""
    if name not in makers:
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    return next(iter([*named, *call.args[makers[name] : makers[name] + 1]]), None)


def constants(value: ast.expr, tree: ast.Module) -> set[str] | None:
    """The strings that an expression may be; empty when it passes a code on, None when they cannot be read off."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return {value.value}
    if isinstance(value, ast.Attribute) and value.attr in ("code", "CODE"):
        return set()
    parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else []
    if isinstance(value, ast.Name):
        parts = [told for node in ast.walk(tree) for name, told in assignments(node) if name == value.id]
        if not parts and any(isinstance(node, ast.arg) and node.arg == value.id for node in ast.walk(tree)):
            return set()
    codes = [constants(part, tree) for part in parts]
    return None if not codes or None in codes else {code for part in codes for code in part or ()}


def assignments(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """(name, value) pairs of an assignment, those of `a, b = x, y` included."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return []
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    unpacked = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
    pairs = zip(target.elts, node.value.elts, strict=False) if unpacked else [(target, node.value)]
    return [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]


@pytest.mark.parametrize(
    "module",
    [
        "draftproof.cli",
        "draftproof.config.report",
        "draftproof.bench.suite",
        "draftproof.engine.request",
        "draftproof.doctor.links",
    ],
)
def test_import_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_cli_parameter_is_read() -> None:
    """An option that its command never mentions would be accepted and ignored."""
    for path in sorted((ROOT / "draftproof" / "cli").glob("*.py")):
        for function in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)):
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            ignored = [arg.arg for arg in function.args.args if arg.arg not in names]
            assert not ignored, f"{function.name} ignores {ignored}"


def test_help_is_quick_and_bad_input_is_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftproof.cli", "run", "hi", "--temperature", "-1"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("draftproof: [bad-option]") and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["demo_doctor", "plugin_cost", "faults"])
def test_what_make_runs_by_hand_can_be_imported(name: str) -> None:
    """Targets that no test runs must not rot when a name moves."""
    importlib.import_module(f"tests.vllm.{name}")
