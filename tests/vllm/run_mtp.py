"""Runs in vLLM's own Python: answers prompts with the target's MTP head, and tells what its counters say of each.

Arguments: target folder, drafts a step, a JSON list of prompt ids, the JSON file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COUNTERS = ("num_drafts", "num_accepted_tokens")


def main(target: str, drafts: int, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    speculative = {"method": "mtp", "num_speculative_tokens": drafts}
    llm = LLM(
        model=target, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=1,
        gpu_memory_utilization=0.3, speculative_config=speculative, disable_log_stats=False,
    )  # fmt: skip
    answers, before = [], dict.fromkeys(COUNTERS, 0)
    for prompt in prompts:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling)
        values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        now = {name: int(values[f"vllm:spec_decode_{name}"]) for name in COUNTERS}
        steps, accepted = (now[name] - before[name] for name in COUNTERS)
        answers.append({"ids": list(out.outputs[0].token_ids), "steps": steps, "accepted": accepted})
        before = now
    return answers


if __name__ == "__main__":
    folder, drafts, source, result, tokens = sys.argv[1:]
    told = main(folder, int(drafts), json.loads(Path(source).read_text()), int(tokens))
    Path(result).write_text(json.dumps(told))
