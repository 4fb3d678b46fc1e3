"""What a user chooses about an EAGLE-3 draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from speculators.errors import UsageError
from speculators.models.choices import DecoderChoices, completed
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.family import VerifierShape


class FusedChoices(DecoderChoices):
    """The shape of an EAGLE-3 draft or one of its descendants. What is None follows the verifier.

    `aux_layer_ids` default to 2, L // 2 and L - 3, each once. `sliding_window` needs layers of type qwen3, the only
    ones for which vLLM honours it.
    """

    norm_before_residual: bool = True
    norm_before_fc: bool = True

    def fused_fields(self, verifier: VerifierShape, train_embeddings: bool | None) -> dict[str, Any]:
        """The keys of a `FusedDraftConfig` that follow from these choices and the verifier.

        `train_embeddings` None means only where the verifier's do not fit. UsageError for windows that vLLM ignores and
        for embeddings that are neither the verifier's nor trained.
        """
        if self.sliding_window is not None and self.layer_type != "qwen3":
            raise UsageError("sliding_window needs layer_type 'qwen3': vLLM gives llama layers full attention")
        own_width, layers = self.has_own_width(verifier), verifier.num_hidden_layers
        if own_width and train_embeddings is False:
            raise UsageError(
                f"embed_requires_grad is false, but the verifier's embeddings, {verifier.hidden_size} wide, do not fit "
                f"hidden_size {self.hidden_size}; leave it out to train embeddings of the draft's own"
            )
        default = sorted({2, layers // 2, layers - 3})
        return {
            **self.decoder_fields(verifier),
            "eagle_aux_hidden_state_layer_ids": self.checked_layer_ids(default, verifier),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "embed_requires_grad": own_width if train_embeddings is None else train_embeddings,
        }


class Eagle3Draft(FusedChoices):
    """The shape of an EAGLE-3 draft: `FusedChoices`, and what is recycled from step to step.

    `embed_requires_grad` trains the embeddings, from the verifier's on; a draft with a `hidden_size` of its own has no
    others. The other flags are those of the config.
    """

    fc_norm: bool = False
    norm_output: bool = True
    embed_requires_grad: bool | None = None
    num_speculative_tokens: int = Field(default=3, gt=0)

    def resolve(self, verifier: VerifierShape) -> Eagle3Config:
        """Complete the choices with the verifier's shape.

        Raises UsageError for a choice that contradicts the verifier or another choice, FormatError for what no config
        can say, such as a rotation of the verifier's that no draft can follow (give `rope_parameters` then).
        """
        if self.fc_norm and self.norm_before_fc:
            raise UsageError("fc_norm and norm_before_fc are both true: two ways of one step; set one of them to false")
        return completed(
            Eagle3Config,
            self.num_speculative_tokens,
            verifier,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            **self.fused_fields(verifier, self.embed_requires_grad),
        )
