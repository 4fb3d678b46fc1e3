"""What a resolved Medusa speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from speculators.formats.config import MAX_SPECULATIVE_TOKENS, SpeculatorConfig, TensorSpec
from speculators.formats.decoder import Size, Vocabulary


class MedusaConfig(SpeculatorConfig):
    """Medusa: residual blocks and a head over the vocabulary for each token ahead.

    Keys are those of Medusa's own files (`medusa_num_heads`, `medusa_num_layers`, `base_model_name_or_path`), which
    vLLM reads too, and of vLLM's `MedusaConfig` for the rest. `original_lm_head` says that all heads share one output
    head, the verifier's. `truncated_vocab_size` equals `vocab_size` where every token can be proposed. Neither
    `medusa_fc_bias` nor `original_lm_head` has a default: readers take an absent bias for there or not there.
    """

    architectures: list[str] = Field(default=["MedusaModel"], min_length=1)
    speculators_model_type: Literal["medusa"] = Field(default="medusa", description="the speculator's family")
    medusa_num_heads: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS, description="tokens that a step can draft")
    medusa_num_layers: int = Field(gt=0, le=64, description="residual layers before each output head")
    medusa_fc_bias: bool = Field(description="whether the residual layers have biases")
    original_lm_head: bool = Field(description="whether the heads share the verifier's output head")
    hidden_size: Size
    vocab_size: Vocabulary
    truncated_vocab_size: Vocabulary = Field(description="tokens that can be proposed; vocab_size for all")
    base_model_name_or_path: str | None = Field(default=None, description="the verifier, as Medusa's own files name it")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        drafted, heads = self.num_speculative_tokens, self.medusa_num_heads
        if drafted > heads:
            yield "contradiction", f"speculative_tokens is {drafted} but medusa_num_heads is {heads}: a head a token"
        if self.truncated_vocab_size > self.vocab_size:
            text = f"truncated_vocab_size {self.truncated_vocab_size} exceeds vocab_size {self.vocab_size}"
            yield "contradiction", text
        name = self.verifier.name_or_path
        if self.base_model_name_or_path not in (None, name):
            text = f"base_model_name_or_path is {self.base_model_name_or_path!r} but verifier.name_or_path {name!r}"
            yield "contradiction", text

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds; the verifier is named the way Medusa's own files do it besides."""
        return super().to_json() | {"base_model_name_or_path": self.verifier.name_or_path}

    @property
    def max_speculative_tokens(self) -> int:
        """A token a head."""
        return self.medusa_num_heads

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's last state, and of everything here."""
        return self.hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""
        return self.vocab_size

    @property
    def num_draft_ids(self) -> int:
        """Tokens that can be proposed."""
        return self.truncated_vocab_size

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        heads = f"{self.medusa_num_heads} head{'s' if self.medusa_num_heads > 1 else ''}"
        layers = f"{self.medusa_num_layers} residual layer{'' if self.medusa_num_layers == 1 else 's'}"
        return f"{heads} of {layers} of width {self.hidden_size}"

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's Medusa loader names and shapes them.

        A shared output head is stored, once: vLLM does not take the verifier's. `token_map` (the verifier's id of each
        draft id, ascending) is there exactly when the vocabulary is truncated.
        """
        hidden, drafted = self.hidden_size, self.truncated_vocab_size
        tensors: dict[str, TensorSpec] = {}
        for head in range(self.medusa_num_heads):
            for layer in range(self.medusa_num_layers):
                tensors[f"blocks.{head}.layers.{layer}.weight"] = TensorSpec((hidden, hidden))
                if self.medusa_fc_bias:
                    tensors[f"blocks.{head}.layers.{layer}.bias"] = TensorSpec((hidden,))
            if not self.original_lm_head:
                tensors[f"lm_heads.{head}.weight"] = TensorSpec((drafted, hidden))
        if self.original_lm_head:
            tensors["lm_head.weight"] = TensorSpec((drafted, hidden))
        if drafted < self.vocab_size:
            tensors["token_map"] = TensorSpec((drafted,), "int")
        return tensors
