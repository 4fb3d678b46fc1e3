"""What is trained is what is served: states, logits and laws agree between extraction, training and the runtime."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier


def test_captured_states_are_the_residual_stream(tiny_verifier: Path) -> None:
    """Id i is their hidden_states[i], id L the one before the final norm (pitfall 1, pitfall 7, pitfall 41)."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    rows = [[5, 9, 200, 31, 7], [8, 8, 300], [100, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    ids = [0, 2, 4, 5, 8]
    for batch in (rows, rows[::-1], rows[1:2], rows):
        for row, states in zip(batch, verifier.capture(batch, [8, 2, 0, 5, 4]), strict=True):
            reference = model(torch.tensor([row]), output_hidden_states=True).hidden_states
            for place, layer in enumerate(ids[:-1]):
                torch.testing.assert_close(states[:, place], reference[layer][0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(model.model.norm(states[:, -1]), reference[-1][0], atol=1e-5, rtol=1e-5)


def test_teacher_logits_from_stored_states_are_the_verifiers(tiny_verifier: Path, tied_verifier: Path) -> None:
    """Final norm (random weights) and head on the state of id L give the verifier's own logits (pitfall 1)."""
    for directory in (tiny_verifier, tied_verifier):
        verifier = Verifier.from_pretrained(directory, dtype="float32")
        row = [3, 17, 250, 90, 41, 41, 2]
        state = verifier.capture([row], [8])[0][:, 0]
        from speculators.formats.verifier_weights import load_verifier_weights
        from speculators.models.losses import VerifierHead

        head = VerifierHead.from_weights(load_verifier_weights(directory))
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(torch.tensor([row])).logits[0]
        torch.testing.assert_close(head.logits(state), expected, atol=1e-4, rtol=1e-4)


def exact_law(verifier: Verifier, prompt: list[int], length: int, temperature: float) -> np.ndarray:
    """Probability of every continuation of `length` tokens, by enumeration; shape [V] * length, flattened."""
    law = np.ones(1)
    prefixes: list[list[int]] = [[]]
    vocab = verifier.vocab_size
    for _ in range(length):
        logits = verifier.model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1]
        step = (logits.double() / temperature).softmax(-1).numpy()
        law = (law[:, None] * step).ravel()
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(vocab)]
    return law


def sampled_statistic(method: str, draws: int, draft_vocab_size: int | None) -> float:
    """Chi-square of the first three tokens through the whole engine against the exact law."""
    verifier = random_verifier(6, wide=0.25)
    speculator = random_speculator(verifier, draft_vocab_size=draft_vocab_size)
    limits = EngineLimits(max_num_seqs=500, max_model_len=32)
    llm = LLM.from_parts(
        verifier, speculator, num_speculative_tokens=2, draft_sample_method=method, limits=limits, seed=9
    )
    params = SamplingParams(temperature=1.2, max_tokens=3)
    outputs = llm.generate([[1, 4, 2]] * draws, params, use_tqdm=False)
    codes = [int("".join(map(str, output.outputs[0].token_ids)), 6) for output in outputs]
    assert llm.stats is not None
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
    expected = exact_law(verifier, [1, 4, 2], 3, 1.2) * draws
    counts = np.bincount(codes, minlength=216)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_output_follows_the_verifier(method: str) -> None:
    assert sampled_statistic(method, 5_000, 3) < chi2.ppf(1 - 1e-6, 215)


@pytest.mark.full
@pytest.mark.parametrize("draft_vocab_size", [None, 3])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_output_follows_the_verifier_closely(method: str, draft_vocab_size: int | None) -> None:
    assert sampled_statistic(method, 100_000, draft_vocab_size) < chi2.ppf(1 - 1e-6, 215)
