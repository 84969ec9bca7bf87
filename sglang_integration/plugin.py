"""Entry point of the group `sglang.srt.plugins`: SGLang calls `register()` in each of its processes, at their start.

Imports no torch. SGLang requires the entry point `nvidia_megakernel`; a second one, `kimi_k3_megakernel`, survives
where another package defines the same name. Both lead here, and registering twice changes nothing.
"""

import logging

from sglang_integration import compat, per_op

logger = logging.getLogger(__name__)

# architecture of config.json -> where SGLang finds its MegakernelSpec, imported when the flag is given
SPECS = {
    "KimiLinearForCausalLM": "sglang_integration.spec:KIMI_LINEAR",
    "KimiK3LinearForCausalLM": "sglang_integration.spec:K3_TEXT",
    "KimiK3ForConditionalGeneration": "sglang_integration.spec:K3",
}


def register() -> None:
    """Registers the specs and the op backend. Where this SGLang cannot take them: one line in the log, nothing else."""
    reason = compat.unsupported_version()
    if reason:
        logger.warning("kimi-kernels registers nothing: %s", reason)
        return
    try:
        for architecture, path in SPECS.items():
            compat.register_spec(architecture, path)
    except ValueError as error:
        logger.warning("kimi-kernels registers no whole step: %s", error)
    compat.keep_raw_mxfp4()
    compat.check_results()
    per_op.register()
