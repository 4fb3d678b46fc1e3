"""What the `config.json` of a Gemma 4 assistant says, the tensors beside it, and whose keys its layers can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from speculators.errors import EngineError, FormatError
from speculators.formats.checkpoint import read_config
from speculators.formats.config import TensorSpec

# By the type of an assistant's language part, that of the verifiers that it was made for (it is the same).
TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
# Parts of a Gemma 4 verifier that no assistant has.
_ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


@dataclass(frozen=True)
class AssistantSizes:
    """The numbers that a network is built of: `text` is its language part, as transformers reads it.

    States that go in and come out are `backbone_hidden_size` wide, as the verifier's. With ordered embeddings, tokens
    lie in `num_centroids` groups, of which the `top_centroids` nearest to a state have logits; both are None without.
    """

    text: PretrainedConfig
    backbone_hidden_size: int
    tied: bool
    num_centroids: int | None = None
    top_centroids: int | None = None

    @classmethod
    def read(cls, directory: Path) -> AssistantSizes:
        """Read a local directory's config.json; FormatError says what is missing there or not known."""
        written = read_config(directory).get("text_config")
        kind = written.get("model_type", TEXT_TYPES[0]) if isinstance(written, dict) else None
        if kind not in TEXT_TYPES:
            raise FormatError(
                f"assistant {directory}: its text_config is of type {kind!r}; expected one of {', '.join(TEXT_TYPES)}"
            )
        try:
            config: Any = AutoConfig.from_pretrained(directory)
            text: Any = config.get_text_config()
        except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
            raise FormatError(f"assistant {directory}: its config.json cannot be read: {error}") from error
        for name in _ABSENT:
            if getattr(text, name, None):
                raise FormatError(
                    f"assistant {directory}: {name} is {getattr(text, name)!r}, which no assistant has; expected none"
                )
        ordered = bool(config.use_ordered_embeddings)
        centroids = (int(config.num_centroids), int(config.centroid_intermediate_top_k)) if ordered else (None, None)
        sizes = cls(text, int(config.backbone_hidden_size), bool(config.tie_word_embeddings), *centroids)
        sizes._check(directory)
        return sizes

    @property
    def vocab_size(self) -> int:
        """Tokens that have a logit, those of the verifier."""
        return int(self.text.vocab_size)

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of each layer, which says whose keys it reads."""
        return list(self.text.layer_types)

    def head_dim(self, layer: int) -> int:
        """Size of a layer's heads."""
        return int(self.text.per_layer_config[layer].head_dim)

    def window(self, layer: int) -> int | None:
        """How many of the last keys a layer sees; None for all."""
        return int(self.text.sliding_window) if self.layer_types[layer] == "sliding_attention" else None

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Name, shape and necessity of every tensor."""
        text, hidden, wide = self.text, int(self.text.hidden_size), int(self.text.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
            "pre_projection.weight": (hidden, 2 * self.backbone_hidden_size),
            "post_projection.weight": (self.backbone_hidden_size, hidden),
        }
        for layer in range(len(self.layer_types)):
            queries = int(text.num_attention_heads) * self.head_dim(layer)
            inner: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj.weight": (queries, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
                "self_attn.q_norm.weight": (self.head_dim(layer),),
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "pre_feedforward_layernorm.weight": (hidden,),
                "post_feedforward_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (wide, hidden),
                "mlp.up_proj.weight": (wide, hidden),
                "mlp.down_proj.weight": (hidden, wide),
                "layer_scalar": (1,),
            }
            if text.attention_bias:
                inner |= {"self_attn.q_proj.bias": (queries,), "self_attn.o_proj.bias": (hidden,)}
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
        if self.num_centroids is not None:
            shapes["masked_embedding.centroids.weight"] = (self.num_centroids, hidden)
        tensors = {name: TensorSpec(shape) for name, shape in shapes.items()}
        if self.num_centroids is not None:
            tensors["masked_embedding.token_ordering"] = TensorSpec((self.vocab_size,), "int")
        return tensors | {"lm_head.weight": TensorSpec((self.vocab_size, hidden), required=not self.tied)}

    def key_layers(self, verifier: PretrainedConfig, name: str) -> Mapping[str, int]:
        """The verifier's layer whose keys and values each kind of layer here reads: the last that makes its own.

        `verifier` is the configuration of its language part, `name` what it is called. EngineError where it is no
        verifier of this assistant.
        """
        if verifier.model_type not in TEXT_TYPES:
            raise _unfit(name, f"is of type {verifier.model_type!r}", " or ".join(TEXT_TYPES))
        for ours, theirs, key in (
            (self.backbone_hidden_size, verifier.hidden_size, "hidden_size"),
            (self.vocab_size, verifier.vocab_size, "vocab_size"),
        ):
            if ours != theirs:
                raise _unfit(name, f"has {key} {theirs}", str(ours))
        own = list(verifier.layer_types)[: verifier.num_hidden_layers - verifier.num_kv_shared_layers]
        found: dict[str, int] = {}
        for layer, kind in enumerate(self.layer_types):
            if kind not in own:
                raise _unfit(name, f"has no {kind} layer with keys of its own", f"one, which layer {layer} reads")
            found[kind] = index = len(own) - 1 - own[::-1].index(kind)
            there, heads = verifier.per_layer_config[index], int(self.text.num_attention_heads)
            if there.head_dim != self.head_dim(layer) or heads % there.num_key_value_heads:
                got = f"has {there.num_key_value_heads} key heads of size {there.head_dim} in layer {index}"
                raise _unfit(name, got, f"such that {heads} query heads of size {self.head_dim(layer)} read them")
        return found

    def _check(self, directory: Path) -> None:
        groups, top = self.num_centroids, self.top_centroids
        if groups is None or top is None:
            return
        if groups < 1 or self.vocab_size % groups or not 0 < top <= groups:
            raise FormatError(
                f"assistant {directory}: num_centroids is {groups} and centroid_intermediate_top_k {top}; expected "
                f"groups of equal size of {self.vocab_size} tokens, and no more of them than there are"
            )


def _unfit(name: str, got: str, expected: str) -> EngineError:
    return EngineError(
        f"speculative_config: verifier {name!r} {got}; this assistant reads the keys and states of another, and "
        f"expects {expected}: give the assistant that was made for this verifier"
    )
