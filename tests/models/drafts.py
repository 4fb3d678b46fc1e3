"""Random drafts and packed batches, small enough to compute by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.formats.config import SpeculatorConfig
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator

VOCAB, HIDDEN, DRAFT_VOCAB = 40, 32, 16
GOLDEN_VERIFIER = Path(__file__).parent.parent / "golden" / "verifier" / "config.json"


def verifier_shape(**changes: Any) -> VerifierShape:
    """An 8-layer verifier with 40 tokens, hidden size 32, 4 heads on 2 key heads."""
    return VerifierShape(
        **{
            "name_or_path": "org/tiny",
            "architectures": ("LlamaForCausalLM",),
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **changes,
        }
    )


def verifier_weights(seed: int = 0) -> VerifierWeights:
    """Random embeddings, head and final norm for `verifier_shape`."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = 0.5 * torch.randn(VOCAB, HIDDEN, generator=generator)
    return VerifierWeights(embedding, head, 0.2 + torch.rand(HIDDEN, generator=generator), norm_eps=1e-6)


def draft_vocab(size: int = DRAFT_VOCAB) -> DraftVocab:
    """A vocabulary with gaps: every other token from 3 on."""
    return DraftVocab.from_ids(range(3, 3 + 2 * size, 2), VOCAB)


def golden_verifier_shape() -> VerifierShape:
    """That of the verifier in tests/golden/verifier, under the name that the golden checkpoints give it."""
    return VerifierShape.from_config_dict(json.loads(GOLDEN_VERIFIER.read_text(encoding="utf-8")), "golden/verifier")


def verifier_head() -> VerifierHead:
    """The final norm and head of `verifier_weights`, which turn `PackedBatch.last_hidden_states` into logits."""
    return VerifierHead.from_weights(verifier_weights())


def config_of(family: str, shape: VerifierShape, options: Mapping[str, Any]) -> SpeculatorConfig:
    """Resolve options as `tests.models.contract` explains them; the tests' own default is a small draft vocabulary."""
    chosen = dict(options)
    shape = replace(shape, **chosen.pop("verifier", {}))
    keys = chosen.pop("config", {})
    kind = FAMILIES[family].draft
    if "draft_vocab_size" in kind.model_fields:
        chosen.setdefault("draft_vocab_size", DRAFT_VOCAB)
    config: SpeculatorConfig = kind(**chosen).resolve(shape)
    return type(config).from_json(config.to_json() | keys) if keys else config


def random_speculator(family: str = "eagle3", *, seed: int = 1, **options: Any) -> Speculator:
    """An untrained draft whose norms are not ones and whose biases are not zeros."""
    config = config_of(family, verifier_shape(), options)
    vocab = draft_vocab(config.num_draft_ids) if config.num_draft_ids < VOCAB else None
    speculator = Speculator.create(config, verifier_weights(), vocab, seed=seed)
    randomize(speculator, seed)
    return speculator


def randomize(speculator: Speculator, seed: int, deviation: float = 0.2) -> None:
    """Add noise to every trained parameter, so that nothing is 0 or 1 by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in speculator.draft.trained_parameters():
            parameter.add_(deviation * torch.randn(parameter.shape, generator=generator))


def pack(masks: Sequence[Sequence[int]], *, row: int, num_aux: int = 3, seed: int = 2) -> PackedBatch:
    """Documents with these loss masks, laid one after another into rows of `row` tokens; states are random.

    Tokens are drawn from the draft vocabulary. A document that does not fit opens a new row; the rest is padding.
    """
    rows: list[list[Sequence[int]]] = [[]]
    for mask in masks:
        if sum(map(len, rows[-1])) + len(mask) > row:
            rows.append([])
        rows[-1].append(mask)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), row)
    ids = draft_vocab().draft_ids
    batch = PackedBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        aux_hidden_states=torch.zeros(*shape, num_aux * HIDDEN),
        last_hidden_states=torch.zeros(*shape, HIDDEN),
        document_ids=torch.full(shape, -1),
        position_ids=torch.zeros(shape, dtype=torch.int64),
    )
    number = 0
    for index, documents in enumerate(rows):
        start = 0
        for mask in documents:
            place = (index, slice(start, start + len(mask)))
            batch.input_ids[place] = ids[torch.randint(len(ids), (len(mask),), generator=generator)]
            batch.loss_mask[place] = torch.tensor(mask, dtype=torch.bool)
            batch.aux_hidden_states[place] = torch.randn(len(mask), num_aux * HIDDEN, generator=generator)
            batch.last_hidden_states[place] = torch.randn(len(mask), HIDDEN, generator=generator)
            batch.document_ids[place] = number
            batch.position_ids[place] = torch.arange(len(mask))
            number, start = number + 1, start + len(mask)
    return batch


def document_of(batch: PackedBatch, number: int) -> PackedBatch:
    """One document of a batch as a batch of its own, without padding."""
    chosen = batch.document_ids == number
    return PackedBatch(**{name: getattr(batch, name)[chosen][None] for name in vars(batch)})


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by name, and forget them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
