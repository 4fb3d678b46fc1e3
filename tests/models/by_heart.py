"""A tiny verifier in memory, and a draft that learns one of its answers by heart."""

from dataclasses import dataclass
from functools import cache

import torch

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.models.contract import contract_of
from tests.models.drafts import HIDDEN, VOCAB, config_of, draft_vocab, randomize
from tests.runtime.parts import random_verifier

PROMPT = [7, 21, 3, 15, 9]
SUPERVISED = 64  # tokens of the sample, of which about the first RECITED after the prompt must be known
RECITED = 40
MOST_LESSONS = 4


@dataclass(frozen=True)
class ByHeart:
    """A draft that has seen `token_ids`, the verifier's greedy answer to PROMPT with the prompt, and nothing else."""

    verifier: Verifier
    speculator: Speculator
    token_ids: list[int]


@cache
def tiny_verifier() -> Verifier:
    """A random float32 Llama of the tests' tiny shape: 8 layers, hidden size 32, 40 tokens."""
    return random_verifier(VOCAB, hidden_size=HIDDEN, num_layers=8, wide=0.2)


def fresh_speculator(family: str, verifier: Verifier, *, seed: int = 3) -> Speculator:
    """An untrained draft on `verifier`, with the options that the family's contract gives for the runtime."""
    raw = {**verifier.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    options = {"draft_vocab_size": None} if "draft_vocab_size" in FAMILIES[family].draft.model_fields else {}
    config = config_of(
        family, VerifierShape.from_config_dict(raw, "random"), options | dict(contract_of(family).overfit.options)
    )
    vocab = draft_vocab(config.num_draft_ids) if config.num_draft_ids < VOCAB else None
    return Speculator.create(config, VerifierWeights.from_model(verifier.model), vocab, seed=seed)


def greedy_answer(verifier: Verifier, prompt: list[int], length: int) -> list[int]:
    """What the verifier alone writes."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    return LLM.from_parts(verifier).generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def sample_of(verifier: Verifier, token_ids: list[int], aux_layer_ids: tuple[int, ...]) -> PackedBatch:
    """One row with the verifier's states, everything but the first token supervised."""
    last = verifier.num_layers
    states_TAH = verifier.capture([token_ids], [*aux_layer_ids, last])[0]
    num_aux, length = len(aux_layer_ids), len(token_ids)
    return PackedBatch(
        input_ids=torch.tensor([token_ids]),
        loss_mask=torch.ones(1, length, dtype=torch.bool),
        aux_hidden_states=states_TAH[:, :num_aux].flatten(1)[None].clone(),
        last_hidden_states=states_TAH[:, -1][None].clone(),
        document_ids=torch.zeros(1, length, dtype=torch.int64),
        position_ids=torch.arange(length)[None],
    )


@cache
def learnt_by_heart(family: str) -> ByHeart:
    """Train a fresh draft of the family on one sample as its contract says, and again while drafts are rejected.

    How far a number of steps leads differs a little between machines, so that a lesson may be repeated.
    """
    lesson, verifier = contract_of(family).overfit, tiny_verifier()
    token_ids = PROMPT + greedy_answer(verifier, PROMPT, SUPERVISED - len(PROMPT))
    speculator = fresh_speculator(family, verifier)
    batch = sample_of(verifier, token_ids, speculator.draft.aux_layer_ids)
    head = VerifierHead.from_weights(VerifierWeights.from_model(verifier.model))
    objective = FAMILIES[family].objective(**lesson.objective)
    learnt = ByHeart(verifier, speculator, token_ids)
    torch.manual_seed(0)
    for part in range(MOST_LESSONS):
        optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=lesson.lr / (1 + part))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, lesson.steps)
        speculator.draft.train()
        for _ in range(lesson.steps):
            optimizer.zero_grad()
            objective.step(speculator.draft, batch, head).loss.backward()
            optimizer.step()
            schedule.step()
        if recite(learnt, depth_of(family)).stats.num_drafts == verifications(depth_of(family)):
            break
    return learnt


def depth_of(family: str) -> int:
    """Drafts a step with which the sample is known by heart."""
    contract = contract_of(family)
    return contract.overfit.depth or contract.depth


def verifications(depth: int) -> int:
    """How many verifications write the recited part of the sample where every draft is accepted."""
    return RECITED // (1 + depth)


def recite(learnt: ByHeart, depth: int) -> LLM:
    """Let the engine recite the sample from its prompt; returns it with its counts.

    The first verification finds no draft and emits one token; those that follow emit 1 + depth each at best.
    """
    llm = LLM.from_parts(learnt.verifier, learnt.speculator, num_speculative_tokens=depth)
    length = 1 + verifications(depth) * (1 + depth)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert PROMPT + output.outputs[0].token_ids == learnt.token_ids[: len(PROMPT) + length]
    return llm


def unlearnt(family: str, verifier: Verifier) -> Speculator:
    """A draft of random weights, none of them 0 or 1 by its initialisation."""
    speculator = fresh_speculator(family, verifier)
    randomize(speculator, 1)
    return speculator
