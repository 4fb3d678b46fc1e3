"""What preparing rows counts, and what follows from the counts: reasons, statistics, draft vocabularies, previews."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from speculators.errors import DataError, StoreError
from speculators.extract.conversations import TextRow, parse_row
from speculators.extract.prepared import DRAFT_VOCAB, RowEncoder, merged_counts, merged_draft_vocab, read_draft_vocab
from speculators.extract.preview import LEARNT, coloured_row
from speculators.extract.run import PrepareOptions, prepare
from speculators.extract.tokenize import ChatTokenizer, encode_text
from tests.extract.row_files import five_rows, talk, write
from tests.extract.templates import QWEN3
from tests.tiny_models import END, START, make_tokenizer, make_verifier


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return five_rows(tmp_path)


def test_shares_reasons_and_lengths_are_counted(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    with data.open("a") as stream:
        stream.write("{\n" + json.dumps({"prompt": "x" * 5000}) + "\n")
    more = write(tmp_path / "more.jsonl", {"input_ids": [400], "loss_mask": [1]}, {"input_ids": [1], "loss_mask": [1]})
    options = PrepareOptions(minimum_valid_tokens=3, max_length=64, max_row_bytes=4096, skip_bad_rows=True)
    with pytest.raises(DataError, match=r"data\.jsonl:6: not JSON"):
        prepare(tiny_verifier, data, tmp_path / "out", PrepareOptions(), progress=False)
    prepared = prepare(tiny_verifier, [data, more], tmp_path / "out", options, progress=False)
    statistics = prepared.statistics()
    assert statistics["read"] == 9
    assert statistics["rows"] == len(prepared) == 2
    assert statistics["skipped"] == 7
    assert statistics["skipped_why"] == {
        "no assistant message": 1,
        "fewer than 3 tokens to learn": 1,
        "nothing to learn": 2,
        "bad row": 3,
    }
    faults = statistics["faults"]
    for fault, reason in zip(faults, ("not JSON", "above the limit of 4096", "token id 400 is outside"), strict=True):
        assert reason in fault
    tokens = sum(prepared.lengths)
    learnt = sum(int(mask.sum()) for _, mask in prepared)
    assert (statistics["tokens"], statistics["supervised_tokens"]) == (tokens, learnt)
    assert statistics["supervised_share"] == pytest.approx(learnt / tokens, abs=1e-6)
    assert statistics["row_tokens"]["max"] == max(prepared.lengths)


def test_row_24_a_dataset_without_assistant_turns_says_so(tmp_path: Path, tiny_verifier: Path) -> None:
    """A mask of zeros alone is an error before anything is trained on it (pitfall 24)."""
    data = write(tmp_path / "data.jsonl", *(talk(f"Question {i}?") for i in range(3)))
    with pytest.raises(DataError, match=r"none of the 3 rows .*\(3 no assistant message\); .*want regenerating"):
        prepare(tiny_verifier, data, tmp_path / "out", progress=False)


def test_plain_text_is_learnt_as_it_stands(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "verifier", num_layers=1)
    (verifier / "chat_template.jinja").unlink()
    data = write(tmp_path / "data.jsonl", {"text": "Rain fell all night."})
    ids, mask = prepare(verifier, data, tmp_path / "out", progress=False)[0]
    assert make_tokenizer().decode(ids) == "Rain fell all night."
    assert mask.all()


def test_row_24_a_conversation_that_was_formatted_before_is_refused(tmp_path: Path, tiny_verifier: Path) -> None:
    """As plain text all of it would be learnt, questions and headers too (pitfall 24)."""
    text = f"{START}user\nWhy?{END}\n{START}assistant\nNobody knows.{END}"
    data = write(tmp_path / "data.jsonl", {"text": text})
    with pytest.raises(DataError, match=r"data\.jsonl:1: the text holds the markup .*formatted conversation"):
        prepare(tiny_verifier, data, tmp_path / "out", progress=False)


def test_a_token_that_begins_every_text_is_not_learnt() -> None:
    tokenizer = make_tokenizer()
    start = (START, tokenizer.convert_tokens_to_ids(START))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{START} $A", special_tokens=[start])
    row = parse_row(json.dumps({"text": "Rain fell."}), Path("data.jsonl"), 1)
    assert isinstance(row, TextRow)
    ids, mask, _ = encode_text(tokenizer, row)
    assert ids[0] == start[1]
    assert mask == [False] + [True] * (len(ids) - 1)


def test_history_that_a_template_rewrites_becomes_several_rows(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "verifier", num_layers=1)
    tokenizer = QWEN3.tokenizer()
    tokenizer.save_pretrained(verifier)
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer)}))
    talks = (talk("What is it?", "A fox.", "Why?", "Nobody knows."), talk("And then?", "Rain fell."))
    data = write(tmp_path / "data.jsonl", *talks)
    prepared = prepare(verifier, data, tmp_path / "out", PrepareOptions(draft_vocab_size=20), progress=False)
    learnt = [tokenizer.decode(ids[mask]) for ids, mask in prepared]
    assert learnt == ["A fox.<|im_end|>", "Nobody knows.<|im_end|>", "Rain fell.<|im_end|>"]
    assert [prepared.manifest[key] for key in ("read", "rows", "split")] == [2, 3, 1]
    # The markup of tools and thinking is never learnt here, and yet a draft must be able to propose it.
    vocab = read_draft_vocab(prepared.directory / DRAFT_VOCAB)
    kept = tokenizer.convert_ids_to_tokens(vocab.draft_ids.tolist())
    markup = {"<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"}
    assert markup | {"<|im_start|>", "<|im_end|>"} <= set(kept)
    counts = prepared.token_counts
    expected = counts[vocab.draft_ids].sum() / counts.sum()
    coverage = prepared.statistics()["draft_vocab"]
    assert coverage == {"size": 20, "coverage": pytest.approx(float(expected), abs=1e-6)}


def test_counts_of_several_folders_add_up(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    other = write(tmp_path / "other.jsonl", talk("Why?", "Seven wise owls watch."))
    parts = [prepare(tiny_verifier, file, tmp_path / file.stem / "p", progress=False) for file in (data, other)]
    both = prepare(tiny_verifier, [data, other], tmp_path / "both", progress=False)
    assert merged_counts(parts).tolist() == both.token_counts.tolist()
    one, two = merged_draft_vocab(parts, 30), merged_draft_vocab([both], 30)
    assert one.draft_ids.tolist() == two.draft_ids.tolist()
    end = make_tokenizer().convert_tokens_to_ids(END)
    assert end in merged_draft_vocab(parts, 2).draft_ids.tolist()
    foreign = make_verifier(tmp_path / "foreign", num_layers=1)
    make_tokenizer(320).save_pretrained(foreign)
    parts.append(prepare(foreign, other, tmp_path / "foreign_prepared", progress=False))
    with pytest.raises(StoreError, match="were prepared with different tokenizers"):
        merged_draft_vocab(parts, 30)


def test_row_25_a_mask_is_as_long_as_its_ids_wherever_a_row_is_cut() -> None:
    """At every length, from two tokens to more than there are (pitfall 25)."""
    row = parse_row(json.dumps(talk("And then?", "Rain fell all night.", "Why?", "Nobody knows.")), Path("d.jsonl"), 1)
    chat = ChatTokenizer(make_tokenizer())
    [(whole_ids, whole_mask, _)] = chat.encode_rows(row)
    for length in range(2, len(whole_ids) + 2):
        learnt = any(whole_mask[1:length])
        encoder = RowEncoder(chat, 384, length)
        assert encoder.encode(row) == [(whole_ids[:length], whole_mask[:length])] * learnt
        assert (encoder.cut, encoder.skipped.total()) == ((len(whole_ids) > length) * learnt, not learnt)


def test_what_is_learnt_is_coloured(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    prepared = prepare(tiny_verifier, data, tmp_path / "out", progress=False)
    text = coloured_row(prepared, 2, make_tokenizer())
    assert text.plain == make_tokenizer().decode(prepared[2][0])
    shown = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert [part for part, style in shown if style == LEARNT] == [f"Rain fell all night.{END}", f"Nobody knows.{END}"]
    assert "".join(part for part, _ in shown) == text.plain
