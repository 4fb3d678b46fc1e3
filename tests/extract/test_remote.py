"""Hidden states from servers: the verifier's own, and no row lost or wrong when a server misbehaves."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators import LLM
from speculators.cli import main
from speculators.errors import ServerError, StoreError, UsageError
from speculators.extract.endpoints import RetryPolicy
from speculators.extract.prepared import PreparedData
from speculators.extract.remote import ServerOptions, check_token_ids
from speculators.extract.run import extract, extract_share
from speculators.extract.store import HiddenStatesStore, shard_name
from speculators.formats.hidden_states import HiddenStatesWriter
from tests.extract.rows import AUX, EXACT, Reference, check_store, prepare_rows
from tests.extract.scripted_server import scripted
from tests.runtime.serving import serving

LAYERS = [*AUX, 8]
QUICK = RetryPolicy(retries=2, backoff_seconds=0.01, timeout_seconds=60)


@pytest.fixture(scope="module")
def prepared(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare_rows(tiny_verifier, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path) -> Reference:
    return Reference(tiny_verifier)


def extracting_server(verifier: Path, folder: Path, layers: list[int]) -> LLM:
    return LLM(
        str(verifier),
        dtype="float32",
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    )


@pytest.fixture(scope="module")
def server(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("served")
    # More layers than are asked for: the files say which.
    llm = extracting_server(tiny_verifier, folder, [0, *LAYERS])
    with serving(llm, "tiny") as address:
        yield address, folder
    llm.close()


def from_servers(*urls: str, **more: Any) -> Any:
    return replace(EXACT, source="server", server=ServerOptions(urls, policy=QUICK, file_seconds=2, **more))


def test_states_are_the_verifiers_own(
    server: tuple[str, Path], tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    address, folder = server
    store = extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, from_servers(address), progress=False)
    check_store(store, prepared, reference)
    assert list(folder.iterdir()) == []


def test_the_command_asks_servers(
    server: tuple[str, Path], tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    words = ["extract", "--source", "server", "--endpoint", server[0], "--concurrency", "3"]
    words += ["--verifier", str(tiny_verifier), "--data", str(prepared.directory), "--out", str(tmp_path / "s")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--layers", "2,4,5,8", "--store-dtype", "float32"])
    assert ended.value.code == 0
    check_store(HiddenStatesStore.open(tmp_path / "s"), prepared, reference)


def test_one_of_two_servers_may_be_down(
    server: tuple[str, Path], tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    with scripted(lambda _path, _body: (503, {"error": {"message": "overloaded"}})) as broken:
        options = from_servers(broken, server[0], model="tiny", concurrency=2)
        options = replace(options, server=replace(options.server, policy=replace(QUICK, retries=6)))
        store = extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, options, progress=False)
    check_store(store, prepared, reference)


class Relay:
    """A server that writes what it is told to write for each request, as a real one would."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        self.writer, self.reference = HiddenStatesWriter(folder), reference
        self.count, self.mutex = 0, threading.Lock()

    def answer(self, _path: str, body: Any) -> tuple[int, Any]:
        with self.mutex:
            self.count += 1
            number = self.count
        return self.reply(number, body["prompt"])

    def reply(self, number: int, ids: list[int]) -> tuple[int, Any]:
        return self.write(number, ids, self.reference.states(torch.tensor(ids)))

    def write(self, number: int, ids: list[int], states: torch.Tensor) -> tuple[int, Any]:
        path = self.writer.reserve(f"r{number}")
        self.writer.submit(path, states.contiguous(), torch.tensor(ids), LAYERS)
        return 200, {"kv_transfer_params": {"hidden_states_path": str(path)}}


class ShiftedIds(Relay):
    def reply(self, number: int, ids: list[int]) -> tuple[int, Any]:
        wrong = [*ids[:4], ids[4] + 1, *ids[5:]]
        return self.write(number, wrong, self.reference.states(torch.tensor(ids)))


class OneNaN(Relay):
    length = 0

    def reply(self, number: int, ids: list[int]) -> tuple[int, Any]:
        states = self.reference.states(torch.tensor(ids))
        if len(ids) == self.length:
            states[3, 1, 5] = float("nan")
        return self.write(number, ids, states)


class DiesAtTheFifth(Relay):
    def reply(self, number: int, ids: list[int]) -> tuple[int, Any]:
        return super().reply(number, ids) if number < 5 else (502, {"error": {"message": "gone"}})


class LosesFiles(Relay):
    def reply(self, number: int, ids: list[int]) -> tuple[int, Any]:
        status, answer = super().reply(number, ids)
        if number % 3 == 1:
            answer["kv_transfer_params"]["hidden_states_path"] += ".gone"
        return status, answer


def run(relay: type[Relay], tmp_path: Path, reference: Reference, verifier: Path, data: PreparedData, **more: Any):
    served = relay(tmp_path / "served", reference)
    with scripted(served.answer) as url:
        options = replace(from_servers(url, model="tiny", concurrency=1, **more.pop("server", {})), **more)
        options = replace(options, server=replace(options.server, file_seconds=0.2))
        try:
            return extract_share(verifier, data.directory, tmp_path / "s", AUX, options, progress=False)
        finally:
            served.writer.close()


def test_wrong_tokens_back_name_the_first_that_differs(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"token ids differ first at index 4: got \d+, sent \d+"):
        run(ShiftedIds, tmp_path, reference, tiny_verifier, prepared)
    for got, sent, message in (
        ([1, 2], [1, 2, 3], "index 2: got nothing, sent 3"),
        ([9, 1, 2], [1, 2], "index 0: got 9, sent 1"),
        ([1, 2, 7], [1, 2], "index 2: got 7, sent nothing"),
    ):
        with pytest.raises(StoreError, match=message):
            check_token_ids(got, sent, tmp_path)


def test_nan_states_are_refused_or_left_out_on_wish(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    lengths = list(prepared.lengths)
    row = next(row for row, length in enumerate(lengths) if lengths.count(length) == 1)
    OneNaN.length = lengths[row]
    with pytest.raises(StoreError, match=rf"1 failed; row {row}: NaN or infinite states, first at token 3"):
        run(OneNaN, tmp_path, reference, tiny_verifier, prepared)
    with pytest.raises(StoreError, match="is unfinished"):
        HiddenStatesStore.open(tmp_path / "s")
    result = run(OneNaN, tmp_path, reference, tiny_verifier, prepared, skip_failed=True)
    assert result.skipped == 1
    assert result.before + result.done == len(prepared) - 1
    store = HiddenStatesStore.open(tmp_path / "s", verify=True)
    assert (len(store), store.num_skipped) == (len(prepared) - 1, 1)
    kept = [number for number in range(len(prepared)) if number != row]
    assert list(store.lengths) == [prepared.lengths[number] for number in kept]
    for place, number in enumerate(kept):
        assert torch.equal(store[place].input_ids, prepared[number][0])
        expected = reference.states(prepared[number][0])[:, -1]
        torch.testing.assert_close(store[place].last_hidden_states, expected, atol=1e-5, rtol=0)


def test_a_server_that_dies_costs_no_finished_shard(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match=r"rows done, 0 there before, 0 skipped, 0 failed; run it again.*gone"):
        run(DiesAtTheFifth, tmp_path, reference, tiny_verifier, prepared)
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("shard-*")}
    assert shard_name(0) in finished
    result = run(Relay, tmp_path, reference, tiny_verifier, prepared)
    assert result.before > 0
    for name, stamp in finished.items():
        assert (tmp_path / "s" / name).stat().st_mtime_ns == stamp
    check_store(HiddenStatesStore.open(tmp_path / "s", verify=True), prepared, reference)


def test_a_file_that_never_comes_is_asked_for_again(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    result = run(LosesFiles, tmp_path, reference, tiny_verifier, prepared)
    assert result.done == len(prepared)
    check_store(HiddenStatesStore.open(tmp_path / "s"), prepared, reference)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((200, {"choices": []}), StoreError, "answered without kv_transfer_params.hidden_states_path"),
        ((404, {"error": {"message": "no such model"}}), ServerError, "HTTP 404: no such model"),
        ((400, {"error": {"message": "too long"}}), StoreError, "9 failed; row 0: .*HTTP 400: too long"),
    ],
)
def test_refusals_are_told(
    tiny_verifier: Path, prepared: PreparedData, tmp_path: Path, reply: Any, error: type[Exception], message: str
) -> None:
    with scripted(lambda _path, _body: reply) as url, pytest.raises(error, match=message):
        extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, from_servers(url, model="tiny"), progress=False)


def test_a_server_with_other_layers_is_named(tiny_verifier: Path, prepared: PreparedData, tmp_path: Path) -> None:
    llm = extracting_server(tiny_verifier, tmp_path / "served", [0, 4, 8])
    with serving(llm) as address, pytest.raises(StoreError, match=r"holds layers \[0, 4, 8\], but \[2, 5\] are wanted"):
        extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, from_servers(address), progress=False)
    llm.close()
    for name, message in (
        ("server", "source server needs endpoints"),
        ("loca", "source 'loca': expected one of local"),
    ):
        with pytest.raises(UsageError, match=message):
            replace(EXACT, source=name)
