"""Whether a converted draft is read as it was trained: acceptance under each reading that its file leaves open.

Layer ids that are one off, or a flag of a norm the wrong way round, raise nothing and slow nothing but the acceptance.
Weights are never changed: a reading is another configuration over the same tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

from speculators.errors import FormatError, UsageError
from speculators.formats.config import DecoderDraftConfig, SpeculatorConfig
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.speculator import Speculator
from speculators.runtime.evaluate import Conversation, EvaluateOptions, measure_each
from speculators.runtime.stats import SpecDecodeStats
from speculators.runtime.verifier import Verifier

PROMPTS = Path(__file__).parent / "check_prompts.jsonl"
# Of a small verifier, whose neighbouring layers are much alike, a quarter of it does not tell shifted ids from chance.
MAX_NEW_TOKENS = 128
# Flags that change what a draft computes from the same tensors, and that most files do not carry.
FLAGS = ("norm_before_residual", "norm_output", "sample_from_anchor", "sliding_window_non_causal")
WRITTEN = "as written"
# Standard errors of a sum of differences that chance alone hardly makes.
_BEYOND_NOISE = 2.0
# Mean tokens of a verification below which a draft is of no use under any reading.
_HARDLY_ANY = 1.05


@dataclass(frozen=True)
class Reading:
    """One way to read a draft: keys of its `config.json` that are changed, and the options that ask for it."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What a reading accepted, prompt by prompt."""

    reading: Reading
    each: tuple[SpecDecodeStats, ...]

    @property
    def num_drafts(self) -> int:
        """Verifications of drafts over all prompts."""
        return sum(one.num_drafts for one in self.each)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were kept over all prompts."""
        return sum(one.num_accepted_tokens for one in self.each)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification; 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def surely_beats(self, other: Measured) -> bool:
        """Whether it needed fewer verifications for the same answers than chance explains, prompt against prompt.

        A single prompt says nothing about chance.
        """
        saved = [theirs.num_drafts - mine.num_drafts for mine, theirs in zip(self.each, other.each, strict=True)]
        if len(saved) < 2:
            return False
        return sum(saved) > _BEYOND_NOISE * stdev(saved) * sqrt(len(saved))


@dataclass(frozen=True)
class Check:
    """Acceptance under every reading, the written one first."""

    measured: tuple[Measured, ...]

    @property
    def written(self) -> Measured:
        """The reading that the converted directory has."""
        return self.measured[0]

    @property
    def best(self) -> Measured:
        """The reading that accepts most."""
        return max(self.measured, key=lambda one: one.acceptance_length)

    @property
    def better(self) -> Measured | None:
        """The best reading where it beats the written one beyond noise."""
        gains = self.best.acceptance_length > self.written.acceptance_length
        return self.best if gains and self.best.surely_beats(self.written) else None

    @property
    def warning(self) -> str | None:
        """What is wrong in a sentence, with the options to convert with; None where nothing is."""
        better, written = self.better, self.written
        if better is not None:
            given = ", ".join(f"{name} = {value}" for name, value in better.reading.options.items())
            return (
                f"the draft accepts more when read otherwise: {better.acceptance_length:.2f} tokens a step with "
                f"{better.reading.name} against {written.acceptance_length:.2f} {WRITTEN}; convert again with {given}"
            )
        if written.acceptance_length < _HARDLY_ANY:
            return (
                f"hardly a draft is accepted under any reading ({written.acceptance_length:.2f} tokens a step): the "
                "weights are not trained, not for this verifier, or not what their names say"
            )
        return None

    def to_json(self) -> list[dict[str, Any]]:
        """`[{reading, acceptance_length, num_drafts, num_accepted_tokens, options}]`, the written reading first."""
        return [
            {
                "reading": one.reading.name,
                "acceptance_length": one.acceptance_length,
                "num_drafts": one.num_drafts,
                "num_accepted_tokens": one.num_accepted_tokens,
                "options": dict(one.reading.options),
            }
            for one in self.measured
        ]


def check(
    directory: str | os.PathLike[str],
    prompts: Sequence[Conversation | Sequence[int]] | None = None,
    *,
    verifier: Verifier | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Check:
    """Measure a speculator directory under every reading of its tensors, answering prompts greedily.

    `prompts` are conversations or token ids, the twenty of this package where None. The verifier is loaded where none
    is given. VerifierError where it cannot be, FormatError where the directory is no speculator.
    """
    speculator = Speculator.from_pretrained(directory)
    verifier = verifier or Verifier.from_pretrained(speculator.config.verifier.name_or_path)
    return check_speculator(speculator, verifier, built_in_prompts() if prompts is None else prompts, max_new_tokens)


def check_speculator(
    speculator: Speculator,
    verifier: Verifier,
    prompts: Sequence[Conversation | Sequence[int]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Check:
    """The same for a speculator and a verifier that are loaded already."""
    if not prompts:
        raise UsageError("there is nothing to check with: no prompts; give a JSONL file with at least one row")
    speculator.attach_verifier(VerifierWeights.from_model(verifier.model))
    candidates = [(one, _config_of(speculator.config, one)) for one in readings(speculator.config)]
    read = [
        (one, speculator.read_as(config))
        for one, config in candidates
        if config is not None and max(config.aux_layer_ids, default=0) <= verifier.num_layers
    ]
    # One depth for all: where a block's readings differ in how many tokens it predicts, the fewest.
    most = [one.config.max_speculative_tokens for _, one in read]
    depth = min([speculator.num_speculative_tokens, *(item for item in most if item is not None)])
    options = EvaluateOptions(depth, max_new_tokens, max_num_seqs=min(len(prompts), 8))
    asked = [_asked(verifier, prompt) for prompt in prompts]
    return Check(tuple(Measured(reading, tuple(measure_each(verifier, one, asked, options))) for reading, one in read))


def readings(config: SpeculatorConfig) -> Iterator[Reading]:
    """Every reading of a draft's tensors that its file alone could not rule out, the written one first."""
    yield Reading(WRITTEN)
    if isinstance(config, DecoderDraftConfig):
        for shift in (1, -1):
            ids = [item + shift for item in config.aux_layer_ids]
            name = f"layer ids {'+' if shift > 0 else '-'} 1"
            yield Reading(name, {config.layer_ids_key: ids}, {"aux_layer_ids": ids})
    for flag in FLAGS:
        if flag in type(config).model_fields:
            flipped = not getattr(config, flag)
            yield Reading(f"{flag} {str(flipped).lower()}", {flag: flipped}, {flag: flipped})


def _config_of(config: SpeculatorConfig, reading: Reading) -> SpeculatorConfig | None:
    """The configuration of a reading; None where it is none of this draft's, such as a layer below the embeddings."""
    written = config.to_json()
    written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 1
    try:
        return type(config).from_json(written | dict(reading.changes))
    except FormatError:
        return None


def built_in_prompts() -> list[Conversation]:
    """The twenty conversations of this package, of one turn each."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


def _asked(verifier: Verifier, prompt: Conversation | Sequence[int]) -> Conversation | Sequence[int]:
    """The prompt; where the verifier has no chat template, the token ids of its last message."""
    messages = [item for item in prompt if isinstance(item, Mapping)]
    tokenizer = verifier.tokenizer
    if not messages or getattr(tokenizer, "chat_template", None):
        return prompt
    if tokenizer is None:
        raise UsageError(f"verifier {verifier.name_or_path} has no tokenizer; give prompts of token ids")
    return [int(token) for token in tokenizer(str(messages[-1]["content"]))["input_ids"]]
