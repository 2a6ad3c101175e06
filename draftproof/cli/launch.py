"""`draftproof launch`: start an engine here or on another host, and look after it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftproof.launch.machine import Machine

from draftproof.cli.app import Json, app
from draftproof.cli.options import (
    Drafts,
    EngineMethod,
    KvDtype,
    MaxBatchedTokens,
    MaxModelLen,
    MaxNumSeqs,
    NoPrefixCaching,
    PipelineParallel,
    PlatformName,
    Runner,
    TensorParallel,
)
from draftproof.errors import UserError

launch_app = typer.Typer(no_args_is_help=True)
app.add_typer(launch_app, name="launch", help="Start vLLM, SGLang or llama.cpp with a pair, exactly; here or over ssh.")

Host = Annotated[str | None, typer.Option("--host", help="user@machine over the system's ssh; default: this machine")]
SshOption = Annotated[list[str] | None, typer.Option(help="one word for ssh's own command line; may repeat")]
Name = Annotated[str | None, typer.Option(help="name of the launch (default: engine and port)")]
Which = Annotated[str, typer.Argument(help="name of the launch")]
EXTRA = {"allow_extra_args": True}


def start_engine(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="folder on the engine's machine, hub id, or smollm2-135m")],
    drafter: Annotated[str | None, typer.Option(help="the same; left out with --method mtp")] = None,
    method: EngineMethod = None,
    num_speculative_tokens: Drafts = None,
    tensor_parallel_size: TensorParallel = None,
    pipeline_parallel_size: PipelineParallel = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_cache_dtype: KvDtype = None,
    no_prefix_caching: NoPrefixCaching = False,
    gpu_memory_utilization: Annotated[float | None, typer.Option(min=0.05, max=1)] = None,
    runner: Runner = None,
    platform: PlatformName = None,
    bind: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option()] = None,
    reasoning_parser: Annotated[str | None, typer.Option()] = None,
    tool_call_parser: Annotated[str | None, typer.Option()] = None,
    chat_template: Annotated[Path | None, typer.Option(help="file on this machine, sent along")] = None,
    release: Annotated[str | None, typer.Option(help="release the plan is for (default: the installed one)")] = None,
    venv: Annotated[str | None, typer.Option(help="the engine's environment on its machine")] = None,
    executable: Annotated[str | None, typer.Option(help="the engine's program on its machine")] = None,
    ik: Annotated[bool, typer.Option("--ik", help="llamacpp: the program is ik_llama.cpp's")] = False,
    target_config: Annotated[Path | None, typer.Option(help="llamacpp: Hugging Face config of the target")] = None,
    drafter_config: Annotated[Path | None, typer.Option(help="llamacpp: Hugging Face config of the drafter")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the engine; may repeat")] = None,
    accept: Annotated[list[str] | None, typer.Option(help="start although this finding refutes it; may repeat")] = None,
    prove: Annotated[bool, typer.Option("--prove", help="vllm: a plugin writes down what the engine does")] = False,
    bisect: Annotated[bool, typer.Option("--bisect", help="with --prove: for `draftproof doctor --bisect`")] = False,
    host: Host = None,
    ssh_option: SshOption = None,
    name: Name = None,
    print_form: Annotated[str | None, typer.Option("--print", help="argv, shell, yaml, compose or systemd")] = None,
    image: Annotated[str | None, typer.Option(help="container image of --print compose")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the plan with its reasons; start nothing")] = False,
    wait: Annotated[float, typer.Option(min=1, help="seconds to wait until it serves")] = 1800,
    as_json: Json = False,
) -> None:
    """Check the pair, fill in what it needs, start the engine and wait until it serves. It outlives this command and
    the connection: `draftproof launch status`, `logs` and `stop` look after it. The engine's own flags follow after
    --."""
    from draftproof.launch.session import LaunchAsk, prepare_launch
    from draftproof.launch.show import run_plan, show_plan
    from draftproof.models.hub import resolve_config

    engine = {"llamacpp": "ik_llama.cpp" if ik else "llama.cpp"}.get(str(context.info_name), str(context.info_name))
    if not engine.endswith("llama.cpp") and (ik or target_config or drafter_config):
        raise UserError("bad-option", "--ik and --*-config are for launch llamacpp", "leave them out")
    if engine != "vllm" and runner:
        raise UserError("bad-option", f"--runner means nothing for {engine}", "leave it out")
    if bisect and not prove:
        raise UserError("bad-option", "--bisect works through the plugin", "add --prove")
    if image and print_form != "compose":
        raise UserError("bad-option", "--image is for --print compose", "leave it out")
    named = {
        "method": method, "drafts": num_speculative_tokens, "tensor_parallel": tensor_parallel_size,
        "pipeline_parallel": pipeline_parallel_size, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_num_batched_tokens, "kv_dtype": kv_cache_dtype, "runner": runner,
        "platform": platform, "prefix_caching": False if no_prefix_caching else None,
        "gpu_share": gpu_memory_utilization,
    }  # fmt: skip
    ask = LaunchAsk(
        engine, target, drafter, machine_of(host, ssh_option), named, bind, port, release, venv, executable,
        served_model_name, reasoning_parser, tool_call_parser, chat_template, target_config,
        drafter_config, tuple(accept or ()), tuple(context.args), _variables(env or []), prove, bisect,
    )  # fmt: skip
    prepared = prepare_launch(ask, resolve_config)
    if print_form or dry_run:
        show_plan(prepared, print_form, image, as_json)
    else:
        run_plan(prepared, ask.machine, name or f"{context.info_name}-{port}", wait, as_json)


for engine_name in ("vllm", "sglang", "llamacpp"):
    launch_app.command(engine_name, context_settings=EXTRA)(start_engine)


@launch_app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="one launch (default: all)")] = None,
    host: Host = None,
    ssh_option: SshOption = None,
    as_json: Json = False,
) -> None:
    """What runs, what ended and how."""
    from draftproof.launch.show import show_status

    show_status(machine_of(host, ssh_option), name, as_json)


@launch_app.command()
def stop(
    name: Which,
    host: Host = None,
    ssh_option: SshOption = None,
    seconds: Annotated[float, typer.Option(min=0, help="time to end by itself before it is killed")] = 30,
) -> None:
    """End exactly the processes this launch started."""
    from draftproof.launch.show import stop_launch

    stop_launch(machine_of(host, ssh_option), name, seconds)


@launch_app.command()
def logs(
    name: Which,
    host: Host = None,
    ssh_option: SshOption = None,
    lines: Annotated[int, typer.Option(min=1, help="how many of the last lines")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the engine ends")] = False,
) -> None:
    """The engine's own output."""
    from draftproof.launch.start import logs as read_logs

    read_logs(machine_of(host, ssh_option), name, _write, lines=lines, follow=follow)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def machine_of(host: str | None, ssh_option: list[str] | None) -> Machine:
    from draftproof.launch.machine import Local, Remote

    if host is None:
        if ssh_option:
            raise UserError("bad-option", "--ssh-option means nothing without --host", "add --host user@machine")
        return Local()
    return Remote(host, tuple(ssh_option or ()))


def _variables(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise UserError("bad-option", f"--env {pair!r} is not NAME=VALUE", "write --env NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise UserError("flag-conflict", f"--env {name} is given twice", "say it once")
    return found
