"""Time of each stage of a step."""

import time

import torch


class Stopwatch:
    """Measures laps on the CPU always, on a GPU only when asked.

    Work on a GPU is asynchronous, so that a lap is only true behind a synchronisation, which costs time
    itself.

    Args:
        device: Where the work runs.
        synchronise: Whether to wait for a GPU at the end of each lap.
    """

    def __init__(self, device: torch.device, *, synchronise: bool) -> None:
        self._device = device
        self._wait = synchronise and device.type == "cuda"
        self._running = self._wait or device.type == "cpu"
        self._laps: dict[str, float] = {}
        self._last = self._now()

    def start(self) -> None:
        """Begins a step: what lies before is nobody's time."""
        if self._running:
            self._last = self._now()

    def lap(self, stage: str) -> None:
        """Ends a stage.

        Args:
            stage: Its name.
        """
        if self._running:
            now = self._now()
            self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
            self._last = now

    def take(self) -> dict[str, float]:
        """Seconds of each stage since the last call."""
        laps, self._laps = self._laps, {}
        return laps

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
