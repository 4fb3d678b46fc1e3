"""Classes of the user's own: what they are given, what they may answer, and what is said where they cannot be used."""

import numpy as np
import pytest
import torch

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.custom import CustomProposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime import custom_drafters
from tests.runtime.lookups import proposed, request_of
from tests.runtime.parts import random_verifier

HERE = "tests.runtime.custom_drafters"


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return random_verifier(32, num_layers=2)


def named(name: str, verifier: Verifier, *, depth: int = 3) -> CustomProposer:
    return CustomProposer(name, num_tokens=depth, verifier=verifier, max_model_len=64, max_num_seqs=4)


def test_a_class_of_vllms_signature_gets_tokens_and_a_config(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[custom_drafters.Repeating] = []
    asked: list[tuple[object, ...]] = []

    class Watched(custom_drafters.Repeating):
        def __init__(self, *arguments: custom_drafters.CustomConfig) -> None:
            super().__init__(*arguments)
            made.append(self)

        def propose(self, sampled, lengths, ids, slot_mappings=None):
            asked.append((sampled, lengths.copy(), ids.copy(), slot_mappings))
            return super().propose(sampled, lengths, ids, slot_mappings)

    monkeypatch.setattr(custom_drafters, "Watched", Watched, raising=False)
    proposer = named(f"{HERE}.Watched", verifier)
    config = made[0].config
    assert made[0].target is verifier.model
    assert config.speculative_config.num_speculative_tokens == 3
    assert (config.speculative_config.method, config.speculative_config.model) == ("custom_class", f"{HERE}.Watched")
    assert (config.model_config.max_model_len, config.model_config.get_vocab_size()) == (64, 32)
    assert (config.model_config.model, config.scheduler_config.max_num_seqs) == ("random", 4)
    first, second = request_of("a", [1, 2, 3, 4, 5], [1, 2]), request_of("b", [9, 8], [7])
    assert proposed(proposer, [first, second], [2, 1]) == [[3, 4, 5], []]
    sampled, lengths, ids, slot_mappings = asked[0]
    assert (sampled, lengths.tolist(), slot_mappings) == ([[1, 2], [7]], [7, 3, 0, 0], None)
    assert (ids.dtype, lengths.dtype, ids.shape) == (np.int32, np.int32, (4, 64))
    assert ids[0, :7].tolist() == first.tokens
    # The second request moves into the first one's row, and goes on there.
    proposer.forget(first)
    proposer.move(1, 0, 2)
    second.tokens += [9]
    assert proposed(proposer, [second]) == [[8, 7, 9]]
    assert asked[1][2][0, :4].tolist() == [9, 8, 7, 9]


def test_a_proposer_of_ours_runs_as_it_is(verifier: Verifier) -> None:
    """It reads hidden states, sees every event, and the output is that of plain decoding."""
    outputs = []
    proposer = named(f"{HERE}.Counting", verifier)
    assert proposer.aux_layer_ids == (1,)
    for one in (proposer, None):
        engine = Engine(verifier, one, limits=EngineLimits(2, 64))
        for name in "abc":
            engine.add_request(name, [1, 2, ord(name) % 32], SamplingParams(temperature=0, max_tokens=8))
        done = {}
        while engine.has_unfinished:
            done.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
        outputs.append(done)
    assert outputs[0] == outputs[1]
    seen = proposer._own.seen
    assert seen[:2] == ["observe a", "observe b"]
    assert [event for event in seen if event.startswith("forget")] == ["forget a", "forget b", "forget c"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Class", "expected a dotted path"),
        (".Class", "expected a dotted path"),
        ("no.such.module.Class", "module 'no.such.module' cannot be imported"),
        (f"{HERE}.Missing", "has nothing of that name; expected a class"),
        (f"{HERE}.A_FUNCTION", "has A_FUNCTION, which is a builtin_function_or_method; expected a class"),
        (f"{HERE}.WithoutPropose", "has no method `propose`"),
        (f"{HERE}.WithoutConfig", "must take one positional argument"),
        (f"{HERE}.HalfProposer", "has no method `move`"),
    ],
)
def test_classes_that_cannot_be_used(verifier: Verifier, path: str, words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        named(path, verifier)
    assert f"custom class {path!r}" in str(caught.value)


def ids(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("Answering", None, "gave None for 2 requests; expected a list of token ids a request"),
        ("Answering", [[1]], "gave 1 lists for 2 requests"),
        ("Answering", [[1], 5], "gave 5 for request 1; expected a list"),
        ("Answering", [[1, 2, 3, 4], []], "gave 4 tokens for request 0; expected at most 3"),
        ("Answering", [[], [1, 32]], r"gave 32 for request 1; expected token ids in 0\.\.31"),
        ("Answering", [[-1], []], "gave -1 for request 0"),
        ("Answering", [[1.5], []], "gave 1.5 for request 0"),
        ("Answering", [[True], []], "gave True for request 0"),
        ("AnsweringProposer", [[1], [2]], "expected a Proposal"),
        ("AnsweringProposer", Proposal(ids(1, 3), ids(1)), r"gave ids of shape \[1, 3\] with lengths \[1\] for 2 req"),
        ("AnsweringProposer", Proposal(ids(2, 3), 4 * ids(2)), r"with lengths \[4, 4\]"),
        ("AnsweringProposer", Proposal(40 * ids(2, 3), ids(2)), "gave 40 for request 0"),
    ],
)
def test_answers_that_are_no_drafts(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch, name: str, answer: object, words: str
) -> None:
    monkeypatch.setattr(getattr(custom_drafters, name), "answer", answer)
    proposer = named(f"{HERE}.{name}", verifier)
    with pytest.raises(EngineError, match=words):
        proposed(proposer, [request_of("a", [1], [2]), request_of("b", [1], [2])])


def test_numpy_ids_are_ids(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_drafters.Answering, "answer", [np.array([3, 4]), [np.int32(5)]])
    proposer = named(f"{HERE}.Answering", verifier)
    assert proposed(proposer, [request_of("a", [1], [2]), request_of("b", [1], [2])]) == [[3, 4], [5]]
