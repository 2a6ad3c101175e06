"""What vLLM's own process does with a drafter, written down while it runs: a general plugin (entry point group
`vllm.general_plugins`) that `draftproof launch vllm --prove` lays next to the engine.

It acts only when DRAFTPROOF_PROVE names a folder. It looks at parts of the engine by their names and parameters, never
by the release; what looks different is named in `refused`, and the rest is still told. It changes no result and raises
nothing in the engine: every look is guarded, and after an error of its own, or once each draft layer was seen often
enough, its hooks are gone. One file a worker process, `inside-<pid>.json`, whose `facts` have the names of
`draftproof.doctor.facts.InsideFacts`.

Windows count keys, the query's own included: a backend's (w - 1, 0) or (w - 1, w - 1) is told as w, none as -1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SCHEMA = "draftproof.inside/1"
FOLDER, BISECT = "DRAFTPROOF_PROVE", "DRAFTPROOF_PROVE_BISECT"
OURS = "_draftproof_prove"
ENOUGH = 3  # calls a draft layer is watched for
CHUNK = 1 << 20
STACKED = (
    (".q_proj.", ".qkv_proj."), (".k_proj.", ".qkv_proj."), (".v_proj.", ".qkv_proj."),
    (".gate_proj.", ".gate_up_proj."), (".up_proj.", ".gate_up_proj."),
)  # fmt: skip
RENAMED = (
    ("midlayer.", "layers.0."), ("encoder.output_norm_enc.", "hidden_norm."), ("encoder.fc.", "fc."),
    ("d2t", "draft_id_to_target_id"),
)  # fmt: skip


class Different(Exception):  # noqa: N818
    """A part of the engine does not look as expected here."""


def register() -> None:
    """Called by vLLM in its API server, engine core and workers, before a model is loaded; also several times."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    seen = Inside(folder)
    try:
        _hook_workers(folder)
    except Exception as error:
        seen.fail("workers", error)
        seen.write()


def _hook_workers(folder: str) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase as Wrapper

    for name, parameters in (("init_device", ()), ("initialize_from_config", ("kv_cache_configs",))):
        need(Wrapper, name, *parameters)
    if getattr(Wrapper.init_device, OURS, False):
        return

    def device_ready(wrapper: Any) -> None:
        seen = Inside(folder)
        setattr(wrapper, OURS, seen)
        seen.guard("model loading", lambda: _hook_loading(seen, wrapper))

    def cache_ready(wrapper: Any) -> None:
        seen = getattr(wrapper, OURS, None)
        if seen is not None and not seen.told_cache:
            seen.told_cache = True
            seen.guard("KV cache", lambda: _read_cache(seen, wrapper.worker.model_runner))
            seen.guard("attention calls", lambda: _hook_calls(seen, wrapper.worker.model_runner))
            if os.environ.get(BISECT) == "1":
                seen.guard("bisection", lambda: _hook_bisection(seen, wrapper.worker))
            seen.write()

    _after(Wrapper, "init_device", device_ready)
    _after(Wrapper, "initialize_from_config", cache_ready)


def _after(owner: Any, name: str, look: Callable[[Any], None]) -> None:
    """Call `look(self)` after the method `name` of a class, whatever it returns."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with contextlib.suppress(Exception):  # nothing here may stop the engine
            look(self)
        return result

    setattr(method, OURS, True)
    setattr(owner, name, method)


def _uncover(owner: Any, name: str) -> None:
    """The class's method again. Not through `__dict__`: CPython builds one when asked, and reads the object's other
    attributes the slower way ever after."""
    with contextlib.suppress(AttributeError):
        delattr(owner, name)


def need(owner: Any, name: str, *parameters: str) -> Any:
    """An attribute that must be there and, if it is called, takes these parameters."""
    where = getattr(owner, "__name__", type(owner).__name__)
    try:
        found = getattr(owner, name)
    except AttributeError:
        raise Different(f"{where} has no {name}") from None
    takes = inspect.signature(found).parameters if parameters else {}
    for parameter in parameters:
        if parameter not in takes:
            raise Different(f"{where}.{name} takes no {parameter}")
    return found


class Inside:
    """The facts of one worker, and what is hooked in it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.rank: int | None = None
        self.errors: list[str] = []
        self.calls: dict[str, list[dict[str, Any]]] = {}  # by draft layer
        self.unhook: list[Callable[[], None]] = []
        self.told_cache = False
        self.told_calls = 0  # calls of each draft layer that were written

    def fail(self, what: str, error: Exception) -> None:
        text = str(error) if isinstance(error, Different) else f"{type(error).__name__}: {error}"
        self.errors.append(f"{what}: {text}")

    def guard(self, what: str, look: Callable[[], Any]) -> Any:
        """The value of `look`, or None and a word about why not."""
        try:
            return look()
        except Exception as error:
            self.fail(what, error)
            return None

    def tell(self, name: str, look: Callable[[], Any]) -> None:
        self.facts[name] = self.guard(name, look)

    def remove_hooks(self) -> None:
        while self.unhook:
            try:
                self.unhook.pop()()
            except Exception as error:
                self.fail("removing a hook", error)

    def write(self) -> None:
        """All or nothing: a reader sees the old file or the new one."""
        facts = dict(self.facts, refused=self.errors[0] if self.errors else None)
        whole = {"schema": SCHEMA, "pid": os.getpid(), "rank": self.rank, "facts": facts}
        whole.update(errors=self.errors, calls=self.calls)
        path = os.path.join(self.folder, f"inside-{os.getpid()}.json")
        with contextlib.suppress(Exception):  # a full disk is no business of the engine
            os.makedirs(self.folder, exist_ok=True)
            with open(path + ".part", "w", encoding="utf-8") as file:
                json.dump(whole, file, indent=1)
            os.replace(path + ".part", path)


# ---- what a loaded model says


def _hook_loading(seen: Inside, wrapper: Any) -> None:
    worker = need(wrapper, "worker")
    runner = need(worker, "model_runner")
    original = need(runner, "load_model")
    seen.rank = getattr(worker, "rank", None)

    @functools.wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        _uncover(runner, "load_model")
        loaded: dict[int, Loaded] = {}
        restore = seen.guard("weight loader", lambda: _hook_loader(seen, loaded))
        try:
            result = original(*args, **kwargs)
        finally:
            if restore is not None:
                restore()
        seen.guard("loaded model", lambda: _read_loaded(seen, runner, loaded))
        seen.write()
        return result

    runner.load_model = load_model


class Loaded:
    """What the loader says about one module: the parameters it filled, and which of all hold only zeros. Looked at
    right then, because some backends move weights elsewhere afterwards."""

    def __init__(self) -> None:
        self.filled: set[str] = set()
        self.zero: set[str] = set()


def _hook_loader(seen: Inside, loaded: dict[int, Loaded]) -> Callable[[], None]:
    from vllm.model_executor.models.utils import AutoWeightsLoader as Loader

    original = need(Loader, "load_weights", "weights")

    def note(module: Any, names: Iterable[str]) -> None:
        found = loaded.setdefault(id(module), Loaded())
        found.filled.update(names)
        found.zero = set(_zero_weights(module))

    @functools.wraps(original)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = original(self, *args, **kwargs)
        seen.guard("loaded weights", lambda: note(need(self, "module"), names))
        return names

    Loader.load_weights = load_weights
    return lambda: setattr(Loader, "load_weights", original)


def _read_loaded(seen: Inside, runner: Any, loaded: dict[int, Loaded]) -> None:
    import vllm

    seen.facts.update(
        release=getattr(vllm, "__version__", None), runner="v2" if hasattr(runner, "speculator") else "v1"
    )
    config = need(runner, "vllm_config")
    speculative = config.speculative_config
    seen.tell("max_model_len", lambda: config.model_config.max_model_len)
    seen.tell("hybrid_manager", lambda: _not(config.scheduler_config.disable_hybrid_kv_cache_manager))
    drafter = drafter_of(runner)
    if speculative is None or drafter is None:
        return
    seen.facts.update(drafter_class=type(drafter).__name__, method=need(speculative, "method"))
    seen.tell("num_speculative_tokens", lambda: speculative.num_speculative_tokens)
    seen.tell("mask_id", lambda: _mask_id(drafter))
    if getattr(drafter, "model", None) is None:  # ngram and the like
        return
    model, target = unwrapped(drafter.model), unwrapped(need(runner, "model"))
    seen.tell("taps", lambda: _taps(target))
    seen.tell("fc_inputs", lambda: getattr(getattr(inner(model), "fc", None), "input_size", None))
    seen.tell("layers", lambda: [_declared(name, *layer) for name, layer in draft_layers(runner).items()])
    seen.tell("position_rows", lambda: _position_rows(model))
    seen.tell("shares_embedding", lambda: _shares(inner(model), inner(target), ("embed_tokens", "embedding")))
    seen.tell("shares_head", lambda: _shares(model, target, ("lm_head",)))
    known = loaded.get(id(model), Loaded())
    seen.tell("zero_weights", lambda: _own_zeros(seen.facts, known.zero | set(_zero_weights(model))))
    if seen.facts["method"] == "dflash":
        draft_config = need(speculative, "draft_model_config")
        seen.tell("skipped_weights", lambda: _skipped(model, known.filled, draft_config))


def drafter_of(runner: Any) -> Any:
    """V1's proposer or V2's speculator; None where there is none (other pipeline stages)."""
    drafter = getattr(runner, "speculator", None)
    return drafter if drafter is not None else getattr(runner, "drafter", None)


def unwrapped(model: Any) -> Any:
    """The module in a CUDA graph wrapper."""
    return model.unwrap() if hasattr(model, "unwrap") and not hasattr(model, "named_parameters") else model


def inner(model: Any) -> Any:
    """The decoder in a model with a head; vision models have it in their language model."""
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    return getattr(language, "model", language)


def draft_layers(runner: Any) -> dict[str, tuple[Any, Any, bool | None]]:
    """(attention layer, the module around it, declared causality) by the layer's name, in the order they run."""
    drafter = drafter_of(runner)
    model = unwrapped(drafter.model)
    causal: list[bool | None] = []
    if hasattr(model, "get_draft_kv_cache_layer_names"):
        names = list(model.get_draft_kv_cache_layer_names())
        causal = [bool(one) for one in model.get_draft_attn_causal()] if hasattr(model, "get_draft_attn_causal") else []
    else:
        attribute = (
            "draft_attn_layer_names" if hasattr(drafter, "draft_attn_layer_names") else "_draft_attn_layer_names"
        )
        names = sorted(need(drafter, attribute), key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    layers = need(runner.vllm_config.compilation_config, "static_forward_context")
    around = {id(module.attn): module for module in model.modules() if hasattr(module, "attn")}
    found = {}
    for place, name in enumerate(names):
        module = around.get(id(layers[name]))
        declared = causal[place] if place < len(causal) else getattr(module, "causal", None)
        found[name] = (layers[name], module, declared)
    return found


def _declared(name: str, layer: Any, module: Any, causal: bool | None) -> dict[str, Any]:
    window = getattr(module, "sliding_window", None)
    if window is None:
        window = getattr(layer, "sliding_window", None)
    rope = getattr(module, "rotary_emb", None)
    base = getattr(rope, "base", None)
    told = {"name": name, "window": _window(window), "causal": causal}
    told.update(rope_base=None if base is None else float(base), neox=getattr(rope, "is_neox_style", None))
    told["rotary_dim"] = getattr(rope, "rotary_dim", None)
    return dict(told, executed_window=None, executed_causal=None, when="not observed")


def _window(window: Any) -> int:
    """Keys a query sees to its left and at itself; -1 is all."""
    if isinstance(window, (tuple, list)):
        return int(window[0]) + 1 if window and window[0] is not None and window[0] >= 0 else -1
    return -1 if window is None or window < 0 else int(window)


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _mask_id(drafter: Any) -> int | None:
    """The id that is put into masked rows, and the one whose embedding the model may replace: they must agree."""
    put = getattr(drafter, "parallel_drafting_token_id", None)
    named = getattr(inner(unwrapped(drafter.model)), "mask_token_id", None) if hasattr(drafter, "model") else None
    if put is not None and named is not None and put != named:
        raise Different(f"the drafter puts {put}, its model names {named}")
    return put if put is not None else named


def _taps(target: Any) -> list[int] | None:
    for module in target.modules():
        layers = getattr(module, "aux_hidden_state_layers", None)
        if layers:
            return [int(layer) for layer in layers]
    return None


def _position_rows(model: Any) -> int | None:
    caches = [module.rotary_emb.cos_sin_cache for module in model.modules() if hasattr(module, "rotary_emb")]
    return min((int(cache.shape[0]) for cache in caches), default=None)


def _shares(model: Any, target: Any, names: tuple[str, ...]) -> bool | None:
    """Does a matrix of the drafter lie where the target's does? None where one of them is not in this process."""
    pair = [next((getattr(one, name) for name in names if hasattr(one, name)), None) for one in (model, target)]
    weights = [getattr(one, "weight", None) for one in pair]
    if weights[0] is None or weights[1] is None:
        return None
    return bool(pair[0] is pair[1] or weights[0].data_ptr() == weights[1].data_ptr())


def _zero_weights(model: Any) -> list[str]:
    unused = set() if getattr(inner(model), "has_separate_mask_embedding", True) else {"mask_embedding"}
    return [
        name
        for name, weight in model.named_parameters()
        if name.rpartition(".")[2] not in unused and weight.numel() and not weight.is_meta and _all_zero(weight)
    ]


def _own_zeros(facts: dict[str, Any], names: set[str]) -> list[str]:
    """Without the matrices that are the target's: what lay in their place while loading means nothing."""
    foreign = (("shares_embedding", "embed_tokens."), ("shares_head", "lm_head."))
    shared = [part for fact, part in foreign if facts.get(fact)]
    return sorted(name for name in names if not any(part in name for part in shared))


def _all_zero(weight: Any) -> bool:
    """In parts: no copy as large as the weight is made, and the first part nearly always decides."""
    import torch

    flat = weight.detach().reshape(-1)
    if flat.is_floating_point() and flat.element_size() == 1:  # no arithmetic on 8-bit floats
        flat = flat.view(torch.uint8)
    return not any(bool((flat[start : start + CHUNK] != 0).any()) for start in range(0, flat.numel(), CHUNK))


def _skipped(model: Any, filled: set[str], config: Any) -> list[str]:
    """Tensors of the drafter's files that filled no parameter."""
    filled = filled or {name for name, _ in model.named_parameters()}
    names = _checkpoint_names(_folder_of(config))
    return sorted(name for name in names if not any(way in filled for way in _ways(name)))


def _ways(name: str) -> Iterable[str]:
    for old, new in RENAMED:
        name = name.replace(old, new)
    for old, new in (("", ""), *STACKED):
        if old in name:
            changed = name.replace(old, new) if old else name
            yield from (changed, "model." + changed)


def _folder_of(config: Any) -> str:
    name = need(config, "model")
    if os.path.isdir(name):
        return str(name)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, revision=getattr(config, "revision", None), local_files_only=True))


def _checkpoint_names(folder: str) -> set[str]:
    files = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    if not files:
        raise Different("no safetensors file to compare with")
    names: set[str] = set()
    for name in files:
        with open(os.path.join(folder, name), "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            names |= json.loads(file.read(size)).keys() - {"__metadata__"}
    return names


# ---- what runs


def _read_cache(seen: Inside, runner: Any) -> None:
    config = need(runner, "kv_cache_config")
    seen.facts["kv_groups"] = [list(group.layer_names) for group in need(config, "kv_cache_groups")]


def _hook_calls(seen: Inside, runner: Any) -> None:
    """Watch the attention call of each draft layer, and of no other: the hook sits on the layer's own object."""
    drafter = drafter_of(runner)
    if drafter is None or getattr(drafter, "model", None) is None:
        return
    for name, (layer, _, _) in draft_layers(runner).items():
        impl = need(layer, "impl")
        original = need(impl, "forward", "attn_metadata")
        seen.calls[name] = []
        seen.unhook.append(functools.partial(_uncover, impl, "forward"))
        impl.forward = _watched(seen, name, impl, original)


def _watched(seen: Inside, name: str, impl: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(original).parameters).index("attn_metadata")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            metadata = kwargs["attn_metadata"] if "attn_metadata" in kwargs else args[place]
            _look(seen, name, impl, metadata)
        except Exception as error:
            seen.fail(f"attention call of {name}", error)
            seen.remove_hooks()
            seen.write()
        return original(*args, **kwargs)

    return forward


def _look(seen: Inside, name: str, impl: Any, metadata: Any) -> None:
    """Note one call. A profile run has no metadata, and what a compiler traces is no call."""
    import torch

    if metadata is None or torch.compiler.is_compiling():
        return
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    causal = need(metadata, "causal")
    call = {
        "causal": causal if isinstance(causal, bool) else None,  # None: decided per request, on the GPU
        "window": _window(getattr(impl, "sliding_window", None)),
        "max_query_len": getattr(metadata, "max_query_len", None),
        "when": "capture" if capturing else "eager",
        "by": type(impl).__name__,
    }
    seen.calls[name].append(call)
    layer = next(one for one in seen.facts["layers"] if one["name"] == name)
    layer.update(executed_window=call["window"], executed_causal=call["causal"], when=call["when"])
    if len({(one["causal"], one["window"]) for one in seen.calls[name][-2:]}) > 1:
        seen.errors.append(f"attention call of {name}: not the same each time")
    if len(seen.calls[name]) >= ENOUGH:
        _uncover(impl, "forward")
    least = min(len(calls) for calls in seen.calls.values())
    if least != seen.told_calls and least in (1, ENOUGH):
        seen.told_calls = least
        seen.write()


def _hook_bisection(seen: Inside, worker: Any) -> None:
    if drafter_of(worker.model_runner) is not None:
        hand_out = importlib.import_module(__name__ + "_bisect")

        def failed(error: Exception) -> None:
            seen.fail("bisection", error)
            seen.write()

        hand_out.install(seen.folder, worker, failed)
