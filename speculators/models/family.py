"""What a draft family is: the names of its parts, and what a draft inherits from its verifier. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from speculators.errors import VerifierError
from speculators.formats.checkpoint import text_config
from speculators.formats.decoder import ROPE_TYPES
from speculators.models.dense_shape import dense_heads, dense_width, number_of, size_of

if TYPE_CHECKING:
    from speculators.formats.config import SpeculatorConfig
    from speculators.models.draft_model import DraftModel
    from speculators.models.objective import TrainingObjective


@dataclass(frozen=True)
class Count:
    """A sum and what it is divided by, kept apart so that a rate over many batches and ranks is derived once."""

    sum: float
    count: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.sum, self.count))

    def plus(self, other: Count) -> Count:
        """Add two counts of one quantity."""
        return Count(self.sum + other.sum, self.count + other.count)

    @property
    def rate(self) -> float:
        """Sum over count, 0 where nothing was counted."""
        return self.sum / self.count if self.count else 0.0


_FULL_ACCURACY = re.compile(r"full_acc_(\d+)")


def by_position(metrics: Mapping[str, Count]) -> list[Count]:
    """`full_acc_0`, `full_acc_1` ... in order: draft tokens that were right together with all before them."""
    found = {int(match[1]): count for name, count in metrics.items() if (match := _FULL_ACCURACY.fullmatch(name))}
    return [found[position] for position in sorted(found)]


class DraftOptions(Protocol):
    """What a user chooses about a draft; a pydantic model without torch."""

    def resolve(self, verifier: VerifierShape) -> SpeculatorConfig:
        """Complete the choices with what the verifier dictates; pure."""
        ...


@dataclass(frozen=True)
class DraftFamily:
    """A draft architecture with its objective.

    `name` equals `speculators_model_type` and the folder's name. `module` is that folder as a dotted name; its modules
    `draft`, `config`, `model` and `objective` hold the classes `<prefix>Draft`, `<prefix>Config`, `<prefix>Model` and
    `<prefix>Objective`. They are imported on first use, so that a table of families costs nothing. `parity_depth` is
    the draft step up to which training and serving compute the same (None: every step; 1 where training feeds true
    states that serving does not have at later steps). `starts_from` is another family whose trained drafts this one can
    go on from, by a function `from_<that family>` of the folder's module `warm_start`.
    """

    name: str
    module: str
    prefix: str
    parity_depth: int | None = None
    starts_from: str | None = None

    def _part(self, name: str) -> ModuleType:
        return import_module(f"{self.module}.{name}")

    @cached_property
    def draft(self) -> type[Any]:
        """The options class (torch-free); its instances are `DraftOptions`."""
        part: type[Any] = getattr(self._part("draft"), f"{self.prefix}Draft")
        return part

    @cached_property
    def config(self) -> type[SpeculatorConfig]:
        """The schema of this family's config.json (torch-free)."""
        part: type[SpeculatorConfig] = getattr(self._part("config"), f"{self.prefix}Config")
        return part

    @cached_property
    def model(self) -> type[DraftModel]:
        """The network."""
        part: type[DraftModel] = getattr(self._part("model"), f"{self.prefix}Model")
        return part

    @cached_property
    def objective(self) -> type[TrainingObjective]:
        """The training objective; its fields are the knobs of training this family."""
        part: type[TrainingObjective] = getattr(self._part("objective"), f"{self.prefix}Objective")
        return part

    def start_from(self, other: str) -> Callable[..., Any]:
        """What makes a draft of this family of a speculator of family `other`, which is `starts_from`."""
        maker: Callable[..., Any] = getattr(self._part("warm_start"), f"from_{other}")
        return maker


@dataclass(frozen=True)
class VerifierShape:
    """What a draft inherits from its verifier; read from the verifier's config.json alone.

    `vocab_size` is the config's (padding rows included). `rope_parameters` always holds `rope_type` and `rope_theta`.
    `intermediate_size` and the attention heads are those of a dense draft, which a mixture of experts or latent
    attention does not have itself (see `dense_shape`).
    `raw` is the config of the language part as it was read, empty where the shape was put together by hand.
    """

    name_or_path: str
    architectures: tuple[str, ...]
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], name_or_path: str) -> VerifierShape:
        """Read a verifier's config.json.

        A multimodal config's language part (`text_config`) is used. Raises VerifierError where a size or the rope base
        is missing: a guess would train a draft that a server rotates differently.
        """
        text = text_config(config)
        hidden = size_of(text, "hidden_size", name_or_path)
        heads = dense_heads(text, hidden, name_or_path)
        return cls(
            name_or_path=name_or_path,
            architectures=_names(config.get("architectures") or text.get("architectures") or [], name_or_path),
            model_type=str(text.get("model_type") or config.get("model_type") or ""),
            hidden_size=hidden,
            intermediate_size=dense_width(text, hidden, name_or_path),
            num_hidden_layers=_num_layers(text, name_or_path),
            num_attention_heads=heads.num_attention_heads,
            num_key_value_heads=heads.num_key_value_heads,
            head_dim=heads.head_dim,
            vocab_size=size_of(text, "vocab_size", name_or_path),
            max_position_embeddings=size_of(text, "max_position_embeddings", name_or_path),
            rope_parameters=rope_parameters_of(text, name_or_path),
            rms_norm_eps=number_of(text, "rms_norm_eps", 1e-6, name_or_path),
            initializer_range=number_of(text, "initializer_range", 0.02, name_or_path),
            bos_token_id=text.get("bos_token_id"),
            eos_token_id=text.get("eos_token_id"),
            pad_token_id=text.get("pad_token_id"),
            raw=dict(text),
        )


def _num_layers(text: Mapping[str, Any], name_or_path: str) -> int:
    """How many layers there are: the number that is written, or else as many as have a kind (Nemotron-H)."""
    kinds = text.get("layers_block_type")
    if text.get("num_hidden_layers") is None and isinstance(kinds, list) and kinds:
        return len(kinds)
    return size_of(text, "num_hidden_layers", name_or_path)


def _names(value: object, name_or_path: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise VerifierError(
            f"configuration of verifier {name_or_path!r} says architectures={value!r}, where a list of class names is "
            "expected"
        )
    return tuple(value)


def rope_parameters_of(config: Mapping[str, Any], name_or_path: str) -> dict[str, Any]:
    """The rope settings of a model's config as one flat dict with `rope_type` and `rope_theta`.

    `rope_parameters` is read first (of several layer types, full attention counts), then the older `rope_scaling` with
    a flat `rope_theta`. Keys of multi-axis rope are left out: on text all their axes carry the same position. So are
    those that a draft's rope of this type does not have, such as a scale of the attention by position. A "proportional"
    rope is a plain one that leaves a part of each head unturned.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, Mapping) and isinstance(found.get("full_attention"), Mapping):
        found = found["full_attention"]
    if not isinstance(found, Mapping):
        raise VerifierError(f"the configuration of verifier {name_or_path!r} has rope settings {found!r}, no object")
    parameters = {key: value for key, value in found.items() if not key.startswith("mrope") and value is not None}
    legacy_type = parameters.pop("type", None)
    kind = parameters.setdefault("rope_type", legacy_type or "default")
    if kind in ("mrope", "proportional"):
        kind = parameters["rope_type"] = "default"
    if isinstance(kind, str) and kind in ROPE_TYPES:
        known = {"rope_type", "rope_theta", "partial_rotary_factor"}.union(*ROPE_TYPES[kind])
        parameters = {key: value for key, value in parameters.items() if key in known}
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    if parameters.get("rope_theta") is None:
        raise VerifierError(
            f"the configuration of verifier {name_or_path!r} names no rope_theta, neither in rope_parameters nor flat; "
            "write the value the model was trained with, a default would be a guess"
        )
    if parameters["rope_type"] in ("llama3", "yarn") and config.get("original_max_position_embeddings") is not None:
        parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return parameters
