"""What drafts for a plan: one table from the method's name to how its proposer is built.

A method is prepared before the verifier's weights are read, so that whatever is wrong is told at once; what comes of it
builds the proposer beside the loaded verifier.
"""

from collections.abc import Callable, Mapping

from speculators.errors import EngineError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.hub import resolve
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.gemma4_assistant.network import Gemma4Assistant
from speculators.models.serving_window import limit_draft_window
from speculators.models.slot_states import kept_states
from speculators.models.speculator import Speculator
from speculators.models.stepwise import StepwiseDraftModel
from speculators.runtime.additional import TreeDraftingConfig
from speculators.runtime.config import (
    CONFIDENCE_HEAD_METHODS,
    METHOD_OF_FAMILY,
    OWN_CHECKPOINT_METHODS,
    WINDOW_METHODS,
    SpeculativeConfig,
)
from speculators.runtime.config_rules import EXTRACT_METHOD, NGRAM_METHODS, WHERE
from speculators.runtime.description import LanguageModel, ModelDescription
from speculators.runtime.engine import EngineLimits
from speculators.runtime.infer import Plan
from speculators.runtime.proposers.custom import CustomProposer, custom_class
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.draft_model import (
    DraftModelProposer,
    ParallelDraftModelProposer,
    draft_vocabulary,
)
from speculators.runtime.proposers.gemma4_assistant import Gemma4AssistantProposer
from speculators.runtime.proposers.ngram import NgramProposer, VectorisedNgramProposer
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.proposers.suffix import SuffixProposer
from speculators.runtime.proposers.tree import TreeProposer
from speculators.runtime.verifier import Verifier

Build = Callable[[Verifier, EngineLimits], Proposer]
Preparation = Callable[[Plan, SpeculativeConfig, LanguageModel], Build]


def prepare(plan: Plan, verifier: LanguageModel) -> Build | None:
    """Read and check what drafts as a plan says, beside a verifier that need not be loaded; None for no drafts.

    EngineError, FormatError or VerifierError says what cannot be served.
    """
    if plan.config is None or plan.config.method == EXTRACT_METHOD:
        return None
    assert plan.config.method is not None
    return BUILDERS[plan.config.method](plan, plan.config, verifier)


def _draft_head(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    if plan.assistant:
        return _assistant(plan, config, verifier)
    speculator = plan.speculator or _native(plan, config)
    budget = plan.additional.dynamic_spec_config.method
    if budget in CONFIDENCE_HEAD_METHODS and not speculator.draft.tells_confidence:
        raise EngineError(
            f"additional_config.dynamic_spec_config: method={budget!r} reads a confidence head, and {config.model} has "
            "none; leave it out, or give a speculator with one"
        )
    _check_sizes(speculator.config, config.model, verifier)
    window = plan.additional.draft_window_size if config.method in WINDOW_METHODS else None
    tree = plan.additional.tree_drafting
    if tree is not None:
        _check_tree(tree, speculator, verifier)

    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        placed = speculator.to(loaded.device, loaded.dtype)
        if placed.draft.missing_tensors():
            placed.attach_verifier(VerifierWeights.from_model(loaded.model))
        placed.draft.num_candidates = config.num_candidates
        if window is not None:
            limit_draft_window(placed.draft, window)
        if tree is not None:
            assert isinstance(placed.draft, StepwiseDraftModel)
            return TreeProposer(placed.draft, tree.shape, limits.num_slots)
        return DraftHeadProposer(
            placed.draft, plan.num_speculative_tokens, limits.num_slots, probabilistic=config.probabilistic
        )

    return build


def _assistant(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    """A draft that has no keys of its own; what it reads has to fit before the verifier's weights are read."""
    assert config.model is not None
    assistant = Gemma4Assistant.from_pretrained(resolve(config.model, revision=config.revision))
    assistant.sizes.key_layers(verifier.config, verifier.name_or_path)

    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        return Gemma4AssistantProposer(
            assistant, loaded, plan.num_speculative_tokens, probabilistic=config.probabilistic
        )

    return build


def _check_sizes(draft: SpeculatorConfig, source: str | None, verifier: LanguageModel) -> None:
    """Refuse a draft that was made for a verifier of another vocabulary or width, by what the files of both say."""
    for what, made_for, found in (
        ("a vocabulary", draft.verifier_vocab_size, verifier.vocab_size),
        ("a hidden size", draft.verifier_hidden_size, int(verifier.config.hidden_size)),
    ):
        if made_for != found:
            raise EngineError(
                f"{WHERE}: {source} drafts for a verifier with {what} of {made_for}, and {verifier.name_or_path!r} has "
                f"{found}; give it {draft.verifier.name_or_path!r}, for which it was made"
            )


def _check_tree(tree: TreeDraftingConfig, speculator: Speculator, verifier: LanguageModel) -> None:
    where, most = "additional_config.tree_drafting", speculator.config.num_draft_ids
    if not isinstance(speculator.draft, StepwiseDraftModel):
        family = speculator.config.speculators_model_type
        raise EngineError(f"{where}: a {family} draft makes no token from the one before; leave tree_drafting out")
    if tree.top_k > most:
        raise EngineError(f"{where}: top_k={tree.top_k}: expected a whole number in [1, {most}] (draft tokens)")
    kept = kept_states(verifier.config)
    if kept:
        raise EngineError(
            f"{where}: verifier {verifier.name_or_path!r} ({verifier.config.model_type}) has {', '.join(sorted(kept))} "
            "layers, whose running state reads one path of tokens, not a tree; leave tree_drafting out"
        )


def _native(plan: Plan, config: SpeculativeConfig) -> Speculator:
    """The draft that the verifier's own checkpoint has."""
    if config.model != plan.verifier or config.method not in OWN_CHECKPOINT_METHODS:
        raise EngineError(
            f"{WHERE}: model={config.model!r} is no speculator directory: its config.json has no speculators_config, "
            f"and method {config.method!r} drafts from nothing else; `speculators convert` makes one of drafts that "
            "others have published"
        )
    return Speculator.from_verifier(config.model, config.method, revision=plan.verifier_revision)


def _draft_model(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    assert config.model is not None
    parallel, source = bool(config.parallel_drafting), config.model
    vocabulary = draft_vocabulary(
        verifier,
        ModelDescription(source, config.revision),
        parallel=parallel,
        heterogeneous=config.use_heterogeneous_vocab,
        max_length=config.max_model_len,
    )

    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        draft = Verifier.from_pretrained(source, dtype=loaded.dtype, device=loaded.device, revision=config.revision)
        kind = ParallelDraftModelProposer if parallel else DraftModelProposer
        return kind(
            draft,
            plan.num_speculative_tokens,
            limits.num_slots,
            vocabulary=vocabulary,
            probabilistic=config.probabilistic,
            max_length=config.max_model_len,
        )

    return build


def _ngram(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    kind = NgramProposer if config.method == NGRAM_METHODS[0] else VectorisedNgramProposer
    shortest, longest = config.lookup_range

    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        return kind(
            plan.num_speculative_tokens,
            prompt_lookup_min=shortest,
            prompt_lookup_max=longest,
            max_model_len=limits.max_model_len,
        )

    return build


def _suffix(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            num_tokens=plan.num_speculative_tokens,
        )

    return build


def _custom(plan: Plan, config: SpeculativeConfig, verifier: LanguageModel) -> Build:
    assert config.model is not None
    path = config.model
    custom_class(path)

    def build(loaded: Verifier, limits: EngineLimits) -> Proposer:
        return CustomProposer(
            path,
            num_tokens=plan.num_speculative_tokens,
            verifier=loaded,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
        )

    return build


BUILDERS: Mapping[str, Preparation] = {
    **dict.fromkeys(METHOD_OF_FAMILY.values(), _draft_head),
    **dict.fromkeys(NGRAM_METHODS, _ngram),
    "draft_model": _draft_model,
    "suffix": _suffix,
    "custom_class": _custom,
}
