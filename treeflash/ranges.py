"""Ranges of settings that several floors check, known without torch, which takes seconds to import."""

import attrs

from treeflash.errors import InputError

# The generator of draws is keyed with words of 64 bits.
MAX_SEED = 2**64 - 1
# Nodes of a tree: it is read in one pass, under a mask that grows with the square of its size.
MOST_NODES = 4096
# What a model can be computed in.
DTYPE_NAMES = ("float32", "float64", "bfloat16", "float16")
# What may stand for a dtype's name: the model's own, and the one that the device multiplies fastest.
AUTO, FASTEST = "auto", "fastest"


def even(instance: object, field: "attrs.Attribute[int]", value: int) -> None:
    """Refuses odd numbers, as attrs' validators do.

    Args:
        instance: Not looked at.
        field: Not looked at.
        value: The number.

    Raises:
        InputError: When it is odd.
    """
    if value % 2:
        raise InputError(f"expected an even number, found {value}")
