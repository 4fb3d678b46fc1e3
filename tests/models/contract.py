"""What a family tells the contract test about itself: `tests/models/<family>/contract.py` exports it as `CONTRACT`.

`tests/models/test_family_contract.py` imports that module for every line of `FAMILIES` and checks everything below on
tiny random drafts (`tests.models.drafts`: a verifier of 8 layers, hidden size 32, 40 tokens; 16 draft ids).

Options are keywords of the family's `<Prefix>Draft`. Two keys beside them are understood wherever options are given:
`verifier`, a dict of changes to `drafts.verifier_shape` (a model type, MoE sizes, ...); and `config`, a dict of keys of
config.json changed after `resolve`, for what no option reaches. `draft_vocab_size` is 16 where the family has that
option and the options do not say otherwise. Block drafters use blocks of 4, so that short documents have anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator

Options = Mapping[str, Any]
PerStep = Callable[[Speculator, PackedBatch], list[Tensor]]


@dataclass(frozen=True)
class Flag:
    """Options that must do something: a draft of `base | change` is compared with one of `base`, weights shared.

    `output` says what must differ: "logits" (those of `FamilyContract.training_logits`), "trained" (the names of the
    trained parameters), or a key of `FamilyContract.outputs`. Every boolean at the top level of the family's config
    must be flipped by at least one flag.
    """

    change: Options
    base: Options = field(default_factory=dict)
    output: str = "logits"


@dataclass(frozen=True)
class Overfit:
    """How a draft learns one sample by heart: `steps` steps of Adam with rate `lr`, `options` and `objective` knobs.

    With `depth` drafts a step (None: the contract's depth) every one must be accepted afterwards in the runtime. The
    verifier is a real Llama of the tiny shape (8 layers, hidden size 32, 40 tokens).
    """

    steps: int = 300
    lr: float = 1e-2
    options: Options = field(default_factory=dict)
    objective: Options = field(default_factory=dict)
    depth: int | None = None


@dataclass(frozen=True)
class FamilyContract:
    """One family, as its tests see it.

    - `variants`: name -> options that reach the family's branches; "plain" must be there and stays the smallest.
    - `training_logits(speculator, document)`: the logits of the training forward for one document without padding,
      all of it supervised ([1, T] in every field). One tensor [P, D] a draft step k; row t is what `propose` shows its
      sampler at step k when t is the last verified position (states 0..t and tokens 0..t+1 are known, tokens
      t+2..t+1+k are its own drafts, taken from the data). Made with gradients enabled, differentiable by the states the
      family reads. Trailing rows that do not exist are left out; rows that the training forward does not make (no
      anchor there) are NaN. Of the first 11 positions of a document of 17, at least 4 must be there.
      A block drafter's anchor a is the token after the last verified position: row t belongs to anchor t + 1.
    - `depth`: draft steps compared, at most what the smallest variant can draft. Steps from the table's `parity_depth`
      on are not compared with serving, but must not see the future either.
    - `token_reach(k)`: the logits of row t at step k read the data's tokens up to t + token_reach(k), and do read that
      one; None where no token is read. Eagle-like drafts read t + 1 + k, a block without Markov head t + 1.
    - `reads`: the states that the draft reads: "aux" (`PackedBatch.aux_hidden_states`, and
      `DraftContext.aux_hidden_states_BTX`), or "normed" (`PackedBatch.last_hidden_states`, to which training applies
      `drafts.verifier_head().norm`, and `DraftContext.normed_hidden_states_BTH`). The other field is None in serving.
    - `objective`: knobs with which a step is deterministic (all anchors, no dropping), so that packed equals alone.
    - `frozen`: parameters that may be frozen; those of a variant that are frozen must be among them.
    - `flags` and `outputs`: see `Flag`. `outputs` are further things to compare, with the signature of
      `training_logits`, such as confidences.
    - `overfit`: see `Overfit`.
    - `golden`: options that, resolved on `drafts.golden_verifier_shape()` (that of tests/golden/verifier), give exactly
      tests/golden/configs/<family>.json (its `speculators_version` aside).
    - `vllm`: what `formats.vllm.describe_for_vllm` must say of the golden config, written from vLLM's rules; keys that
      are left out are not compared.
    """

    variants: Mapping[str, Options]
    training_logits: PerStep
    golden: Options
    vllm: Mapping[str, Any]
    flags: Sequence[Flag] = ()
    depth: int = 3
    token_reach: Callable[[int], int | None] = lambda step: 1 + step
    reads: Literal["aux", "normed"] = "aux"
    objective: Options = field(default_factory=dict)
    frozen: frozenset[str] = frozenset({"embed_tokens.weight", "lm_head.weight"})
    outputs: Mapping[str, PerStep] = field(default_factory=dict)
    overfit: Overfit = field(default_factory=Overfit)

    def __post_init__(self) -> None:
        assert "plain" in self.variants
        assert all(flag.output in {"logits", "trained", *self.outputs} for flag in self.flags)


def contract_of(family: str) -> FamilyContract:
    """The contract of a family in the table."""
    contract = import_module(f"tests.models.{family}.contract").CONTRACT
    assert isinstance(contract, FamilyContract)
    return contract
