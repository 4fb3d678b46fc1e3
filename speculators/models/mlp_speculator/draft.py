"""What a user chooses about an MLPSpeculator, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.models.choices import DraftChoices, completed, tokens_a_step
from speculators.models.family import VerifierShape
from speculators.models.mlp_speculator.config import MlpSpeculatorConfig


class MlpSpeculatorDraft(DraftChoices):
    """The shape of an MLPSpeculator.

    `n_predict` tokens can be drafted a step; the recurrence has the verifier's width unless `inner_dim` is given.
    `tie_weights` and `scale_input` as in the config. `num_speculative_tokens` defaults to `n_predict`. The tree that
    IBM's runtime would verify takes `top_k_tokens_per_head` at each depth (by default 5, 4, 3, ... and at least 1) and
    keeps the best `n_candidates` sequences.
    """

    n_predict: int = Field(default=3, ge=1, le=MAX_SPECULATIVE_TOKENS)
    inner_dim: int | None = Field(default=None, gt=0)
    tie_weights: bool = True
    scale_input: bool = True
    top_k_tokens_per_head: list[int] | None = None
    n_candidates: int = Field(default=5, gt=0)
    num_speculative_tokens: int | None = Field(default=None, gt=0)

    def resolve(self, verifier: VerifierShape) -> MlpSpeculatorConfig:
        """Complete the choices with the verifier's shape.

        Raises UsageError where more tokens than steps are asked for, FormatError for what no config can say.
        """
        candidates = self.top_k_tokens_per_head or [max(5 - step, 1) for step in range(self.n_predict)]
        return completed(
            MlpSpeculatorConfig,
            tokens_a_step(self.num_speculative_tokens, self.n_predict, "n_predict"),
            verifier,
            vocab_size=verifier.vocab_size,
            emb_dim=verifier.hidden_size,
            inner_dim=self.inner_dim or verifier.hidden_size,
            n_predict=self.n_predict,
            top_k_tokens_per_head=candidates,
            n_candidates=self.n_candidates,
            tie_weights=self.tie_weights,
            scale_input=self.scale_input,
        )
