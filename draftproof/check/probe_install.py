"""What one Python environment holds of an engine, as one JSON object on stdout; nothing of the engine is imported.

`draftproof/check/installed.py` sends this source to the interpreter of that environment (`python -I - REQUEST`), so it
uses the standard library alone and runs from Python 3.8 on. REQUEST is JSON: `engine`, `package` (its import name),
`paths` (files under the package, wildcards allowed, that are looked for and whose hashes are checked), `extensions`
(packages that hold its compiled parts) and, for tests, `site`: the only folder to look in.
"""

from __future__ import annotations

import base64
import csv
import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import sys

SHOWN = 20  # names listed of a long list; its length is always given
VERSION = re.compile(r"(?m)^__version__\s*(?::[^=\n]+)?=[^'\"\n]*['\"]([^'\"]+)['\"]")
TUPLE = re.compile(r"(?m)^__version_tuple__\s*(?::[^=\n]+)?=[^(\n]*\(([^)]*)\)")
COMMIT = re.compile(r"(?m)^__commit_id__\s*(?::[^=\n]+)?=[^'\"\n]*['\"]g?([0-9a-f]{6,40})['\"]")
CUDA = re.compile(r"(?m)^cuda\b[^=\n]*=[^'\"\n]*['\"]([^'\"]+)['\"]")
TRITONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")


def facts(request: dict) -> dict:
    package = request["package"]
    if request.get("site"):
        sys.path[:] = [request["site"]] + [path for path in sys.path if "-packages" not in path]
    roots = list(dict.fromkeys(os.path.realpath(path) for path in sys.path if os.path.isdir(path)))
    found = [one for root in roots for one in distributions(root, package)]
    location, namespace = locate(package)
    rows = [row for one in found for row in one.pop("rows")]
    files = package_files(location)
    return {
        "engine": request["engine"],
        "package": package,
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "distributions": found,
        "location": location,
        "namespace": namespace,
        **module_version(location),
        "leftovers": [os.path.join(root, name) for root in roots for name in leftovers(root, package)],
        **checked_files(rows, location, request["paths"], files),
        "paths": {path: bool(fnmatch.filter(files, path)) for path in request["paths"]},
        "compiled": [f"{package}/{name}" for name in files if name.endswith(".so")] + extensions(request),
        "torch": version_of(roots, ("torch",)),
        "cuda": search(CUDA, read(os.path.join(locate("torch")[0] or "", "version.py"))),
        "triton": version_of(roots, TRITONS),
    }


def distributions(root: str, package: str) -> list:
    """The metadata folders in `root` that are named like the package or whose RECORD lists files of it."""
    result = []
    for entry in sorted(os.listdir(root)):
        if not entry.endswith(".dist-info") or entry.startswith("~"):
            continue
        folder = os.path.join(root, entry)
        text = read(os.path.join(folder, "RECORD"))
        lines: list = list(csv.reader(text.splitlines())) if f"{package}/" in text else []
        rows = [(root, *row) for row in lines if len(row) == 3 and row[0].startswith(package + "/")]
        name, version = names(folder, entry)
        if rows or normal(name) == normal(package):
            metadata = {"name": name, "version": version, "folder": folder, "files": len(rows), "rows": rows}
            whole = {part.lower(): bool(read(os.path.join(folder, part))) for part in ("METADATA", "RECORD")}
            result.append({**metadata, **whole, **origin(read(os.path.join(folder, "direct_url.json")))})
    return result


def names(folder: str, entry: str) -> tuple:
    """Name and version as METADATA says, else as the folder's own name does."""
    head = read(os.path.join(folder, "METADATA")).split("\n\n")[0]
    name, version = (search(re.compile(rf"(?mi)^{key}:\s*(\S+)"), head) for key in ("Name", "Version"))
    parts = entry[: -len(".dist-info")].partition("-")
    return name or parts[0], version or parts[2]


def origin(text: str) -> dict:
    """What direct_url.json says: installed from a folder or a repository instead of an index."""
    try:
        raw = json.loads(text) if text else {}
    except ValueError:
        raw = {}
    editable = bool(raw.get("dir_info", {}).get("editable"))
    return {"url": raw.get("url"), "commit": raw.get("vcs_info", {}).get("commit_id"), "editable": editable}


def locate(package: str) -> tuple:
    """The package's folder and whether it is only a namespace, a folder without __init__.py."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None, False
    return os.path.realpath(next(iter(spec.submodule_search_locations))), spec.origin is None


def package_files(location: str) -> list:
    """Every file of the package but caches, relative to it."""
    result = []
    for folder, below, found in os.walk(location) if location else []:
        below[:] = [name for name in below if name != "__pycache__"]
        result += [os.path.relpath(os.path.join(folder, name), location).replace(os.sep, "/") for name in found]
    return sorted(result)


def module_version(location: str) -> dict:
    """Version and commit as the package's own version file says, read as text."""
    text = "".join(read(os.path.join(location or "", name)) for name in ("_version.py", "version.py"))
    numbers = re.findall(r"\b\d+\b", search(TUPLE, text) or "")[:3]
    version = search(VERSION, text) or ".".join(numbers) or None
    commit = search(COMMIT, text) or search(re.compile(r"[+.'\"]g([0-9a-f]{6,40})\b"), text)
    return {"module_version": version, "module_commit": commit}


def leftovers(root: str, package: str) -> list:
    """`~llm`, `~-lm`, ...: what pip renames a package to while it replaces it."""
    pattern = re.compile(rf"^~({re.escape(package[1:])}|.{re.escape(package[2:])})($|[-_.])")
    return [name for name in sorted(os.listdir(root)) if pattern.match(name)]


def checked_files(rows: list, location: str, wanted: list, files: list) -> dict:
    """Files against RECORD: sizes of all, hashes of those a drafter needs, and files that no RECORD lists."""
    missing, changed, listed = [], [], set()
    for root, path, digest, size in rows:
        full = os.path.join(root, path)
        listed.add(os.path.realpath(full))
        inner = path.partition("/")[2]
        if "__pycache__" in path:
            continue
        if not os.path.isfile(full):
            missing.append(path)
        elif size.isdigit() and os.path.getsize(full) != int(size):
            changed.append(f"{path}: {os.path.getsize(full)} bytes, RECORD says {size}")
        elif any(fnmatch.fnmatch(inner, name) for name in (*wanted, "_version.py")) and other_hash(full, digest):
            changed.append(f"{path}: another sha256 than in RECORD")
    names = [name for name in files if name.endswith(".py")] if rows else []
    unlisted = [name for name in names if os.path.realpath(os.path.join(location, name)) not in listed]
    lists = {"missing": missing, "changed": changed, "unlisted": unlisted}
    return {name: {"count": len(items), "first": items[:SHOWN]} for name, items in lists.items()}


def other_hash(path: str, digest: str) -> bool:
    if not digest.startswith("sha256="):
        return False
    with open(path, "rb") as file:
        seen = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).decode().rstrip("=")
    return seen != digest[len("sha256=") :]


def extensions(request: dict) -> list:
    names = [(name, locate(name)[0]) for name in request["extensions"]]
    return [f"{name}/{file}" for name, place in names for file in package_files(place) if file.endswith(".so")]


def version_of(roots: list, wanted: tuple) -> str | None:
    for root in roots:
        for entry in sorted(os.listdir(root)):
            if entry.endswith(".dist-info") and normal(entry.partition("-")[0]) in wanted:
                return names(os.path.join(root, entry), entry)[1]
    return None


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def search(pattern: re.Pattern, text: str) -> str | None:
    match = pattern.search(text)
    return match.group(1) if match else None


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    json.dump(facts(json.loads(sys.argv[1])), sys.stdout)
