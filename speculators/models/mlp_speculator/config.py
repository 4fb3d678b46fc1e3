"""What a resolved MLPSpeculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from speculators.formats.config import MAX_SPECULATIVE_TOKENS, SpeculatorConfig, TensorSpec
from speculators.formats.decoder import Size, Vocabulary


class MlpSpeculatorConfig(SpeculatorConfig):
    """MLPSpeculator: `n_predict` steps of a recurrence, each with an embedding, a projection, a norm and a head.

    Keys are those of IBM's files, which vLLM's `MLPSpeculatorConfig` has too. `emb_dim` is the width of the verifier's
    state, `inner_dim` that of the recurrence (0: `emb_dim`). `top_k_tokens_per_head` and `n_candidates` describe the
    tree of candidates that IBM's own runtime verifies; drafting here follows one sequence. `tie_weights` and
    `scale_input` have no defaults: every reader has others.
    """

    architectures: list[str] = Field(default=["MLPSpeculatorPreTrainedModel"], min_length=1)
    speculators_model_type: Literal["mlp_speculator"] = Field(
        default="mlp_speculator", description="the speculator's family"
    )
    vocab_size: Vocabulary
    emb_dim: Size
    inner_dim: int = Field(ge=0, le=1 << 20, description="width of the recurrence; 0 for emb_dim")
    n_predict: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS, description="tokens that a step can draft")
    top_k_tokens_per_head: list[Annotated[int, Field(gt=0, le=1 << 20)]]
    n_candidates: int = Field(default=5, gt=0, le=1 << 20)
    tie_weights: bool = Field(description="whether all steps share embedding, norm and head, and all but the first "
                              "their projection")  # fmt: skip
    scale_input: bool = Field(description="whether the verifier's state is normed and divided by the root of 2")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        if len(self.top_k_tokens_per_head) != self.n_predict:
            text = f"top_k_tokens_per_head has {len(self.top_k_tokens_per_head)} entries; n_predict is {self.n_predict}"
            yield "contradiction", text
        if self.num_speculative_tokens > self.n_predict:
            text = f"speculative_tokens is {self.num_speculative_tokens} but n_predict is {self.n_predict}"
            yield "contradiction", text
        if self.tie_weights and self.n_predict == 1:
            yield "contradiction", "tie_weights is true and n_predict is 1: one step has nothing to share"

    @property
    def width(self) -> int:
        """Of the recurrence's state."""
        return self.inner_dim or self.emb_dim

    @property
    def max_speculative_tokens(self) -> int:
        """A token a head."""
        return self.n_predict

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's last state."""
        return self.emb_dim

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""
        return self.vocab_size

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        steps = f"{self.n_predict} step{'s' if self.n_predict > 1 else ''}"
        return f"{steps} of a recurrence of width {self.width}{' with tied weights' if self.tie_weights else ''}"

    def copies(self) -> dict[str, str]:
        """Return, of tied weights, the tensors that a file may hold besides, and which stored one each must equal."""
        if not self.tie_weights:
            return {}
        names = ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
        found = {name.format(step): name.format(0) for step in range(1, self.n_predict) for name in names}
        return found | {f"proj.{step}.weight": "proj.1.weight" for step in range(2, self.n_predict)}

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as IBM's files and vLLM name them, without a prefix.

        Of tied weights the first is stored; a file that holds the copies too is read where they are equal.
        """
        inner, copies = self.width, self.copies()
        tensors: dict[str, TensorSpec] = {}
        for step in range(self.n_predict):
            shapes: dict[str, tuple[int, ...]] = {
                f"emb.{step}.weight": (self.vocab_size, inner),
                f"proj.{step}.weight": (inner, inner if step else self.emb_dim),
                f"ln.{step}.weight": (inner,),
                f"ln.{step}.bias": (inner,),
                f"head.{step}.weight": (self.vocab_size, inner),
            }
            tensors |= {name: TensorSpec(shape, required=name not in copies) for name, shape in shapes.items()}
        return tensors
