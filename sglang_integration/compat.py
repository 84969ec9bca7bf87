"""The one module that touches SGLang: every name of SGLang that this package uses is imported here, when first needed.

Written against SGLang 0.5.23, the first with a contract for whole decode steps, and API version 1 of that contract. The
contract says nothing about state pools of hybrid models, so `Running` reads SGLang's objects; `missing()` says which of
the names in `USED` another version lacks, and `tests/sglang/test_contract.py` holds them.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REQUIRED = (0, 5, 23)
API_VERSION = 1
CONTRACT = "sglang.kernels.plugin_kernels.nvidia.spec"
RAW_MXFP4 = "kimi_raw_mxfp4"  # attribute of an experts module: (w13, w13_scale, w2, w2_scale) as loaded
KDA_DISPATCHER = "sglang.srt.layers.attention.linear.kda_backend.KDAKernelDispatcher"
KDA_BACKEND = "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend"
MXFP4_METHOD = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
USED = (
    f"{CONTRACT}.MegakernelSpec",
    "sglang.srt.kernel_plugins.nvidia.binding.megakernel_enabled",
    "sglang.srt.kernel_plugins.nvidia.binding.built_megakernel",
    "sglang.srt.model_executor.forward_context.get_attn_backend",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._track_mamba_state_decode",
    "sglang.srt.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
    "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.get_mamba_indices",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool.get_key_buffer",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookRegistry._hooks",
    "sglang.srt.configs.mamba_utils.mamba2_state_dtype",
    "sglang.srt.arg_groups.choices.add_linear_attn_kernel_backend_choices",
    f"{KDA_DISPATCHER}.__init__",
    f"{KDA_BACKEND}.forward_decode",
    f"{MXFP4_METHOD}.process_weights_after_loading",
    f"{RESULTS}.process_batch_result_decode",
)


def installed_version() -> str | None:
    """Version of the installed SGLang, None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def unsupported_version() -> str | None:
    """Why this SGLang can take nothing of ours, in words; None where it can."""
    version = installed_version()
    wanted = ".".join(map(str, REQUIRED))
    if version is None:
        return f"sglang is not installed (needs {wanted})"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < REQUIRED:
        return f"sglang {version} has no contract for whole decode steps (needs {wanted})"
    try:
        found = contract().MEGAKERNEL_API_VERSION
    except (ImportError, AttributeError) as error:
        return f"sglang {version} has no {CONTRACT}: {error}"
    if found != API_VERSION:
        return f"sglang {version} has version {found} of the megakernel contract, this package version {API_VERSION}"
    return None


def missing() -> list[str]:
    """Names of `USED` that the installed SGLang does not have."""

    def absent(path: str) -> bool:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError):
            return True
        return False

    return [path for path in USED if absent(path)]


def contract() -> Any:
    """SGLang's module of the megakernel contract: MegakernelSpec, Requirements, Step, ..."""
    return importlib.import_module(CONTRACT)


def register_spec(architecture: str, path: str) -> None:
    """Raises ValueError where another package registered the architecture."""
    contract().register(architecture=architecture, path=path)


def start_engine(arguments: dict) -> Any:
    """`sglang.Engine` with these arguments."""
    return importlib.import_module("sglang").Engine(**arguments)


def hook_around(target: str, function: Callable) -> None:
    """`function(original, *args, **kwargs)` runs in place of `target`; asked for twice, it is hooked once."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if not any(hook is function for _, hook, _ in hooks.HookRegistry._hooks[target]):
        hooks.HookRegistry.register(target, function, hooks.HookType.AROUND)


def add_linear_attn_backend(name: str) -> None:
    """Makes `name` a value of `--linear-attn-decode-backend`."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    if name not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([name])


def linear_attn_backends() -> tuple[str | None, str | None]:
    """(--linear-attn-backend, --linear-attn-decode-backend) of this process."""
    mamba = importlib.import_module("sglang.srt.runtime_context").get_exec().mamba
    return mamba.linear_attn_backend, mamba.linear_attn_decode_backend


def triton_backend() -> Any:
    """The member of SGLang's enum for its own Triton kernels."""
    return importlib.import_module("sglang.srt.layers.attention.linear.utils").LinearAttnKernelBackend.TRITON


def keep_raw_mxfp4() -> None:
    """Has SGLang note MXFP4 experts as loaded, before it repacks them for its own runner."""
    hook_around(f"{MXFP4_METHOD}.process_weights_after_loading", around_repacking)


def around_repacking(original: Callable, method: Any, layer: Any) -> Any:
    """Notes the loaded tensors on the experts module under RAW_MXFP4, not copied; only with the flag."""
    if importlib.import_module("sglang.srt.kernel_plugins.nvidia.binding").megakernel_enabled():
        parts = (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
        layer.__dict__[RAW_MXFP4] = tuple(part.data for part in parts)
    return original(method, layer)


def check_results() -> None:
    """Has the built step asked for launches that gave up before tokens of a decode step are handed out."""
    hook_around(f"{RESULTS}.process_batch_result_decode", around_results)


def around_results(original: Callable, processor: Any, batch: Any, result: Any) -> Any:
    """A replayed graph runs none of our Python; here its results reach the host, where SGLang waits for them anyway."""
    binding = importlib.import_module("sglang.srt.kernel_plugins.nvidia.binding")
    built = binding.built_megakernel(processor.model_worker.model_runner.model)
    if hasattr(built, "check_launches"):
        if result.copy_done is None:  # steps do not overlap: SGLang waits by reading the tokens
            result.next_token_ids.tolist()
        else:
            result.copy_done.synchronize()
        built.check_launches()
    return original(processor, batch, result)


def text_model(model: Any) -> Any:
    """The causal LM inside: the language model of the multimodal K3, else the model itself."""
    return getattr(model, "language_model", None) or model


def up_rows_first(mlp: Any) -> bool:
    """Whether SGLang loads w3 before w1 into w13, as some of its runners want."""
    method = getattr(getattr(mlp, "experts", None), "quant_method", None)
    return bool(getattr(method, "load_up_proj_weight_first", False))


def act_dtype(text: Any) -> "torch.dtype":
    return text.lm_head.weight.dtype


def state_dtypes(hf_config: Any) -> "tuple[torch.dtype, torch.dtype]":
    """Dtypes that SGLang will give the convolution windows and the recurrent states."""
    dtypes = importlib.import_module("sglang.srt.configs.mamba_utils").mamba2_state_dtype(hf_config)
    return dtypes.conv, dtypes.temporal


@dataclass(frozen=True)
class Running:
    """What the forward of this moment reads and writes: SGLang's tensors, nothing copied."""

    conv: "torch.Tensor"  # [KDA layers, SLOTS, W-1, 3*H*K] act, slot 0 reserved
    temporal: "torch.Tensor"  # [KDA layers, SLOTS, H, V, K] float32
    pool_index: Mapping[int, int]  # layer of the model -> index in conv and temporal
    key_buffer: Callable[[int], "torch.Tensor"]  # layer of the model -> [tokens, 1, L+P] act
    page_size: int  # tokens that lie together: slot of token j is a run of this length, aligned
    req_to_token: "torch.Tensor"  # [requests, positions] int32, token slots
    slots: "torch.Tensor"  # [B] int32, KDA slot of each row; 0 or negative in padded rows
    backend: Any  # SGLang's linear-attention backend


def running_forward() -> Running:
    """Reads the attention backend of the forward that runs now; under graph capture its tensors are the static ones."""
    hybrid = importlib.import_module("sglang.srt.model_executor.forward_context").get_attn_backend()
    linear, requests, tokens = hybrid.linear_attn_backend, hybrid.req_to_token_pool, hybrid.token_to_kv_pool
    cache = requests.mamba_pool.mamba_cache
    return Running(
        conv=cache.conv[0],
        temporal=cache.temporal,
        pool_index=requests.mamba_map,
        key_buffer=tokens.get_key_buffer,
        page_size=tokens.page_size,
        req_to_token=requests.req_to_token,
        slots=linear.forward_metadata.mamba_cache_indices,
        backend=linear,
    )


def track_states(running: Running, forward_batch: Any) -> None:
    """Copies conv windows and states of all layers to the slots that prefix-cache entries will own, where due.

    SGLang's layers do this after the last KDA layer; a step that leaves it out corrupts later prefix hits silently.
    """
    last = max(running.pool_index, key=running.pool_index.__getitem__)
    running.backend._track_mamba_state_decode(forward_batch, None, None, running.slots, layer_id=last)


def is_plain_decode(forward_batch: Any) -> bool:
    """One new token for every request and nothing but logits wanted; reads host values only."""
    hidden = forward_batch.capture_hidden_mode
    return bool(
        forward_batch.forward_mode.is_decode()
        and forward_batch.spec_info is None
        and not (hidden is not None and hidden.need_capture())
        and getattr(forward_batch, "input_embeds", None) is None
    )


def logits_output(text: Any, logits: "torch.Tensor", forward_batch: Any) -> Any:
    """What the model's forward hands to the sampler: logits [B, VOCAB] as float32, in its buffer where it has one."""
    module = importlib.import_module("sglang.srt.layers.logits_processor")
    wanted = module.LogitsMetadata.from_forward_batch(forward_batch)
    filled = text.logits_processor._copy_logits_to_buffer(logits, wanted)
    return module.LogitsProcessorOutput(next_token_logits=filled)
