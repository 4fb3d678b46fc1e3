"""Extraction: the states are the verifier's own, whatever the batch, and an interruption costs one shard."""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.errors import StoreError, VerifierError
from speculators.extract.fingerprint import verifier_fingerprint
from speculators.extract.local import LocalSource, batches_by_length, extract_rows
from speculators.extract.prepared import PreparedData
from speculators.extract.run import extract, prepare
from speculators.extract.sourcing import ExtractOptions
from speculators.extract.store import HiddenStatesStore, StoreIdentity, StoreWriter, shard_name
from speculators.runtime.verifier import Verifier
from tests.tiny_models import SENTENCES, make_verifier

AUX = (2, 4, 5)
EXACT = ExtractOptions(dtype="float32", store_dtype="float32", batch_tokens=100, shard_bytes=120 * 4 * 64 * 4)


@pytest.fixture
def prepared(tmp_path: Path, tiny_verifier: Path) -> PreparedData:
    path = tmp_path / "data.jsonl"
    with path.open("w") as stream:
        for i in range(9):
            question, answer = SENTENCES[i % 6][: 8 + 7 * i], SENTENCES[(i + 2) % 6][: 60 - 6 * i]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return prepare(tiny_verifier, path, tmp_path / "prepared", progress=False)


def identity_of(verifier: Path, prepared: PreparedData, dtype: str = "float32") -> StoreIdentity:
    return StoreIdentity(
        str(verifier), verifier_fingerprint(verifier), AUX, 8, 64, dtype, prepared.template_hash, prepared.rows_hash
    )


def check(store: HiddenStatesStore, verifier: Path, prepared: PreparedData) -> None:
    """Every row against transformers' own hidden states of the row alone, and its logits rebuilt from the last one."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    assert list(store.lengths) == list(prepared.lengths)
    for number in range(len(store)):
        ids, mask = prepared[number]
        sample = store[number]
        assert torch.equal(sample.input_ids, ids)
        assert torch.equal(sample.loss_mask, mask)
        with torch.no_grad():
            output = model(ids[None], output_hidden_states=True)
            logits = model.lm_head(model.model.norm(sample.last_hidden_states))
        for place, layer in enumerate(AUX):
            torch.testing.assert_close(
                sample.aux_hidden_states[:, place], output.hidden_states[layer][0], atol=1e-4, rtol=1e-4
            )
        torch.testing.assert_close(logits, output.logits[0], atol=1e-4, rtol=1e-4)


def test_states_are_the_verifiers_own(tmp_path: Path, tiny_verifier: Path, prepared: PreparedData) -> None:
    """States are those before the final norm, and say so; an id is the number of layers that ran.

    Pitfall 1 and pitfall 7.
    """
    store = extract(tiny_verifier, prepared.directory, tmp_path / "store", AUX, EXACT, progress=False)
    assert len(list((tmp_path / "store").glob("shard-*"))) > 2
    check(store, tiny_verifier, prepared)


def test_storage_rounds_and_nothing_else(tmp_path: Path, tiny_verifier: Path, prepared: PreparedData) -> None:
    exact = extract(tiny_verifier, prepared.directory, tmp_path / "exact", AUX, EXACT, progress=False)
    options = ExtractOptions(dtype="float32", batch_tokens=100, shard_bytes=120 * 4 * 64 * 4)
    rounded = extract(tiny_verifier, prepared.directory, tmp_path / "rounded", AUX, options, progress=False)
    for number in range(len(exact)):
        # Shards differ in size, hence batches, hence the last bits before rounding.
        torch.testing.assert_close(
            rounded[number].last_hidden_states.float(), exact[number].last_hidden_states, atol=1e-4, rtol=2**-8
        )


class InterruptedVerifier(Verifier):
    """The verifier with a user who presses Ctrl-C at its n-th pass."""

    passes_left = 3

    def capture(self, token_ids: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[Tensor]:
        if self.passes_left == 0:
            raise KeyboardInterrupt
        self.passes_left -= 1
        return super().capture(token_ids, layer_ids)


def test_an_interruption_keeps_finished_shards(tmp_path: Path, tiny_verifier: Path, prepared: PreparedData) -> None:
    directory = tmp_path / "store"
    verifier = InterruptedVerifier.from_pretrained(tiny_verifier, dtype="float32")
    writer = StoreWriter(
        directory, identity_of(tiny_verifier, prepared), prepared.lengths, shard_bytes=EXACT.shard_bytes
    )
    with pytest.raises(KeyboardInterrupt), writer:
        extract_rows(verifier, prepared, writer, batch_tokens=100, progress=False)
    finished = {path.name: path.stat().st_mtime_ns for path in directory.glob("shard-*")}
    assert finished
    with pytest.raises(StoreError, match="is unfinished"):
        HiddenStatesStore.open(directory)
    store = extract(tiny_verifier, prepared.directory, directory, AUX, EXACT, progress=False)
    for name, stamp in finished.items():
        assert (directory / name).stat().st_mtime_ns == stamp
    assert len(list(directory.glob("shard-*"))) > len(finished)
    check(store, tiny_verifier, prepared)


def test_a_finished_store_is_opened_without_the_verifiers_weights(tmp_path: Path, prepared: PreparedData) -> None:
    verifier = make_verifier(tmp_path / "verifier")
    first = extract(verifier, prepared.directory, tmp_path / "store", AUX, EXACT, progress=False)
    stamps = [path.stat().st_mtime_ns for path in sorted(first.directory.iterdir())]
    extract(verifier, prepared.directory, tmp_path / "store", AUX, EXACT, progress=False)
    assert [path.stat().st_mtime_ns for path in sorted(first.directory.iterdir())] == stamps
    (first.directory / shard_name(1)).unlink()
    store = extract(verifier, prepared.directory, tmp_path / "store", AUX, EXACT, progress=False)
    check(store, verifier, prepared)


def test_another_verifier_layer_set_or_template_is_refused(
    tmp_path: Path, tiny_verifier: Path, tied_verifier: Path, prepared: PreparedData
) -> None:
    directory = tmp_path / "store"
    extract(tiny_verifier, prepared.directory, directory, AUX, EXACT, progress=False)
    with pytest.raises(StoreError, match=r"made for verifier fingerprint .* \(made with .*verifier.*\), now"):
        extract(tied_verifier, prepared.directory, directory, AUX, EXACT, progress=False)
    with pytest.raises(StoreError, match=r"aux layer ids \[2, 4, 5\], now \[2, 4, 6\]"):
        extract(tiny_verifier, prepared.directory, directory, (6, 4, 2), EXACT, progress=False)
    other = tmp_path / "other"
    shutil.copytree(tiny_verifier, other)
    template = other / "chat_template.jinja"
    template.write_text("A talk.\n" + template.read_text())
    with pytest.raises(StoreError, match="was prepared with the chat template"):
        extract(other, prepared.directory, directory, AUX, EXACT, progress=False)
    data = tmp_path / "data.jsonl"
    again = prepare(other, data, tmp_path / "prepared_by_other", progress=False)
    with pytest.raises(StoreError, match="template hash"):
        extract(other, again.directory, directory, AUX, EXACT, progress=False)


def test_the_fingerprint_is_of_weights_and_architecture(tmp_path: Path, tiny_verifier: Path) -> None:
    first = verifier_fingerprint(tiny_verifier)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_verifier, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9", "_name_or_path": "x"}))
    assert verifier_fingerprint(copy) == first
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    assert verifier_fingerprint(copy) != first
    assert verifier_fingerprint(make_verifier(tmp_path / "seed", seed=5)) != first


@pytest.mark.parametrize("budget", [1, 10, 64, 1000])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_hold_every_row_once_within_their_budget(budget: int, workers: int) -> None:
    lengths = [3, 9, 1, 4, 4, 2, 12, 5, 30]
    batches = batches_by_length(lengths, budget, workers=workers)
    by_length = [lengths[row] for batch in batches for row in batch]
    assert by_length == sorted(lengths, reverse=True)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget


def test_batches_keep_all_workers_busy() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (300,), generator=generator).tolist()
    for workers in (1, 2, 4, 8):
        sizes = [sum(lengths[row] for row in batch) for batch in batches_by_length(lengths, 2048, workers=workers)]
        assert len(sizes) % workers == 0
        assert max(sizes) <= 2048
        assert max(sizes) - min(sizes) <= 2 * 400


def test_passes_in_threads_give_what_one_pass_gives(tiny_verifier: Path, prepared: PreparedData) -> None:
    """Several passes at once, of one model; the number of threads is as before, also when a pass fails."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32", device="cpu")
    source = LocalSource(verifier, identity_of(tiny_verifier, prepared), batch_tokens=100)
    rows = [prepared[row][0] for row in range(len(prepared))]
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        counted: list[tuple[int, int]] = []
        found = source.states(rows, lambda *counts: counted.append(counts))
        with pytest.raises(VerifierError, match="at least one token"):
            source.states([*rows, torch.empty(0, dtype=torch.int64)], lambda *_: None)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert len(counted) > 4
    assert [sum(parts) for parts in zip(*counted, strict=True)] == [len(rows), prepared.num_tokens]
    for ids, states in zip(rows, found, strict=True):
        assert isinstance(states, Tensor)
        alone = verifier.capture([ids.tolist()], [*AUX, verifier.num_layers])[0]
        torch.testing.assert_close(states, alone, atol=1e-5, rtol=1e-5)


def test_rows_begun_later_come_later_and_may_be_given_up(tiny_verifier: Path, prepared: PreparedData) -> None:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32", device="cpu")
    source = LocalSource(verifier, identity_of(tiny_verifier, prepared), batch_tokens=100)
    rows = [prepared[row][0] for row in range(len(prepared))]
    half, before = len(rows) // 2, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        counted: list[int] = []
        begun = [source.begin(part, lambda count, _: counted.append(count)) for part in (rows[:half], rows[half:])]
        third = source.begin(rows, lambda count, _: counted.append(count))
        found = [state for one in begun for state in one.result()]
        third.cancel()
        third.cancel()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("extract")] == []
    assert sum(counted) == len(rows)
    for ids, states in zip(rows, found, strict=True):
        assert isinstance(states, Tensor)
        alone = verifier.capture([ids.tolist()], [*AUX, verifier.num_layers])[0]
        torch.testing.assert_close(states, alone, atol=1e-5, rtol=1e-5)


def test_a_pass_computes_no_padding(tiny_verifier: Path, prepared: PreparedData) -> None:
    """Each token has one position in a pass, and those that all rows begin with have one for all."""
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32", device="cpu")
    computed: list[int] = []
    verifier.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: computed.append(output.shape[:-1].numel())
    )
    source = LocalSource(verifier, identity_of(tiny_verifier, prepared), batch_tokens=120)
    rows = [prepared[row][0] for row in range(len(prepared))]
    source.states(rows, lambda *_: None)
    assert len(computed) > 2
    assert sum(computed) <= sum(map(len, rows))
    verifier.capture([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 5, 6]], [0])
    assert computed[-1] == 2 + 2 + 1 + 3


@pytest.mark.parametrize(
    ("rope", "reentrant"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, True),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, False),
        (
            {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
            False,
        ),
    ],
)
def test_a_rotation_that_changes_with_the_pass_keeps_passes_apart(
    tiny_verifier: Path, rope: dict[str, Any], reentrant: bool
) -> None:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32", device="cpu")
    verifier.config.rope_parameters = rope
    assert verifier.reentrant is reentrant


def test_no_tokens_a_pass_is_refused(tiny_verifier: Path, tmp_path: Path, prepared: PreparedData) -> None:
    with pytest.raises(StoreError, match="batch_tokens is 0"):
        extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, ExtractOptions(batch_tokens=0), progress=False)
