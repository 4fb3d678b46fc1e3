"""Sampling parameters: ranges, processed distributions against numpy, independent noise streams."""

import numpy as np
import pytest
import torch

from speculators.errors import RequestError
from speculators.runtime.sampling import NoiseStreams, SamplingParams, exponential, probabilities, uniform

LOGITS = np.array([2.0, 1.0, 0.5, -1.0, 1.5, -3.0])


def numpy_law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The law by direct definition, one token set at a time."""
    scaled = logits / temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    kept = law >= min_p * law.max()
    law = np.where(kept, law, 0)
    order = np.argsort(-law, kind="stable")
    if top_k > 0:
        law[order[top_k:]] = 0
    law /= law.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            law[token] = 0
        mass += law[token]
    return law / law.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.3, -1, 0.6, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.5, 4, 0.9, 0.05),
        (2.0, 1, 1.0, 0.0),
    ],
)
def test_probabilities_match_the_definition(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    other = SamplingParams(temperature=0.9)
    got = probabilities(torch.tensor(np.stack([LOGITS, LOGITS]), dtype=torch.float32), [params, other])
    np.testing.assert_allclose(got[0], numpy_law(LOGITS, temperature, top_k, top_p, min_p), atol=1e-6)
    np.testing.assert_allclose(got[1], numpy_law(LOGITS, 0.9, 0, 1.0, 0.0), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("n", True),
        ("presence_penalty", 2.5),
        ("presence_penalty", "0"),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_tokens", 17),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: None}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", 5),
        ("bad_words", "x"),
        ("bad_words", [" "]),
        ("bad_words", [7]),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("logits_processors", [len]),
        ("truncate_prompt_tokens", 5),
        ("detokenize", False),
        ("guided_decoding", {"regex": "a"}),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"sampling parameter {name}=") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_streams_are_independent_and_repeatable() -> None:
    """One seed gives three different streams, and the same ones again (row 55)."""
    device = torch.device("cpu")
    first, again = NoiseStreams.from_seed(7, device), NoiseStreams.from_seed(7, device)
    draws = [uniform(4, stream) for stream in (first.draft, first.accept, first.sample)]
    assert all(not torch.equal(draws[i], draws[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert torch.equal(draws[0], uniform(4, again.draft))
    assert not torch.equal(uniform(4, NoiseStreams.from_seed(8, device).draft), draws[0])
    assert (exponential(1000, first.sample) > 0).all()
