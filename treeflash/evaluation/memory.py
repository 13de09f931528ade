"""Most memory in use while something ran."""

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Begins to watch.

    Args:
        device: Whose memory.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # what Linux takes for: forget the greatest resident size
    except OSError:
        pass


def peak(device: torch.device) -> int | None:
    """The most in use since `reset_peak`.

    Args:
        device: Whose memory.

    Returns:
        Bytes allocated on a GPU, or the greatest resident size of the process; None where neither is told.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
