"""What `launch vllm --prove` costs (`make plugin-cost`): two engines in one process, one made with the plugin.

Rounds alternate (ABBA), so that whatever slows the machine slows both: separate processes differ by 15 % with equal
work, far more than what is measured. Prints, for both orders of making the engines and for a control without plugin,
tokens/s of the second engine over the first one's with its 95 % interval. Runs itself again in vLLM's own Python.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS, WARM, TOKENS = 60.0, 8, 100
ORDERS = (("off", "on"), ("on", "off"), ("off", "off"))


def make_engine(folder: Path, plugin: bool) -> Any:
    """An engine of the tiny pair; the plugin hooks the worker's class while the engine is made, or is taken off it."""
    from vllm import LLM
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    own = {name: WorkerWrapperBase.__dict__[name] for name in ("init_device", "initialize_from_config")}
    if plugin:
        os.environ["DRAFTPROOF_PROVE"] = tempfile.mkdtemp(dir=folder)
        importlib.import_module("draftproof_prove").register()
        assert WorkerWrapperBase.init_device is not own["init_device"]
    speculative = {"method": "dflash", "model": str(folder / "drafter-dflash"), "num_speculative_tokens": 7}
    engine = LLM(
        model=str(folder / "target"), speculative_config=speculative, enforce_eager=True, dtype="float32",
        max_model_len=512, max_num_seqs=4, seed=0,
    )  # fmt: skip
    for name, function in own.items():
        setattr(WorkerWrapperBase, name, function)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
    assert hasattr(worker, "_draftproof_prove") == plugin
    return engine


def compare(folder: Path, order: list[str]) -> dict[str, Any]:
    """Ratios of the second engine's speed to the first one's, a pair of rounds each."""
    from vllm import SamplingParams

    engines = [make_engine(folder, name == "on") for name in order]
    prompts = [{"prompt_token_ids": [5 + (i * 7 + j) % 90 for j in range(20)]} for i in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def spent(engine: Any) -> float:
        begun = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    ratios, end = [], time.monotonic() + SECONDS
    for _ in range(WARM):
        for engine in engines:
            spent(engine)
    while time.monotonic() < end:
        for turn in ((0, 1), (1, 0)):
            seconds = {which: spent(engines[which]) for which in turn}
            ratios.append(seconds[0] / seconds[1])
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "order": order,
        "pairs": len(ratios),
        "ratio": statistics.median(ratios),
        "95 %": [medians[50], medians[1949]],
    }


def main() -> None:
    from draftproof.launch import prove

    from .conftest import COMMON, RUNNER, VENV
    from .pair import make_pair

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_pair(folder, "full")
        for name, content in prove.plugin_files().items():
            if name.endswith(".py"):
                (folder / Path(name).name).write_bytes(content)
        env = os.environ | COMMON | RUNNER["v1"] | {"PYTHONPATH": scratch, "VLLM_USE_V2_MODEL_RUNNER": "0"}
        for order in ORDERS:
            command = [f"{VENV}/bin/python", __file__, scratch, *order]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(compare(Path(sys.argv[1]), sys.argv[2:])))
    else:
        main()
