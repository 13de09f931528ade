"""What a config in the DFlash layout says that makes it another kind of drafter than DFlash and TreeFlash."""

from collections.abc import Mapping
from typing import Any

from treeflash.checkpoints.config_keys import Setting, nested, odd_settings, shown, unknown_keys
from treeflash.checkpoints.reader import Checkpoint
from treeflash.errors import CheckpointError

TABLE, REFINER_TABLE = "dflash_config", "treeflash_config"
_ARCHITECTURES = ("DFlashDraftModel", "TreeFlashDraftModel")
_ONE_WAY = "slots that do not see those after them are not supported"
_FROM_ANCHOR = "a block whose anchor predicts too is not supported"
_WINDOW = "windows are not supported"
_CORRECTED = "heads that correct drafts token by token are not supported"
_CONFIDENCE = "heads that foresee acceptance are not supported"
_SCALED = "scaled states and logits are not supported"
# Of drafters that share the layout, and what public code reads where.
_SETTINGS = {
    "causal": Setting(False, _ONE_WAY),
    "is_causal": Setting(False, _ONE_WAY),
    "sample_from_anchor": Setting(False, _FROM_ANCHOR),
    "query_zero_predicts_next": Setting(False, _FROM_ANCHOR),
    "shift_label": Setting(False, _FROM_ANCHOR),
    "projector_type": Setting("dflash", _CORRECTED),
    "markov_rank": Setting(0, _CORRECTED),
    "markov_head_type": Setting(None, _CORRECTED),
    "use_confidence_head": Setting(False, _CONFIDENCE),
    "enable_confidence_head": Setting(False, _CONFIDENCE),
    "use_aux_hidden_state": Setting(True, "drafters without the target's states are not supported"),
    "use_swa": Setting(False, _WINDOW),
    "sliding_window_non_causal": Setting(False, _WINDOW),
    "attention_sink_bias": Setting(False, "attention sinks are not supported"),
    "mlp_bias": Setting(False, "biases there are not supported"),
    "input_embedding_scale": Setting(1, _SCALED),
    "output_multiplier": Setting(1, _SCALED),
    "final_logit_softcapping": Setting(None, _SCALED),
}
# Settings of DFlash 2, and parts of the names of its tensors.
_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DFLASH_2_TENSORS = ("candidate_selector.", "attention_conv.", "mlp_conv.")
# The same layers, counted by outputs from the embeddings' on.
_COUNTED_FROM_ONE = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_KEYS = ("block_size", "mask_token_id", "target_layer_ids", *_COUNTED_FROM_ONE, *_SETTINGS)


def refuse_dflash_2(checkpoint: Checkpoint) -> None:
    """Says in one sentence what a hundred unknown tensors would say.

    Args:
        checkpoint: What was opened.

    Raises:
        CheckpointError: When it is a drafter of DFlash 2.
    """
    config = checkpoint.config
    names, inner = config.get("architectures"), nested(config, TABLE, [])
    signs = [f"architectures {shown(names)}"] if "DFlash2" in shown(names) else []
    signs += [key for key in _DFLASH_2 if inner.get(key, config.get(key)) is not None]
    signs += [name for name in checkpoint.backbone if any(part in name for part in _DFLASH_2_TENSORS)][:1]
    if signs:
        raise CheckpointError(
            f"{checkpoint.folder}: expected a DFlash or TreeFlash drafter, found one of DFlash 2 "
            f"({', '.join(signs)}), which is not supported yet"
        )


def other_kinds(config: Mapping[str, Any]) -> list[str]:
    """Finds what says that a drafter computes something else than those that are read.

    Args:
        config: The config.

    Returns:
        One sentence per fault.
    """
    names = config.get("architectures")
    faults = []
    if names is not None and not (isinstance(names, list) and all(name in _ARCHITECTURES for name in names)):
        faults.append(f"architectures: expected {' or '.join(_ARCHITECTURES)}, found {shown(names)}")
    faults += odd_settings(config, (TABLE,), _SETTINGS)
    draft, whole = config.get("draft_vocab_size"), config.get("vocab_size")
    if None not in (draft, whole) and draft != whole:
        faults.append(f"draft_vocab_size: expected the vocab_size, {whole}, found {shown(draft)}")
    return [
        *faults,
        *unknown_keys(config, TABLE, _KEYS),
        *unknown_keys(config, REFINER_TABLE, ("ar_approximation", "candidate_tokens")),
    ]


def odd_layers(config: Mapping[str, Any], inner: Mapping[str, Any], layers: list[int]) -> list[str]:
    """Says what is wrong with the target layers, whichever target it is.

    Args:
        config: The config.
        inner: Its `dflash_config`.
        layers: Its `target_layer_ids`.

    Returns:
        One sentence per fault.
    """
    faults = []
    if len(set(layers)) < len(layers):
        faults.append(f"{TABLE}.target_layer_ids: expected each layer once, found {shown(layers)}")
    counted = [layer + 1 for layer in layers]
    for where, place in (("", config), (f"{TABLE}.", inner)):
        for key in _COUNTED_FROM_ONE:
            if place.get(key) not in (None, counted):
                faults.append(
                    f"{where}{key}: expected the target_layer_ids plus one, {shown(counted)}, "
                    f"found {shown(place[key])}"
                )
    return faults
