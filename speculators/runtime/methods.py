"""What drafts for a plan: one table from the method's name to how its proposer is built."""

from collections.abc import Callable, Mapping

from speculators.errors import EngineError
from speculators.formats.verifier_weights import VerifierWeights
from speculators.runtime.config import METHOD_OF_FAMILY, SpeculativeConfig
from speculators.runtime.config_rules import EXTRACT_METHOD, WHERE
from speculators.runtime.engine import EngineLimits
from speculators.runtime.infer import Plan
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.schema import changed_keys
from speculators.runtime.verifier import Verifier

Builder = Callable[[Plan, SpeculativeConfig, Verifier, EngineLimits], Proposer]


def make_proposer(plan: Plan, verifier: Verifier, limits: EngineLimits) -> Proposer | None:
    """What drafts as the plan says, beside its loaded verifier; None where nothing is drafted."""
    if plan.config is None or plan.config.method == EXTRACT_METHOD:
        return None
    return _builder(plan)(plan, plan.config, verifier, limits)


def require_served(plan: Plan) -> None:
    """Refuse a plan that this engine cannot run, before its verifier is loaded; EngineError says what is not served."""
    config = plan.config
    if config is None or config.method == EXTRACT_METHOD:
        return
    if _builder(plan) is _draft_head and plan.speculator is None:
        raise EngineError(
            f"{WHERE}: model={config.model!r} is no speculator directory: its config.json has no speculators_config, "
            f"and method {config.method!r} drafts from nothing else yet"
        )
    for name, _, value in changed_keys(config):
        if name in _UNSERVED_KEYS:
            raise EngineError(f"{WHERE}: {name}={value!r} is not served yet; leave it out")
    for name, _, value in changed_keys(plan.additional):
        if name in _UNSERVED_ADDITIONAL:
            raise EngineError(f"additional_config: {name}={value!r} is not served yet; leave it out")


def _builder(plan: Plan) -> Builder:
    builder = None if plan.method is None else BUILDERS.get(plan.method)
    if builder is None:
        raise EngineError(
            f"{WHERE}: method={plan.method!r} is not served yet; these are: {', '.join(sorted(BUILDERS))}"
        )
    return builder


def _draft_head(plan: Plan, config: SpeculativeConfig, verifier: Verifier, limits: EngineLimits) -> Proposer:
    assert plan.speculator is not None
    assert config.num_speculative_tokens is not None
    speculator = plan.speculator.to(verifier.device, verifier.dtype)
    if speculator.draft.missing_tensors():
        speculator.attach_verifier(VerifierWeights.from_model(verifier.model))
    speculator.draft.num_candidates = config.num_candidates
    return DraftHeadProposer(
        speculator.draft, config.num_speculative_tokens, limits.max_num_seqs, probabilistic=config.probabilistic
    )


BUILDERS: Mapping[str, Builder] = dict.fromkeys(METHOD_OF_FAMILY.values(), _draft_head)

# Keys whose values are checked, and which nothing acts on yet: any value but the default is refused.
_UNSERVED_KEYS = frozenset(
    {
        "rejection_sample_method",
        "num_speculative_tokens_per_batch_size",
        "enable_adaptive_verification",
    }
)
_UNSERVED_ADDITIONAL = frozenset({"rejection_sampler_config", "dynamic_spec_config", "draft_window_size"})
