"""What a resolved P-EAGLE speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from speculators.formats.config import TensorSpec, mask_token_problem
from speculators.formats.faults import contradictions
from speculators.models.eagle3.config import FusedDraftConfig


class PEagleConfig(FusedDraftConfig):
    """P-EAGLE (arXiv 2602.01469): EAGLE-3 layers that draft every token in one pass.

    Slots behind the last verified token read the embedding of `mask_token_id`, a row of the embedding table, and
    `mask_hidden` in place of the verifier's states. No state is recycled, so that `norm_output` means nothing: it is
    read, and written as false. `fc_norm` is refused, since engines do not pass it on.
    """

    architectures: list[str] = Field(default=["PEagleDraftModel"], min_length=1)
    speculators_model_type: Literal["peagle"] = Field(default="peagle", description="the speculator's family")
    mask_token_id: int = Field(ge=0, lt=1 << 24, description="the token whose embedding unknown tokens have")
    embed_requires_grad: bool = True
    fc_norm: Literal[False] = False
    norm_output: Literal[False] = False

    @field_validator("norm_output", mode="before")
    @classmethod
    def _means_nothing(cls, value: object) -> object:
        return False if value is True else value

    @field_validator("fc_norm", mode="before")
    @classmethod
    def _is_not_passed_on(cls, value: object) -> object:
        if value is True:
            text = "fc_norm is true, which engines do not pass on to a P-EAGLE draft; expected false"
            contradictions([("fc-norm-not-read", f"{text}; train with norm_before_fc or without")])
        return value

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        yield from mask_token_problem(self.mask_token_id, self.transformer_layer_config.vocab_size)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor: those of EAGLE-3, and `mask_hidden` [1, 1, A*Ht]."""
        return super().expected_tensors() | {"mask_hidden": TensorSpec((1, 1, self.num_features))}
