"""Whether a model can be verified in trees: tiny trees against their paths, one by one."""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from treeflash.errors import InputError
from treeflash.rounding import difference, largest_difference
from treeflash.target.hugging_face import HuggingFaceTarget
from treeflash.target.masks import additive_masks
from treeflash.target.taps import tapped
from treeflash.tree import TokenTree

# The window that sliding layers are given meanwhile, so that the tiny tree reaches past it.
_WINDOW = 4
# Where the last positions are looked for in a model that names no limit.
_FAR = 1 << 15


def probe(target: HuggingFaceTarget) -> str | None:
    """Compares trees with their paths: a tree that is read, kept and followed, and one at the last positions.

    The reference is the model's own forward over each path, without a cache.

    Args:
        target: The target.

    Returns:
        None when the logits agree; otherwise the reason not to use the target.
    """
    with target.loan.lock:  # windows are the config's, which other threads' passes go by
        return _probed(target)


def _probed(target: HuggingFaceTarget) -> str | None:
    config = target.model.config.get_text_config(decoder=True)
    windows = target.windows
    if not any(windows.values()):
        return _checked(_compare_tree, target) or _checked(_compare_far, target)
    window = config.sliding_window
    try:
        # Masks are made from the config at every forward, the model's own too: one that ignores the
        # window, or counts it otherwise, shows it here however long the window is.
        config.sliding_window = _WINDOW
        target.windows = {kind: _WINDOW if size else None for kind, size in windows.items()}
        fault = _checked(_compare_tree, target)
        target.windows = dict.fromkeys(windows)
        return fault or _checked(_compare_far, target)
    finally:
        config.sliding_window, target.windows = window, windows


def _checked(compare: Callable[[HuggingFaceTarget], str | None], target: HuggingFaceTarget) -> str | None:
    """What a comparison finds, a forward that fails included."""
    try:
        with torch.inference_mode():
            return compare(target)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        return f"its forward does not take a tree: {type(error).__name__}: {error}"


def _compare_tree(target: HuggingFaceTarget) -> str | None:
    ids = [token % target.vocab_size for token in range(11, 20)]
    prompt, (root, *others, after) = ids[:3], ids[3:]
    # Siblings differ even in a vocabulary of two.
    left, right = others[0::2], others[1::2]
    # Breadth first, so that neither branch lies in the order of its positions.
    tree = TokenTree.from_lists(
        [root, left[0], right[0], left[1], right[1]], [-1, 0, 0, 1, 2], device=target.device
    )
    state = target.start(1, len(ids) + tree.size, ())
    last = target.prefill(state, _row(target, prompt)).logits[0, -1]
    nodes = target.verify(state, tree).logits[0]
    unwritten = sum(not layer.is_initialized for layer in state.cache.layers)
    if unwritten:
        return f"{unwritten} of {target.num_layers} layers keep no keys and values per position"
    target.commit(state, [[0, 2, 4]])
    following = target.verify(state, TokenTree.root_only(_row(target, [after])[0])).logits[0]
    paths = [[*prompt, root, *left, after], [*prompt, root, *right, after]]
    first, second = _plain_and_tapped(target, paths[0])[2:], _plain(target, paths[1])[2:]
    expected = torch.stack([first[0], first[1], first[2], second[2], first[3], second[3], second[4]])
    found = torch.stack([last, nodes[0], nodes[1], nodes[2], nodes[3], nodes[4], following[0]])
    return _compare(found, expected, target.dtype)


def _compare_far(target: HuggingFaceTarget) -> str | None:
    """Puts a tree at the last positions, behind a prompt at the first ones.

    Whatever changes on the way, at positions that a config may name anywhere, tells the passes apart if it
    changes what was read before, or goes by a token's index. Masks are given to both, since a model takes
    a gap between positions for the border between two texts.
    """
    ids = [token % target.vocab_size for token in range(11, 17)]
    prompt, path, beside = ids[:3], ids[3:], ids[4] + 1 if ids[4] + 1 < target.vocab_size else 0
    gap = (target.max_positions or _FAR) - len(ids)
    if gap <= 0:
        return None
    tree = TokenTree.from_lists([path[0], beside, path[1], path[2]], [-1, 0, 0, 2], device=target.device)
    state = target.start(1, len(ids) + tree.size, ())
    last = target.prefill(state, _row(target, prompt)).logits[0, -1]
    nodes = target.verify(state, attrs.evolve(tree, depths=tree.depths + gap)).logits[0]
    positions = [place + gap * (place >= len(prompt)) for place in range(len(ids))]
    expected = _plain(target, ids, positions)[2:]
    far = f"a tree at positions up to {positions[-1]}"
    return _compare(torch.stack([last, nodes[0], nodes[2], nodes[3]]), expected, target.dtype, far)


def _compare(found: Tensor, expected: Tensor, dtype: torch.dtype, tree: str = "a tree") -> str | None:
    error, tolerance = difference(found, expected), largest_difference(dtype)
    if error <= tolerance:
        return None
    if not expected.isfinite().all():
        return f"its own forward gives logits that are not finite in {_spelled(dtype)}: {_advice(dtype)}"
    if not found.isfinite().all():
        return f"logits of {tree} are not finite, and those of its paths are"
    return (
        f"logits of {tree} differ from those of its paths by {error:.1e} of their spread, expected at most "
        f"{tolerance:.0e}: it does not follow the positions and masks it is given"
    )


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _advice(dtype: torch.dtype) -> str:
    """What to do about logits that are not finite."""
    wider = {torch.float16: "bfloat16 or float32, whose range is wider", torch.bfloat16: "float32"}
    return f"load it in {wider[dtype]}" if dtype in wider else "check its weights for NaN and infinity"


def _plain(target: HuggingFaceTarget, path: list[int], positions: list[int] | None = None) -> Tensor:
    """Logits of a path by the model's own forward; at given positions, with a mask that shows all before."""
    inputs = {"input_ids": _row(target, path), "use_cache": False, "return_dict": True}
    if positions is not None:
        where = _row(target, positions)
        visible = where[:, None, :] <= where[:, :, None]
        masks = additive_masks(target.windows, visible, where, where, target.dtype)
        inputs |= {"position_ids": where, "attention_mask": masks}
    with target.borrowed():
        logits: Tensor = target.model(**inputs).logits[0]
    return logits[:, : target.vocab_size]


def _plain_and_tapped(target: HuggingFaceTarget, path: list[int]) -> Tensor:
    """As `_plain`; the target is told if its layers give anything else than a state for each token."""
    if target.tap_fault is not None:
        return _plain(target, path)
    wanted = (1, len(path), target.hidden_size)
    with tapped(target.decoder, target.modules_of(range(target.num_layers))) as outputs:
        logits = _plain(target, path)
    shapes = [tuple(getattr(output, "shape", ())) for output in outputs]
    layer = next((layer for layer, shape in enumerate(shapes) if shape != wanted), None)
    if layer is not None:
        target.tap_fault = (
            f"expected them as {list(wanted)} for {len(path)} tokens, found {list(shapes[layer])} behind "
            f"layer {layer}"
        )
    return logits


def _row(target: HuggingFaceTarget, token_ids: list[int]) -> Tensor:
    return torch.tensor([token_ids], device=target.device)
