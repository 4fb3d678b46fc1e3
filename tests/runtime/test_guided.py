"""Guided decoding: outputs have the form that was asked for, and drafts change nothing about them."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from speculators.errors import RequestError
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.guided import GrammarCompiler, allowed_tokens
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import NO_TOKEN_ALLOWED, RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.structured_outputs import StructuredOutputsParams
from speculators.runtime.tree_engine import TreeEngine
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier
from tests.runtime.replaying import ReplayProposer, ReplayTrees
from tests.tiny_models import make_tokenizer

PROMPTS = ["The quick brown fox", "rain fell all night, the road was closed", "What is the sum of twelve?"]
LIMITS = EngineLimits(max_num_seqs=2, max_model_len=200)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "owl", "lazy dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CHOICES = ["the quick fox", "seven wise owls", 'a "dog"\n', "größer", "7"]
REGEX = r"[a-f]{3,9}-(oak|apples) [0-9]{2}"
LARK = 'start: item ("," item)*\nitem: /[a-z]{2,4}/ "=" /[0-9]/'


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier.from_pretrained(tiny_verifier, dtype="float32")


def fits_json(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "age", "kind"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert value["age"] in range(121)
    return value["kind"] in ("fox", "owl", "lazy dog")


def fits_grammar(text: str) -> bool:
    return all(re.fullmatch(r"[a-z]{2,4}=[0-9]", item) for item in text.split(","))


FORMS = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, fits_json),
    "json text": ({"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}, fits_json),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "lark": ({"grammar": LARK}, fits_grammar),
    "gbnf": ({"grammar": 'root ::= "ab" [0-9] [0-9]?'}, lambda text: re.fullmatch(r"ab\d{1,2}", text) is not None),
    "object": ({"json_object": True, "disable_any_whitespace": True}, lambda text: isinstance(json.loads(text), dict)),
}


def ask(form: str, **more: object) -> SamplingParams:
    """Parameters of a completion of a form, which has to end by itself; the bias keeps open-ended forms short."""
    closing_brace, end = 94, 1
    bias = {end: 8.0, closing_brace: 3.0}
    wanted = StructuredOutputsParams(**FORMS[form][0])
    return SamplingParams(**{"temperature": 0, "max_tokens": 80, "logit_bias": bias, **more}, structured_outputs=wanted)


def answers(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def shown(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    completions = [output.outputs[0] for output in outputs]
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in completions]


def replaying(verifier: Verifier, known: Sequence[RequestOutput], num_tokens: int, *, trees: bool = False) -> LLM:
    """Drafts these outputs with every third token wrong, or as trees; of the wrong ones, no grammar allows most."""
    llm = LLM.from_parts(verifier, limits=LIMITS)
    continuations = {tuple(one.prompt_token_ids): [*one.outputs[0].token_ids, 1, 1, 1] for one in known}
    engine, proposer = (TreeEngine, ReplayTrees) if trees else (Engine, ReplayProposer)
    llm.engine = engine(verifier, proposer(continuations, num_tokens), limits=LIMITS)
    return llm


@pytest.mark.parametrize("form", FORMS)
def test_outputs_fit_and_drafts_leave_them_as_they_are(verifier: Verifier, form: str) -> None:
    """Greedy; the sequence ends inside a draft window, after what completes the form."""
    params, fits = ask(form), FORMS[form][1]
    plain = answers(LLM.from_parts(verifier, limits=LIMITS), params)
    for output in plain:
        assert output.outputs[0].finish_reason == "stop"
        assert fits(output.outputs[0].text), output.outputs[0].text
    for num_tokens, trees in ((2, False), (5, False), (4, True)):
        llm = replaying(verifier, plain, num_tokens, trees=trees)
        assert shown(answers(llm, params)) == shown(plain)
        assert llm.engine.stats is not None
        assert 0 < llm.engine.stats.num_accepted_tokens < llm.engine.stats.num_draft_tokens
    untrained = LLM.from_parts(verifier, random_speculator(verifier), num_speculative_tokens=3, limits=LIMITS)
    assert shown(answers(untrained, params)) == shown(plain)


@pytest.mark.parametrize("form", ["json", "regex", "choice"])
def test_sampled_outputs_fit(verifier: Verifier, form: str) -> None:
    """With drafts of a sampled output and with sampled drafts; neighbours may be free."""
    fits = FORMS[form][1]
    params = [ask(form, temperature=1.0, seed=seed) for seed in range(2)]
    params.insert(1, SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True))
    known = LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS, params, use_tqdm=False)
    sampled = LLM.from_parts(verifier, random_speculator(verifier), draft_sample_method="probabilistic", limits=LIMITS)
    for llm in (replaying(verifier, known, 3), replaying(verifier, known, 3, trees=True), sampled):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output in (outputs[0], outputs[2]):
            assert output.outputs[0].finish_reason == "stop"
            assert fits(output.outputs[0].text), output.outputs[0].text
        assert len(outputs[1].outputs[0].token_ids) == 12


def test_masks_equal_those_of_a_regular_language_by_hand() -> None:
    """At every position of a window, tokens that some completion begins with; a forbidden draft ends what is known."""
    tokenizer = make_tokenizer()
    texts = {token: tokenizer.decode([token]) for token in range(2, len(tokenizer))}
    compiler = GrammarCompiler(tokenizer, 390, frozenset({1}))
    state = compiler.start(StructuredOutputsParams(regex="(ab|a)c{0,2}"))
    language = [first + "c" * count for first in ("ab", "a") for count in range(3)]

    def expected(before: str) -> set[int]:
        """By enumeration of the six words."""
        goes_on = {t for t, text in texts.items() if text and any(word.startswith(before + text) for word in language)}
        return goes_on | ({1} if before in language else set())

    def allowed(mask: bytes | str | None) -> set[int]:
        assert isinstance(mask, bytes)
        return set(np.flatnonzero(allowed_tokens([mask], 390, torch.device("cpu"))[0]).tolist())

    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    for path in ([], [a], [a, c], [a, b, c], [a, b, c, c]):
        before = "".join(texts[token] for token in path)
        assert allowed(state.masks([path])[0]) == expected(before)
    chain = state.masks([[], [a], [a, c], [a, c, b], [a, c, b, c]])
    assert [allowed(mask) for mask in chain[:3]] == [expected(""), expected("a"), expected("ac")]
    assert chain[3:] == [None, None]
    tree = state.masks([[], [a], [b], [a, b], [a, c], [a, b, c], [a, b, c, c, 1, 1]])
    assert [allowed(mask) for mask in tree if mask is not None] == [
        expected(""), expected("a"), expected("ab"), expected("ac"), expected("abc"), {1}
    ]  # fmt: skip
    assert tree[2] is None
    assert state.advance([a, b, c, c])
    # The form is complete: only the end may follow, any number of times.
    assert [allowed(mask) for mask in state.masks([[], [1], [1, 1]])] == [{1}, {1}, {1}]
    assert not state.advance([a])


def test_tokens_after_the_end_of_a_grammar_are_ends(verifier: Verifier) -> None:
    """With ignore_eos nothing else ends the request."""
    params = ask("choice", ignore_eos=True, max_tokens=25)
    plain = answers(LLM.from_parts(verifier, limits=LIMITS), params)
    for output in plain:
        ids = output.outputs[0].token_ids
        assert len(ids) == 25
        first = ids.index(1)
        assert set(ids[first:]) == {1}
        assert verifier.tokenizer.decode(ids[:first]) in CHOICES
    assert shown(answers(replaying(verifier, plain, 4), params)) == shown(plain)


def test_a_form_that_ends_before_min_tokens_leaves_no_token(verifier: Verifier) -> None:
    output = LLM.from_parts(verifier).generate(PROMPTS[0], ask("gbnf", min_tokens=9), use_tqdm=False)[0]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", NO_TOKEN_ALLOWED)
    assert output.error is not None
    assert "structured_outputs, min_tokens together leave no token to choose" in output.error
    assert re.fullmatch(r"ab\d{1,2}", output.outputs[0].text)


def test_a_token_against_the_grammar_ends_the_request(verifier: Verifier) -> None:
    """What a rule that does not keep the verifier's law may accept is told, and never taken over."""
    engine = Engine(verifier, limits=LIMITS)
    engine.add_request("x", [5, 6], ask("regex"))
    engine.step()
    engine.running[0].tokens.append(30)
    (output,) = engine.step()
    assert output.outputs[0].stop_reason == NO_TOKEN_ALLOWED
    assert output.error is not None
    assert "grammar does not allow the tokens" in output.error
    assert not engine.has_unfinished


def test_closed_objects_have_no_further_properties(verifier: Verifier) -> None:
    """`disable_additional_properties` closes nested objects, but no data that looks like one."""
    schema = {
        "type": "object",
        "properties": {"properties": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        "$defs": {"open": {"type": "object", "additionalProperties": {"properties": {}}}},
        "enum": [{"properties": 1}],
        "anyOf": [{"properties": {}}],
    }
    before = json.dumps(schema)
    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True).schema
    assert json.dumps(schema) == before
    assert closed["additionalProperties"] is False
    assert closed["properties"] == {
        "properties": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    }
    inner = {"properties": {}, "additionalProperties": False}
    assert closed["$defs"] == {"open": {"type": "object", "additionalProperties": inner}}
    assert (closed["enum"], closed["anyOf"]) == ([{"properties": 1}], [inner])
    assert StructuredOutputsParams(json=schema).schema == schema


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, "expected exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[]"}, "expected a JSON schema"),
        ({"json": {"enum": [{1, 2}]}}, "json holds what JSON cannot"),
        ({"regex": ""}, "regex='': expected a text"),
        ({"grammar": 5}, "grammar=5: expected a text"),
        ({"choice": []}, r"choice=\[\]: expected a list of texts"),
        ({"choice": ["a", ""]}, "none empty"),
        ({"json_object": False}, "json_object=False: expected True"),
        ({"regex": "a", "disable_any_whitespace": True}, "belongs to json or json_object, got it with regex"),
        ({"json_object": True, "disable_additional_properties": True}, "belongs to json, got it with json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace=1: expected"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradict each other"),
        ({"regexp": "a"}, "unknown field 'regexp'; did you mean 'regex'"),
        ("a+", "expected StructuredOutputsParams or a dict"),
    ],
)
def test_wrong_wishes_are_refused_by_name(wanted: object, words: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs: .*{words}") as caught:
        SamplingParams(structured_outputs=wanted)
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "(("}, "regex is wrong: .*unclosed group"),
        ({"grammar": "start: thing"}, "grammar is wrong: .*unknown name"),
        ({"grammar": "root ::= ("}, "grammar is wrong: .*GBNF"),
        ({"json": {"type": "objct"}}, "json is wrong: .*objct"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "json is wrong: .*unevaluatedProperties"),
        ({"json_object": True, "whitespace_pattern": "(("}, "json_object is wrong"),
    ],
)
def test_wrong_grammars_are_refused_when_they_are_asked_for(
    verifier: Verifier, wanted: dict[str, object], words: str
) -> None:
    llm = LLM.from_parts(verifier, limits=LIMITS)
    with pytest.raises(RequestError, match=f"(?s)structured_outputs: {words}"):
        answers(llm, SamplingParams(structured_outputs=wanted))
    assert not llm.engine.has_unfinished


def test_what_guided_decoding_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="needs a fast tokenizer, and the verifier's is none"):
        LLM.from_parts(random_verifier(8)).generate([1, 2], SamplingParams(structured_outputs=wanted), use_tqdm=False)
    with pytest.raises(RequestError, match="needs a token that ends a sequence"):
        GrammarCompiler(make_tokenizer(), 384, frozenset()).start(wanted)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestError, match=r"not installed; install it with: pip install 'speculators\[guided\]'"):
        GrammarCompiler(make_tokenizer(), 384, frozenset({1})).start(wanted)


def test_many_grammars_do_not_pile_up() -> None:
    compiler = GrammarCompiler(make_tokenizer(), 384, frozenset({1}))
    for count in range(70):
        compiler.start(StructuredOutputsParams(regex=f"a{{{count + 1}}}"))
    assert len(compiler._compiled) == 64


@pytest.mark.parametrize("drafting", ["nothing", "chains", "trees"])
def test_logprobs_are_of_what_the_grammar_leaves(verifier: Verifier, drafting: str) -> None:
    """Forbidden tokens have no share; a bias, which comes later, changes nothing that is told."""
    wanted = StructuredOutputsParams(choice=["the quick fox", "seven wise owls", "the quiet oak"])
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=2, logit_bias={90: 3.0}, structured_outputs=wanted)
    plain = answers(LLM.from_parts(verifier, limits=LIMITS), params)
    outputs = plain
    if drafting != "nothing":
        outputs = answers(replaying(verifier, plain, 3, trees=drafting == "trees"), params)
    compiler = GrammarCompiler(verifier.tokenizer, verifier.vocab_size, verifier.eos_token_ids)
    narrow = 0
    for output in outputs:
        ids, completion = [*output.prompt_token_ids, *output.outputs[0].token_ids], output.outputs[0]
        logits = verifier.model(torch.tensor([ids])).logits[0, len(output.prompt_token_ids) - 1 :]
        grammar = compiler.start(wanted)
        for place, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs or [], strict=True)):
            (mask,) = grammar.masks([[]])
            assert isinstance(mask, bytes)
            allowed = allowed_tokens([mask], verifier.vocab_size, torch.device("cpu"))[0].nonzero().flatten().tolist()
            law = dict(zip(allowed, logits[place, allowed].log_softmax(-1).tolist(), strict=True))
            assert abs(entry[token].logprob - law[token]) < 1e-4
            assert entry[token].rank == sum(value > law[token] for value in law.values()) + 1
            assert all(one in law or entry[one].logprob == float("-inf") for one in entry)
            narrow += 1 < len(allowed) < verifier.vocab_size
            assert grammar.advance([token])
    assert narrow
