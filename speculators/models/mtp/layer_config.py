"""`transformer_layer_config` of an MTP block: the verifier's own configuration (free of torch).

The block is one layer of the verifier's kind, with full attention unless all of the verifier's have a window. Keys that
its numbers depend on are checked here; the others are the verifier's business and are carried along.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from speculators.formats.decoder import HF_BOOKKEEPING, RopeParameters, Size, Strict, Vocabulary, with_rope_parameters
from speculators.formats.faults import contradictions
from speculators.models.mtp.styles import STYLES, LayerStyle

# How the verifier's weights are stored, and where its code was found: nothing that holds for the block's own tensors.
_NOT_THE_BLOCKS = HF_BOOKKEEPING | {"quantization_config", "auto_map"}

OptionalSize = Size | None
ModelType = Literal[
    "llama",
    "qwen2",
    "mimo",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "glm4_moe",
]


class MtpLayerConfig(Strict):
    """A verifier's text configuration as transformers writes it, of one of the model types in `STYLES`.

    `num_hidden_layers` and `layer_types` describe the verifier; the block is like its last full-attention layer, and
    with DeepSeek and GLM like the layer that would follow. Keys that are None here belong to other model types.
    """

    model_config = ConfigDict(extra="allow")

    model_type: ModelType = Field(description="the verifier's kind of decoder layer")
    hidden_size: Size
    num_hidden_layers: int = Field(gt=0, le=1024)
    num_attention_heads: int = Field(gt=0, le=65536)
    num_key_value_heads: int = Field(gt=0, le=65536)
    vocab_size: Vocabulary
    rms_norm_eps: float = Field(gt=0, lt=1)
    max_position_embeddings: int = Field(gt=0, le=1 << 31)
    rope_parameters: RopeParameters
    hidden_act: Literal["silu"] = "silu"
    initializer_range: float = Field(default=0.02, ge=0, le=1)
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    head_dim: OptionalSize = None
    intermediate_size: OptionalSize = None
    layer_types: list[str] | None = None
    full_attention_interval: int | None = Field(default=None, gt=0, le=1024)
    use_sliding_window: bool | None = None
    sliding_window: int | None = Field(default=None, gt=0, le=1 << 31)
    max_window_layers: int | None = Field(default=None, ge=0, le=1 << 20)
    use_qk_norm: bool | None = None
    num_experts: int | None = Field(default=None, ge=0, le=65536)
    n_routed_experts: int | None = Field(default=None, ge=0, le=65536)
    n_shared_experts: int | None = Field(default=None, gt=0, le=65536)
    num_experts_per_tok: int | None = Field(default=None, gt=0, le=65536)
    moe_intermediate_size: OptionalSize = None
    shared_expert_intermediate_size: OptionalSize = None
    decoder_sparse_step: int | None = Field(default=None, gt=0, le=1024)
    mlp_only_layers: list[int] | None = None
    first_k_dense_replace: int | None = Field(default=None, ge=0, le=1 << 20)
    norm_topk_prob: bool | None = None
    n_group: int | None = Field(default=None, gt=0, le=65536)
    topk_group: int | None = Field(default=None, gt=0, le=65536)
    routed_scaling_factor: float | None = Field(default=None, gt=0, le=1e6)
    scoring_func: Literal["sigmoid"] | None = None
    topk_method: Literal["noaux_tc"] | None = None
    moe_layer_freq: Literal[1] | None = None
    q_lora_rank: OptionalSize = None
    kv_lora_rank: OptionalSize = None
    qk_rope_head_dim: OptionalSize = None
    qk_nope_head_dim: OptionalSize = None
    v_head_dim: OptionalSize = None
    rope_interleave: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _explicit(cls, data: object) -> object:
        """Write out what the file leaves to defaults of its configuration class, which readers may not know."""
        if not isinstance(data, dict):
            return data
        data = with_rope_parameters({key: value for key, value in data.items() if key not in _NOT_THE_BLOCKS})
        _check_json({key: value for key, value in data.items() if key not in cls.model_fields})
        style = STYLES.get(data["model_type"]) if isinstance(data.get("model_type"), str) else None
        if style is None:
            return data
        # Newer transformers writes the number of experts of every family under one name.
        experts = "n_routed_experts" if style.moe == "after_dense" else "num_experts"
        if data.get(experts) is None and "num_local_experts" in data:
            data[experts] = data.pop("num_local_experts")
        missing = {key: value for key, value in style.defaults.items() if data.get(key) is None}
        data |= {key: value for key, value in missing.items() if key in cls.model_fields}
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("num_key_value_heads") is None and "num_attention_heads" in data:
            data["num_key_value_heads"] = heads
        derives = style.attention == "plain" and style.qk_norm != "yes"
        if derives and data.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
            data["head_dim"] = hidden // heads
        return _with_layer_types(_with_one_axis(data, style), style)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        missing = [
            f"{key} is missing, which a layer of type {self.model_type} needs; write it" for key in self._missing()
        ]
        contradictions(("missing-key", f"transformer_layer_config: {text}") for text in missing)
        contradictions(("contradiction", f"transformer_layer_config: {text}") for text in self._contradictions())
        return self

    @property
    def style(self) -> LayerStyle:
        """What this model type's layer computes."""
        return STYLES[self.model_type]

    @property
    def num_routed_experts(self) -> int:
        """Experts that the block's router chooses from; 0 where its MLP is dense."""
        kind, index = self.style.moe, self.layer_index
        experts = (self.n_routed_experts if kind == "after_dense" else self.num_experts) or 0
        if kind == "sparse_step":
            sparse = index not in (self.mlp_only_layers or []) and (index + 1) % (self.decoder_sparse_step or 1) == 0
        else:
            sparse = kind == "always" or (kind == "after_dense" and index >= (self.first_k_dense_replace or 0))
        return experts if sparse else 0

    @property
    def layer_index(self) -> int:
        """The verifier's layer that the block is like."""
        if self.style.moe == "after_dense":
            return self.num_hidden_layers
        kinds = self.layer_types or ["full_attention"] * self.num_hidden_layers
        # Of windows, where there is nothing else: a linear layer is no model of the block.
        for wanted in ("full_attention", "sliding_attention"):
            if wanted in kinds:
                return len(kinds) - 1 - kinds[::-1].index(wanted)
        return len(kinds) - 1

    @property
    def window(self) -> int | None:
        """How many of the last positions the block sees; None for all, as where any of the verifier's layers does."""
        return self.sliding_window if self._all_sliding else None

    @property
    def _all_sliding(self) -> bool:
        if self.model_type == "qwen3_moe":
            # Its layers are all of one kind, and no `layer_types` says which.
            return bool(self.use_sliding_window)
        return self.layer_types is not None and "full_attention" not in self.layer_types

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed, each head by itself."""
        return self.style.qk_norm == "yes" or (self.style.qk_norm == "asked" and bool(self.use_qk_norm))

    def bias_of(self, projection: str) -> bool:
        """Whether an attention projection has a bias."""
        return projection in self.style.biases and (self.style.fixed_bias or bool(self.attention_bias))

    def to_json(self) -> dict[str, Any]:
        """Return the block as it is written: what was read, and the defaults that were filled in."""
        return self.model_dump(exclude_unset=True) | {
            "hidden_act": self.hidden_act,
            "initializer_range": self.initializer_range,
        }

    def _missing(self) -> Iterator[str]:
        style = self.style
        keys = [*style.required, *(style.required_of_experts if self.num_routed_experts else ())]
        yield from (key for key in keys if getattr(self, key) is None)
        if style.attention == "latent" and "q_lora_rank" not in self.model_fields_set:
            yield "q_lora_rank"
        if style.moe in ("sparse_step", "always") and self.num_experts is None:
            yield "num_experts"

    def _contradictions(self) -> Iterator[str]:
        style, extra = self.style, self.model_extra or {}
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            yield f"{heads} is no multiple of num_key_value_heads {self.num_key_value_heads}"
        if self.model_type == "llama" and self.hidden_size % self.num_attention_heads:
            yield f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}"
        if "rope_theta" in extra:
            nested = self.rope_parameters["rope_theta"]
            yield f"rope_theta is {extra['rope_theta']!r} but rope_parameters says {nested!r}"
        if style.fixed_bias and self.attention_bias is False:
            yield f"attention_bias is false; layers of type {self.model_type} have biases"
        if self.mlp_bias and self.model_type != "llama":
            yield f"mlp_bias is true; layers of type {self.model_type} have no MLP biases"
        turned = self._turned_dimensions()
        if turned < 2 or turned % 2:
            yield f"{turned} dimensions of a head are rotated; rotary embedding needs pairs"
        if not style.turns_part and self.rope_parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            yield f"partial_rotary_factor is set; layers of type {self.model_type} rotate whole heads"
        if style.moe == "always" and not self.num_experts:
            yield f"num_experts is 0; layers of type {self.model_type} are mixtures of experts"
        yield from self._layer_contradictions()
        if self.num_routed_experts:
            yield from self._router_contradictions()

    def _turned_dimensions(self) -> int:
        if self.style.attention == "latent":
            return self.qk_rope_head_dim or 0
        return int((self.head_dim or 0) * self.rope_parameters.get("partial_rotary_factor", 1.0))

    def _layer_contradictions(self) -> Iterator[str]:
        kinds = self.layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            yield f"layer_types has {len(kinds)} entries; num_hidden_layers is {self.num_hidden_layers}"
        if kinds is not None and not {"full_attention", "sliding_attention"} & set(kinds):
            yield "layer_types has neither full_attention nor sliding_attention, which the block is made of"
        if self._all_sliding and self.sliding_window is None:
            yield "sliding_window is missing, although every layer of the verifier has a window; write it"

    def _router_contradictions(self) -> Iterator[str]:
        experts, chosen = self.num_routed_experts, self.num_experts_per_tok or 0
        if self.style.moe == "always" and self.norm_topk_prob is False:
            yield f"norm_topk_prob is false; layers of type {self.model_type} always norm the experts' weights"
        if chosen > experts:
            yield f"num_experts_per_tok {chosen} exceeds the {experts} experts"
        if self.style.moe == "after_dense":
            groups, kept = self.n_group or 1, self.topk_group or 1
            if experts % groups or experts // groups < 2:
                yield f"n_routed_experts {experts} in n_group {groups}; expected groups of one size, two or more"
            elif kept > groups or chosen > kept * (experts // groups):
                yield f"topk_group {kept} of n_group {groups} leaves too few experts for num_experts_per_tok {chosen}"


def _with_one_axis(data: dict[str, Any], style: LayerStyle) -> dict[str, Any]:
    """Leave out axes of multi-axis rope, which on text all carry one position; move in the share that is turned.

    transformers rotates by the nested share, and writes its classes' flat default beside it.
    """
    given = data.get("rope_parameters")
    if not isinstance(given, dict):
        return data
    rope = {key: value for key, value in given.items() if not str(key).startswith("mrope")}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    data = data | {"rope_parameters": rope}
    flat = data.pop("partial_rotary_factor", None)
    share = style.defaults.get("partial_rotary_factor") if flat is None else flat
    if share is not None:
        rope.setdefault("partial_rotary_factor", share)
    return data


def _with_layer_types(data: dict[str, Any], style: LayerStyle) -> dict[str, Any]:
    """Spell out which layers attend fully, by the rules of transformers' configuration classes."""
    layers = data.get("num_hidden_layers")
    if data.get("layer_types") is not None or type(layers) is not int or not 0 < layers <= 1024:
        return data
    if data["model_type"] in ("qwen2", "mimo", "qwen3") and data.get("use_sliding_window") is True:
        first, sliding = data.get("max_window_layers", 28), data.get("sliding_window", 4096) is not None
        full = [not (sliding and type(first) is int and index >= first) for index in range(layers)]
        return data | {"layer_types": ["full_attention" if whole else "sliding_attention" for whole in full]}
    given = data.get("full_attention_interval")
    every = style.full_attention_interval if given is None else given
    if style.full_attention_interval is None or type(every) is not int or every < 1:
        return data
    return data | {"layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]}


def _check_json(carried: dict[str, Any]) -> None:
    """Raise ValueError where keys that are only carried along could not be written again."""
    try:
        json.dumps(carried, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"values that JSON can hold: {error}") from None
