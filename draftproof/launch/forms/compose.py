"""The plan as a docker compose file with one service.

Compose replaces `$NAME` in every value, so each dollar sign is doubled. The program is named by its last part, because
this machine's path to it is not the image's; it stands in `entrypoint`, so that the image's own entrypoint and default
command are out of play. In the container the engine listens on all addresses; the port is published on the plan's
address only.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from typing import Any

from draftproof.errors import UserError
from draftproof.launch.forms.paths import is_hub_id
from draftproof.launch.forms.yaml_config import dump
from draftproof.launch.plan import Plan

_IMAGES = {
    "vllm": "vllm/vllm-openai:vRELEASE",
    "sglang": "lmsysorg/sglang:vRELEASE",
    "llama.cpp": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}
_HUB_CACHE = ("~/.cache/huggingface", "/root/.cache/huggingface")
_DEVICES = re.compile(r"(\d+|(GPU|MIG)-[\w/-]+)(,(\d+|(GPU|MIG)-[\w/-]+))*", re.ASCII)


def render(plan: Plan, image: str | None) -> str:
    """The compose file. Raises UserError bad-option without an image."""
    if not image:
        known = _IMAGES.get(plan.engine, "NAME:TAG")
        raise UserError("bad-option", f"no container image is known for {plan.engine}", f"pass --image {known}")
    files = {f"file{index}": item for index, item in enumerate(plan.files.items())}
    tree: dict[str, Any] = {"services": {_service_name(plan.engine): _service(plan, image, list(files))}}
    if files:
        tree["configs"] = {name: {"content": _text(*item)} for name, item in files.items()}
    return "# docker compose -f THIS-FILE up\n" + dump(_escape(tree))


def _service(plan: Plan, image: str, configs: list[str]) -> dict[str, Any]:
    devices, env = _gpus(plan)
    service: dict[str, Any] = {
        "image": image,
        "entrypoint": [_program(plan)],
        "command": _listen(plan.argv[1:]),
        "environment": env,
        "volumes": _volumes(plan.checkpoints),
        "configs": [
            {"source": name, "target": posixpath.normpath(path)} for name, path in zip(configs, plan.files, strict=True)
        ],
        "ports": [_port(plan)],
        "ipc": "host",
        "healthcheck": {
            "test": _probe(plan),
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": "30m",
        },
    }
    if devices:
        service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
    return {key: value for key, value in service.items() if value or key == "command"}


def _program(plan: Plan) -> str:
    """llama.cpp's image keeps its program outside PATH."""
    return ("/app/" if plan.engine == "llama.cpp" else "") + posixpath.basename(plan.argv[0])


def _listen(words: tuple[str, ...]) -> list[str]:
    """The arguments with `--host` set to all addresses, as a port of the container needs."""
    kept = list(words)
    for index, word in enumerate(kept):
        if word == "--host" and index + 1 < len(kept):
            kept[index + 1] = "0.0.0.0"
            return kept
        if word.startswith("--host="):
            kept[index] = "--host=0.0.0.0"
            return kept
    return [*kept, "--host", "0.0.0.0"]


def _port(plan: Plan) -> str:
    try:
        address = ipaddress.ip_address("127.0.0.1" if plan.host == "localhost" else plan.host)
    except ValueError:
        raise UserError("bad-option", f"compose cannot publish on {plan.host!r}", "give --host an IP address") from None
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{plan.port}:{plan.port}"


def _gpus(plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    """The reservation and the environment left. CUDA_VISIBLE_DEVICES becomes the reservation: the container counts its
    own GPUs from 0."""
    env = dict(plan.env)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if plan.gpus < 1 or visible in ("", "-1"):
        return {}, env
    chosen: dict[str, Any] = {"count": plan.gpus}
    if visible is not None and _DEVICES.fullmatch(visible):
        chosen = {"device_ids": env.pop("CUDA_VISIBLE_DEVICES").split(",")}
    return {"driver": "nvidia", **chosen, "capabilities": ["gpu"]}, env


def _volumes(checkpoints: tuple[str, ...]) -> list[dict[str, Any]]:
    """Folders read-only, in the same place. A snapshot in the Hub's cache holds links to its neighbours, so its
    repository is taken. For ids of the Hub the user's cache is mounted, writable."""
    volumes: dict[str, dict[str, Any]] = {}
    for path in checkpoints:
        head, found, _ = path.partition("/snapshots/")
        source = head if found and posixpath.basename(head).startswith("models--") else path
        if path.startswith("/"):
            volumes[source] = {"type": "bind", "source": source, "target": source, "read_only": True}
        elif is_hub_id(path):
            volumes[_HUB_CACHE[0]] = {"type": "bind", "source": _HUB_CACHE[0], "target": _HUB_CACHE[1]}
        else:
            raise UserError("bad-option", f"compose cannot mount {path!r}", "give the checkpoint's absolute path")
    return [{**volume, "bind": {"create_host_path": False}} for volume in volumes.values()]


def _probe(plan: Plan) -> list[str]:
    url = f"http://127.0.0.1:{plan.port}{plan.health}"
    if "llama.cpp" in plan.engine:
        return ["CMD", "curl", "-f", url]
    return ["CMD", "python3", "-c", f"import urllib.request as r; r.urlopen({url!r}, timeout=8)"]


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError("bad-option", f"compose cannot carry {path}: it is not text", "use --print shell") from None


def _service_name(engine: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]", "-", engine) or "engine"


def _escape(node: Any) -> Any:
    """Every text value with `$` doubled; keys are not interpolated."""
    if isinstance(node, str):
        return node.replace("$", "$$")
    if isinstance(node, list):
        return [_escape(item) for item in node]
    return {key: _escape(value) for key, value in node.items()} if isinstance(node, dict) else node
