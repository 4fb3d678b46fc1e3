"""What a user chooses about a Medusa draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.models.choices import DraftChoices, completed, reduced_vocabulary, tokens_a_step
from speculators.models.family import VerifierShape
from speculators.models.medusa.config import MedusaConfig


class MedusaDraft(DraftChoices):
    """The shape of a Medusa draft.

    `num_heads` tokens can be drafted a step, each by its own head of `num_layers` residual layers. Every head has an
    output head of its own, trained from the verifier's; with `shared_lm_head` all use the verifier's, frozen.
    `draft_vocab_size` at or above the verifier's vocabulary means all of it, as does None. `num_speculative_tokens`
    defaults to `num_heads`.
    """

    num_heads: int = Field(default=5, ge=1, le=MAX_SPECULATIVE_TOKENS)
    num_layers: int = Field(default=1, ge=1, le=64)
    bias: bool = True
    shared_lm_head: bool = False
    draft_vocab_size: int | None = Field(default=None, gt=0)
    num_speculative_tokens: int | None = Field(default=None, gt=0)

    def resolve(self, verifier: VerifierShape) -> MedusaConfig:
        """Complete the choices with the verifier's shape.

        Raises UsageError where more tokens than heads are asked for, FormatError for what no config can say.
        """
        return completed(
            MedusaConfig,
            tokens_a_step(self.num_speculative_tokens, self.num_heads, "num_heads"),
            verifier,
            medusa_num_heads=self.num_heads,
            medusa_num_layers=self.num_layers,
            medusa_fc_bias=self.bias,
            original_lm_head=self.shared_lm_head,
            hidden_size=verifier.hidden_size,
            vocab_size=verifier.vocab_size,
            truncated_vocab_size=reduced_vocabulary(self.draft_vocab_size, verifier),
            base_model_name_or_path=verifier.name_or_path,
        )
