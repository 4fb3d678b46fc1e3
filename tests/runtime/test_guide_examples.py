"""Every configuration that the guides show is taken as it is, or refused for a reason that is said."""

import re
from typing import Any

import pytest

from speculators.errors import EngineError
from speculators.runtime.additional import AdditionalConfig
from speculators.runtime.config import METHODS, SpeculativeConfig
from speculators.runtime.engine_keywords import TAKEN, check_engine_keywords
from tests.runtime.guide_examples import EXAMPLES, Example


def read(example: Example) -> tuple[SpeculativeConfig, AdditionalConfig]:
    taken: dict[str, Any] = {name: value for name, value in example.engine.items() if name not in TAKEN}
    check_engine_keywords(taken)
    config = SpeculativeConfig.from_dict(example.speculative_config or {})
    additional = AdditionalConfig.from_dict(example.additional_config or {})
    additional.check_against(config)
    return config, additional


def as_written(value: Any) -> Any:
    return [as_written(one) for one in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("example", [pytest.param(one, id=name) for name, one in EXAMPLES])
def test_an_example_is_taken_or_refused_for_a_reason(example: Example) -> None:
    if example.refused is not None:
        with pytest.raises(EngineError, match=example.refused):
            read(example)
        return
    config, additional = read(example)
    for name, value in (example.speculative_config or {}).items():
        assert as_written(getattr(config, name)) == value
    if example.additional_config is not None:
        assert additional != AdditionalConfig()


def test_the_guides_show_every_method_but_two() -> None:
    """`medusa` and `ngram_gpu` are named and not shown."""
    shown = {(one.speculative_config or {}).get("method") for _, one in EXAMPLES}
    assert set(METHODS) - shown == {"medusa", "ngram_gpu"}
    assert len({name for name, _ in EXAMPLES}) == len(EXAMPLES)
    assert all(re.compile(one.refused) for _, one in EXAMPLES if one.refused is not None)
