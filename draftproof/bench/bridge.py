"""Where `bench` runs models: the one file of it that reaches torch, inside its functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftproof.bench.workloads import Prompt
from draftproof.errors import UserError

if TYPE_CHECKING:
    from draftproof.bench.choose import Way
    from draftproof.engine.acceptance import Acceptance
    from draftproof.engine.batch import Drafter
    from draftproof.engine.pair import Pair
    from draftproof.engine.propose import Speculation
    from draftproof.engine.replay import Text
    from draftproof.models.dflash import DFlashDrafter


@dataclass(frozen=True)
class Timed:
    """One generation: token ids, wall seconds of prefill and decoding together, steps after the prefill, drafted tokens
    that they verified."""

    ids: list[int]
    seconds: float
    steps: int
    nodes: int = 0


def encode(pair: Pair, prompt: Prompt) -> list[int]:
    from draftproof.engine.text import encode_chat

    return encode_chat(pair.tokenizer, prompt.messages)


def write_texts(pair: Pair, prompts: Sequence[list[int]], temperature: float, max_tokens: int, seed: int) -> list[Text]:
    """The target's own answers, many side by side; the noise of a prompt depends on the seed and its number alone."""
    from draftproof.engine.replay import Text
    from draftproof.train.regen import Job, Writer

    slots = min(len(prompts), 512 if pair.target.device.type == "cuda" else 16)
    longest = max(map(len, prompts))
    writer = Writer(pair.target, slots=slots, max_prompt=longest, max_tokens=max_tokens, stops=pair.stop_ids)
    jobs = {seed + i: Job(ids, temperature, seed + i, max_tokens) for i, ids in enumerate(prompts)}
    order = sorted(jobs.values(), key=lambda j: len(j.prompt_ids))
    written = {job.seed: ids for job, ids in writer.write(order)}
    return [Text(jobs[key].prompt_ids, written[key]) for key in jobs]


def load_drafters(pair: Pair, names: Sequence[str]) -> list[DFlashDrafter]:
    """Other drafters for the same target, checked against it."""
    from draftproof.config.drafter import read_drafter
    from draftproof.config.pair import check_pair, require_pair
    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.hub import resolve_drafter

    folders = [resolve_drafter(name) for name in names]
    for folder in folders:
        require_pair(check_pair(read_drafter(folder), pair.target.spec))
    drafters = [DFlashDrafter.load(folder, pair.target) for folder in folders]
    for drafter in drafters:
        drafter.prepack()
    return drafters


def replay_texts(pair: Pair, drafters: Sequence[Drafter], texts: Sequence[Text]) -> list[Acceptance]:
    """Acceptance of every drafter along the same texts."""
    from draftproof.engine.replay import replay

    return [replay(pair.target, drafter, texts) for drafter in drafters]


Runner = Callable[[list[int], int], Timed]  # (prompt ids, seed) -> the answer


def runner(
    pair: Pair, drafter: Any, how: Speculation | None, temperature: float, max_tokens: int, context: int
) -> Runner:
    """This engine with `drafter` (None: plain decoding), warm from prompt to prompt."""
    from draftproof.engine.calibrate import auto_for, remember
    from draftproof.engine.engine import Engine
    from draftproof.engine.request import Request, SamplingParams

    stops = pair.stop_ids
    auto = None
    if drafter and how and how.budget == "auto":
        auto = auto_for(pair.target, drafter, how, context=context, sampled=temperature > 0)
    engine = Engine(pair.target, drafter, context=context, how=how, auto=auto)

    def run(ids: list[int], seed: int) -> Timed:
        sampling = SamplingParams(temperature=temperature, seed=seed)
        out: list[int] = []
        begun, steps, nodes = time.perf_counter(), 0, 0
        for result in engine.generate([Request(ids, max_tokens, sampling, stops)]):
            out += result.tokens
            steps += not result.prefill
            nodes += result.nodes
        timed = Timed(out, time.perf_counter() - begun, steps, nodes)
        if auto:
            remember(auto, drafter, temperature > 0)
        return timed

    return run


def way_runner(
    pair: Pair, way: Way, temperature: float, max_tokens: int, context: int, noise_aware: bool, builder: str
) -> Runner:
    """One way of `choose`: with the pair's drafter, with the target's own head, or plainly."""
    from draftproof.engine.propose import Speculation
    from draftproof.models.hub import resolve_target
    from draftproof.models.mtp import MTPDrafter
    from draftproof.spec.builders import BUILDERS, SPINE_FIRST

    assert pair.drafter is not None
    if way.kind == "none":
        return runner(pair, None, None, temperature, max_tokens, context)
    if way.kind == "chain" and way.number > pair.drafter.depth:
        raise UserError("bad-option", f"--way {way.name}: the drafter drafts {pair.drafter.depth}", "lower the width")
    if way.kind == "mtp":
        head = MTPDrafter.load(resolve_target(pair.name), pair.target, way.number)
        head.prepack()
        return runner(pair, head, Speculation(noise_aware=noise_aware), temperature, max_tokens, context)
    shape = SPINE_FIRST if way.kind == "chain" else BUILDERS[builder]
    how = Speculation("auto" if way.kind == "auto" else way.number or "chain", shape, noise_aware)
    own = copy(pair.drafter)  # the same weights with caches of its own: several engines are alive at once
    return runner(pair, own, how, temperature, max_tokens, context)


def runners(
    pair: Pair, temperature: float, max_tokens: int, context: int, how: Speculation | None = None
) -> dict[str, Runner]:
    """Three ways to answer a prompt: this engine with the drafter, this engine plain, transformers' own generate."""
    stops = pair.stop_ids
    plain = plain_model(pair)

    def theirs(ids: list[int], seed: int) -> Timed:
        import torch

        tokens = torch.tensor([ids], device=pair.target.device)
        torch.manual_seed(seed)
        begun = time.perf_counter()
        out = plain.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=generation_config(temperature, max_tokens, stops),
        )[0, len(ids) :].tolist()
        return Timed(out, time.perf_counter() - begun, len(out))

    return {
        "drafted": runner(pair, pair.drafter, how, temperature, max_tokens, context),
        "none": runner(pair, None, None, temperature, max_tokens, context),
        "transformers": theirs,
    }


def generation_config(temperature: float, max_tokens: int, stops: tuple[int, ...]) -> Any:
    """transformers' settings for plain greedy or plain temperature sampling, with none of its defaults on top."""
    from transformers import GenerationConfig

    chosen = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return GenerationConfig(
        max_new_tokens=max_tokens, eos_token_id=list(stops), pad_token_id=stops[0], **({"do_sample": False} | chosen)
    )


def plain_model(pair: Pair) -> Any:
    """The target as transformers itself would run it: the same weights, plain, its own sdpa attention and cache."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    config = deepcopy(pair.target.model.config)  # from_config writes its attention choice into the config
    plain = AutoModelForCausalLM.from_config(config, dtype=pair.target.dtype, attn_implementation="sdpa")
    plain.load_state_dict(pair.target.model.state_dict(), assign=True, strict=False)
    plain.tie_weights()
    return plain.to(pair.target.device).eval()


def score_gap(pair: Pair, ids: list[int], one: int, two: int, temperature: float, seed: int) -> float:
    """|score(one) - score(two)| after the text `ids`, by one plain pass: logits, or logits / T + noise when sampled."""
    import torch

    from draftproof.models.target import causal_plan
    from draftproof.spec.noise import gumbel

    cache = pair.target.new_cache(slots=1, capacity=len(ids), chunk=len(ids))
    plan = causal_plan(cache, slice(0, 1), len(ids), len(ids))
    scores = pair.target.forward(torch.tensor([ids], device=pair.target.device), plan, rows=1).logits[0, -1].double()
    if temperature:
        key = torch.tensor([seed], device=scores.device), torch.tensor([0], device=scores.device)
        where = torch.tensor([[len(ids)]], device=scores.device)
        scores = scores / temperature + gumbel(*key, where, len(scores))[0, 0].double()
    return abs(float(scores[one] - scores[two]))


def peak_memory(pair: Pair, max_tokens: int) -> dict[str, float]:
    """Bytes while one prompt is decoded: the peak, and the weights plus caches it should be made of.

    On a CPU the peak is the process's resident growth over the interpreter and its libraries, which cannot be told from
    weights that are mapped; it is measured from the moment before decoding plus the weights' own size.
    """
    import torch

    from draftproof.bench.machine import peak_rss, reset_peak_rss
    from draftproof.engine.engine import Engine
    from draftproof.engine.request import Request

    prompt = encode(pair, Prompt("memory", [{"role": "user", "content": "Explain why the sky is blue."}], ""))
    modules = [pair.target.model] + ([pair.drafter.model] if pair.drafter else [])
    weights = sum(w.numel() * w.element_size() for module in modules for w in module.parameters())
    on_gpu = pair.target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    reset_peak_rss()
    before = peak_rss()
    engine = Engine(pair.target, pair.drafter, context=len(prompt) + max_tokens)
    for _ in engine.generate([Request(prompt, max_tokens)]):
        pass
    caches = engine.cache.nbytes + (pair.drafter.cache.nbytes if pair.drafter and pair.drafter.cache else 0)
    peak = torch.cuda.max_memory_allocated() if on_gpu else weights + peak_rss() - before
    if not on_gpu and not before:
        raise UserError("device-unavailable", "this system does not tell a process's peak memory", "leave the part out")
    return {"peak": peak, "weights": weights, "caches": caches, "ratio": peak / (weights + caches)}
