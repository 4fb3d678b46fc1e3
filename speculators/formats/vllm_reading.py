"""What vLLM 0.32 reads from a speculator's `config.json`, type by type, in its words; nothing here judges it.

The rules are those of its speculators configuration reader and of the draft classes behind it, as tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Which of vLLM's two model runners have the draft class.
Runner = Literal["V1 or V2", "V1", "V2"]

_EAGLE_IDS, _BLOCK_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
_DEFAULT_AUX_FEATURES = 3


@dataclass(frozen=True)
class Served:
    """How vLLM reads one `speculators_model_type`.

    - `method`, `parallel_drafting`: what the type sets in the speculative configuration.
    - `classes`: draft class by `transformer_layer_config.model_type`; of a single entry under "", whatever that says.
    - `layer_ids`: the key that lists the capture ids.
    - `forwarded`: top-level keys that become attributes of the draft's configuration, and what stands for absent ones.
    - `dflash`: keys that are copied into `dflash_config` where they are not null; None where the type has none.
    """

    method: str
    classes: Mapping[str, str]
    layer_ids: str
    forwarded: Mapping[str, Any]
    parallel_drafting: bool = True
    runner: Runner = "V1 or V2"
    dflash: tuple[str, ...] | None = None

    @property
    def fills_blocks(self) -> bool:
        """Whether the type drafts blocks of slots over the context's keys, as DFlash does."""
        return self.layer_ids == _BLOCK_IDS

    def architecture(self, layer_type: object, architectures: Sequence[object]) -> str | None:
        """The draft class for a kind of layers; vLLM also heeds `architectures` where it knows several for one type."""
        if "" not in self.classes:
            return self.classes.get(layer_type) if isinstance(layer_type, str) else None
        known = [name for name in architectures if isinstance(name, str) and name in self.classes]
        return known[0] if known else self.classes[""]


_SIZES = {"draft_vocab_size": None, "target_hidden_size": None}
# Of a block drafter: keys of which vLLM takes a value of its own where they are absent.
_BLOCK_DEFAULTS = {"sample_from_anchor": False, "sliding_window_non_causal": True}

SERVED: dict[str, Served] = {
    "eagle3": Served(
        "eagle3",
        {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"},
        _EAGLE_IDS,
        _SIZES | {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
        parallel_drafting=False,
    ),
    "peagle": Served(
        "eagle3",
        {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"},
        _EAGLE_IDS,
        _SIZES | {"norm_before_residual": False, "norm_before_fc": False, "mask_token_id": None},
        runner="V1",
    ),
    "dflash": Served("dflash", {"": "DFlashDraftModel"}, _BLOCK_IDS, _SIZES, dflash=()),
    "dflash2": Served(
        "dflash",
        {"": "DFlash2DraftModel"},
        _BLOCK_IDS,
        _SIZES,
        runner="V2",
        dflash=("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    ),
    "dspark": Served(
        "dspark",
        {
            "": "Qwen3DSparkModel",
            "Qwen3DSparkModel": "Qwen3DSparkModel",
            "Qwen3OmniDSparkModel": "Qwen3OmniDSparkModel",
        },
        _BLOCK_IDS,
        _SIZES
        | {"sample_from_anchor": False, "mask_token_id": None, "block_size": None}
        | {"markov_rank": None, "markov_head_type": None}
        | {"enable_confidence_head": None, "confidence_head_with_markov": None},
        runner="V2",
    ),
}

# Types that vLLM has no reader for, and what to do with such a directory.
INSTEAD: dict[str, str] = {
    "mtp": "vLLM finds MTP blocks only inside the verifier: write this one back into a copy of the verifier's own "
    "checkpoint, under the names it has there, and serve that copy with method mtp",
    "eagle": "export it to the layout of EAGLE's own releases and give that to vLLM as the draft model of method "
    "eagle; its class knows no bias of fc and no norms besides those of the layers",
    "medusa": "export it to Medusa's own layout, with model_type medusa, and give that to vLLM as the draft model of "
    "method medusa",
    "mlp_speculator": "vLLM 0.32 runs no MLP speculator in any layout; serve it with this library",
}


def default_of(kind: str, key: str) -> tuple[bool, Any]:
    """Whether vLLM takes a value of its own where `key` is absent from a directory of this type, and which."""
    served = SERVED.get(kind)
    if served is None:
        return False, None
    defaults = dict(served.forwarded) | (_BLOCK_DEFAULTS if served.dflash is not None else {})
    return key in defaults and defaults[key] is not None, defaults.get(key)


def reading_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM makes of a well-formed `config.json` of a type that it serves, also of an older layout.

    `causal_layers` says of each draft layer whether the tokens drafted together see only those before them.
    """
    kind = config["speculators_model_type"]
    served, layer = SERVED[kind], config["transformer_layer_config"]
    ids = list(config.get(served.layer_ids) or ())
    causal = causal_layers(config)
    reading: dict[str, Any] = {
        "method": served.method,
        "parallel_drafting": served.parallel_drafting,
        "num_speculative_tokens": config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
        "model": config["speculators_config"]["verifier"]["name_or_path"],
        "architecture": served.architecture(layer.get("model_type"), config.get("architectures") or ()),
        "runner": _runner(served, layer),
        "capture_layer_ids": sorted(set(ids)),
        "num_aux_features": aux_features(kind, layer, ids),
        "mask_token_id": config.get("mask_token_id") if served.parallel_drafting else None,
        "causal_layers": causal,
        "dflash_config": None,
        "draft": {key: config.get(key, default) for key, default in served.forwarded.items()},
        "layers": layer,
    }
    module_ids = [layer_id - 1 for layer_id in ids]
    if served.dflash is not None:
        reading["dflash_config"] = {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": module_ids,
            "sample_from_anchor": bool(config.get("sample_from_anchor", _BLOCK_DEFAULTS["sample_from_anchor"])),
            "causal": not _non_causal(config),
            **{key: config[key] for key in served.dflash if config.get(key) is not None},
        }
    elif served.fills_blocks:
        reading["draft"] |= {
            "target_layer_ids": module_ids,
            "dspark_bonus_anchor": not reading["draft"]["sample_from_anchor"],
        }
    return reading


def aux_features(kind: str, layer: Mapping[str, Any], layer_ids: Sequence[int]) -> int:
    """Return how many features the draft expects; EAGLE-3's llama class never looks at the list of layer ids."""
    if kind in SERVED and SERVED[kind].fills_blocks:
        return len(set(layer_ids))
    llama = layer.get("model_type") == "llama"
    keys = ("num_aux_hidden_states",) if llama else ("num_aux_layers", "num_aux_hidden_states")
    given = next((layer[key] for key in keys if isinstance(layer.get(key), int)), None)
    if given is not None:
        return int(given)
    return _DEFAULT_AUX_FEATURES if llama else len(layer_ids)


def causal_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each draft layer whether vLLM runs it causally within what is drafted together.

    DFlash has one flag for all layers, DSpark goes by each layer's type, and an explicit `is_causal` overrides both.
    """
    kind, layer = config.get("speculators_model_type"), config["transformer_layer_config"]
    names = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    types = [name == "sliding_attention" for name in names]
    served = SERVED.get(kind) if isinstance(kind, str) else None
    if served is None or not served.fills_blocks:
        return [True] * len(types)
    if isinstance(layer.get("is_causal"), bool):
        return [layer["is_causal"]] * len(types)
    if served.dflash is None:
        return types
    return [not _non_causal(config)] * len(types)


def _non_causal(config: Mapping[str, Any]) -> bool:
    return bool(config.get("sliding_window_non_causal", _BLOCK_DEFAULTS["sliding_window_non_causal"]))


def _runner(served: Served, layer: Mapping[str, Any]) -> Runner:
    """Block drafters with windows in some layers only need the newer runner."""
    mixed = len(set(layer.get("layer_types") or ())) > 1
    return "V2" if mixed and served.fills_blocks else served.runner
