"""Many damaged inputs in a row: each gives an answer, or one error of the library's own."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treeflash.errors import TreeflashError

LONGEST = 30  # seconds


def try_all(cases: int, attempt: Callable[[int, random.Random], None], *, named: str = "") -> dict[str, int]:
    """Tries cases, each with a generator of its own.

    Args:
        cases: How many.
        attempt: Makes input number so and so, and uses it.
        named: What every error message must hold; `{case}` stands for the number.

    Returns:
        How many were "accepted" and "refused".

    Raises:
        AssertionError: Listing the cases that ended in any other error, or took too long.
    """
    seen, faults = {"accepted": 0, "refused": 0}, list[str]()
    for case in range(cases):
        try:
            with no_longer_than(LONGEST):
                attempt(case, random.Random(case))
        except TreeflashError as error:
            seen["refused"] += 1
            if not str(error).strip() or named.format(case=case) not in str(error):
                faults.append(f"case {case}: {type(error).__name__} does not say where: {error}")
        except Exception as error:
            faults.append(f"case {case}: {type(error).__name__}: {error}")
        else:
            seen["accepted"] += 1
    if faults:
        raise AssertionError("\n".join([f"{len(faults)} of {cases} cases, {seen}", *faults]))
    assert min(seen.values()) > cases // 20, f"hardly any variety: {seen}"
    return seen


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Ends what hangs."""

    def late(signum, frame):
        raise RuntimeError(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
