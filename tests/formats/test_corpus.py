"""Bad input of every family: malformed configurations and hostile weight files end in this library's own errors."""

import contextlib
import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculators.errors import FormatError
from speculators.formats.checkpoint import read_config
from speculators.formats.vllm import describe_for_vllm
from speculators.models import FAMILIES
from speculators.models.speculator import Speculator
from tests.formats.eagle3_directory import write_safetensors
from tests.formats.families import config_json, faults_of, write_family
from tests.formats.test_config import JSON_VALUES, paths

CORPUS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
CONFIGS = {family: config_json(family) for family in FAMILIES}

Path_ = tuple[Any, ...]
Change = Callable[[Any, Any, Any], None]


def _remove(owner: Any, key: Any, value: Any) -> None:
    del owner[key]


def _replace(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


def _add(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[f"{key}_"] = value
    else:
        owner.append(value)


def _negate(owner: Any, key: Any, value: Any) -> None:
    found = owner[key]
    owner[key] = -found if isinstance(found, int | float) else -1


HUGE = st.sampled_from([2**31, 2**53, 2**63, 10**30, 1e308, -(2**63), 10**400])
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
CHANGES: st.SearchStrategy[tuple[Change, Any]] = st.one_of(
    st.tuples(st.just(_remove), st.none()),
    st.tuples(st.just(_replace), JSON_VALUES),
    st.tuples(st.just(_add), JSON_VALUES),
    st.tuples(st.just(_negate), st.none()),
    st.tuples(st.just(_replace), HUGE),
    st.tuples(st.just(_replace), st.none()),
    st.tuples(st.just(_replace), NOT_FINITE),
)


@st.composite
def malformed(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A configuration of one to three changes: something missing, added, of another type, negative, huge, null, NaN."""
    config: Any = copy.deepcopy(CONFIGS[family])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(sorted(paths(config), key=str)))
        change, value = draw(CHANGES)
        owner = config
        for key in place[:-1]:
            owner = owner[key]
        change(owner, place[-1], value)
        if not config:
            break
    return dict(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_malformed_configurations_are_refused_by_code_or_understood(family: str) -> None:
    """Pitfall 9 and pitfall 10: nothing is dropped; what is accepted means the same after a round trip."""
    kind = FAMILIES[family].config

    @settings(CORPUS, max_examples=100)
    @given(malformed(family))
    def check(raw: dict[str, Any]) -> None:
        try:
            config = kind.from_json(raw)
        except FormatError as error:
            refusal: FormatError | None = error
        else:
            refusal = None
            written = config.to_json()
            assert kind.from_json(json.loads(json.dumps(written, allow_nan=False))).to_json() == written
            assert config.expected_tensors()
            assert config.num_draft_ids <= config.verifier_vocab_size
            assert config.network()
            json.dumps([describe_for_vllm(config), describe_for_vllm(config, raw)], allow_nan=False)
        assert refusal is None or refusal.code is not None

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_malformed_directories_are_loaded_whole_or_not_at_all(family: str, tmp_path: Path) -> None:
    """What cannot be loaded has an error in the validator's list, and neither of the two breaks down."""
    directory = write_family(tmp_path / "draft", family)

    @settings(CORPUS, max_examples=30)
    @given(malformed(family))
    def check(raw: dict[str, Any]) -> None:
        (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        found = faults_of(directory)
        try:
            speculator = Speculator.from_pretrained(directory)
        except FormatError as error:
            refusal: FormatError | None = error
        else:
            refusal = None
            assert set(speculator.draft.missing_tensors()) <= speculator.draft.borrows.keys()
        if refusal is not None:
            assert refusal.code is not None
            assert any(fault.level == "ERROR" for fault in found), refusal

    check()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [40, 70, 5000, 200_000])
def test_deep_documents_are_refused(family: str, depth: int, tmp_path: Path) -> None:
    text = json.dumps(CONFIGS[family])
    nested = f'{text[:-1]}, "surprise": {"[" * depth}{"]" * depth}}}'
    (write_family(tmp_path / "draft", family) / "config.json").write_text(nested, encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        Speculator.from_pretrained(tmp_path / "draft")
    assert caught.value.code == ("F031" if depth == 40 else "F001")
    assert "ERROR" in {fault.level for fault in faults_of(tmp_path / "draft")}


def test_type_names_that_are_none_are_refused(tmp_path: Path) -> None:
    for number, kind in enumerate((None, 3, ["eagle3"], {"a": 1}, "EAGLE3", "__class__", "xpress", "")):
        directory = write_family(tmp_path / str(number), "eagle3", {"speculators_model_type": kind})
        with pytest.raises(FormatError) as caught:
            Speculator.from_pretrained(directory)
        assert caught.value.code in ("F006", "F007")
        assert "ERROR" in {fault.level for fault in faults_of(directory)}


# --- weight files ---------------------------------------------------------------------------------------------------


class Weights:
    """A sound safetensors file, taken apart: its header as JSON and the bytes behind it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "model.safetensors"
        raw = self.path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.header.pop("__metadata__", None)
        self.data = raw[8 + length :]
        self.raw = raw
        by_place = sorted(self.header, key=lambda name: self.header[name]["data_offsets"])
        self.first, self.second, self.last = by_place[0], by_place[1], by_place[-1]
        raw_config = read_config(directory)
        expected = FAMILIES[raw_config["speculators_model_type"]].config.from_json(raw_config).expected_tensors()
        required = [name for name in by_place if expected[name].required]
        self.matrix = next(name for name in required if len(set(expected[name].shape)) == 2)

    def write(self, data: bytes | None = None, length: int | None = None) -> None:
        write_safetensors(self.path, self.header, self.data if data is None else data, length=length)

    def change(self, name: str, **entry: Any) -> None:
        self.header[name] = self.header[name] | entry
        self.write()

    def text(self, header: bytes, length: int | None = None) -> None:
        write_safetensors(self.path, header, self.data, length=length)


class Marker:
    """Pickled, it runs code when it is unpickled: that of making a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def sparse(weights: Weights) -> None:
    with weights.path.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(100_000_100)


def duplicated(weights: Weights) -> None:
    body = json.dumps(weights.header)
    entry = json.dumps(weights.header[weights.first])
    weights.text(f'{body[:-1]}, "{weights.first}": {entry}}}'.encode())


def pickled(weights: Weights) -> None:
    weights.path.write_bytes(pickle.dumps(Marker(weights.path.with_name("executed"))))


def pickled_beside(weights: Weights) -> None:
    pickled(weights)
    weights.path.rename(weights.path.with_name("pytorch_model.bin"))


def indexed(file: Any) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights.path.unlink()
        weight_map = dict.fromkeys(weights.header, file)
        weights.path.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def folder(weights: Weights) -> None:
    weights.path.unlink()
    weights.path.mkdir()


def dropped(weights: Weights) -> None:
    start, end = weights.header.pop(weights.matrix)["data_offsets"]
    for entry in weights.header.values():
        if entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [place - (end - start) for place in entry["data_offsets"]]
    weights.write(weights.data[:start] + weights.data[end:])


def added(weights: Weights) -> None:
    end = len(weights.data)
    weights.header["__class__"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    weights.write(weights.data + bytes(4))


HOSTILE: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "empty": (lambda w: w.path.write_bytes(b""), "F025"),
    "a length alone": (lambda w: w.path.write_bytes(w.raw[:8]), "F025"),
    "half": (lambda w: w.path.write_bytes(w.raw[: len(w.raw) // 2]), "F025"),
    "a byte short": (lambda w: w.path.write_bytes(w.raw[:-1]), "F025"),
    "a byte long": (lambda w: w.path.write_bytes(w.raw + b"\0"), "F025"),
    "zeros": (lambda w: w.path.write_bytes(bytes(len(w.raw))), "F025"),
    "giant header": (sparse, "F025"),
    "header longer than the file": (lambda w: w.write(length=2**63), "F025"),
    "header shorter than it is": (lambda w: w.write(length=10), "F025"),
    "header of no JSON": (lambda w: w.text(b"{'fc.weight': 1}"), "F025"),
    "header of no text": (lambda w: w.text(b"\xff\xfe{}"), "F025"),
    "header of a list": (lambda w: w.text(b"[]"), "F025"),
    "deep header": (lambda w: w.text(b'{"a":' + b"[" * 100_000), "F025"),
    "duplicate keys": (duplicated, "F025"),
    "no entry": (lambda w: w.text(b'{"fc.weight": null}'), "F025"),
    "metadata of numbers": (lambda w: (w.header.update(__metadata__={"a": 1}), w.write()), "F025"),
    "overlap": (lambda w: w.change(w.second, data_offsets=w.header[w.first]["data_offsets"]), "F025"),
    "reversed offsets": (lambda w: w.change(w.first, data_offsets=w.header[w.first]["data_offsets"][::-1]), "F025"),
    "negative offset": (lambda w: w.change(w.first, data_offsets=[-4, w.header[w.first]["data_offsets"][1]]), "F025"),
    "offset beyond the end": (lambda w: w.change(w.last, data_offsets=[2**60, 2**60 + 4]), "F025"),
    "hole": (lambda w: (w.header.pop(w.first), w.write()), "F025"),
    "overflowing shape": (lambda w: w.change(w.first, shape=[2**40, 2**40]), "F025"),
    "negative shape": (lambda w: w.change(w.first, shape=[-1]), "F025"),
    "shape of floats": (lambda w: w.change(w.first, shape=[1.0]), "F025"),
    "shape of words": (lambda w: w.change(w.first, shape="32"), "F025"),
    "unknown dtype": (lambda w: w.change(w.first, dtype="F31"), "F025"),
    "dtype of a list": (lambda w: w.change(w.first, dtype=["F32"]), "F025"),
    "integers for floats": (lambda w: w.change(w.matrix, dtype="U32"), "F021"),
    "transposed": (lambda w: w.change(w.matrix, shape=w.header[w.matrix]["shape"][::-1]), "F019 F020"),
    "missing tensor": (dropped, "F016 F018 F039"),
    "unknown tensor": (added, "F017"),
    "pickle": (pickled, "F025"),
    "pickle beside": (pickled_beside, "F024"),
    "folder": (folder, "F024"),
    "index to elsewhere": (indexed("../../secret.safetensors"), "F026"),
    "index to an absolute path": (indexed("/etc/hostname"), "F026"),
    "index to what is not there": (indexed("model-00001-of-00001.safetensors"), "F026"),
    "index to numbers": (indexed(3), "F026"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_weight_files_are_refused_by_code(family: str, tmp_path: Path) -> None:
    """Pitfall 29 and pitfall 46: no part of such a file is loaded, and nothing in it is executed."""
    source = write_family(tmp_path / "source", family)
    config = (source / "config.json").read_bytes()
    weights = (source / "model.safetensors").read_bytes()
    for number, (name, (spoil, codes)) in enumerate(HOSTILE.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_bytes(config)
        (directory / "model.safetensors").write_bytes(weights)
        spoil(Weights(directory))
        with pytest.raises(FormatError) as caught:
            Speculator.from_pretrained(directory)
        assert caught.value.code in codes.split(), (name, str(caught.value))
        found = faults_of(directory)
        assert caught.value.code in {fault.code for fault in found if fault.level == "ERROR"}, (name, found)
        assert not (directory / "executed").exists(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_index_files_are_refused(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "draft", family)
    (directory / "model.safetensors").unlink()
    for text in ("", "[]", "{", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": null}}', "[" * 99999):
        (directory / "model.safetensors.index.json").write_text(text)
        with pytest.raises(FormatError) as caught:
            Speculator.from_pretrained(directory)
        assert caught.value.code == "F026"
        assert "F026" in {fault.code for fault in faults_of(directory)}


def test_verifiers_named_to_break_a_path_are_no_crash(tmp_path: Path) -> None:
    block = CONFIGS["eagle3"]["speculators_config"]
    for number, name in enumerate(("~nobody/x", "/" + "a" * 5000, "a\0b", "/a\0b", "..", "/", "\ud800")):
        changed = {"speculators_config": {**block, "verifier": {"name_or_path": name, "architectures": []}}}
        directory = write_family(tmp_path / str(number), "eagle3", changed)
        assert faults_of(directory) == faults_of(directory)
        with contextlib.suppress(FormatError):
            assert Speculator.from_pretrained(directory).config.verifier.name_or_path == name


def test_an_unreadable_configuration_is_named(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "draft", "eagle3")
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")
    with pytest.raises(FormatError) as caught:
        read_config(directory)
    assert caught.value.code == "F001"
