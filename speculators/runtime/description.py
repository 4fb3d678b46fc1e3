"""What the files of a language model say of it before its weights are read."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from speculators.errors import VerifierError
from speculators.models.layers import STATIC_ROPE_TYPES

# Beside those that drafts know: that of Gemma 4's full attention, which turns a share of each head's dimensions.
_STATIC_TYPES = (*STATIC_ROPE_TYPES, "proportional")


class LanguageModel(Protocol):
    """A causal language model, loaded or not: its configuration (of its language part), tokenizer and sizes."""

    @property
    def name_or_path(self) -> str:
        """What a user calls it."""
        ...

    @property
    def config(self) -> PretrainedConfig:
        """The language part of its config.json."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer, where it has one."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest sequence the positions were made for, None where nothing says so."""
        ...


def has_static_rotation(config: PretrainedConfig) -> bool:
    """Whether a token is rotated by its position alone, whatever the length of its sequence (not so for `dynamic`)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in parameters.values() if isinstance(one, dict)]
    return all(one.get("rope_type", "default") in _STATIC_TYPES for one in nested or [parameters])


@dataclass(frozen=True)
class ModelDescription:
    """A language model whose weights are not loaded; its files are read as they are asked for.

    VerifierError where one of them cannot be read.
    """

    name_or_path: str
    revision: str | None = None
    trust_remote_code: bool = False
    tokenizer_path: str | None = None

    @cached_property
    def config(self) -> PretrainedConfig:
        """The language part of its config.json."""
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                self.name_or_path, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise VerifierError(
                f"model {self.name_or_path!r} cannot be read: {error}. Give a local folder with config.json, "
                "safetensors and a tokenizer, or a hub id."
            ) from error
        return config.get_text_config()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer."""
        path = self.tokenizer_path or self.name_or_path
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                path, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise VerifierError(
                f"model {self.name_or_path!r}: its tokenizer cannot be read from {path!r}: {error}"
            ) from error
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int | None:
        """Longest sequence the positions were made for, None where nothing says so."""
        length = getattr(self.config, "max_position_embeddings", None)
        return None if length is None else int(length)
