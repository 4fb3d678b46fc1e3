"""What a resolved DFlash 2 speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from speculators.formats.config import TensorSpec
from speculators.models.dflash.config import BlockDraftConfig


class DFlash2Config(BlockDraftConfig):
    """DFlash 2: a block drafter with convolutions along the block and a candidate selector behind its head.

    None of the four keys has a default: vLLM fails without them. Candidates are ids of the verifier's vocabulary, which
    the draft therefore proposes in full.
    """

    architectures: list[str] = Field(default=["DFlash2DraftModel"], min_length=1)
    speculators_model_type: Literal["dflash2"] = Field(default="dflash2", description="the speculator's family")
    sliding_window_non_causal: bool = True
    conv_kernel_size: int = Field(gt=0, le=1024, description="slots that a convolution reads, its own included")
    conv_group_size: int = Field(gt=0, le=1 << 20, description="channels that share a dynamic kernel")
    selector_rank: int = Field(gt=0, le=1 << 16, description="width of the selector's codebooks")
    selector_top_k: int = Field(gt=0, le=1 << 16, description="candidates a slot that the selector chooses from")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        layer = self.transformer_layer_config
        if layer.hidden_size % self.conv_group_size:
            text = f"conv_group_size {self.conv_group_size} does not divide hidden_size {layer.hidden_size}"
            yield "contradiction", text
        if self.draft_vocab_size < layer.vocab_size:
            text = (
                f"draft_vocab_size is {self.draft_vocab_size}; a DFlash 2 draft proposes all {layer.vocab_size} tokens"
            )
            yield "reduced-vocabulary", f"{text}, because engines read candidates as the verifier's ids"
        if self.selector_top_k > layer.vocab_size:
            text = f"selector_top_k {self.selector_top_k} exceeds vocab_size {layer.vocab_size}"
            yield "contradiction", text

    @property
    def num_conv_coefficients(self) -> int:
        """Rows of a kernel projection, ordered [side, tap, group]."""
        return 2 * self.conv_kernel_size * (self.transformer_layer_config.hidden_size // self.conv_group_size)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's DFlash 2 loader names and shapes them."""
        layer = self.transformer_layer_config
        hidden, codebook = layer.hidden_size, (layer.vocab_size, self.selector_rank)
        shapes: dict[str, tuple[int, ...]] = {
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
            "candidate_selector.hidden_projection.weight": (self.selector_rank, hidden),
        }
        for index in range(layer.num_hidden_layers):
            for name in ("attention_conv", "mlp_conv"):
                place = f"layers.{index}.{name}"
                shapes[f"{place}.base_kernel"] = (2, self.conv_kernel_size, hidden)
                shapes[f"{place}.kernel_projection.weight"] = (self.num_conv_coefficients, hidden)
        return super().expected_tensors() | {name: TensorSpec(shape) for name, shape in shapes.items()}

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        return f"{super().network()} with convolutions, and a selector among {self.selector_top_k} candidates a token"
