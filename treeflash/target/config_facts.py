"""What a model's config says that decoding goes by."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from treeflash.errors import InputError


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Reads which tokens end a model's texts.

    Args:
        model: The model. Its generation config comes first, then its config.

    Returns:
        Token ids; none when the model names none.

    Raises:
        InputError: When something else than token ids is named, which would never end a text.
    """
    generation = getattr(model, "generation_config", None)
    stop = getattr(generation, "eos_token_id", None)
    if stop is None:
        stop = getattr(model.config, "eos_token_id", None)
    if stop is None:
        return ()
    found = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if any(type(token) is not int or token < 0 for token in found):
        raise InputError(f"eos_token_id: expected a token id or a list of token ids, found {stop!r}")
    return found


def max_positions(config: Any) -> int | None:
    """Counts the positions up to which a model was made to read, and a tree can be read like its paths.

    `max_position_embeddings` says so, with two exceptions. YaRN stretches `original_max_position_embeddings`
    by `factor`, and many configs keep the original length in `max_position_embeddings`. LongRoPE and dynamic
    scaling choose the frequencies of a whole pass by its last position: beyond the switch, the deepest node
    of a tree would change all others. Linear scaling and Llama 3's do not change with position, and their
    tables do not say whether the config's length includes the factor.

    Args:
        config: The model's text config.

    Returns:
        Positions; None when the config names no limit.

    Raises:
        InputError: When a length is no positive number.
    """
    limit = _length(config, "max_position_embeddings")
    switches = []
    for table in rope_tables(config):
        kind, factor = table.get("rope_type"), table.get("factor")
        original = _length(table, "original_max_position_embeddings")
        if kind == "yarn" and original is not None and limit is not None and factor is not None:
            limit = max(limit, int(original * factor))
        elif kind == "longrope":
            switches.append(original)
        elif kind == "dynamic":
            switches.append(_length(config, "max_position_embeddings"))
    return min((length for length in (limit, *switches) if length is not None), default=None)


def rope_theta(config: Any) -> float | None:
    """Reads the base of a model's rotary positions.

    Args:
        config: The model's text config.

    Returns:
        The base; None when there is none, or kinds of layers have different ones.
    """
    bases = {table.get("rope_theta") for table in rope_tables(config)}
    base = bases.pop() if len(bases) == 1 else None
    return None if base is None else float(base)


def rope_tables(config: Any) -> list[Mapping[str, Any]]:
    """Lists a config's tables of rotary positions.

    Args:
        config: The model's text config.

    Returns:
        One table, or one for each kind of layer that turns its keys; empty without rotary positions.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        return []
    by_kind = [table for table in parameters.values() if isinstance(table, Mapping)]
    return by_kind or [parameters]


def _length(holder: Any, key: str) -> int | None:
    """A number of positions, from a config or from a table of one."""
    value = holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**62:
        raise InputError(f"{key}: expected a number of positions, found {value!r}")
    return int(value)
