"""The SwiGLU refiner over the two previous tokens."""

from typing import ClassVar

import attrs

from treeflash.components.refiners.swiglu import SwiGlu


@attrs.define(eq=False)
class TwoToken(SwiGlu):
    """Sees the embeddings of the last two tokens, the older first."""

    layout: ClassVar[str] = "two-token"
    history: ClassVar[int] = 2
