"""From hidden states to a tree, each part apart, at the sizes of a large model.

    python benchmarks/tree_build.py [--vocabulary 151936] [--hidden 2560] [--positions 15] [--rounds 5]

A draft of random hidden states goes through the backbone's head, a SwiGLU refiner behind M = 16 contexts a
depth with K = 16 children each, over all tokens and over 64 candidates, and the selection of trees of several
budgets, in both forms of `opt-tree`: level by level, and best first on the host, where the table comes over
first if it is not there. Both give the same trees; parts take turns, and the median of the rounds is shown.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from timed_passes import now
from torch.nn import functional

from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.swiglu import SwiGlu, SwiGluNetwork
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.layouts import Linear
from treeflash.proposal import TableProposal
from treeflash.tree import TokenTree
from treeflash.types import BlockDraft, DraftHead, Limits, Transitions

BUDGETS = (15, 63, 255, 1023)
BRANCHING, CHILDREN, CANDIDATES = 16, 16, 64


def main() -> None:
    """Times every part and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--positions", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    console = Console()
    with torch.inference_mode():
        parts, proposal, depth = prepare(options)
        for budget in BUDGETS:
            one, other = (select(proposal, budget, depth) for select in (level_by_level, best_first))
            assert one.paths() == other.paths(), budget
            parts[f"select {budget}, level by level"] = lambda b=budget: level_by_level(proposal, b, depth)
            parts[f"select {budget}, best first"] = lambda b=budget: best_first(proposal, b, depth)
        times: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(1 + options.rounds):
            for name, part in parts.items():
                times[name].append(timed(part, torch.device(options.device)))
    table = Table("part", "ms")
    for name, taken in times.items():
        table.add_row(name, f"{1000 * median(taken[1:]):.2f}")
    console.print(table)


def prepare(
    options: argparse.Namespace,
) -> tuple[dict[str, Callable[[], object]], TableProposal, int]:
    """Makes the draft and the parts that come before the selection."""
    device, hidden = torch.device(options.device), options.hidden
    torch.manual_seed(0)
    head = Linear(hidden, options.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=3 * hidden**-0.5)  # some tokens are likely, most are not
    embedding = torch.randn(options.vocabulary, hidden, device=device, dtype=torch.bfloat16)
    states = torch.randn(1, options.positions, hidden, device=device, dtype=torch.bfloat16)
    network = SwiGluNetwork(hidden, 2 * hidden, 1).to(device, torch.bfloat16)

    def norm(states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, (hidden,))

    def draft() -> BlockDraft:
        draft_head = DraftHead(
            lambda ids: functional.embedding(ids, embedding),
            norm,
            head,
            options.vocabulary,
            rows=lambda ids: (functional.embedding(ids, head.weight), None),
        )
        recent = torch.tensor([[1, 2]], device=device)
        return BlockDraft(recent, states, norm(states), draft_head)

    builder, limits = TopM(BRANCHING, CHILDREN), Limits(max(BUDGETS), options.positions)
    known = draft()
    lattice = builder.build(known, 1, limits)
    few, every = SwiGlu(network, CANDIDATES), SwiGlu(network)
    parts: dict[str, Callable[[], object]] = {
        "backbone's head and contexts": lambda: builder.build(draft(), 1, limits),
        "refine over all tokens": lambda: every.transitions(known, lattice),
        f"refine over {CANDIDATES} candidates": lambda: few.transitions(known, lattice),
    }
    anchor = known.recent[:, 1]
    return parts, TableProposal(anchor, few.transitions(known, lattice)), options.positions


class Asked(TableProposal):
    """Does not tell that it knows everything."""

    table = None


def level_by_level(proposal: TableProposal, budget: int, depth: int) -> TokenTree:
    """As `opt-tree` selects on a GPU, and on a CPU from what is no table."""
    asked = Asked(proposal.anchor, proposal.transitions)
    return OptTree(budget).select(asked, Limits(budget, depth))


def best_first(proposal: TableProposal, budget: int, depth: int) -> TokenTree:
    """As it selects on a CPU."""
    table = proposal.transitions
    host = Transitions(table.token_ids.cpu(), table.log_probs.cpu(), table.next_context.cpu())
    return OptTree(budget).select(TableProposal(proposal.anchor.cpu(), host), Limits(budget, depth))


def timed(part: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    begin = now(device)
    part()
    return now(device) - begin


if __name__ == "__main__":
    main()
