"""What `config.json` of a speculator says, as strict models: a key that is not known is refused by its name.

The file's keys are these models' fields; nothing is renamed between them. Importing this module needs neither torch nor
transformers. Key meanings follow what vLLM reads from such a file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from speculators.formats.decoder import DecoderConfig, Size, Strict, Vocabulary
from speculators.formats.faults import config_faults, contradictions, error_of, fault, shown

MAX_SPECULATIVE_TOKENS = 128  # vLLM's rejection sampler asserts on more
_FALLBACK_VERSION = "0.1.0"

Dtype = Literal["float32", "bfloat16", "float16"]
LayerIds = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=1, max_length=1024)]


class TensorSpec(NamedTuple):
    """Shape, kind of number and necessity of one tensor of a checkpoint; `float32` is one that is never rounded."""

    shape: tuple[int, ...]
    kind: Literal["float", "float32", "int", "bool"] = "float"
    required: bool = True


class VerifierConfig(Strict):
    """The model whose output distribution the speculator keeps: what a server can resolve, and its HF class names."""

    name_or_path: str = Field(min_length=1, description="the verifier's hub id or absolute path")
    architectures: list[str]


class ProposalConfig(Strict):
    """How many tokens are proposed per step, and by which rule they are accepted."""

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS, description="draft tokens per step")
    verifier_accept_k: int = Field(default=1, ge=1, le=1 << 20)
    accept_tolerance: float = Field(default=0.0, ge=0.0, le=1e6)


class SpeculatorsConfig(Strict):
    """The block that says how a checkpoint speculates, and for whom."""

    algorithm: str = Field(min_length=1)
    default_proposal_method: str = "greedy"
    proposal_methods: list[ProposalConfig] = Field(min_length=1)
    verifier: VerifierConfig


def package_version() -> str:
    """Return the installed version of this package, or its first one where it runs without being installed."""
    try:
        return metadata.version("speculators")
    except metadata.PackageNotFoundError:
        return _FALLBACK_VERSION


class SpeculatorConfig(Strict):
    """`config.json` of any family; a family adds its own keys and says which tensors the checkpoint holds."""

    architectures: list[str] = Field(min_length=1)
    speculators_model_type: str = Field(min_length=1, description="the speculator's family")
    speculators_version: str = Field(default_factory=package_version)
    speculators_config: SpeculatorsConfig
    dtype: Dtype = Field(description="dtype of the stored float tensors")
    tie_word_embeddings: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _without_noise(cls, data: object) -> object:
        """Drop what other writers add and mean nothing by; whatever could mean something stays, to be refused."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        data.pop("transformers_version", None)
        if data.get("model_type") in (None, "speculators"):
            data.pop("model_type", None)
        auto_map = data.get("auto_map")
        if auto_map is None or (isinstance(auto_map, dict) and set(auto_map) <= {""}):
            data.pop("auto_map", None)
        old_name = data.pop("torch_dtype", None)
        if old_name is not None:
            data.setdefault("dtype", old_name)
        return data

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        contradictions(self.disagreements())
        return self

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        block, kind = self.speculators_config, self.speculators_model_type
        if block.algorithm != kind:
            text = f"speculators_config.algorithm is {block.algorithm!r} but speculators_model_type is {kind!r}"
            yield "contradiction", text
        kinds = [method.proposal_type for method in block.proposal_methods]
        if block.default_proposal_method not in kinds:
            text = f"default_proposal_method {block.default_proposal_method!r} is none of the proposal types {kinds}"
            yield "contradiction", text

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: object = "config.json") -> Self:
        """Check a parsed `config.json`; FormatError names each wrong key, what was got and what was expected."""
        if not isinstance(data, dict):
            raise error_of([fault("no-config", f"expected a JSON object, got {shown(data)}")], source)
        if "speculators_model_type" not in data:
            text = "speculators_model_type is missing; write the speculator's family"
            raise error_of([fault("no-speculators-model-type", text)], source)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise error_of(config_faults(error, cls), source) from None

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds: every key that changes numbers, and never a top-level `model_type`."""
        return self.model_dump()

    @property
    def num_speculative_tokens(self) -> int:
        """How many tokens a step drafts unless told otherwise: the first proposal's, the only one that engines read."""
        return self.speculators_config.proposal_methods[0].speculative_tokens

    @property
    def verifier(self) -> VerifierConfig:
        """The model that the speculator drafts for."""
        return self.speculators_config.verifier

    @property
    def aux_layer_ids(self) -> list[int]:
        """Depths of the verifier whose residual streams feed the draft, ascending: i enters layer i, 0 = embeddings.

        Empty for a draft that reads the verifier's last state alone.
        """
        return []

    @property
    def max_speculative_tokens(self) -> int | None:
        """The most tokens that one step can draft; None where the draft goes on as long as it is asked to."""
        return None

    @property
    @abstractmethod
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's hidden states."""

    @property
    @abstractmethod
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""

    @property
    def num_draft_ids(self) -> int:
        """Size of the draft vocabulary; the verifier's where the draft proposes every token."""
        return self.verifier_vocab_size

    @abstractmethod
    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return every tensor that the checkpoint may hold: its name, shape, kind and whether it must be there."""

    @abstractmethod
    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""


class DecoderDraftConfig(SpeculatorConfig):
    """A family of decoder layers that read auxiliary states, with a vocabulary that may be a part of the verifier's.

    `draft_vocab_size` equals `transformer_layer_config.vocab_size` where nothing is left out. `target_hidden_size` is
    the verifier's width where the draft has another.
    """

    # The family's key for the depths of the verifier, a list.
    layer_ids_key: ClassVar[str]

    transformer_layer_config: DecoderConfig
    draft_vocab_size: Vocabulary
    target_hidden_size: Size | None = None

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        layer, ids = self.transformer_layer_config, self.aux_layer_ids
        if self.draft_vocab_size > layer.vocab_size:
            yield "contradiction", f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {layer.vocab_size}"
        if layer.mlp_bias:
            yield "contradiction", "transformer_layer_config.mlp_bias is true; a draft has no MLP biases"
        if ids != sorted(set(ids)):
            order = "the order in which engines concatenate the states whatever is written"
            yield "layer-ids", f"{self.layer_ids_key} is {ids}; expected {sorted(set(ids))}, {order}"

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds, the layer block as it is written."""
        return super().to_json() | {"transformer_layer_config": self.transformer_layer_config.to_json()}

    @property
    def aux_layer_ids(self) -> list[int]:
        """Depths of the verifier whose residual streams feed the draft, ascending."""
        ids: list[int] = getattr(self, self.layer_ids_key)
        return ids

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's hidden states, of which each auxiliary layer gives one per token."""
        return self.target_hidden_size or self.transformer_layer_config.hidden_size

    @property
    def num_features(self) -> int:
        """Width of the auxiliary states side by side, which `fc` reads."""
        return len(self.aux_layer_ids) * self.verifier_hidden_size

    @property
    def has_own_width(self) -> bool:
        """Whether the verifier's embeddings and head do not fit the draft, so that it has both of its own."""
        return self.transformer_layer_config.hidden_size != self.verifier_hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""
        return self.transformer_layer_config.vocab_size

    @property
    def num_draft_ids(self) -> int:
        """Size of the draft vocabulary."""
        return self.draft_vocab_size

    @property
    def output_bias(self) -> bool:
        """Whether `attention_bias` gives the attention's output projection a bias too (vLLM's llama layers do)."""
        return self.transformer_layer_config.model_type == "llama"

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        return self.transformer_layer_config.words

    def vocabulary_tensors(self, *, own_embeddings: bool) -> dict[str, TensorSpec]:
        """Return embeddings, head and map; `own_embeddings` says whether the first are not the verifier's.

        A head is there where the vocabulary is reduced or the draft has a width of its own, and may be shipped
        elsewhere. The map `d2t` is there exactly where the vocabulary is reduced; `t2d` follows from it.
        """
        layer, drafted = self.transformer_layer_config, self.draft_vocab_size
        vocab, hidden, reduced = layer.vocab_size, layer.hidden_size, drafted < layer.vocab_size
        tensors = {
            "embed_tokens.weight": TensorSpec((vocab, hidden), required=own_embeddings),
            "lm_head.weight": TensorSpec((drafted, hidden), required=reduced or self.has_own_width),
            "t2d": TensorSpec((vocab,), "bool", required=False),
        }
        return tensors | ({"d2t": TensorSpec((drafted,), "int")} if reduced else {})


def mask_token_problem(mask_token_id: int, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield the fault of a mask token that is no row of the embeddings, as `disagreements` does."""
    if mask_token_id >= vocab_size:
        yield "mask-token-id", f"mask_token_id {mask_token_id} has no embedding; expected an id below {vocab_size}"


def layer_tensors(
    layer: DecoderConfig, index: int, *, output_bias: bool, attention_input: int | None = None
) -> dict[str, TensorSpec]:
    """Return the tensors of decoder layer `index`; `attention_input` is what q, k and v read, if not one state.

    `output_bias` says whether `attention_bias` holds for the attention's output projection too.
    """
    hidden, intermediate = layer.hidden_size, layer.intermediate_size
    wide, narrow = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    read = attention_input or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (wide, read),
        "self_attn.k_proj.weight": (narrow, read),
        "self_attn.v_proj.weight": (narrow, read),
        "self_attn.o_proj.weight": (hidden, wide),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if layer.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (wide if name == "q" else narrow,) for name in "qkv"}
        if output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
    if layer.model_type == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (layer.head_dim,), "self_attn.k_norm.weight": (layer.head_dim,)}
    return {f"layers.{index}.{name}": TensorSpec(shape) for name, shape in shapes.items()}
