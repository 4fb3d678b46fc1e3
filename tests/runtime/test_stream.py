"""Text as it becomes certain: no stop string leaks, pieces add up, and accepted drafts are told apart."""

from pathlib import Path

import pytest

from speculators.errors import RequestError
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.stats import SpecDecodeStats
from speculators.runtime.stream import TextStream, describe_acceptance, length_held_back
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier
from tests.runtime.replaying import greedy, replaying_llm

PROMPT = "The quick brown fox jumps over"


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier.from_pretrained(tiny_verifier, dtype="float32")


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("", ["ab"], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),
        ("xaba", ["abac"], 3),
        ("xabab", ["abac"], 2),
        ("Ob", ["Observation", "b!"], 2),
        ("b", ["Observation", "b!"], 1),
        ("anything", [], 0),
    ],
)
def test_what_could_become_a_stop_string_is_held_back(text: str, stops: list[str], held: int) -> None:
    assert length_held_back(text, stops) == held


def test_pieces_join_to_the_text_and_say_which_tokens_were_accepted(verifier: Verifier) -> None:
    """With two drafts a step and every third token of them wrong, what is accepted follows by counting."""
    llm = replaying_llm(verifier, [PROMPT], 2)
    whole = LLM.from_parts(verifier).generate(PROMPT, greedy(14), use_tqdm=False)[0].outputs[0]
    stream = TextStream(llm, PROMPT, greedy(14))
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert stream.output is not None
    completion = stream.output.outputs[0]
    assert completion.token_ids == whole.token_ids
    # Token 0 comes without drafts. Of drafts 1 and 2 the second is wrong. From token 3 on, each step brings two drafts
    # that are accepted and then the verifier's own token, at the place where a draft would have been wrong.
    expected = [False, True, False] + [True, True, False] * 3 + [True, True]
    assert completion.accepted == expected
    shown = {flag: "".join(piece.text for piece in pieces if piece.accepted is flag) for flag in (True, False)}
    assert len(shown[True]) + len(shown[False]) == len(whole.text)
    assert llm.stats is not None
    assert (llm.stats.num_drafts, llm.stats.num_accepted_tokens) == (5, 9)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_stop_string_never_leaks(verifier: Verifier, included: bool, depth: int) -> None:
    llm = LLM.from_parts(verifier, random_speculator(verifier), num_speculative_tokens=depth)
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    full = llm.generate(PROMPT, SamplingParams(**sampled), use_tqdm=False)[0].outputs[0].text
    # Bytes that are no UTF-8 are replaced at the very end; a stop string is looked for in text that is certain.
    stops = [stop for stop in (full[start : start + 3] for start in range(3, 60, 2)) if stop.isascii() and stop]
    assert len(stops) >= 3
    for stop in stops[:4]:
        params = SamplingParams(**sampled, stop=[stop, "never in there"], include_stop_str_in_output=included)
        stream = TextStream(llm, PROMPT, params)
        text = "".join(piece.text for piece in stream)
        assert text == full[: full.find(stop) + (len(stop) if included else 0)]
        assert stream.output is not None
        assert (stream.output.outputs[0].finish_reason, stream.output.outputs[0].text) == ("stop", text)


def test_leaving_a_stream_ends_its_request(verifier: Verifier) -> None:
    llm = LLM.from_parts(verifier)
    pieces = iter(TextStream(llm, {"prompt_token_ids": [5, 6, 7]}, greedy(100)))
    assert next(pieces).text
    assert llm.engine.has_unfinished
    pieces.close()
    assert not llm.engine.has_unfinished


def test_a_stream_shows_one_completion_that_has_text(verifier: Verifier) -> None:
    with pytest.raises(RequestError, match="n=2"):
        TextStream(LLM.from_parts(verifier), PROMPT, SamplingParams(n=2))
    with pytest.raises(RequestError, match="no tokenizer"):
        TextStream(LLM.from_parts(random_verifier()), [1, 2], greedy(3))


def test_the_statistics_line(verifier: Verifier) -> None:
    stream = TextStream(replaying_llm(verifier, [PROMPT], 2), PROMPT, greedy(14))
    assert stream.statistics() == "nothing was generated"
    assert sum(bool(piece.text) for piece in stream) > 0
    line = stream.statistics()
    assert line.startswith("14 tokens in ")
    # 5 steps drafted two tokens each; all accepted the first, all but the first step the second.
    assert line.endswith("acceptance length 2.80: 9 of 10 drafts accepted in 5 steps, per position 1.00 0.80")
    plain = TextStream(LLM.from_parts(verifier), PROMPT, greedy(3))
    assert sum(bool(piece.text) for piece in plain) > 0
    assert "acceptance" not in plain.statistics()
    assert describe_acceptance(SpecDecodeStats(2)) == "nothing was drafted"
