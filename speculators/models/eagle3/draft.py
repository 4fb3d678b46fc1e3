"""What a user chooses about an EAGLE-3 draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from speculators.errors import UsageError
from speculators.formats.faults import refused_as_format_error
from speculators.models.decoder_choices import DecoderChoices, speculators_block
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.family import VerifierShape


class Eagle3Draft(DecoderChoices):
    """The shape of an EAGLE-3 draft. What is None follows the verifier.

    `aux_layer_ids` are capture ids (id i enters decoder layer i, 0 = embeddings, L = last output); the default is
    2, L // 2 and L - 3, each once. `draft_vocab_size` at or above the verifier's vocabulary means all of it, as does
    None. `sliding_window` needs layers of type qwen3, the only ones for which vLLM honours it. `embed_requires_grad`
    trains the embeddings, from the verifier's on; a draft with a `hidden_size` of its own has no others.
    """

    norm_before_residual: bool = True
    norm_before_fc: bool = True
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
        with refused_as_format_error(f"a draft of this shape for {verifier.name_or_path}"):
            return Eagle3Config(
                speculators_config=speculators_block("eagle3", self.num_speculative_tokens, verifier),
                norm_before_residual=self.norm_before_residual,
                norm_before_fc=self.norm_before_fc,
                fc_norm=self.fc_norm,
                norm_output=self.norm_output,
                **fused_fields(self, verifier, self.embed_requires_grad),
            )


def fused_fields(choices: DecoderChoices, verifier: VerifierShape, train_embeddings: bool | None) -> dict[str, Any]:
    """The fields of a `FusedDraftConfig` that follow from the layers and the verifier.

    `train_embeddings` None means only where the verifier's do not fit. Raises UsageError for windows that vLLM ignores
    and for embeddings that are neither the verifier's nor trained.
    """
    if choices.sliding_window is not None and choices.layer_type != "qwen3":
        raise UsageError("sliding_window needs layer_type 'qwen3': vLLM gives llama layers full attention")
    layer, layers = choices.decoder(verifier), verifier.num_hidden_layers
    own_width = layer.hidden_size != verifier.hidden_size
    if own_width and train_embeddings is False:
        raise UsageError(
            f"embed_requires_grad is false, but the verifier's embeddings, {verifier.hidden_size} wide, do not fit "
            f"hidden_size {layer.hidden_size}; leave it out to train embeddings of the draft's own"
        )
    return {
        "transformer_layer_config": layer,
        "target_hidden_size": verifier.hidden_size if own_width else None,
        "dtype": "bfloat16",
        "draft_vocab_size": choices.reduced_vocabulary(verifier),
        "eagle_aux_hidden_state_layer_ids": choices.checked_layer_ids(sorted({2, layers // 2, layers - 3}), layers),
        "embed_requires_grad": own_width if train_embeddings is None else train_embeddings,
    }
