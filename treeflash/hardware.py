"""What speeds depend on beside our own code: the device, its threads, the libraries that compute."""

import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def hardware(device: torch.device) -> dict[str, Any]:
    """Names what computes, so that times under it are not taken for times under something else.

    Args:
        device: What computes.

    Returns:
        `device`, the GPU's or the processor's name; `instructions` and `threads`, None on a GPU; and the
        versions of the libraries.
    """
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "instructions": None if cuda else instructions(),
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def instructions() -> str:
    """Names the vector instructions that a CPU's products use.

    Virtual machines call many processors by one name, and environment variables (`ATEN_CPU_CAPABILITY`,
    `ONEDNN_MAX_CPU_ISA`) leave instructions unused that the processor has.

    Returns:
        For instance "AVX2", or "AVX512 with bfloat16 products".
    """
    found = torch.backends.cpu.get_cpu_capability()
    return f"{found} with bfloat16 products" if multiplies_bfloat16(torch.device("cpu")) else found


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products in bfloat16; without, they are emulated and slow.

    Args:
        device: The device.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # What oneDNN may use: it heeds its environment variable, but takes AVX-512 alone for enough.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return True
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
