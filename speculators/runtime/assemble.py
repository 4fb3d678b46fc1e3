"""What an engine is given beside a proposer, from a plan: the rule that verifies, and how deep it drafts."""

from dataclasses import asdict

from speculators.formats.config import DecoderDraftConfig
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.confidence import ConfidenceBudget
from speculators.runtime.config import CONFIDENCE_HEAD_METHODS, SpeculativeConfig
from speculators.runtime.depth import DepthPolicy, DraftContextLimit, StaticDepth
from speculators.runtime.depth_table import BatchSizeTable
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.infer import Plan
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.rules import Rule, StandardRule, make_rule
from speculators.runtime.step_costs import measure_costs
from speculators.runtime.tree_engine import TreeEngine
from speculators.runtime.verifier import Verifier


def choose_rule(plan: Plan) -> Rule:
    """The rule that a plan's drafts are verified by; a warning says so where outputs are lossy or meaningless."""
    config = plan.config
    if config is None or not plan.num_speculative_tokens:
        return StandardRule()
    return make_rule(
        config.rejection_sample_method,
        plan.num_speculative_tokens,
        synthetic_acceptance_rates=config.synthetic_acceptance_rates,
        synthetic_acceptance_length=config.synthetic_acceptance_length,
        lossy=plan.additional.rejection_sampler_config,
    )


def choose_engine(plan: Plan) -> type[Engine]:
    """The kind of engine that a plan's drafts need."""
    return Engine if plan.additional.tree_drafting is None else TreeEngine


def choose_depth(plan: Plan, proposer: Proposer | None, verifier: Verifier, limits: EngineLimits) -> DepthPolicy | None:
    """How many tokens a plan drafts and verifies; None where nothing is drafted.

    For adaptive verification, passes of the verifier and proposals are timed here, before any request is there.
    """
    config = plan.config
    if config is None or proposer is None:
        return None
    depth = _depth(plan, config, proposer, verifier, limits)
    longest = _draft_context(plan, config)
    return depth if longest is None or longest >= limits.max_model_len else DraftContextLimit(depth, longest)


def _depth(
    plan: Plan, config: SpeculativeConfig, proposer: Proposer, verifier: Verifier, limits: EngineLimits
) -> DepthPolicy:
    ranges, budget = config.num_speculative_tokens_per_batch_size, plan.additional.dynamic_spec_config
    most = proposer.num_tokens
    if ranges is not None:
        return BatchSizeTable(ranges, most, limits.max_num_seqs, plan.additional.batch_size_hysteresis)
    if budget.method is not None:
        from_head = budget.method in CONFIDENCE_HEAD_METHODS
        return ConfidenceBudget(most, from_head=from_head, **asdict(budget.method_params))
    if config.enable_adaptive_verification:
        costs = measure_costs(verifier, proposer, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len)
        return AdaptiveVerification(most, costs)
    return StaticDepth(most)


def _draft_context(plan: Plan, config: SpeculativeConfig) -> int | None:
    """How long a request may be with its drafts: as the user says, or as many as a draft's layers have positions."""
    if config.max_model_len is not None or plan.speculator is None:
        return config.max_model_len
    draft = plan.speculator.config
    return draft.transformer_layer_config.max_position_embeddings if isinstance(draft, DecoderDraftConfig) else None
