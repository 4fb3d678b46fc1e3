"""Drafts that know many answers of a tiny verifier, by its states and not by the tokens alone.

A draft that has one answer by heart recites it whatever it is fed; what several answers have in common can only be told
apart by the verifier's states, so that a draft of them notices when it is read wrongly.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.models.by_heart import sample_of, tiny_verifier
from tests.models.contract import contract_of
from tests.models.drafts import VOCAB, config_of

ANSWERS, PROMPT, LENGTH = 16, 4, 24
STEPS, RATE = 110, 8e-3


@dataclass(frozen=True)
class Trained:
    """A draft, its verifier, the prompts that it knows the answers of, and how long these are."""

    verifier: Verifier
    speculator: Speculator
    prompts: list[list[int]]
    length: int = LENGTH - PROMPT - 2


@cache
def answers() -> list[list[int]]:
    """Prompts of random tokens with the verifier's greedy answers."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(1, VOCAB, (ANSWERS, PROMPT), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT, ignore_eos=True)
    llm = LLM.from_parts(tiny_verifier(), limits=EngineLimits(max_num_seqs=ANSWERS, max_model_len=64))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]


@cache
def trained(family: str, draft_vocab_size: int | None = None, steps: int = STEPS, **options: object) -> Trained:
    """A draft of the family, trained on `answers()`; of a reduced vocabulary their most frequent tokens are kept."""
    verifier, lesson = tiny_verifier(), contract_of(family).overfit
    raw = {**verifier.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    chosen = {**lesson.options, **options}
    if "draft_vocab_size" in FAMILIES[family].draft.model_fields:
        chosen["draft_vocab_size"] = draft_vocab_size
    config = config_of(family, VerifierShape.from_config_dict(raw, "random"), chosen)
    weights = VerifierWeights.from_model(verifier.model)
    vocab = None
    if config.num_draft_ids < VOCAB:
        counts = torch.bincount(torch.tensor(answers()).flatten(), minlength=VOCAB)
        vocab = DraftVocab.from_counts(counts, config.num_draft_ids)
    speculator = Speculator.create(config, weights, vocab, seed=3)
    batch = _batch(verifier, tuple(speculator.draft.aux_layer_ids))
    objective = FAMILIES[family].objective(**lesson.objective)
    head = VerifierHead.from_weights(weights)
    optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    speculator.draft.train()
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        objective.step(speculator.draft, batch, head).loss.backward()
        optimizer.step()
        schedule.step()
    speculator.draft.eval()
    return Trained(verifier, speculator, [answer[:PROMPT] for answer in answers()])


def _batch(verifier: Verifier, aux_layer_ids: tuple[int, ...]) -> PackedBatch:
    rows = [sample_of(verifier, answer, aux_layer_ids) for answer in answers()]
    batch = PackedBatch(**{name: torch.cat([getattr(row, name) for row in rows]) for name in vars(rows[0])})
    batch.document_ids.copy_(torch.arange(len(rows))[:, None].expand_as(batch.document_ids))
    return batch


def save_verifier(verifier: Verifier, folder: Path) -> Path:
    """Its configuration and weights as a directory."""
    verifier.model.save_pretrained(folder)
    return folder
