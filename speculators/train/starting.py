"""What a recipe's draft starts from: random values, a trained speculator, or the block that its verifier has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators.errors import SpeculatorsError, UsageError
from speculators.extract.prepared import DRAFT_VOCAB, read_draft_vocab
from speculators.formats.checkpoint import read_config
from speculators.formats.config import SpeculatorConfig
from speculators.formats.hub import fetch_config, is_local, resolve
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.speculator import Speculator, family_of
from speculators.models.warm_start import require_same_tensors, started_from
from speculators.train.journal import file_digest

if TYPE_CHECKING:
    from speculators.train.stages import Run

# `warm_start` says this, or names a speculator; a folder that is called so can be given as a path.
NATIVE = "verifier"


def takes_vocabulary(run: Run) -> bool:
    """Whether the draft vocabulary is that of the speculator started from, which is never rebuilt."""
    return run.recipe.warm_start not in (None, NATIVE)


def require_possible_start(source: str | None, config: SpeculatorConfig, *, offline: bool = False) -> None:
    """Raise UsageError where a draft of `config` cannot start from `source`, naming the values of both that differ.

    Only configurations are read; `offline`, only those that are here.
    """
    if source is None or source == NATIVE or (offline and not is_local(source)):
        return
    try:
        require_same_tensors(config, _config_of(source))
    except SpeculatorsError as error:
        raise UsageError(f"warm_start={source}: {error}") from error


def start_identity(run: Run) -> dict[str, Any]:
    """What tells one start from another (JSON): nothing for random values, else the weights' digests."""
    source = run.recipe.warm_start
    if source is None or source == NATIVE:
        return {} if source is None else {"warm_start": NATIVE}
    return {"warm_start": [file_digest(path) for path in sorted(resolve(source).glob("*.safetensors"))]}


def make_speculator(run: Run, weights: VerifierWeights) -> Speculator:
    """The draft as its training begins; `weights` are the verifier's."""
    config, seed, source = run.speculator_config, run.recipe.train.seed, run.recipe.warm_start
    if source is not None and source != NATIVE:
        return started_from(Speculator.from_pretrained(source), config, weights, seed=seed)
    vocab = None if run.draft_vocab_size is None else read_draft_vocab(run.outputs.prepared / DRAFT_VOCAB)
    speculator = Speculator.create(config, weights, vocab, seed=seed)
    return speculator if source is None else speculator.take_native(resolve(run.verifier), weights)


def _config_of(source: str) -> SpeculatorConfig:
    raw = read_config(resolve(source)) if is_local(source) else fetch_config(source)
    return family_of(raw.get("speculators_model_type"), source).config.from_json(raw, source)
