"""`transformer_layer_config`: the decoder layers of a draft, as a strict model (free of torch).

Key meanings follow what vLLM reads from such a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from speculators.formats.faults import contradictions, shown

Size = Annotated[int, Field(gt=0, le=1 << 20)]
Vocabulary = Annotated[int, Field(gt=0, le=1 << 24)]

# rope_type -> (keys it cannot do without, keys it may have) besides rope_type, rope_theta and partial_rotary_factor.
_LLAMA3_KEYS = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
_YARN_KEYS = frozenset(
    {
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)
ROPE_TYPES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (_LLAMA3_KEYS, frozenset()),
    "yarn": (frozenset({"factor"}), _YARN_KEYS),
}

# What transformers writes about itself and its caller: no number of the draft depends on it, so reading drops it.
# fmt: off
HF_BOOKKEEPING = frozenset({
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "transformers_version",
    "architectures", "dtype", "torch_dtype", "return_dict", "output_attentions", "output_hidden_states",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
})
# Keys of a decoder block that are written only where they were given.
_WHEN_GIVEN = frozenset({
    "num_aux_hidden_states", "num_aux_layers", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "attention_dropout", "max_window_layers", "use_cache", "pretraining_tp", "partial_rotary_factor", "logit_scale",
    "is_causal", "is_neox_style", "qkv_bias",
})
# fmt: on


class Strict(BaseModel):
    """Refuses unknown keys, values of another type and numbers that are not finite; cannot be changed once made."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


def _token_ids(value: object) -> object:
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(item) is int and item >= 0 for item in ids):
        raise ValueError("a token id, a list of token ids or null")
    return value


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    kind = parameters.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(f"a rope_type of {', '.join(ROPE_TYPES)}, got {shown(kind)}: another would be rotated wrongly")
    required, optional = ROPE_TYPES[kind]
    needed = required | {"rope_theta"}
    known = needed | optional | {"rope_type", "partial_rotary_factor"}
    for key in sorted(needed - parameters.keys()):
        raise ValueError(f"a value of {key}: no engine agrees on a default for it")
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"only {', '.join(sorted(known))} with rope_type {kind}, got {shown(key)}")
        if key == "rope_type" or (key == "truncate" and isinstance(value, bool)):
            continue
        limit = 1.0 if key == "partial_rotary_factor" else 1e12
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
            raise ValueError(f"a number above 0, at most {limit:g}, as {key}, got {shown(value)}")
    return parameters


TokenIds = Annotated[Any, AfterValidator(_token_ids)]
RopeParameters = Annotated[dict[str, Any], AfterValidator(_rope)]
Only1 = Annotated[float, Field(ge=1, le=1)]


class DecoderConfig(Strict):
    """`transformer_layer_config`: the draft's decoder layers, every value explicit because engines apply no defaults.

    `num_hidden_layers` counts draft layers; `vocab_size` is the verifier's (rows of the input embedding). The keys from
    `bos_token_id` on are what Hugging Face configurations carry besides; they are kept as they were read, and refused
    where a value would change the numbers in a way that the draft does not compute.
    """

    model_type: Literal["llama", "qwen3"] = Field(description="the kind of decoder layer")
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: int = Field(gt=0, le=1024)
    num_attention_heads: int = Field(gt=0, le=65536)
    num_key_value_heads: int = Field(gt=0, le=65536)
    head_dim: int = Field(gt=0, le=65536)
    vocab_size: Vocabulary
    rms_norm_eps: float = Field(gt=0, lt=1)
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: int = Field(gt=0, le=1 << 31)
    rope_parameters: RopeParameters
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[Literal["full_attention", "sliding_attention"]]
    sliding_window: int | None = Field(default=None, gt=0, le=1 << 31)
    use_sliding_window: bool = False
    initializer_range: float = Field(default=0.02, ge=0, le=1)
    tie_word_embeddings: bool = False
    num_aux_hidden_states: int | None = Field(default=None, gt=0, le=1024)
    num_aux_layers: int | None = Field(default=None, gt=0, le=1024)
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: TokenIds = None
    unk_token_id: TokenIds = None
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    max_window_layers: int | None = Field(default=None, ge=0, le=1 << 20)
    use_cache: bool | None = None
    pretraining_tp: Literal[1] | None = None
    partial_rotary_factor: Only1 | None = None
    logit_scale: Only1 | None = None
    is_causal: Literal[True] | None = None
    is_neox_style: Literal[True] | None = None
    qkv_bias: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _explicit(cls, data: object) -> object:
        """Write out what older files leave to a class default that follows from their other keys."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if key not in HF_BOOKKEEPING}
        heads, hidden, layers = (data.get(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        if data.get("num_key_value_heads") is None and "num_attention_heads" in data:
            data["num_key_value_heads"] = heads
        if data.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
            data["head_dim"] = hidden // heads
        if data.get("layer_types") is None and type(layers) is int and 0 < layers <= 1024:
            data["layer_types"] = ["full_attention"] * layers
        if data.get("use_sliding_window") is None and isinstance(data.get("layer_types"), list):
            data["use_sliding_window"] = "sliding_attention" in data["layer_types"]
        return with_rope_parameters(data)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        contradictions(("contradiction", f"transformer_layer_config: {text}") for text in self._contradictions())
        return self

    def _contradictions(self) -> Iterator[str]:
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        sliding = "sliding_attention" in self.layer_types
        if heads % shared:
            yield f"num_attention_heads {heads} is no multiple of num_key_value_heads {shared}"
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd; rotary embedding needs pairs"
        if len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types has {len(self.layer_types)} entries; num_hidden_layers is {self.num_hidden_layers}"
        if sliding and self.sliding_window is None:
            yield "layer_types has sliding_attention but sliding_window is null; give its width"
        if sliding and not self.use_sliding_window:
            yield "layer_types has sliding_attention but use_sliding_window is false"

    @property
    def words(self) -> str:
        """What the layers are in a few words, as for a model card."""
        layers = f"{self.num_hidden_layers} `{self.model_type}` layer{'s' if self.num_hidden_layers > 1 else ''}"
        return f"{layers} of width {self.hidden_size}"

    def to_json(self) -> dict[str, Any]:
        """Return the block as it is written: every value that changes numbers, and the other keys that were given."""
        absent = _WHEN_GIVEN - self.model_fields_set
        written = {key: value for key, value in self.model_dump().items() if key not in absent}
        return {key: value for key, value in written.items() if not (key.startswith("num_aux") and value is None)}


def with_rope_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """Read flat `rope_theta` and `rope_scaling` too; the nested block comes first, a disagreement stays an error."""
    flat, scaling = data.get("rope_theta"), data.get("rope_scaling")
    given = data.get("rope_parameters")
    if given is None and (flat is not None or isinstance(scaling, dict)):
        given = dict(scaling) if isinstance(scaling, dict) else {}
        given |= {} if flat is None or "rope_theta" in given else {"rope_theta": flat}
    if not isinstance(given, dict):
        return data
    given = dict(given)
    old_name = given.pop("type", None)
    given.setdefault("rope_type", "default" if old_name is None else old_name)
    if flat is None or given.get("rope_theta") == flat:
        data.pop("rope_theta", None)
    data.pop("rope_scaling", None)
    return data | {"rope_parameters": given}
