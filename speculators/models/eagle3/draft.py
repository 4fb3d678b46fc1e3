"""What a user chooses about an EAGLE-3 draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators.errors import UsageError
from speculators.formats.config import DecoderConfig, ProposalConfig, SpeculatorsConfig, VerifierConfig
from speculators.formats.faults import refused_as_format_error
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.family import VerifierShape

DEFAULT_DRAFT_VOCAB_SIZE = 8192


class Eagle3Draft(BaseModel):
    """The shape of an EAGLE-3 draft. What is None follows the verifier.

    `aux_layer_ids` are capture ids (id i enters decoder layer i, 0 = embeddings, L = last output); the default is
    2, L // 2 and L - 3, each once. `draft_vocab_size` at or above the verifier's vocabulary means all of it, as does
    None. `sliding_window` needs layers of type qwen3, the only ones for which vLLM honours it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_layers: int = Field(default=1, ge=1, le=64)
    layer_type: Literal["llama", "qwen3"] = "llama"
    aux_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = Field(default=DEFAULT_DRAFT_VOCAB_SIZE, gt=0)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(default=None, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)
    attention_bias: bool = False
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = True
    num_speculative_tokens: int = Field(default=3, gt=0)

    def resolve(self, verifier: VerifierShape) -> Eagle3Config:
        """Complete the choices with the verifier's shape.

        Raises UsageError for a choice that contradicts the verifier or another choice, FormatError for what no config
        can say, such as a rotation of the verifier's that no draft can follow (give `rope_parameters` then).
        """
        if self.fc_norm and self.norm_before_fc:
            raise UsageError("fc_norm and norm_before_fc are both true: two ways of one step; set one of them to false")
        with refused_as_format_error(f"a draft of this shape for {verifier.name_or_path}"):
            return self._config(verifier)

    def _config(self, verifier: VerifierShape) -> Eagle3Config:
        vocab = verifier.vocab_size
        return Eagle3Config(
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[ProposalConfig(speculative_tokens=self.num_speculative_tokens)],
                verifier=VerifierConfig(name_or_path=verifier.name_or_path, architectures=list(verifier.architectures)),
            ),
            transformer_layer_config=self._decoder(verifier),
            dtype="bfloat16",
            draft_vocab_size=min(self.draft_vocab_size or vocab, vocab),
            eagle_aux_hidden_state_layer_ids=self._aux_layer_ids(verifier.num_hidden_layers),
            norm_before_residual=self.norm_before_residual,
            norm_before_fc=self.norm_before_fc,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
        )

    def _aux_layer_ids(self, num_layers: int) -> list[int]:
        given = self.aux_layer_ids
        ids = sorted({2, num_layers // 2, num_layers - 3}) if given is None else given
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
            raise UsageError(
                f"aux_layer_ids {'defaults to' if given is None else 'is'} {ids}; expected ascending ids, each once, "
                f"from 0 (embeddings) to {num_layers} (the output of the verifier's last layer)"
            )
        return list(ids)

    def _decoder(self, verifier: VerifierShape) -> DecoderConfig:
        if self.sliding_window is not None and self.layer_type != "qwen3":
            raise UsageError("sliding_window needs layer_type 'qwen3': vLLM gives llama layers full attention")
        # A part of a head left unturned is the verifier's own business: the draft turns whole heads on both sides.
        rope = {key: value for key, value in verifier.rope_parameters.items() if key != "partial_rotary_factor"}
        sliding = self.sliding_window is not None
        return DecoderConfig(
            model_type=self.layer_type,
            hidden_size=verifier.hidden_size,
            intermediate_size=self.intermediate_size or verifier.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads or verifier.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads or verifier.num_key_value_heads,
            head_dim=self.head_dim or verifier.head_dim,
            vocab_size=verifier.vocab_size,
            rms_norm_eps=self.rms_norm_eps or verifier.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings or verifier.max_position_embeddings,
            rope_parameters=self.rope_parameters or rope,
            attention_bias=self.attention_bias,
            layer_types=["sliding_attention" if sliding else "full_attention"] * self.num_layers,
            sliding_window=self.sliding_window,
            use_sliding_window=sliding,
            initializer_range=verifier.initializer_range,
            bos_token_id=verifier.bos_token_id,
            eos_token_id=verifier.eos_token_id,
            pad_token_id=verifier.pad_token_id,
        )
