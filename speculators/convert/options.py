"""What a user tells a conversion beyond the file: the verifier, and what no checkpoint of that kind carries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators.errors import UsageError
from speculators.formats.checkpoint import read_config
from speculators.formats.config import MAX_SPECULATIVE_TOKENS, Dtype, LayerIds
from speculators.formats.hub import fetch_config, is_local, resolve
from speculators.formats.verifier_weights import VerifierWeights, load_verifier_weights
from speculators.models.family import VerifierShape

IdMeaning = Literal["depth", "output"]


class ConvertOptions(BaseModel):
    """What overrides a source's own word, or stands in for what it does not say; None leaves it to the source.

    `aux_layer_ids` are depths of the verifier (i enters layer i, 0 = embeddings). `layer_ids_mean` says how the ids
    that the *file* has are counted, against its producer's habit: `depth`, or `output` of a layer (depth - 1).
    `d2t_holds` says how its vocabulary map is read where both readings are possible.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    aux_layer_ids: LayerIds | None = None
    layer_ids_mean: IdMeaning | None = None
    d2t_holds: Literal["offsets", "ids"] | None = None
    speculative_tokens: int | None = Field(default=None, gt=0, le=MAX_SPECULATIVE_TOKENS)
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    mask_token_id: int | None = Field(default=None, ge=0)
    block_size: int | None = Field(default=None, gt=1)
    sample_from_anchor: bool | None = None
    sliding_window_non_causal: bool | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    dtype: Dtype | None = None

    def require_only(self, kind: str, *known: str) -> None:
        """Raise UsageError where anything but `known` is given, which a checkpoint of this `kind` has no use for."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None and name not in known]
        if given:
            raise UsageError(f"{', '.join(given)} cannot be given for {kind}; expected {', '.join(known)}")


@dataclass(frozen=True)
class ConversionVerifier:
    """The verifier of a draft that is converted: its configuration at once, its weights only where they are needed.

    `name_or_path` is what the result says, an absolute path where it is one; the configuration comes from there, or
    from the hub without weights. UsageError for a revision of a directory, which has none.
    """

    name_or_path: str
    revision: str | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        # A server that reads the result may start anywhere.
        if is_local(self.name_or_path):
            if self.revision is not None:
                text = f"verifier {self.name_or_path} is a directory, which has no revision {self.revision!r}"
                raise UsageError(f"{text}; leave the revision out")
            object.__setattr__(self, "name_or_path", str(Path(self.name_or_path).expanduser().absolute()))

    @cached_property
    def shape(self) -> VerifierShape:
        """Sizes that a draft inherits; VerifierError or SpeculatorsError where they cannot be had."""
        if is_local(self.name_or_path):
            config = read_config(Path(self.name_or_path).expanduser())
        else:
            config = fetch_config(self.name_or_path, self.revision, self.token)
        return VerifierShape.from_config_dict(config, self.name_or_path)

    @property
    def is_here(self) -> bool:
        """Whether its weights lie in a directory, so that comparing with them costs no download."""
        return is_local(self.name_or_path)

    @cached_property
    def weights(self) -> VerifierWeights:
        """Its embedding, head and final norm, downloading them where they are not here."""
        return load_verifier_weights(resolve(self.name_or_path, self.revision, self.token))
