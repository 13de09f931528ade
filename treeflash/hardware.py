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
        `device`, the GPU's or the processor's name; `threads`, on a CPU; versions otherwise.
    """
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
