"""What a user may ask of speculation: every key of vLLM's `speculative_config`, honoured or refused by name."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from speculators.errors import EngineError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.runtime.config_rules import (
    EXTRACT_METHOD,
    NGRAM_METHODS,
    WHERE,
    BatchSizeRange,
    BatchSizeRanges,
    Rates,
    check_together,
    layer_ids_of,
)
from speculators.runtime.schema import (
    Anything,
    Choice,
    Flag,
    Key,
    Number,
    Object,
    Text,
    Whole,
    check_keys,
    key,
    nearest,
    read_mapping,
)

logger = logging.getLogger(__name__)

# The methods of a speculator family.
METHOD_OF_FAMILY = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
    "eagle": "eagle",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
}
# Methods whose drafts come from a network, and so have probabilities.
NETWORK_METHODS = tuple(dict.fromkeys([*METHOD_OF_FAMILY.values(), "draft_model"]))
LOOKUP_METHODS = (*NGRAM_METHODS, "suffix")
DRAFTING_METHODS = (*NETWORK_METHODS, *LOOKUP_METHODS, "custom_class")
METHODS = (*DRAFTING_METHODS, EXTRACT_METHOD)
# Methods that need no `model`: they draft from the text, or with what the verifier's own checkpoint has.
MODEL_FREE_METHODS = (*LOOKUP_METHODS, EXTRACT_METHOD)
OWN_CHECKPOINT_METHODS = ("mtp", "dspark")
# Methods that fill all tokens of a step in one pass, whatever is asked.
BLOCK_METHODS = ("dflash", "dspark")
# Methods whose drafts can be made to fill them all in one pass, by training.
PARALLEL_METHODS = ("eagle", "eagle3", "draft_model", *BLOCK_METHODS)
# A depth that changes from step to step is already that of a suffix tree, and fixed by the heads of Medusa.
DYNAMIC_METHODS = tuple(name for name in DRAFTING_METHODS if name not in ("suffix", "medusa"))
# Methods of which a draft says how sure it is of each token: the first by a head that was trained for it, the others by
# the probability of their likeliest token.
CONFIDENCE_HEAD_METHODS = ("dspark",)
CONFIDENT_METHODS = (*CONFIDENCE_HEAD_METHODS, "dflash")
# Methods whose attention can be given a window.
WINDOW_METHODS = ("eagle3", *BLOCK_METHODS)
# Methods whose drafts can be a tree.
TREE_METHODS = ("eagle", "eagle3")
# Whose layers are the verifier's own kind, so that a window would change what they compute.
UNWINDOWED_METHOD = "mtp"
# Both ends of the n-grams that are looked up where neither is given.
_DEFAULT_NGRAM = 5
# Names that vLLM gave the native blocks of single verifiers.
OLD_MTP_METHODS = tuple(
    f"{name}_mtp"
    for name in (
        *("bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5", "exaone_moe"),
        *("gemma4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3", "hy_v4", "inkling", "kimi_k3"),
        *("longcat_flash", "mimo", "mimo_v2", "minimax_m3", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next"),
        *("qwen4_exp", "step3p5"),
    )
)
# Families that are no methods, and the one that each is reached by.
_FAMILIES_NOT_METHODS = {family: method for family, method in METHOD_OF_FAMILY.items() if family not in METHODS}

# What people write into `speculative_config` and belongs elsewhere.
_SAMPLING = "this is a sampling parameter; give it with each request (SamplingParams)"
_INTERNAL = "this is filled in by the engine, from the draft's and the verifier's files; leave it out"
MISPLACED: Mapping[str, str] = {
    "tensor_parallel_size": "not a key of speculative_config; the draft's is draft_tensor_parallel_size",
    **dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "stop"),
            *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
            *("logprobs", "ignore_eos", "bad_words", "allowed_token_ids", "structured_outputs"),
        ),
        _SAMPLING,
    ),
    **dict.fromkeys(("target_model_config", "target_parallel_config", "draft_parallel_config"), _INTERNAL),
}
_ONE_DEVICE = "a draft runs on one device, beside its verifier"
_OWN_ATTENTION = "drafts have one attention and one cache of their own, in the draft's dtype"
_AS_STORED = "a draft computes in the verifier's dtype, with weights that are not quantised"


@dataclass(frozen=True)
class Method:
    """The name of a method; old names of native blocks are taken for what they are now."""

    expected: ClassVar[str] = f"one of {', '.join(METHODS)}"

    def read(self, value: object) -> str:
        """The method's name."""
        if not isinstance(value, str):
            raise ValueError
        if value in OLD_MTP_METHODS:
            logger.warning("%s: method %r is an old name of 'mtp', which is used", WHERE, value)
            return "mtp"
        if value in _FAMILIES_NOT_METHODS:
            instead = _FAMILIES_NOT_METHODS[value]
            raise ValueError(
                f"a {value} speculator is served with method {instead!r}: give that, or none, and its directory as "
                "the model"
            )
        if value not in METHODS:
            raise ValueError(nearest(value, METHODS).removeprefix("; "))
        return value


@dataclass(frozen=True)
class SpeculativeConfig:
    """The speculation asked for; fields are the keys of vLLM's `speculative_config`, with its defaults.

    None means that it follows from the draft's files. Every object is checked when it is made: EngineError names a key
    that is of the wrong type, out of range, contradicted by another or beyond this engine. What depends on the method
    or the depth is checked once they are known, when `infer` replaces them.
    """

    method: str | None = key(None, Key(Method(), "effect", "how drafts are made"))
    model: str | None = key(None, Key(Text(), "effect", "what drafts: a directory, a hub id, or a class's dotted path"))
    num_speculative_tokens: int | None = key(
        None, Key(Whole(1, MAX_SPECULATIVE_TOKENS), "effect", "how many tokens a step drafts, K")
    )
    draft_sample_method: str = key(
        "greedy",
        Key(
            Choice(("greedy", "probabilistic")),
            "effect",
            "whether drafts are a network's likeliest tokens or drawn from its softmax at the request's temperature",
            nullable=False,
            methods=NETWORK_METHODS,
        ),
    )
    revision: str | None = key(None, Key(Text(), "effect", "which commit of the model's hub repository is read"))
    code_revision: str | None = key(None, Key(Text(), "refused", "a draft's own code is never run", honoured=()))
    max_model_len: int | None = key(
        None, Key(Whole(1), "effect", "a request stops drafting where it and its drafts would be longer than this")
    )
    parallel_drafting: bool | None = key(
        None,
        Key(
            Flag(),
            "effect",
            "all tokens of a step are drafted in one pass, by a draft that has a mask token",
            methods=PARALLEL_METHODS,
        ),
    )
    use_heterogeneous_vocab: bool = key(
        False,
        Key(
            Flag(),
            "effect",
            "a draft model with another tokenizer proposes the tokens that both vocabularies have",
            nullable=False,
            methods=("draft_model",),
        ),
    )
    prompt_lookup_max: int | None = key(
        None, Key(Whole(1), "effect", "the longest n-gram that is looked up", methods=NGRAM_METHODS)
    )
    prompt_lookup_min: int | None = key(
        None, Key(Whole(1), "effect", "the shortest n-gram that is looked up", methods=NGRAM_METHODS)
    )
    suffix_decoding_max_tree_depth: int = key(
        24, Key(Whole(1), "effect", "tokens of the longest path in a suffix tree", nullable=False, methods=("suffix",))
    )
    suffix_decoding_max_cached_requests: int = key(
        10000,
        Key(
            Whole(0),
            "effect",
            "how many answers the tree of all requests keeps; 0 for no such tree",
            nullable=False,
            methods=("suffix",),
        ),
    )
    suffix_decoding_max_spec_factor: float = key(
        1.0, Key(Number(0), "effect", "drafts a token that was matched, at most", nullable=False, methods=("suffix",))
    )
    suffix_decoding_min_token_prob: float = key(
        0.1,
        Key(
            Number(0, 1),
            "effect",
            "how often what is drafted must have followed before",
            nullable=False,
            methods=("suffix",),
        ),
    )
    rejection_sample_method: str = key(
        "standard",
        Key(
            Choice(("standard", "synthetic", "block")),
            "effect",
            "by which rule drafts are accepted",
            nullable=False,
            methods=DRAFTING_METHODS,
        ),
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = key(
        None, Key(Rates(), "effect", "how often the synthetic rule accepts all drafts up to each, whatever they are")
    )
    synthetic_acceptance_length: float | None = key(
        None, Key(Number(1), "effect", "tokens that a step of the synthetic rule yields on average")
    )
    num_speculative_tokens_per_batch_size: tuple[BatchSizeRange, ...] | None = key(
        None, Key(BatchSizeRanges(), "effect", "how many tokens are drafted at a batch size", methods=DYNAMIC_METHODS)
    )
    enable_adaptive_verification: bool = key(
        False,
        Key(
            Flag(),
            "effect",
            "how many drafts of each request are verified, by their confidence and by what a step costs",
            nullable=False,
            methods=NETWORK_METHODS,
        ),
    )
    dspark_draft_topk: int | None = key(
        None, Key(Whole(1), "effect", "the likeliest tokens that the Markov head chooses among", methods=("dspark",))
    )
    draft_model_config: Mapping[str, Any] | None = key(
        None, Key(Anything(), "effect", "the layers whose states are extracted", methods=(EXTRACT_METHOD,))
    )
    draft_tensor_parallel_size: int | None = key(None, Key(Whole(1), "refused", _ONE_DEVICE, honoured=(1,)))
    quantization: str | None = key(None, Key(Text(), "refused", _AS_STORED, honoured=()))
    moe_backend: str | None = key(None, Key(Text(), "refused", "experts have one implementation", honoured=("auto",)))
    attention_backend: str | None = key(None, Key(Text(), "refused", _OWN_ATTENTION, honoured=("auto",)))
    kv_cache_dtype: str | None = key(None, Key(Text(), "refused", _OWN_ATTENTION, honoured=("auto",)))
    draft_load_config: Mapping[str, Any] | None = key(
        None,
        Key(
            Object(),
            "refused",
            "drafts are read from safetensors",
            honoured=({}, {"load_format": "auto"}, {"load_format": "safetensors"}),
        ),
    )
    disable_padded_drafter_batch: bool = key(
        False, Key(Flag(), "refused", "rows of a batch are drafted side by side", nullable=False, honoured=(False,))
    )
    index_share_for_mtp_iteration: bool | None = key(
        None,
        Key(
            Flag(),
            "refused",
            "there is no sparse attention whose index could be shared between steps",
            honoured=(False,),
            methods=("mtp",),
        ),
    )
    enforce_eager: bool | None = key(None, Key(Flag(), "neutral", "drafts run eagerly; graphs would change no token"))
    disable_eagle_block_drop: bool = key(
        False, Key(Flag(), "neutral", "a prefix is shared whole or not at all: no block is dropped", nullable=False)
    )
    use_local_argmax_reduction: bool = key(
        False, Key(Flag(), "neutral", "on one device, the likeliest token is found there anyway", nullable=False)
    )

    def __post_init__(self) -> None:
        check_keys(self, WHERE)
        check_together(self)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Capture ids of `extract_hidden_states`, ascending and distinct; empty for another method."""
        return layer_ids_of(self.draft_model_config) if self.method == EXTRACT_METHOD else ()

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The shortest and the longest n-gram that is looked up: one given is both, none given is 5."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or _DEFAULT_NGRAM, most or least or _DEFAULT_NGRAM

    @property
    def probabilistic(self) -> bool:
        """Whether drafts of sampled requests are drawn."""
        return self.draft_sample_method == "probabilistic"

    @property
    def num_candidates(self) -> int | None:
        """How many of its head's likeliest tokens a draft's Markov head chooses among; None for all."""
        return self.dspark_draft_topk

    def check_draft_vocab(self, num_draft_ids: int) -> None:
        """Refuse a number of likeliest tokens that is more than a draft has; EngineError names it."""
        topk = self.dspark_draft_topk
        if topk is not None and topk > num_draft_ids:
            raise EngineError(
                f"{WHERE}: dspark_draft_topk={topk}: expected a whole number in [1, {num_draft_ids}] (draft tokens)"
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """Check a user's mapping; EngineError names a key that is unknown, misplaced, wrong or beyond this engine."""
        return read_mapping(cls, given, WHERE, MISPLACED)
