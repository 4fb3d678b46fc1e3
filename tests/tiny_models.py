"""Small random verifiers with real tokenizers, and untrained speculators for them, in a second and a megabyte."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator

SENTENCES = [
    "The quick brown fox jumps over the lazy dog while seven wise owls watch from the old oak tree.",
    "Write a short letter to a friend about the weather, the garden and the price of apples.",
    "What is the sum of twelve and thirty? Explain each step and give the final number.",
    "A function takes a list of numbers and returns the largest one: def largest(numbers): return max(numbers)",
    "Name three cities near a river, then say which of them is the oldest and why it was built there.",
    "Summarise this text in one sentence: rain fell all night, the road was closed, and the school stayed open.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"


def make_tokenizer(vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """Byte-level BPE with two special tokens and a ChatML template; the end of a turn ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def make_verifier(
    directory: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 8,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    tie_word_embeddings: bool = False,
    seed: int = 0,
) -> Path:
    """Save a random float32 Llama with its tokenizer; head size is hidden_size / num_heads, norms are not ones.

    Weights are drawn wide enough for greedy answers to differ from prompt to prompt.
    """
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.08,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.convert_tokens_to_ids(START),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else config.initializer_range * noise)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_speculator(directory: Path, verifier: Path, *, draft_vocab_size: int = 128, seed: int = 0) -> Path:
    """Save an untrained EAGLE-3 speculator for a verifier's directory; its drafts are hardly ever accepted."""
    config = json.loads((verifier / "config.json").read_text(encoding="utf-8"))
    shape = VerifierShape.from_config_dict(config, str(verifier))
    family = FAMILIES["eagle3"]
    counts = torch.arange(shape.vocab_size).flip(0)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size, [config["eos_token_id"]])
    resolved = family.draft(draft_vocab_size=draft_vocab_size).resolve(shape)
    Speculator.create(resolved, load_verifier_weights(verifier), vocab, seed=seed).save_pretrained(directory)
    return directory
