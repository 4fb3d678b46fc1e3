"""Prepared data: what is kept, cut, skipped and counted."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from speculators.errors import DataError, StoreError, UsageError, VerifierError
from speculators.extract.prepared import DRAFT_VOCAB, MANIFEST, PreparedData, read_draft_vocab
from speculators.extract.run import PrepareOptions, prepare
from speculators.extract.tokenize import ChatTokenizer
from tests.extract.row_files import five_rows, talk, write
from tests.tiny_models import CHAT_TEMPLATE, END, START, make_tokenizer, make_verifier


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return five_rows(tmp_path)


def test_rows_are_kept_in_order_and_counted(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    prepared = prepare(tiny_verifier, data, tmp_path / "out", progress=False)
    assert len(prepared) == 3
    tokenizer = make_tokenizer()
    for number, texts in ((0, ["Forty two."]), (2, ["Rain fell all night.", "Nobody knows."])):
        ids, mask = prepared[number]
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        assert tokenizer.decode(ids[mask]) == "".join(text + END for text in texts)
    ids, mask = prepared[1]
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7, 8], [False, True, False, True])
    manifest = prepared.manifest
    assert [manifest[key] for key in ("rows", "cut", "skipped")] == [3, 0, 2]
    # The second lacks an answer; a mask that is true at the first position alone has nothing before it to learn from.
    assert manifest["skipped_rows"] == ["data-000002", "data-000004"]
    assert list(prepared.lengths) == [len(prepared[i][0]) for i in range(3)]
    assert manifest["tokens"] == prepared.num_tokens == sum(prepared.lengths)
    counted = Counter(token for ids, mask in prepared for token in ids[mask].tolist())
    counts = prepared.token_counts
    assert counts.shape == (384,)
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == counted
    assert manifest["supervised_tokens"] == counted.total()
    with pytest.raises(IndexError, match="row 3 of 3"):
        prepared[3]


def test_row_25_long_rows_are_cut_where_something_is_left_to_learn(tmp_path: Path, tiny_verifier: Path) -> None:
    """Spans of the verifier's words are found, or it is an error; a cut leaves ids and mask alike.

    Pitfall 24 and pitfall 25.
    """
    tokenizer = make_tokenizer()
    header = len(tokenizer(f"{START}user\nWhat is the sum?{END}\n{START}assistant\n")["input_ids"])
    data = write(tmp_path / "data.jsonl", talk("What is the sum?", "Explain each step and give the final number."))
    for length, left in ((header + 3, 3), (header + 1, 1)):
        prepared = prepare(
            tiny_verifier, data, tmp_path / f"{length}", PrepareOptions(max_length=length), progress=False
        )
        ids, mask = prepared[0]
        assert len(ids) == len(mask) == length
        assert mask.tolist() == [False] * header + [True] * left
        assert prepared.manifest["cut"] == 1
    for length in (header, header - 2, 4):
        with pytest.raises(DataError, match=f"none of the 1 rows has anything to learn within {length} tokens"):
            prepare(tiny_verifier, data, tmp_path / "none", PrepareOptions(max_length=length), progress=False)
        assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="max_length is 1"):
        prepare(tiny_verifier, data, tmp_path / "none", PrepareOptions(max_length=1), progress=False)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("place", ["first header", "first answer", "second header", "second answer"])
def test_row_25_a_conversation_is_cut_anywhere(tmp_path: Path, tiny_verifier: Path, place: str, marked: bool) -> None:
    """Mask and ids are cut alike; what ends before its first answer is skipped and counted (pitfall 25).

    Whether the mask comes from the template's own marks, as transformers gives it, or from comparing renders.
    """
    if marked:
        tiny_verifier = shutil.copytree(tiny_verifier, tmp_path / "verifier")
        said = "{{ message['content'] }}<|im_end|>"
        either = "{% generation %}" + said + "{% endgeneration %}{% else %}" + said + "{% endif %}{{ '\\n' }}"
        template = CHAT_TEMPLATE.replace(said + "\n", "{% if message['role'] == 'assistant' %}" + either)
        (tiny_verifier / "chat_template.jinja").write_text(template, encoding="utf-8")
    texts = ("What is the sum?", "Forty two.", "And then?", "Rain fell all night.")
    tokenizer = make_tokenizer()
    header = f"{START}user\n{texts[0]}{END}\n{START}assistant\n"
    turn = f"{header}{texts[1]}{END}\n{START}user\n{texts[2]}{END}\n{START}assistant\n"
    whole, first, second = (len(tokenizer(text)["input_ids"]) for text in (f"{turn}{texts[3]}{END}\n", header, turn))
    length = {"first header": first - 1, "first answer": first + 2, "second header": second - 2}.get(place, second + 3)
    assert first < length < whole or place == "first header"
    answered = len(tokenizer(f"{texts[1]}{END}")["input_ids"])
    short = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
    data = write(tmp_path / "data.jsonl", talk(*texts), short)
    uncut = prepare(tiny_verifier, data, tmp_path / "uncut", progress=False)
    prepared = prepare(tiny_verifier, data, tmp_path / "cut", PrepareOptions(max_length=length), progress=False)
    skipped = int(place == "first header")
    assert [prepared.manifest[key] for key in ("rows", "cut", "skipped")] == [2 - skipped, 1 - skipped, skipped]
    assert prepared[len(prepared) - 1][0].tolist() == short["input_ids"]
    if not skipped:
        ids, mask = prepared[0]
        assert len(ids) == len(mask) == length
        assert torch.equal(ids, uncut[0][0][:length])
        assert torch.equal(mask, uncut[0][1][:length])
        assert mask[-1].item() is place.endswith("answer")
        learnt = {"first answer": texts[1], "second header": f"{texts[1]}{END}"}.get(
            place, f"{texts[1]}{END}{texts[3]}"
        )
        assert learnt.startswith(tokenizer.decode(ids[mask]))
        assert int(mask.sum()) == {"first answer": 2, "second header": answered}.get(place, answered + 3)
    else:
        assert prepared.manifest["skipped_rows"] == ["data-000001"]


def test_a_rerun_takes_finished_rows_and_a_change_replaces_them(
    tmp_path: Path, tiny_verifier: Path, data: Path
) -> None:
    out = tmp_path / "out"
    first = prepare(tiny_verifier, data, out, progress=False)
    stamp = (out / MANIFEST).stat().st_mtime_ns
    again = prepare(tiny_verifier, [data], out, progress=False)
    assert (out / MANIFEST).stat().st_mtime_ns == stamp
    assert again.rows_hash == first.rows_hash
    write(data, talk("What is the sum?", "Forty three."))
    changed = prepare(tiny_verifier, data, out, progress=False)
    assert len(changed) == 1
    assert changed.rows_hash != first.rows_hash
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out"]


def test_a_failure_keeps_what_was_there(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    out = tmp_path / "out"
    first = prepare(tiny_verifier, data, out, progress=False)
    write(data, talk("a", "b"), {"input_ids": [5, 384], "loss_mask": [1, 1]})
    with pytest.raises(DataError, match=r"data\.jsonl:2: token id 384 is outside the verifier's vocabulary of 384"):
        prepare(tiny_verifier, data, out, progress=False)
    assert PreparedData(out).rows_hash == first.rows_hash


def test_other_folders_are_left_alone(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "manifest.json").write_text('{"format_version": 7}')
    with pytest.raises(StoreError, match="format_version 7, expected 1"):
        prepare(tiny_verifier, data, out, progress=False)
    (out / "manifest.json").rename(out / "thesis.txt")
    with pytest.raises(StoreError, match="holds other files than prepared data"):
        prepare(tiny_verifier, data, out, progress=False)
    assert (out / "thesis.txt").exists()
    with pytest.raises(StoreError, match="holds no prepared data"):
        PreparedData(tmp_path / "nowhere")


def test_the_draft_vocabulary_holds_the_most_frequent_tokens_and_the_ends(
    tmp_path: Path, tiny_verifier: Path, data: Path
) -> None:
    prepared = prepare(tiny_verifier, data, tmp_path / "out", PrepareOptions(draft_vocab_size=16), progress=False)
    vocab = read_draft_vocab(prepared.directory / DRAFT_VOCAB)
    tokenizer = make_tokenizer()
    counts = prepared.token_counts
    specials = set(tokenizer.convert_tokens_to_ids([START, END]))
    by_count = sorted((i for i in range(384) if i not in specials), key=lambda i: (-int(counts[i]), i))
    assert vocab.draft_ids.tolist() == sorted([*specials, *by_count[:14]])
    assert vocab.verifier_size == 384


def test_without_a_chat_template_only_rows_of_tokens_are_possible(tmp_path: Path, data: Path) -> None:
    verifier = make_verifier(tmp_path / "verifier", num_layers=1)
    (verifier / "chat_template.jinja").unlink()
    with pytest.raises(VerifierError, match="has no chat template"):
        prepare(verifier, data, tmp_path / "out", progress=False)
    write(data, {"input_ids": [5, 6], "loss_mask": [0, 1]})
    assert len(prepare(verifier, data, tmp_path / "out", progress=False)) == 1


def test_an_unreadable_verifier_is_named(tmp_path: Path, data: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(VerifierError, match=f"verifier '{empty}' cannot be read"):
        prepare(empty, data, tmp_path / "out", progress=False)


def test_the_template_hash_is_in_the_manifest(tmp_path: Path, tiny_verifier: Path, data: Path) -> None:
    prepared = prepare(tiny_verifier, data, tmp_path / "out", progress=False)
    assert prepared.template_hash == ChatTokenizer(make_tokenizer()).template_hash
