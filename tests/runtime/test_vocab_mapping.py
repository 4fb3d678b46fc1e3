"""Two vocabularies, token by token: what may be drafted, what the draft reads, and that answers stay the verifier's."""

import logging
from collections.abc import Mapping

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from speculators.errors import EngineError
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.proposers.draft_model import draft_model_proposer
from speculators.runtime.proposers.vocab_mapping import (
    VocabMapping,
    normalised,
    same_vocabulary,
    shared_tokens,
    space_markers,
)
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.draft_models import answers, model_of, tokens_of
from tests.tiny_models import SENTENCES, make_tokenizer
from tests.verifier_configs import SIZES

# In the two alphabets, a space before a word.
BYTE_LEVEL, METASPACE = "\u0120", "\u2581"
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)


def metaspace_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A BPE of characters that writes spaces as SentencePiece does, with an unknown token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def word_tokenizer(vocab: Mapping[str, int], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these strings and no others."""
    unknown = special.get("unk_token")
    # Whole words need an unknown one.
    words = models.WordLevel(dict(vocab), unk_token=unknown) if unknown else models.BPE(dict(vocab), [])
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def lm(tokenizer: PreTrainedTokenizerFast | None, size: int, *, name: str = "random", seed: int = 0) -> Verifier:
    sizes = SIZES | {"vocab_size": size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return model_of(LlamaConfig(**sizes), seed=seed, tokenizer=tokenizer, name=name)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return lm(make_tokenizer(), 384, name="verifier")


def test_spaces_are_marked_as_the_tokenizer_marks_them() -> None:
    assert space_markers(make_tokenizer()) == (BYTE_LEVEL,)
    assert space_markers(metaspace_tokenizer()) == (METASPACE,)
    assert space_markers(word_tokenizer({"x": 0, "<unk>": 1}, unk_token="<unk>")) == (BYTE_LEVEL, METASPACE)
    assert normalised(f"{BYTE_LEVEL}the", (BYTE_LEVEL,)) == " the"
    assert normalised(f"{METASPACE}{METASPACE}x", (METASPACE,)) == "  x"
    assert normalised(f"{METASPACE}the", (BYTE_LEVEL,)) == f"{METASPACE}the"
    assert normalised(f"a{BYTE_LEVEL}", (BYTE_LEVEL,)) == f"a{BYTE_LEVEL}"


def test_tokens_of_two_real_tokenizers_are_paired_by_their_text(verifier: Verifier) -> None:
    """Against the intersection written out over both vocabularies, in both directions."""
    draft = lm(metaspace_tokenizer(), 300, name="draft")
    mapping = shared_tokens(verifier, draft)
    ours = {
        (" " + token[1:] if token[0] == BYTE_LEVEL else token): i for token, i in verifier.tokenizer.get_vocab().items()
    }
    theirs = {
        (" " + token[1:] if token[0] == METASPACE else token): i for token, i in draft.tokenizer.get_vocab().items()
    }
    expected = {theirs[text]: ours[text] for text in ours.keys() & theirs.keys()}
    assert dict(zip(mapping.draft_ids_C.tolist(), mapping.verifier_ids_C.tolist(), strict=True)) == expected
    assert len(expected) > 50
    assert (
        expected[draft.tokenizer.get_vocab()[f"{METASPACE}the"]] == verifier.tokenizer.get_vocab()[f"{BYTE_LEVEL}the"]
    )
    back = {i: token for token, i in ours.items()}
    unknown = draft.tokenizer.unk_token_id
    assert mapping.to_draft_V is not None
    assert mapping.to_draft_V.tolist() == [theirs.get(back[i], unknown) for i in range(384)]
    assert not mapping.keeps_ids


def twin_of(verifier: Verifier, dropped: int) -> Verifier:
    """The verifier in another vocabulary: other ids, spaces written otherwise, and without every `dropped`-th token."""
    tokens = sorted(verifier.tokenizer.get_vocab().items(), key=lambda item: item[1])
    kept = [(token, i) for token, i in tokens if i % dropped != dropped - 1]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(4)).tolist()
    vocab = {"<unk>": 0}
    for new, (token, _) in zip(order, kept, strict=True):
        marked = len(token) - len(token.lstrip(BYTE_LEVEL))
        vocab[METASPACE * marked + token[marked:]] = new + 1
    draft = lm(word_tokenizer(vocab, unk_token="<unk>"), len(vocab), name="draft")
    state = dict(verifier.model.state_dict())
    rows = torch.empty(len(vocab), dtype=torch.int64)
    rows[0] = 0
    rows[torch.tensor(order) + 1] = torch.tensor([i for _, i in kept])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][rows]
    draft.model.load_state_dict(state)
    return draft


@pytest.mark.parametrize("dropped", [1000, 4])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_draft_of_another_vocabulary_leaves_answers_unchanged(
    verifier: Verifier, dropped: int, parallel: bool
) -> None:
    """The verifier's own weights under other ids are accepted in full; tokens that the draft lacks are not drafted."""
    draft = twin_of(verifier, dropped)
    draft.config.pard_token = 1
    prompts = [verifier.tokenizer(text)["input_ids"][: 4 + 9 * i] for i, text in enumerate(SENTENCES[:4])]
    plain, _ = answers(verifier, None, prompts, [GREEDY] * 4, batch=3)
    for depth in (1, 3, 7):
        proposer = draft_model_proposer(verifier, draft, depth, 3, parallel=parallel, heterogeneous=True)
        shared = set(proposer.vocabulary.verifier_ids_C.tolist())
        assert len(shared) == 384 - 384 // dropped
        outputs, engine = answers(verifier, proposer, prompts, [GREEDY] * 4, batch=3)
        assert tokens_of(outputs) == tokens_of(plain)
        assert engine.stats is not None
        assert engine.stats.num_drafts > 0
        completions = [output.outputs[0] for output in outputs]
        drafted = {t for one in completions for t, kept in zip(one.token_ids, one.accepted, strict=True) if kept}
        assert drafted <= shared
        if dropped == 1000 and not parallel:
            # Of 17 tokens after the first, one a step is the verifier's; drafts past the end count as accepted.
            assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


def test_of_two_tokens_with_one_text_the_first_is_proposed() -> None:
    ours = lm(word_tokenizer({f"{METASPACE}y": 0, f"{BYTE_LEVEL}y": 1, "x": 2, "<u>": 3}, unk_token="<u>"), 4)
    theirs = lm(word_tokenizer({"<unk>": 0, "x": 1, f"{BYTE_LEVEL}y": 2, f"{METASPACE}y": 3}, unk_token="<unk>"), 4)
    mapping = shared_tokens(ours, theirs)
    assert (mapping.draft_ids_C.tolist(), mapping.verifier_ids_C.tolist()) == ([1, 2], [2, 0])
    assert mapping.to_draft_V is not None
    assert mapping.to_draft_V.tolist() == [2, 2, 1, 0]


def test_little_in_common_is_warned_of_and_nothing_refused(caplog: pytest.LogCaptureFixture) -> None:
    ours = lm(word_tokenizer({"x": 0, "y": 1, "z": 2}), 3, name="verifier")
    theirs = lm(word_tokenizer({"q": 0, "x": 1, "</s>": 2}, eos_token="</s>"), 3, name="draft")
    with caplog.at_level(logging.WARNING):
        mapping = shared_tokens(ours, theirs)
    assert mapping.to_draft_V is not None
    assert mapping.to_draft_V.tolist() == [1, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "verifier 'verifier' and draft model 'draft' have only 1 tokens in common; few drafts will be accepted",
        "draft model 'draft' has no unknown token: it reads the verifier's other tokens as its end of sequence",
    ]
    with pytest.raises(EngineError, match="'draft' has neither an unknown token nor an end of sequence"):
        shared_tokens(ours, lm(word_tokenizer({"x": 0, "q": 1}), 2, name="draft"))
    with pytest.raises(EngineError, match="have no token in common"):
        shared_tokens(ours, lm(word_tokenizer({"p": 0, "<unk>": 1}, unk_token="<unk>"), 2))
    with pytest.raises(EngineError, match="two tokenizers, and 'draft' has none"):
        shared_tokens(ours, lm(None, 3, name="draft"))


def padded(tokenizer: PreTrainedTokenizerFast | None, size: int, name: str, seed: int = 0) -> Verifier:
    """A model whose likeliest token is one of padding at many positions."""
    model = lm(tokenizer, size, name=name, seed=seed)
    with torch.no_grad():
        model.model.lm_head.weight[384:] *= 4
    return model


@pytest.mark.parametrize(("ours", "theirs"), [(384, 390), (390, 384), (390, 400), (390, 390)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_read_but_never_proposed(ours: int, theirs: int, temperature: float) -> None:
    verifier, draft = padded(make_tokenizer(), ours, "verifier"), padded(make_tokenizer(), theirs, "draft", 1)
    params = [SamplingParams(temperature=temperature, max_tokens=15, seed=i) for i in range(4)]
    prompts = [[5, 6, 7 + i] for i in range(4)]
    proposer = draft_model_proposer(verifier, draft, 3, 4, probabilistic=True)
    assert proposer.vocabulary.keeps_ids
    assert len(proposer.vocabulary.draft_ids_C) == 384
    engine = Engine(verifier, proposer, limits=EngineLimits(max_num_seqs=4, max_model_len=64))
    for i in range(4):
        engine.add_request(str(i), prompts[i], params[i])
    drafted: set[int] = set()
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
        drafted.update(token for request in engine.running for token in request.drafts)
    outputs = [done[str(i)] for i in range(4)]
    assert len(drafted) > 10
    assert max(drafted) < 384
    emitted = {token for tokens in tokens_of(outputs) for token in tokens}
    assert (max(emitted) >= 384) is (ours > 384)
    if temperature == 0:
        assert tokens_of(outputs) == tokens_of(answers(verifier, None, prompts, params, batch=4)[0])


def renamed(changes: Mapping[str, int], added: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Words w0..w9 with some ids changed, and added tokens behind them."""
    vocab = {f"w{i}": i for i in range(10)} | dict(changes)
    tokenizer = word_tokenizer({token: i for token, i in vocab.items() if i >= 0})
    tokenizer.add_tokens(list(added or []), special_tokens=True)
    return tokenizer


def test_other_vocabularies_are_refused_by_the_first_token_that_differs() -> None:
    verifier = lm(renamed({}), 12, name="verifier")
    cases = {
        r"token id 3 is 'w3' to verifier 'verifier' and 'w7' to draft model 'draft', and 1 more ids differ": {
            "w3": 7,
            "w7": 3,
        },
        r"token id 9 is 'w9' to verifier 'verifier' and None to draft model 'draft', and 0 more ids": {"w9": -1},
        r"token id 10 is None to verifier 'verifier' and 'w10' to draft model 'draft', and 0 more ids": {"w10": 10},
    }
    for message, changes in cases.items():
        with pytest.raises(EngineError, match=f"{message}.*set use_heterogeneous_vocab"):
            same_vocabulary(verifier, lm(renamed(changes), 12, name="draft"))
    with pytest.raises(EngineError, match="has 12 tokens and verifier 'random' 14, and there are not two tokenizers"):
        same_vocabulary(lm(None, 14), lm(None, 12))
    assert same_vocabulary(lm(None, 12), lm(None, 12)).keeps_ids


def test_added_tokens_of_one_side_are_not_proposed() -> None:
    verifier = lm(renamed({}, ["<both>", "<think>", "<only>"]), 16)
    draft = lm(renamed({}, ["<both>", "<other>"]), 12)
    mapping = same_vocabulary(verifier, draft)
    assert mapping.draft_ids_C.tolist() == mapping.verifier_ids_C.tolist() == list(range(11))
    assert mapping.to_draft_V is not None
    # Rows that the draft does not have are read as its first token, for want of an unknown one.
    assert mapping.to_draft_V.tolist() == [*range(12), 0, 0, 0, 0]


def test_a_mapping_moves_as_a_whole() -> None:
    mapping = VocabMapping(torch.tensor([1]), torch.tensor([2]), torch.tensor([0, 0, 1])).to(torch.device("meta"))
    assert {mapping.draft_ids_C.device.type, mapping.verifier_ids_C.device.type} == {"meta"}
    assert mapping.to_draft_V is not None
    assert mapping.to_draft_V.is_meta
