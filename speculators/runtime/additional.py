"""`additional_config`: what vLLM's plugin for Ascend adds to speculation, with its keys and its defaults, and what this
engine adds of its own."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculators.errors import EngineError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.models.draft_tree import TreeShape
from speculators.runtime.config import (
    CONFIDENT_METHODS,
    TREE_METHODS,
    UNWINDOWED_METHOD,
    WINDOW_METHODS,
    SpeculativeConfig,
)
from speculators.runtime.schema import Choice, Flag, Key, Nested, Number, Whole, check_keys, key, read_mapping

logger = logging.getLogger(__name__)

WHERE = "additional_config"
# Block-wise acceptance by cumulative products is only defined from this depth on.
LEAST_BLOCK = 3


@dataclass(frozen=True)
class RejectionSamplerConfig:
    """Rules that accept more than the verifier's law allows: both are lossy, and off unless asked for.

    Entropy verification accepts x where p(x) / q(x) >= u * min(exp(-posterior_alpha * H), posterior_threshold), with H
    the entropy of the verifier's unprocessed law; block verification compares cumulative products of both sides.
    """

    enable_block_verify: bool = key(
        False, Key(Flag(), "effect", "drafts are accepted by cumulative products (lossy)", nullable=False)
    )
    enable_entropy_verify: bool = key(
        False, Key(Flag(), "effect", "more is accepted where the verifier is uncertain (lossy)", nullable=False)
    )
    posterior_threshold: float = key(
        0.95, Key(Number(0, 1, positive=True), "effect", "the threshold where the verifier is certain", nullable=False)
    )
    posterior_alpha: float = key(
        0.4, Key(Number(0), "effect", "how fast the threshold falls with the entropy", nullable=False)
    )

    def __post_init__(self) -> None:
        check_keys(self, f"{WHERE}.rejection_sampler_config")
        if not self.enable_entropy_verify:
            defaults = RejectionSamplerConfig.posterior_threshold, RejectionSamplerConfig.posterior_alpha
            if (self.posterior_threshold, self.posterior_alpha) != defaults:
                raise EngineError(
                    f"{WHERE}.rejection_sampler_config: posterior_threshold={self.posterior_threshold!r} and "
                    f"posterior_alpha={self.posterior_alpha!r} without enable_entropy_verify: expected it to be true"
                )

    @property
    def lossy(self) -> bool:
        """Whether outputs follow another law than the verifier's."""
        return self.enable_block_verify or self.enable_entropy_verify


@dataclass(frozen=True)
class DynamicSpecParams:
    """How many drafts are verified by their confidence: a budget a request, reckoned anew at intervals."""

    initial_verify_budget_per_req: int = key(
        5, Key(Whole(1), "effect", "drafts verified a request until the budget is reckoned", nullable=False)
    )
    budget_update_interval: int = key(
        16, Key(Whole(1), "effect", "steps after which the budget is reckoned anew", nullable=False)
    )
    budget_threshold: float = key(
        0.3, Key(Number(0, 1), "effect", "drafts likelier than this to survive make up the budget", nullable=False)
    )
    min_verify_tokens: int = key(
        1, Key(Whole(1, MAX_SPECULATIVE_TOKENS), "effect", "drafts that every request keeps", nullable=False)
    )

    def __post_init__(self) -> None:
        check_keys(self, f"{WHERE}.dynamic_spec_config.method_params")


@dataclass(frozen=True)
class DynamicSpecConfig:
    """Verification lengths by confidence, off while `method` is None; the method is the speculation's own."""

    method: str | None = key(
        None, Key(Choice(CONFIDENT_METHODS), "effect", "drafts are verified as far as the budget goes")
    )
    method_params: DynamicSpecParams = key(
        DynamicSpecParams(),
        Key(
            Nested(DynamicSpecParams, f"{WHERE}.dynamic_spec_config.method_params"),
            "effect",
            "how the budget is reckoned",
            nullable=False,
        ),
    )

    def __post_init__(self) -> None:
        where = f"{WHERE}.dynamic_spec_config"
        check_keys(self, where)
        if self.method is None and self.method_params != DynamicSpecParams():
            raise EngineError(
                f"{where}: method_params={self.method_params!r} without method: expected method to be one of "
                f"{', '.join(CONFIDENT_METHODS)}"
            )


@dataclass(frozen=True)
class TreeDraftingConfig:
    """Drafts as a tree, whose size is that of EAGLE-2's reference; a key of this engine's own.

    Counted are drafts alone: the reference counts the last verified token in its `total_token`, too, and not the first
    level in its `depth`.
    """

    top_k: int = key(
        10, Key(Whole(1, 64), "effect", "children of a node, and nodes of a level that are continued", nullable=False)
    )
    depth: int = key(
        7, Key(Whole(1, MAX_SPECULATIVE_TOKENS), "effect", "levels of a tree, which a draft pass each", nullable=False)
    )
    total_token: int = key(
        60, Key(Whole(1, 1024), "effect", "drafts of a tree that are verified, the likeliest ones", nullable=False)
    )

    def __post_init__(self) -> None:
        check_keys(self, f"{WHERE}.tree_drafting")
        if self.total_token < self.depth:
            raise EngineError(
                f"{WHERE}.tree_drafting: total_token={self.total_token} with depth={self.depth}: expected at least as "
                "many tokens as levels, or no tree would reach the last one"
            )

    @property
    def shape(self) -> TreeShape:
        """The same for a draft."""
        return TreeShape(self.top_k, self.depth, self.total_token)


@dataclass(frozen=True)
class AdditionalConfig:
    """Lossy rules, confidence budgets, the drafts' attention window, trees; None and defaults leave all of it out."""

    rejection_sampler_config: RejectionSamplerConfig = key(
        RejectionSamplerConfig(),
        Key(
            Nested(RejectionSamplerConfig, f"{WHERE}.rejection_sampler_config"),
            "effect",
            "rules that accept more than the verifier's law allows",
            nullable=False,
        ),
    )
    dynamic_spec_config: DynamicSpecConfig = key(
        DynamicSpecConfig(),
        Key(
            Nested(DynamicSpecConfig, f"{WHERE}.dynamic_spec_config"),
            "effect",
            "how many drafts are verified, by their confidence",
            nullable=False,
        ),
    )
    draft_window_size: int | None = key(
        None, Key(Whole(1), "effect", "the latest tokens that a draft's attention reads")
    )
    batch_size_hysteresis: int = key(
        0,
        Key(
            Whole(0),
            "effect",
            "a depth by batch size stays while a batch size at most so far away has it (this engine's own key)",
            nullable=False,
        ),
    )

    tree_drafting: TreeDraftingConfig | None = key(
        None,
        Key(
            Nested(TreeDraftingConfig, f"{WHERE}.tree_drafting"),
            "effect",
            "drafts are a tree, of which one verification keeps the best path (this engine's own key)",
        ),
    )

    def __post_init__(self) -> None:
        check_keys(self, WHERE)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "AdditionalConfig":
        """Check a user's mapping; EngineError names a key that is unknown, of the wrong type or out of range."""
        return read_mapping(cls, given, WHERE)

    def check_against(self, config: SpeculativeConfig | None) -> None:
        """Refuse what does not go with the speculation that was resolved; EngineError names the two keys."""
        if config is None:
            if self != AdditionalConfig():
                raise EngineError(f"{WHERE}: its keys are about speculation, and there is none; give a speculator")
            return
        if self.tree_drafting is not None:
            _check_tree(self, config)
        _check_rule(self.rejection_sampler_config, config)
        _check_budget(self.dynamic_spec_config, config)
        _check_window(self.draft_window_size, config)
        if self.batch_size_hysteresis and config.num_speculative_tokens_per_batch_size is None:
            raise EngineError(
                f"{WHERE}: batch_size_hysteresis={self.batch_size_hysteresis} without speculative_config's "
                "num_speculative_tokens_per_batch_size, whose depths it keeps; expected both"
            )


def _check_tree(additional: AdditionalConfig, config: SpeculativeConfig) -> None:
    where = f"{WHERE}.tree_drafting"
    if config.method not in TREE_METHODS or config.parallel_drafting:
        made = " and parallel_drafting" if config.parallel_drafting else ""
        raise EngineError(
            f"{where}: got method {config.method!r}{made}: expected a draft of method {' or '.join(TREE_METHODS)} that "
            "makes each token from the one before; leave tree_drafting out"
        )
    tables, rule = config.num_speculative_tokens_per_batch_size, config.rejection_sample_method
    clashes = (
        ("draft_sample_method", config.probabilistic, "a tree has the likeliest tokens, which are not drawn"),
        ("num_speculative_tokens_per_batch_size", tables, "a tree has the same levels at every batch size"),
        ("enable_adaptive_verification", config.enable_adaptive_verification, "a tree is verified whole"),
        ("rejection_sample_method", rule != "standard", "siblings are tried by the standard rule"),
    )
    for name, clashing, reason in clashes:
        if clashing:
            got = f"{name}={getattr(config, name)!r}"
            raise EngineError(f"{where} with speculative_config's {got}: {reason}; leave one of them out")
    if additional.rejection_sampler_config.lossy:
        raise EngineError(
            f"{where} with rejection_sampler_config: its rules accept chains, and are lossy; leave one of them out"
        )
    if additional.dynamic_spec_config.method is not None:
        raise EngineError(f"{where} with dynamic_spec_config: a tree is verified whole; leave one of them out")


def _check_rule(rule: RejectionSamplerConfig, config: SpeculativeConfig) -> None:
    where = f"{WHERE}.rejection_sampler_config"
    if rule.lossy and config.rejection_sample_method != "standard":
        raise EngineError(
            f"{where}: its rules replace the standard one, and speculative_config has rejection_sample_method="
            f"{config.rejection_sample_method!r}; expected 'standard'"
        )
    depth = config.num_speculative_tokens
    if rule.enable_block_verify and depth is not None and depth < LEAST_BLOCK:
        raise EngineError(
            f"{where}: enable_block_verify=True with num_speculative_tokens={depth}: expected at least {LEAST_BLOCK}"
        )


def _check_budget(budget: DynamicSpecConfig, config: SpeculativeConfig) -> None:
    where = f"{WHERE}.dynamic_spec_config"
    if budget.method is None:
        return
    if budget.method != config.method:
        raise EngineError(
            f"{where}: method={budget.method!r} with speculative_config's method {config.method!r}: expected the same"
        )
    others = ("enable_adaptive_verification", "num_speculative_tokens_per_batch_size")
    for name in others:
        if getattr(config, name):
            raise EngineError(f"{where} and speculative_config's {name} both decide how much is verified; give one")
    least, depth = budget.method_params.min_verify_tokens, config.num_speculative_tokens
    if depth is not None and least > depth:
        raise EngineError(
            f"{where}: min_verify_tokens={least}: expected a whole number in [1, {depth}], num_speculative_tokens"
        )


def _check_window(size: int | None, config: SpeculativeConfig) -> None:
    if size is None or config.method in WINDOW_METHODS:
        return
    if config.method == UNWINDOWED_METHOD:
        logger.warning("%s: draft_window_size=%d does nothing under method %r", WHERE, size, config.method)
        return
    raise EngineError(
        f"{WHERE}: draft_window_size={size} with method {config.method!r}: expected a method of "
        f"{', '.join(WINDOW_METHODS)}"
    )
