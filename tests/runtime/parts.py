"""Verifiers and speculators of the runtime's tests, small enough to enumerate."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from speculators.runtime.verifier import Verifier


def random_verifier(
    vocab_size: int = 8,
    *,
    hidden_size: int = 32,
    num_layers: int = 4,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    wide: float = 0.3,
) -> Verifier:
    """A random float32 Llama in memory; final norms are not ones, nothing ends a sequence."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION_NAME,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else wide * noise)
    return Verifier(model, tokenizer, name_or_path="random")


def random_speculator(
    verifier: Verifier, *, draft_vocab_size: int | None = None, seed: int = 1, **options: object
) -> Speculator:
    """An untrained EAGLE-3 draft on `verifier`; a reduced vocabulary keeps every other id."""
    raw = {**verifier.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    shape = VerifierShape.from_config_dict(raw, "random")
    size = draft_vocab_size or verifier.vocab_size
    choices = FAMILIES["eagle3"].draft(aux_layer_ids=[1, 2, 3], draft_vocab_size=size, **options)
    vocab = None
    if size < verifier.vocab_size:
        counts = torch.zeros(verifier.vocab_size, dtype=torch.int64)
        counts[1 : 2 * size : 2] = 1
        vocab = DraftVocab.from_counts(counts, size)
    speculator = Speculator.create(choices.resolve(shape), VerifierWeights.from_model(verifier.model), vocab, seed=seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in speculator.draft.trained_parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return speculator
