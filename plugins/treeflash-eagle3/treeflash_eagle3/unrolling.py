"""The head run over its own outputs along a text, from every position at once, as it will run when it drafts.

Source: the training-time test of EAGLE-3.
"""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from treeflash.packed_text import PackedText
from treeflash_eagle3.network import Eagle3Network, attend

# Neighbouring roots whose attention is computed together, over the keys of them all.
_GROUP = 32


@attrs.frozen(eq=False)
class Group:
    """Neighbouring roots of one text.

    Attributes:
        members: Which of the roots.
        context: Places of the row that one of them sees.
        visible: bool `[members, context]`: which of these each sees.
    """

    members: slice
    context: slice
    visible: Tensor


@attrs.frozen(eq=False)
class Roots:
    """Places of a packed row that chains of drafts start from, each an anchor.

    Link k of a chain, from 1 on, drafts the token k places behind its root. Where roots stand is worked out
    on the host from the lengths of the texts, so that nothing waits for a GPU.

    Attributes:
        text: The row.
        places: Index of each root in the row, ascending.
        links: Tokens drafted behind a root, P.
    """

    text: PackedText
    places: Sequence[int]
    links: int

    @classmethod
    def everywhere(cls, text: PackedText, links: int) -> "Roots":
        """Takes all places behind which the target wrote a token, and before which a text has one.

        Args:
            text: The row.
            links: Tokens drafted behind a root.
        """
        bounds = zip(text.bounds, text.answers, text.bounds[1:], strict=False)
        ranges = [range(max(begin + 1, answer - 1), end - 1) for begin, answer, end in bounds]
        return cls(text, [place for part in ranges for place in part], links)

    def rows(self) -> Tensor:
        """Index in the row of each root and its links, int64 `[R, 1 + P]`, cut at the row's end."""
        device = self.text.token_ids.device
        offsets = torch.arange(1 + self.links, device=device)
        places = torch.tensor(self.places, dtype=torch.int64).to(device, non_blocking=True)
        return (places[:, None] + offsets).clamp(max=self.text.bounds[-1] - 1)

    def left(self) -> Tensor:
        """Tokens that each root's text has after it, int64 `[R]` on the CPU."""
        found = [self.text.end_behind(place) - 1 - place for place in self.places]
        return torch.tensor(found, dtype=torch.int64)

    def has_label(self) -> Tensor:
        """Bool `[R, P]` on the CPU: whether the text goes on to each link."""
        return torch.arange(1, 1 + self.links)[None] <= self.left()[:, None]

    def groups(self) -> Iterator[Group]:
        """Groups that cover all roots in order: each sees its text up to itself, the first token excepted."""
        device, begin = self.text.token_ids.device, 0
        while begin < len(self.places):
            end = begin + 1
            border = self.text.end_behind(self.places[begin])
            while end < len(self.places) and end - begin < _GROUP and self.places[end] < border:
                end += 1
            first, last = self.text.begin_before(self.places[begin]) + 1, self.places[end - 1] + 1
            visible = torch.arange(first, last)[None] <= torch.tensor(self.places[begin:end])[:, None]
            moved = visible.to(device, non_blocking=True)
            yield Group(slice(begin, end), slice(first, last), moved)
            begin = end


def unroll(network: Eagle3Network, embedded: Tensor, fused: Tensor, roots: Roots) -> Tensor:
    """Runs all chains link by link, behind the text's own tokens.

    A root sees its text's tokens up to itself, each beside the target's state before it. Further down, a link
    takes the output of the one before for its state, and sees what its root sees and the links of its own
    chain.

    Args:
        network: The head.
        embedded: Embeddings of the row, `[S, D]`.
        fused: The target's fused states along it, `[S, D]`.
        roots: Where the chains start.

    Returns:
        `[R, P, D]`: the head's outputs, before its final norm. That of link k - 1, from 0, drafts the token
        k places behind the root.
    """
    rows, groups = roots.rows(), list(roots.groups())
    positions = (roots.text.positions - 1).clamp(min=0)
    before = functional.pad(fused[:-1], (0, 0, 1, 0))
    beside = network.join(embedded[None], before[None])
    context = network.keys_values(beside, network.rotary(embedded[None], positions[None]))
    states, chains, outputs = before[rows[:, 0]][None], list[tuple[Tensor, Tensor]](), []
    for link in range(roots.links):
        tokens = embedded[rows[:, link]][None]
        rotary = network.rotary(tokens, positions[rows[:, 0]][None] + link)
        joined = network.join(tokens, states)
        if link > 0:
            chains.append(network.keys_values(joined, rotary))
        mixed = _attention(network.queries(joined, rotary), context, chains, groups)
        states = network.finish(states, mixed)
        outputs.append(states[0])
    return torch.stack(outputs, dim=1)


def _attention(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    chains: Sequence[tuple[Tensor, Tensor]],
    groups: Sequence[Group],
) -> Tensor:
    """Attention of one link of all chains, `[1, heads, R, d]`.

    Args:
        queries: `[1, heads, R, d]`.
        context: Keys and values of the row, `[1, heads, S, d]` each.
        chains: Those of the links so far behind the roots, `[1, heads, R, d]` each; a chain sees its own.
        groups: What is computed together.
    """
    mixed = []
    for group in groups:
        members = [[part[:, :, group.members] for part in link] for link in chains]
        keys, values = (
            torch.cat([whole[:, :, group.context], *(link[part] for link in members)], dim=2)
            for part, whole in enumerate(context)
        )
        own = torch.eye(len(group.visible), dtype=torch.bool, device=keys.device)
        visible = torch.cat([group.visible, *([own] * len(chains))], dim=1)
        mixed.append(attend(queries[:, :, group.members], keys, values, visible))
    # A row of texts that are too short has no roots.
    return torch.cat(mixed, dim=2) if mixed else queries
