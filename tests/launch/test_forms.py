"""Every form of a plan, read back by the program it is written for, or by an independent reading of its rules."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draftproof.errors import UserError
from draftproof.launch.forms import FORMS, render
from draftproof.launch.plan import Plan, Reason

VLLM = Path("/root/venvs/vllm-cpu/bin/python")
VLLM_ENV = Path(__file__).parents[3] / "shared/vllm-cpu/env.sh"
DUMP = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
NASTY = (
    "", " ", "a b", "it's", '"q"', "$HOME", "${A}", "$$", "$(id)", "`id`", "a\\", "a\\\\b", "\\n", "%n %% %", "x\ny\n",
    "--lead", "-", "=ls", "%self", "~", "!!", "*", "#c", ";", "&", "|", "<", "{a,b}", "[x]", "\t", "é漢🙂", "'\\''",
    '{"a": {"b": "c\'d $X"}}', "yes", "null", "0x10", "1e3", "007", "1_0", ": x", "- y", "@a", "!t", "\\x41",
    "a\u2028b",
)  # fmt: skip
PLAN = Plan(
    engine="vllm",
    argv=("/opt/v/bin/vllm", "serve", "/m/target", "--host", "127.0.0.1", "--port", "8000", "--enforce-eager",
          "--speculative-config", '{"method":"dflash","model":"/m/it\'s","num_speculative_tokens":7}',
          "--gpu-memory-utilization", "0.9", "--chat-template", "{state}/t.jinja"),
    env={"VLLM_USE_V2_MODEL_RUNNER": "1", "PRICE": "$5 %n"},
    host="127.0.0.1",
    port=8000,
    checkpoints=("/m/target", "/c/models--a--b/snapshots/123"),
    files={"{state}/t.jinja": b"{{ '$x' }}\n%"},
    gpus=2,
    why=(Reason("--chat-template", "{state}/t.jinja", "as asked"),),
)  # fmt: skip

texts = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.one_of(st.sampled_from("$\"'\\`%{}\n =-;"), st.characters(exclude_categories=["Cs", "Cc", "Cn"]))),
)
arguments = st.lists(texts, max_size=8)
variables = st.dictionaries(st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}X\Z"), texts, max_size=3)
few = settings(derandomize=True, max_examples=12, deadline=None, database=None)
many = settings(derandomize=True, max_examples=40, deadline=None, database=None)


def made(argv: list[str] | tuple[str, ...], env: dict[str, str] | None = None, program: str = "prog") -> Plan:
    return replace(PLAN, argv=(program, *argv), env=env or {}, files={}, checkpoints=(), why=())


def needs(program: str) -> str:
    return shutil.which(program) or pytest.skip(f"{program} is not on this machine")


def refused(plan: Plan, form: str, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as caught:
        render(plan, form, **options)
    assert caught.value.code == "bad-option" and caught.value.fix


# --- every form


@pytest.mark.parametrize("form", FORMS)
def test_what_no_form_carries(form: str) -> None:
    image = {"image": "i"} if form == "compose" else {}
    for plan in (
        made(["\0"]),
        made(["\ud800"]),
        made([], {"A-B": "x"}),
        made([], program="-x"),
        replace(PLAN, argv=()),
    ):
        refused(plan, form, "cannot be started|NUL|is no name", **image)
    assert "{state}" not in render(PLAN, form, **image)
    assert render(PLAN, form, **image) == render(PLAN, form, **image)
    if form != "compose":
        refused(PLAN, form, "--image", image="i")


def test_unknown_form() -> None:
    refused(PLAN, "toml", "toml")


def test_argv_is_one_json_document() -> None:
    tree = json.loads(render(PLAN, "argv", state="/s"))
    assert tree["argv"] == [*PLAN.argv[:-1], "/s/t.jinja"] and tree["env"] == PLAN.env
    assert tree["files"] == {"/s/t.jinja": {"text": "{{ '$x' }}\n%"}} and tree["why"][0]["value"] == "/s/t.jinja"


# --- shell


def run_shell(shell: str, text: str, folder: Path) -> list[Any]:
    flags = {"zsh": ["-f"], "bash": ["--norc"], "fish": ["--no-config"]}.get(shell, [])
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(folder)}
    (folder / "script").write_text(text)
    done = subprocess.run([needs(shell), *flags, "script"], capture_output=True, cwd=folder, env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def dumping(argv: list[str] | tuple[str, ...], env: dict[str, str] | None = None) -> Plan:
    return made(["-I", "-S", "-c", DUMP, *argv], env, sys.executable)


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh"])
def test_shells_give_back_nasty_words(shell: str, tmp_path: Path) -> None:
    env = {f"V{index}": text for index, text in enumerate(NASTY)}
    argv, seen = run_shell(shell, render(dumping(NASTY, env), "shell"), tmp_path)
    assert tuple(argv) == NASTY and {name: seen[name] for name in env} == env


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh"])
def test_shells_give_back_any_words(shell: str, tmp_path: Path) -> None:
    needs(shell)

    @given(arguments, variables)
    @few
    def check(argv: list[str], env: dict[str, str]) -> None:
        given_back, seen = run_shell(shell, render(dumping(argv, env), "shell"), tmp_path)
        assert given_back == argv and {name: seen[name] for name in env} == env

    check()


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish"])
def test_shell_writes_the_files(shell: str, tmp_path: Path) -> None:
    big = bytes(range(256)) * 600
    files = {"{state}/a b/it's": big, "{state}/empty": b"", "{state}/t": b"$x\n"}
    plan = replace(dumping(["{state}/t"], {"S": "{state}"}), files=files)
    for _ in range(2):
        argv, env = run_shell(shell, render(plan, "shell", state="./s t"), tmp_path)
    assert argv == ["./s t/t"] and env["S"] == "./s t"
    assert [(tmp_path / path.replace("{state}", "s t")).read_bytes() for path in files] == list(files.values())


def test_fish_agrees_where_no_backslash_is_doubled_or_meets_a_quote(tmp_path: Path) -> None:
    unlike = re.compile(r"\\\\|\\'|\\$", re.ASCII)
    same = [text for text in NASTY if not unlike.search(text)]
    assert set(NASTY) - set(same) == {"a\\", "a\\\\b", "'\\''"}
    argv, _ = run_shell("fish", render(dumping([*same, *PLAN.argv]), "shell"), tmp_path)
    assert argv == [*same, *PLAN.argv[:-1], "./draftproof-launch/t.jinja"]


# --- yaml


def flat(text: str) -> list[str]:
    """The documented rule of both engines, written again."""
    words = []
    for key, value in yaml.safe_load(text).items():
        words.append(f"--{key}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


def same_words(got: list[str], want: list[str]) -> bool:
    """Equal, or equal as JSON objects where both are."""

    def read(word: str) -> Any:
        try:
            return json.loads(word) if word.startswith("{") else word
        except ValueError:
            return word

    return [read(word) for word in got] == [read(word) for word in want]


plain_values = texts.filter(lambda text: "{state}" not in text and (not text.startswith("-") or text == "-"))
values = st.lists(plain_values, max_size=3)
flags = st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9-]{0,8}[a-z]\Z").filter(lambda key: key != "config"), values)


def words_of(tree: dict[str, list[str]]) -> list[str]:
    return [word for key, some in tree.items() for word in (f"--{key}", *some)]


@given(flags, variables)
@many
def test_yaml_gives_back_the_words(tree: dict[str, list[str]], env: dict[str, str]) -> None:
    text = render(made(["serve", "mo del", *words_of({"a-b": ["x"]} | tree)], env), "yaml")
    if "model" not in tree:
        assert same_words(flat(text), ["--model", "mo del", *words_of({"a-b": ["x"]} | tree)])
    assert text.isascii() and len([line for line in text.splitlines() if line.startswith("#")]) == (
        1 + len(env) + bool(env)
    )


def test_yaml_of_a_plan() -> None:
    text = render(PLAN, "yaml", state="/s")
    assert yaml.safe_load(text) == {
        "model": "/m/target", "host": "127.0.0.1", "port": 8000, "enforce-eager": True,
        "speculative-config": {"method": "dflash", "model": "/m/it's", "num_speculative_tokens": 7},
        "gpu-memory-utilization": 0.9, "chat-template": "/s/t.jinja",
    }  # fmt: skip
    assert text.startswith("# start with: /opt/v/bin/vllm serve --config FILE.yaml\n")
    assert "#   PRICE='$5 %n'\n" in text and "# needs the file /s/t.jinja\n" in text
    assert flat(render(made(["serve", "m", "--a=1", "--b=", "--c", "-1", "--d", "01"]), "yaml")) == [
        "--model", "m", "--a", "1", "--b", "", "--c", "-1", "--d", "01",
    ]  # fmt: skip


def test_yaml_of_sglang_starts_by_the_module() -> None:
    argv = ("sglang", "serve", "--model-path", "/m", "--tp-size", "2")
    text = render(replace(PLAN, engine="sglang", argv=argv), "yaml")
    assert text.startswith("# start with: python3 -m sglang.launch_server --config FILE.yaml\n")
    assert flat(text) == ["--model-path", "/m", "--tp-size", "2"]


def test_yaml_refusals() -> None:
    refused(replace(PLAN, engine="llama.cpp"), "yaml", "llama.cpp reads no YAML")
    for words in (["--a", "1", "--a", "2"], ["-tp", "2"], ["--config", "x"], ["--a=-b"], ["--a=b", "c"], ["--"]):
        refused(made(["serve", "m", *words]), "yaml", "cannot carry")


VLLM_READER = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
root = FlexibleArgumentParser()
parser = ServeSubcommand().subparser_init(root.add_subparsers(dest="command"))
job = json.load(sys.stdin)
def read(words):
    args = vars(root.parse_args(words))
    return {key: repr(value) for key, value in args.items() if key != "config"}
typed, from_file = read(job["argv"]), read(["serve", "--config", job["plan"]])
typed["model"] = typed.pop("model_tag")
from_file.pop("model_tag")
print(json.dumps({"typed": typed, "from_file": from_file, "flat": [parser.load_config_file(f) for f in job["files"]]}))
"""


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason="the real vLLM is not on this machine")
def test_vllm_itself_reads_the_yaml(tmp_path: Path) -> None:
    wanted: list[list[str]] = []
    files: list[str] = []

    @given(flags)
    @settings(derandomize=True, max_examples=100, deadline=None, database=None, phases=[Phase.generate])
    def collect(tree: dict[str, list[str]]) -> None:
        tree.pop("model", None)
        path = tmp_path / f"{len(files)}.yaml"
        path.write_text(render(made(["serve", "m", *words_of(tree)]), "yaml"))
        wanted.append(["--model", "m", *words_of(tree)])
        files.append(str(path))

    collect()
    plan = tmp_path / "plan.yaml"
    plan.write_text(render(PLAN, "yaml", state="/s"))
    job = {"argv": [*PLAN.argv[1:-1], "/s/t.jinja"], "plan": str(plan), "files": files}
    command = '. "$2" v1; exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", command, VLLM, VLLM_READER, VLLM_ENV],
        input=json.dumps(job),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["from_file"] == read["typed"]
    assert all(same_words(got, want) for got, want in zip(read["flat"], wanted, strict=True))


# --- compose


def interpolate(node: Any) -> Any:
    """The compose specification's interpolation with no variable set: `$$` is `$`, a name is the empty text."""
    if isinstance(node, dict):
        return {key: interpolate(value) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolate(item) for item in node]
    if not isinstance(node, str):
        return node
    rule = re.compile(r"\$(?:(\$)|[A-Za-z_]\w*|\{[A-Za-z_][^}]*\}|(.?))", re.S)

    def put(match: re.Match[str]) -> str:
        assert match.group(2) is None, f"invalid interpolation in {node!r}"
        return match.group(1) or ""

    return rule.sub(put, node)


def service_of(plan: Plan, **options: Any) -> dict[str, Any]:
    (service,) = interpolate(yaml.safe_load(render(plan, "compose", image="i", **options)))["services"].values()
    return service


@given(arguments.filter(lambda argv: not any(word.startswith("--host") for word in argv)), variables)
@many
def test_compose_gives_back_the_words(argv: list[str], env: dict[str, str]) -> None:
    service = service_of(made(argv, env))
    assert service["entrypoint"] == ["prog"] and service["command"] == [*argv, "--host", "0.0.0.0"]
    assert service.get("environment", {}) == env


def test_compose_of_a_plan() -> None:
    tree = interpolate(yaml.safe_load(render(PLAN, "compose", image="vllm/vllm-openai:v0.32.0")))
    service = tree["services"]["vllm"]
    assert service["image"] == "vllm/vllm-openai:v0.32.0" and service["ipc"] == "host"
    listening = ["0.0.0.0" if word == "127.0.0.1" else word for word in PLAN.argv[1:-1]]
    assert [*service["entrypoint"], *service["command"]] == ["vllm", *listening, "/draftproof-launch/t.jinja"]
    assert [v["source"] for v in service["volumes"] if v["read_only"]] == ["/m/target", "/c/models--a--b"]
    assert service["ports"] == ["127.0.0.1:8000:8000"] and "8000/health" in service["healthcheck"]["test"][-1]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert service["configs"] == [{"source": "file0", "target": "/draftproof-launch/t.jinja"}]
    assert tree["configs"] == {"file0": {"content": "{{ '$x' }}\n%"}}


def test_compose_chooses_devices_as_the_variable_does() -> None:
    chosen = service_of(made([], {"CUDA_VISIBLE_DEVICES": "2,3"}))
    (device,) = chosen["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["2", "3"] and "count" not in device and "environment" not in chosen
    assert "deploy" not in service_of(made([], {"CUDA_VISIBLE_DEVICES": ""}))
    assert "deploy" not in service_of(replace(made([]), gpus=0))


def test_compose_addresses_and_hub_ids() -> None:
    assert service_of(replace(made(["--host=::1"]), host="::1"))["ports"] == ["[::1]:8000:8000"]
    assert service_of(replace(made(["--host=::1"]), host="::1"))["command"] == ["--host=0.0.0.0"]
    (volume,) = service_of(replace(made([]), checkpoints=("org/model", "org/drafter")))["volumes"]
    assert volume["target"] == "/root/.cache/huggingface" and "read_only" not in volume
    llama = service_of(replace(made([], program="/usr/bin/llama-server"), engine="llama.cpp"))
    assert llama["entrypoint"] == ["/app/llama-server"] and llama["healthcheck"]["test"][1] == "curl"


def test_compose_refusals() -> None:
    refused(PLAN, "compose", "no container image")
    with pytest.raises(UserError, match=r"--image vllm/vllm-openai:v"):
        render(PLAN, "compose")
    refused(replace(PLAN, host="box.lan"), "compose", "box.lan", image="i")
    refused(replace(PLAN, checkpoints=("./m",)), "compose", "mount", image="i")
    refused(replace(PLAN, files={"{state}/x": b"\xff"}), "compose", "not text", image="i")


def compose_command() -> tuple[list[str], bool]:
    """The command, and whether it is version 2 or later."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"], True
    if shutil.which("docker-compose"):
        version = subprocess.run(["docker-compose", "version", "--short"], capture_output=True, text=True).stdout
        return ["docker-compose"], not version.strip().startswith("1.")
    pytest.skip("docker compose is not on this machine")


def test_docker_compose_itself_reads_it(tmp_path: Path) -> None:
    command, new = compose_command()
    env = {f"V{index}": text for index, text in enumerate(NASTY)}
    plan = replace(PLAN, argv=("vllm", *NASTY), env=env)
    if not new:  # version 1 knows neither `configs: content` nor `create_host_path`
        plan = replace(plan, files={}, checkpoints=())
    file = tmp_path / "compose.yaml"
    file.write_text(render(plan, "compose", image="i"))
    done = subprocess.run([*command, "-f", str(file), "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    service = interpolate(yaml.safe_load(done.stdout))["services"]["vllm"]  # `config` doubles dollar signs again
    assert service["command"] == [*NASTY, "--host", "0.0.0.0"] and service["environment"] == env


# --- systemd

ESCAPES = {"n": "\n", "t": "\t", "s": " ", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def unquote(text: str) -> list[str]:
    """systemd.syntax(7): words apart by blanks, quotes around whole words, C escapes."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"(?:[ \t]+|$)|([^ \t"]+)(?:[ \t]+|$)', text, re.S)

    def put(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] in "x01234567":
            return chr(int(code.lstrip("x"), 16 if code[0] == "x" else 8))
        return ESCAPES.get(code, code)

    return [re.sub(r"\\(x[0-9a-f]{2}|[0-7]{3}|.)", put, quoted or bare, flags=re.S) for quoted, bare in words]


def expand(word: str) -> str:
    """systemd.service(5): no dollar sign may stand alone."""
    assert not re.search(r"(?<!\$)\$(?:\$\$)*(?!\$)", word), word
    return word.replace("$$", "$")


def settings_of(unit: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.split("\n") if line.startswith(name + "=")]


@given(arguments, variables)
@many
def test_systemd_gives_back_the_words(argv: list[str], env: dict[str, str]) -> None:
    unit = render(made(argv, env), "systemd")
    (line,) = settings_of(unit, "ExecStart")
    assert not re.search(r"(?<!%)%(?:%%)*(?!%)", unit)
    assert [expand(word.replace("%%", "%")) for word in unquote(line)] == ["prog", *argv]
    assignments = [unquote(line)[0].replace("%%", "%") for line in settings_of(unit, "Environment")]
    assert assignments == [f"{name}={value}" for name, value in env.items()]


def loaded(unit: str, folder: Path) -> tuple[list[list[str]], str]:
    """What systemd's own loader made of the unit: its commands, and the dump of its variables."""
    file = folder / "draftproof.service"
    file.write_text(unit)
    done = subprocess.run(
        [needs("systemd-analyze"), "verify", "--man=no", "--generators=no", str(file)],
        capture_output=True, text=True, env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    own = [line for line in done.stderr.split("\n") if line.startswith((str(file), "draftproof.service:"))]
    assert not [line for line in own if re.search("ignoring|Invalid|Unknown|Failed", line)], own
    dump = done.stdout.partition("-> Unit draftproof.service:")[2].partition("\n-> Unit")[0]
    return [unquote(line) for line in re.findall(r"Command Line: (.*)", dump)], dump


def test_systemd_itself_reads_it(tmp_path: Path) -> None:
    argv = [*NASTY, *map(chr, range(1, 32)), "\x7f"]
    env = {f"V{index}": text for index, text in enumerate(NASTY)}
    (command,), dump = loaded(render(made(argv, env, sys.executable), "systemd"), tmp_path)
    assert [expand(word) for word in command] == [sys.executable, *argv]
    assert all(f"\tEnvironment: {name}={value}\n" in dump for name, value in env.items())


def test_systemd_itself_reads_any_words(tmp_path: Path) -> None:
    needs("systemd-analyze")

    @given(arguments, variables)
    @settings(derandomize=True, max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(argv: list[str], env: dict[str, str]) -> None:
        (command,), dump = loaded(render(made(argv, env, sys.executable), "systemd"), tmp_path)
        assert [expand(word) for word in command] == [sys.executable, *argv]
        assert all(f"\tEnvironment: {name}={value}\n" in dump for name, value in env.items())

    check()


def test_systemd_writes_the_files(tmp_path: Path) -> None:
    data = bytes(range(256)) * 300
    plan = replace(dumping(["{state}/x"]), files={"{state}/$d 100%/it's": data})
    commands, _ = loaded(render(plan, "systemd", state=str(tmp_path / "s t")), tmp_path)
    for command in commands[1:] if commands[0][0] == sys.executable else commands[:-1]:
        subprocess.run([expand(word) for word in command], check=True)
    assert (tmp_path / "s t" / "$d 100%" / "it's").read_bytes() == data
    assert base64.b64encode(data[:57]).decode() in "".join(word for command in commands for word in command)


def test_systemd_refusals() -> None:
    for program in ("@x", "+x", "!x", "a$b", "./x", "bin/x"):
        refused(made([], program=program), "systemd", "cannot start")
    refused(made([], {"A": "\x01"}), "systemd", "control")
    refused(made(["\ufffe"]), "systemd", "noncharacter")
    refused(replace(PLAN, checkpoints=("./m",)), "systemd", "current folder")
    assert "ExecStart=" in render(replace(PLAN, checkpoints=("org/model",)), "systemd")
    assert f"{os.getcwd()}/draftproof-launch/t.jinja" in render(PLAN, "systemd")
