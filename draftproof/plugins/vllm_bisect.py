"""The tensors of one draft step of vLLM, for a comparison stage by stage: beside the plugin `vllm.py`, and only with
DRAFTPROOF_PROVE_BISECT=1.

A request is a file `bisect.json` in the plugin's folder, {"steps": [0, 3]}: draft steps of the running request, counted
from its first; one request at a time is assumed. Each gives `bisect-<step>.safetensors` (other ranks than 0:
`bisect-<step>.rank<r>.safetensors`), float32, and in its metadata, key `draftproof`, a JSON of what is what:

    features             target's taps of the new context rows, as the drafter gets them  [new, taps * hidden]
    features.positions   their positions                                                   [new]
    projected            the same after fc and hidden_norm (the norm is applied here)       [new, hidden]
    context.{layer}.k    what lies in the paged cache before the anchor, K after RoPE       [anchor, kv_heads, head_dim]
    context.{layer}.v    the same of V; rows whose block was given away are NaN
    block.ids, block.positions   what the drafter is asked: the anchor and the masks        [1 + K]
    block.{layer}        residual stream after each layer                                   [1 + K, hidden]
    logits               as sampled from                                                    [K, vocabulary]
    drafts               as proposed                                                        [K]

Layers count from 0. Modules show their tensors in eager mode only; what a CUDA graph or a compiler hides is named in
`missing`. The order of numbers inside a cache block is the backend's own business: it is found by writing known numbers
into a scratch block with the backend's own function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = "draftproof.bisect/1"
REQUEST = "bisect.json"
BASE = 128  # whole numbers below it are exact in every 16-bit float


def install(folder: str, worker: Any, failed: Callable[[Exception], Any]) -> None:
    """Wrap `propose` of the worker's drafter. `failed` gets the first error, after which nothing is watched."""
    plugin = importlib.import_module(__name__.removesuffix("_bisect"))
    runner = worker.model_runner
    drafter = plugin.drafter_of(runner)
    original = plugin.need(drafter, "propose")
    binder = inspect.signature(original)
    plugin.need(drafter, "propose", "input_batch" if "input_batch" in binder.parameters else "target_token_ids")
    model = plugin.unwrapped(plugin.need(drafter, "model"))
    for name in ("combine_hidden_states", "precompute_and_store_context_kv", "compute_logits"):
        plugin.need(model, name)
    steps = _Steps(os.path.join(folder, REQUEST))

    def give_up(error: Exception) -> None:
        drafter.__dict__.pop("propose", None)
        failed(error)

    @functools.wraps(original)
    def propose(*args: Any, **kwargs: Any) -> Any:
        watch = None
        try:
            step = steps.wanted(runner, binder.bind(*args, **kwargs).arguments)
            if step is not None:
                watch = _Watch(plugin, runner, step)
                watch.hook()
        except Exception as error:
            give_up(error)
        try:
            drafts = original(*args, **kwargs)
        finally:
            if watch is not None:
                watch.unhook()
        try:
            if watch is not None:
                watch.write(folder, getattr(worker, "rank", 0), drafts)
        except Exception as error:
            give_up(error)
        return drafts

    drafter.propose = propose


class _Steps:
    """Counts the draft steps of the running request, and reads which are wanted when the file is new."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.read: int | None = None  # time of the file that was read
        self.left: set[int] = set()
        self.request: str | None = None
        self.count = -1

    def wanted(self, runner: Any, arguments: dict[str, Any]) -> int | None:
        request = _drafting(runner, arguments)
        if request is None:
            return None
        self.count = self.count + 1 if request == self.request else 0
        self.request = request
        try:
            time = os.stat(self.path).st_mtime_ns
        except OSError:
            return None
        if time != self.read:
            with open(self.path, encoding="utf-8") as file:
                self.left = {int(step) for step in json.load(file)["steps"]}
            self.read = time
        if self.count not in self.left:
            return None
        self.left.discard(self.count)
        return self.count


def _drafting(runner: Any, arguments: dict[str, Any]) -> str | None:
    """The id of the first request, once its whole prompt is there; a chunk of a prompt is no draft step."""
    if arguments.get("dummy_run"):
        return None
    batch = arguments.get("input_batch")
    if batch is None:  # V1
        batch = runner.input_batch
        there = batch.num_computed_tokens_cpu[0] + arguments["target_token_ids"].shape[0]
        return batch.req_ids[0] if there >= batch.num_prompt_tokens[0] else None
    there = batch.num_computed_tokens_np[0] + batch.num_scheduled_tokens[0]
    return batch.req_ids[0] if there >= batch.prefill_len_np[0] else None


class _Watch:
    """One draft step: everything on the way is copied, then put in order and written."""

    def __init__(self, plugin: Any, runner: Any, step: int) -> None:
        self.plugin = plugin
        self.runner = runner
        self.drafter = plugin.drafter_of(runner)
        self.model = plugin.unwrapped(self.drafter.model)
        self.step = step
        self.seen: dict[str, Any] = {}
        self.caches: dict[int, tuple[Any, Any, Any]] = {}  # by layer: attention layer, its cache, its block table
        self.errors: list[str] = []
        self.ends: list[Callable[[], Any]] = []

    def hook(self) -> None:
        self._method(self.model, "combine_hidden_states", self._features)
        self._method(self.model, "precompute_and_store_context_kv", self._context)
        self._method(self.model, "compute_logits", self._logits)
        asked = self.model.register_forward_pre_hook(self._guarded(self._asked), with_kwargs=True)
        self.ends.append(asked.remove)
        for place, (layer, _, _) in enumerate(self.plugin.draft_layers(self.runner).values()):
            self._method(layer.impl, "forward", functools.partial(self._cache, place, layer))
        for place, module in enumerate(self.plugin.inner(self.model).layers):
            hook = module.register_forward_hook(self._guarded(functools.partial(self._layer, place)))
            self.ends.append(hook.remove)

    def unhook(self) -> None:
        while self.ends:
            try:
                self.ends.pop()()
            except Exception as error:
                self.errors.append(str(error))

    def _guarded(self, look: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                look(*args)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

        return call

    def _method(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Call `look(arguments, result)` after one method of one object."""
        original, before = getattr(owner, name), vars(owner).get(name)
        binder, guarded = inspect.signature(original), self._guarded(look)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            guarded(binder.bind(*args, **kwargs).arguments, result)
            return result

        owner.__dict__[name] = method
        self.ends.append(functools.partial(_restore, vars(owner), name, before))

    # ---- what passes by

    def _features(self, arguments: dict[str, Any], result: Any) -> None:
        self.seen["features"] = _copy(arguments["hidden_states"])

    def _context(self, arguments: dict[str, Any], result: Any) -> None:
        self.seen["projected"] = _copy(self.plugin.inner(self.model).hidden_norm(arguments["context_states"].clone()))
        self.seen["features.positions"] = _copy(arguments["context_positions"])

    def _asked(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self.seen["block.ids"] = _copy(given["input_ids"])
        self.seen["block.positions"] = _copy(given["positions"])

    def _layer(self, place: int, module: Any, args: Any, result: Any) -> None:
        states, residual = result
        self.seen[f"block.{place}"] = _copy(states).float() + _copy(residual).float()

    def _cache(self, place: int, layer: Any, arguments: dict[str, Any], result: Any) -> None:
        metadata = arguments["attn_metadata"]
        self.caches[place] = (layer, arguments["kv_cache"], self.plugin.need(metadata, "block_table")[0].clone())

    def _logits(self, arguments: dict[str, Any], result: Any) -> None:
        self.seen["logits"] = _copy(result)

    # ---- in order, on disk

    def write(self, folder: str, rank: int | None, drafts: Any) -> None:
        from safetensors.torch import save_file

        tensors = self._in_order(_copy(drafts)[0])
        missing = sorted(_names(len(self.plugin.inner(self.model).layers)) - tensors.keys())
        told = {"schema": SCHEMA, "step": self.step, "rank": rank, "missing": missing, "errors": self.errors}
        told["layers"] = list(self.plugin.draft_layers(self.runner))
        told["anchor"] = int(tensors["block.positions"][0]) if "block.positions" in tensors else None
        name = f"bisect-{self.step}.safetensors" if not rank else f"bisect-{self.step}.rank{rank}.safetensors"
        path = os.path.join(folder, name)
        save_file(tensors, path + ".part", metadata={"draftproof": json.dumps(told)})
        os.replace(path + ".part", path)

    def _in_order(self, drafts: Any) -> dict[str, Any]:
        """Padding and rejected rows away, float32. The new context rows end before the anchor."""
        found = {"drafts": drafts}
        rows = drafts.shape[0] + 1
        for name, tensor in self.seen.items():
            if name.startswith("block."):
                found[name] = tensor[:rows]
            elif name == "logits":
                found[name] = tensor[: rows - 1]
        if "block.positions" not in found:
            return {name: tensor.float().contiguous() for name, tensor in found.items()}
        anchor = int(found["block.positions"][0])
        if "features.positions" in self.seen:
            new = anchor - int(self.seen["features.positions"][0])
            found.update({name: self.seen[name][:new] for name in ("features", "features.positions", "projected")})
        for place, (layer, cache, table) in self.caches.items():
            try:
                found[f"context.{place}.k"], found[f"context.{place}.v"] = _gather(layer, cache, table, anchor)
            except Exception as error:
                self.errors.append(f"cache of layer {place}: {type(error).__name__}: {error}")
        return {name: tensor.float().contiguous() for name, tensor in found.items()}


def _names(layers: int) -> set[str]:
    names = {"features", "features.positions", "projected", "block.ids", "block.positions", "logits", "drafts"}
    for layer in range(layers):
        names |= {f"context.{layer}.k", f"context.{layer}.v", f"block.{layer}"}
    return names


def _restore(attributes: dict[str, Any], name: str, before: Any) -> None:
    attributes.pop(name, None)
    if before is not None:
        attributes[name] = before


def _copy(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)


def _gather(layer: Any, cache: Any, table: Any, length: int) -> tuple[Any, Any]:
    """K and V of the first positions. Block 0 is vLLM's null block: what is mapped to it was given away."""
    blocks = cache if cache.shape[0] != 2 or cache.shape[1] == 2 else cache.movedim(1, 0)
    size = blocks[0].numel() // (2 * layer.num_kv_heads * layer.head_size)
    where = _places(layer, cache, size)
    count = (length + size - 1) // size
    ids = table[:count].long()
    numbers = blocks[ids].reshape(count, -1).cpu().float()
    numbers[ids.cpu() == 0] = float("nan")
    k, v = (numbers[:, part.reshape(-1)].reshape(count * size, *part.shape[1:])[:length] for part in where)
    return k, v


def _places(layer: Any, cache: Any, size: int) -> Any:
    """[2, size, kv_heads, head_dim]: where in a block each number of K and V lies."""
    import torch

    shape = list(cache.shape)
    shape[0 if shape[0] != 2 or shape[1] == 2 else 1] = 1
    scratch = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
    number = torch.arange(scratch.numel(), device=cache.device).reshape(2, size, layer.num_kv_heads, layer.head_size)
    slots, found, weight = torch.arange(size, device=cache.device), torch.zeros(scratch.numel(), dtype=torch.long), 1
    while weight < scratch.numel():
        key, value = ((number // weight) % BASE).to(cache.dtype)
        layer.impl.do_kv_cache_update(layer, key.contiguous(), value.contiguous(), scratch, slots)
        found += weight * scratch.reshape(-1).cpu().long()
        weight *= BASE
    if not torch.equal(found.sort().values, torch.arange(scratch.numel())):
        raise ValueError("a cache block is no mere rearrangement of K and V")
    return found.argsort().reshape(number.shape)
