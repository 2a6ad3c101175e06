"""Run by vLLM's own Python: argument lists on stdin, what its parser and its speculative config make of them on
stdout. An argument list: vllm serve MODEL ..."""

import dataclasses
import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(argv):
    root = FlexibleArgumentParser()
    parser = ServeSubcommand().subparser_init(root.add_subparsers(dest="command"))
    arguments = parser.parse_args(argv[2:])
    ServeSubcommand().validate(arguments)
    arguments.model = arguments.model_tag  # as `vllm serve` does
    return arguments, AsyncEngineArgs.from_cli_args(arguments)


def main():
    request = json.load(sys.stdin)
    answers = []
    for argv in request["argvs"]:
        arguments, engine = parse(argv)
        answer = {"model": engine.model, "speculative": engine.speculative_config, "port": arguments.port}
        names = ("tensor_parallel_size", "max_model_len", "max_num_batched_tokens", "reasoning_parser")
        answer |= {name: getattr(engine, name) for name in names}
        answer["tool_call_parser"] = arguments.tool_call_parser
        if request["config"]:
            config = engine.create_engine_config()
            made = config.speculative_config
            answer["config"] = {
                field.name: getattr(made, field.name)
                for field in dataclasses.fields(made)
                if isinstance(getattr(made, field.name), (int, str, bool, type(None)))
            }
            answer["v2"] = config.use_v2_model_runner
        answers.append(answer)
    print("\nANSWERS" + json.dumps(answers))


main()
