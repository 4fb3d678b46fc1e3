"""`speculative_config.json`: beside an ordinary language model, what says that it drafts, how, and for whom.

No speculator is made of such a draft: its own configuration and weights are kept. Free of torch and transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from speculators.formats.checkpoint import read_json_object
from speculators.formats.config import MAX_SPECULATIVE_TOKENS, VerifierConfig
from speculators.formats.decoder import Strict
from speculators.formats.faults import Fault, config_faults, error_of, fault

DRAFT_MODEL_FILE = "speculative_config.json"


class DraftModelFile(Strict):
    """The file's keys: those of vLLM's `speculative_config` that such a draft fixes, and the verifier.

    Without `verifier` it can be given to vLLM as it is, with the directory as `model`.
    """

    method: Literal["draft_model"] = "draft_model"
    num_speculative_tokens: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS, description="draft tokens per step")
    parallel_drafting: bool = Field(description="whether mask tokens let one pass draft all tokens of a step")
    verifier: VerifierConfig

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: object = DRAFT_MODEL_FILE) -> Self:
        """Check the parsed file; FormatError names each wrong key, what was got and what was expected."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise error_of(config_faults(error, cls), source) from None

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return self.model_dump()


def read_draft_model_file(path: Path) -> DraftModelFile:
    """Read such a file; FormatError where it is unreadable or says what no draft model can do."""
    try:
        data = read_json_object(path)
    except (ValueError, OSError) as error:
        raise error_of([fault("no-config", f"{path.name}: {error}")], path.parent) from None
    return DraftModelFile.from_json(data, path)


def no_speculator(directory: str | os.PathLike[str]) -> Fault | None:
    """The one fault of a language model with such a file where a speculator is expected; None for any other folder."""
    if not (Path(directory) / DRAFT_MODEL_FILE).is_file():
        return None
    text = (
        f"{DRAFT_MODEL_FILE} makes this a language model that drafts, and no speculator; expected a directory whose "
        "config.json has speculators_model_type. `speculators generate`, `serve` and LLM take this one"
    )
    return fault("no-speculators-model-type", text)
