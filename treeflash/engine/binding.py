"""Which decoders use a part, so that none takes over what another one decodes with."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from treeflash.errors import CompositionError
from treeflash.interfaces import Drafter, Refiner
from treeflash.target_interface import Target, identity

# Threads that compose decoders of one part take turns: each has to see what the other bound.
_turn = threading.RLock()


class _Users(WeakSet[Any]):
    """Decoders that use a part; a copy of the part begins with none."""

    def __reduce__(self) -> Any:
        return _Users, ()


@contextmanager
def bound(decoder: Any, target: Target, parts: Mapping[str, Drafter | Refiner | None]) -> Iterator[None]:
    """Binds a decoder's parts to its target, unless a decoder of another target uses one of them.

    Args:
        decoder: The decoder. If nothing is raised inside, its parts are its own as long as it exists.
        target: Its target.
        parts: By kind, those that are bound; None where there is none.

    Yields:
        Nothing: what has to know the parts bound is checked inside.

    Raises:
        CompositionError: When a part is in use for another target; none is bound then.
        CheckpointError: When a part was made for another target.
    """
    # A part that does not ask for the target keeps nothing of it.
    asking = {
        kind: part
        for kind, part in parts.items()
        if part is not None and type(part).bind not in (Drafter.bind, Refiner.bind)
    }
    with _turn:
        for kind, part in asking.items():
            if any(identity(user.target) is not identity(target) for user in _users(part)):
                raise CompositionError(
                    f"{kind}: this {type(part).__name__} is bound to another target, by another decoder; "
                    f"load another {kind} for this target, or delete the other decoder first"
                )
        for part in asking.values():
            part.bind(target)
        yield
        for part in asking.values():
            _users(part).add(decoder)


def _users(part: Drafter | Refiner) -> _Users:
    # Beside the fields: parts are classes of any kind, frozen ones too.
    users: _Users = vars(part).setdefault("_users", _Users())
    return users
