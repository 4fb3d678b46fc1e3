"""What each key of the schema does, as a table."""

from collections.abc import Iterator
from typing import Any

from speculators.runtime.additional import AdditionalConfig
from speculators.runtime.config import MISPLACED, SpeculativeConfig
from speculators.runtime.schema import Coverage, Key, Nested, keys_of


def described_keys(config: type[Any], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every described key of a configuration and of those inside it, by its dotted name."""
    for name, description in keys_of(config).items():
        yield prefix + name, description
        if isinstance(description.kind, Nested):
            yield from described_keys(description.kind.config, f"{prefix}{name}.")


def schema_coverage() -> dict[str, dict[str, str]]:
    """Each key of `speculative_config`, and each of `additional_config` after that name, with `coverage` and `reason`.

    `coverage` is "effect", "neutral" or "refused" (see `schema.Key`); `reason` says what the key changes, why it
    changes nothing, or why it is refused.
    """
    keys = [*described_keys(SpeculativeConfig), *described_keys(AdditionalConfig, "additional_config.")]
    rows = {name: _row(description.coverage, description.about) for name, description in keys}
    return rows | {name: _row("refused", instead) for name, instead in MISPLACED.items()}


def _row(coverage: Coverage, reason: str) -> dict[str, str]:
    return {"coverage": coverage, "reason": reason}
