"""Most memory in use while something ran."""

from pathlib import Path
from typing import Self

import attrs
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@attrs.frozen
class MemoryWatch:
    """Memory from a moment on.

    Attributes:
        device: Whose.
        begun: Whether what was in use before could be forgotten.
    """

    device: torch.device
    begun: bool

    @classmethod
    def begin(cls, device: torch.device) -> Self:
        """Begins to watch.

        Args:
            device: Whose memory.
        """
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device, True)
        try:
            _CLEAR.write_text("5")  # what Linux takes for: forget the greatest resident size
        except OSError:
            return cls(device, False)
        return cls(device, True)

    def peak(self) -> int | None:
        """The most in use since.

        Returns:
            Bytes allocated on a GPU, or the greatest resident size of the process; None where neither is
            told, or only that of the process's whole life.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = _STATUS.read_text().splitlines() if self.begun else []
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
