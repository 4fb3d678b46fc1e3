"""What several keys of `speculative_config` say together, and the lists among its values."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from speculators.errors import EngineError
from speculators.formats.hidden_states_options import LAYER_IDS
from speculators.runtime.schema import Number, changed_keys

if TYPE_CHECKING:
    from speculators.runtime.config import SpeculativeConfig

WHERE = "speculative_config"
# Drafts nothing: the states of these layers go to files instead.
EXTRACT_METHOD = "extract_hidden_states"
NGRAM_METHODS = ("ngram", "ngram_gpu")

BatchSizeRange = tuple[int, int, int]


@dataclass(frozen=True)
class BatchSizeRanges:
    """Depths by batch size: closed ranges [start, end, K] that begin at 1 and do not overlap, kept by their start."""

    expected: ClassVar[str] = "a list of [start, end, K] with 1 <= start <= end and K >= 0, the first from 1 on"

    def read(self, value: object) -> tuple[BatchSizeRange, ...]:
        """The ranges in order."""
        if not isinstance(value, list | tuple) or not value:
            raise ValueError
        ranges = sorted(_range(item) for item in value)
        if ranges[0][0] != 1:
            raise ValueError(f"the first range starts at {ranges[0][0]}, so that no K is known for batch size 1")
        for (start, end, _), (later, last, _) in pairwise(ranges):
            if later <= end:
                raise ValueError(f"[{start}, {end}] and [{later}, {last}] overlap")
        return tuple(ranges)


def _range(item: object) -> BatchSizeRange:
    if not isinstance(item, list | tuple) or len(item) != 3:
        raise ValueError(f"{item!r} is no [start, end, K]")
    for number in item:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{item!r} has {number!r}, which is no whole number")
    start, end, depth = item
    if start < 1 or end < start or depth < 0:
        raise ValueError(f"{list(item)!r} is no range of batch sizes with a K")
    return start, end, depth


@dataclass(frozen=True)
class Rates:
    """Shares in [0, 1], none above the one before it."""

    expected: ClassVar[str] = "a list of numbers in [0, 1] that do not increase, one a draft token"

    def read(self, value: object) -> tuple[float, ...]:
        """The shares."""
        if not isinstance(value, list | tuple) or not value:
            raise ValueError
        share = Number(0, 1)
        try:
            rates = tuple(share.read(one) for one in value)
        except ValueError:
            raise ValueError("it has an entry outside [0, 1]") from None
        for earlier, later in pairwise(rates):
            if later > earlier:
                raise ValueError(f"{later} follows {earlier}; rates are those of all tokens up to the one meant")
        return rates


def check_together(config: "SpeculativeConfig") -> None:
    """Refuse keys that contradict each other; what needs the method or the depth waits until they are known."""
    _check_methods(config)
    _check_synthetic(config)
    _check_lookup(config)
    if config.use_heterogeneous_vocab and config.draft_sample_method != "greedy":
        raise EngineError(
            f"{WHERE}: draft_sample_method={config.draft_sample_method!r} with use_heterogeneous_vocab: expected "
            "'greedy', since a draft's probabilities are not those of the verifier's tokens"
        )
    if config.enable_adaptive_verification and config.num_speculative_tokens_per_batch_size is not None:
        raise EngineError(
            f"{WHERE}: enable_adaptive_verification and num_speculative_tokens_per_batch_size both decide how many "
            "drafts are verified; expected one of them"
        )
    if config.method == EXTRACT_METHOD:
        _check_extraction(config)


def _check_methods(config: "SpeculativeConfig") -> None:
    if config.method is None:
        return
    for name, description, value in changed_keys(config):
        # False asks for nothing.
        if description.methods is not None and config.method not in description.methods and value is not False:
            methods = ", ".join(repr(one) for one in description.methods)
            raise EngineError(
                f"{WHERE}: {name} is for method {methods}, got {name}={value!r} with method={config.method!r}"
            )


def _check_synthetic(config: "SpeculativeConfig") -> None:
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    given = [name for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length") if getattr(config, name)]
    if config.rejection_sample_method != "synthetic":
        if given:
            raise EngineError(
                f"{WHERE}: {given[0]}={getattr(config, given[0])!r} with rejection_sample_method="
                f"{config.rejection_sample_method!r}: expected 'synthetic', which alone accepts at a given rate"
            )
        return
    if len(given) != 1:
        raise EngineError(
            f"{WHERE}: rejection_sample_method='synthetic' with {' and '.join(given) or 'no rate'}: expected one of "
            "synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    depth = config.num_speculative_tokens
    if depth is None:
        return
    if rates is not None and len(rates) != depth:
        raise EngineError(
            f"{WHERE}: synthetic_acceptance_rates={list(rates)} has {len(rates)} entries: expected {depth}, one for "
            "each of num_speculative_tokens"
        )
    if length is not None and length > depth + 1:
        raise EngineError(
            f"{WHERE}: synthetic_acceptance_length={length}: expected a number in [1, {depth + 1}], at most one more "
            f"than num_speculative_tokens={depth}"
        )


def _check_lookup(config: "SpeculativeConfig") -> None:
    least, most = config.prompt_lookup_min, config.prompt_lookup_max
    if least is not None and most is not None and least > most:
        raise EngineError(
            f"{WHERE}: prompt_lookup_min={least} with prompt_lookup_max={most}: expected a prompt_lookup_min in "
            f"[1, {most}]"
        )


def _check_extraction(config: "SpeculativeConfig") -> None:
    where = f"{WHERE}: method {EXTRACT_METHOD!r} drafts nothing"
    if config.num_speculative_tokens not in (None, 1):
        raise EngineError(f"{where}: num_speculative_tokens={config.num_speculative_tokens}, expected 1")
    if config.model is not None:
        raise EngineError(f"{where}: model={config.model!r}, expected no model")
    layer_ids_of(config.draft_model_config)


def layer_ids_of(draft_model_config: object) -> tuple[int, ...]:
    """Capture ids of `extract_hidden_states`, ascending and distinct; EngineError where they are none."""
    where = f"{WHERE}: draft_model_config.hf_config.{LAYER_IDS}"
    given = _only(_only(draft_model_config, "draft_model_config", "hf_config"), "hf_config", LAYER_IDS)
    if not isinstance(given, list | tuple) or not given:
        raise EngineError(f"{where} is {given!r}, expected layer ids like [2, 15, 27, 30]")
    wrong = [one for one in given if isinstance(one, bool) or not isinstance(one, int) or one < 0]
    if wrong:
        raise EngineError(f"{where} has {wrong[0]!r}, expected whole numbers of at least 0")
    return tuple(sorted(set(given)))


def _only(given: object, where: str, name: str) -> object:
    """The value of the one key that a mapping may have."""
    if not isinstance(given, Mapping):
        raise EngineError(f"{WHERE}: {where} is {given!r}, expected {{{name!r}: ...}}")
    others = [one for one in given if one != name]
    if others or name not in given:
        got = ", ".join(repr(one) for one in given) or "nothing"
        raise EngineError(f"{WHERE}: {where} has {got}; expected the key {name!r} alone")
    return given[name]
