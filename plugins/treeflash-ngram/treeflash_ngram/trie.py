"""Every short piece of a text with how often it occurs, grown and undone token by token."""

from collections.abc import Iterator

import attrs

# The empty piece. It has no continuations to draft from: every token follows it.
ROOT = 0
# Two nodes' numbers, or a node's and a token's, share one dictionary key.
_TOKEN_BITS = 32


@attrs.define(eq=False)
class SuffixTrie:
    """The pieces of up to `longest + 1` tokens of a text, as a trie.

    A node stands for a piece, its children for the pieces one token longer. A node's count says how
    often its piece occurs, so that the children of a context are what has followed it, with how often.
    A node's link leads to its piece without the first token: from the longest piece that ends the text,
    the links lead to all shorter ones, and a new token is added to each of them once.

    Nodes are numbers into lists, and a node that is created stands behind all others. Tokens are taken
    back in the reverse order, so the nodes that go are always the last ones, and each is the newest
    child of its parent: undoing cuts the lists and leaves no trace.

    Attributes:
        longest: Tokens of the longest context.
        tokens: The text.
        context: The node of the last `longest` tokens, or of all when they are fewer.
        token: Of each node, the last token of its piece.
        count: Of each node, the occurrences of its piece.
        link: Of each node, the node of its piece without the first token.
    """

    longest: int
    tokens: list[int] = attrs.field(factory=list, init=False)
    context: int = attrs.field(default=ROOT, init=False)
    token: list[int] = attrs.field(factory=lambda: [-1], init=False)
    count: list[int] = attrs.field(factory=lambda: [0], init=False)
    link: list[int] = attrs.field(factory=lambda: [ROOT], init=False)
    # Each node's newest child, and each child's next older sibling; ROOT is nobody's child and ends both.
    _newest: list[int] = attrs.field(factory=lambda: [ROOT], init=False)
    _older: list[int] = attrs.field(factory=lambda: [ROOT], init=False)
    _child: dict[int, int] = attrs.field(factory=dict, init=False)
    # What `context` was before each token.
    _contexts: list[int] = attrs.field(factory=list, init=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_nodes(self) -> int:
        """Pieces, the empty one included."""
        return len(self.token)

    def push(self, token: int) -> None:
        """Adds a token to the text, in `longest + 1` steps.

        Args:
            token: Its id.
        """
        node, longer, deepest = self.context, ROOT, ROOT
        while True:
            child = self._child.get(node << _TOKEN_BITS | token)
            if child is None:
                child = self._create(node, token)
            self.count[child] += 1
            if longer == ROOT:
                deepest = child
            else:
                self.link[longer] = child
            if node == ROOT:
                break
            longer, node = child, self.link[node]
        full = len(self.tokens) >= self.longest
        self._contexts.append(self.context)
        self.tokens.append(token)
        self.context = self.link[deepest] if full else deepest

    def pop(self) -> None:
        """Takes the last token back."""
        token = self.tokens.pop()
        node = self.context = self._contexts.pop()
        size = self.num_nodes
        while True:
            key = node << _TOKEN_BITS | token
            child = self._child[key]
            self.count[child] -= 1
            if self.count[child] == 0:
                del self._child[key]
                self._newest[node] = self._older[child]
                size -= 1
            if node == ROOT:
                break
            node = self.link[node]
        for column in (self.token, self.count, self.link, self._newest, self._older):
            del column[size:]

    def follow(self, context: int, token: int) -> int:
        """The longest context behind one more token, without adding it.

        Args:
            context: A node.
            token: The token.

        Returns:
            The node of the longest piece that ends the context and this token; `ROOT` when the token is
            new.
        """
        while (child := self._child.get(context << _TOKEN_BITS | token)) is None:
            if context == ROOT:
                return ROOT
            context = self.link[context]
        return child

    def children(self, node: int) -> Iterator[int]:
        """The pieces that go one token on, the one that first occurred last first.

        Args:
            node: A node.

        Yields:
            Nodes.
        """
        child = self._newest[node]
        while child != ROOT:
            yield child
            child = self._older[child]

    def _create(self, parent: int, token: int) -> int:
        node = self.num_nodes
        self._child[parent << _TOKEN_BITS | token] = node
        self.token.append(token)
        self.count.append(0)
        self.link.append(ROOT)
        self._newest.append(ROOT)
        self._older.append(self._newest[parent])
        self._newest[parent] = node
        return node
