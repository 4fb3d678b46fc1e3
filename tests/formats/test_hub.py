"""Names, downloads and uploads, with the hub's own client against a hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speculators.errors import DataError, FormatError, SpeculatorsError
from speculators.formats.files import looks_like_path
from speculators.formats.hub import describe, is_local, resolve
from speculators.formats.publish import prepare
from speculators.models import family_config
from tests.formats.eagle3_directory import GOLDEN, make_config, make_tensors, write_directory
from tests.formats.fake_hub import GUEST, OWNER, FakeHub, running_hub, with_client

ROOT = GOLDEN.parent.parent
REPORT: dict[str, Any] = {
    "speculator": "somewhere/draft",
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "num_prompts": 40,
    "acceptance_length": 2.4567,
    "acceptance_rate_per_position": [0.7293, 0.4862, 0.2407],
}


@pytest.mark.parametrize("name", ["/models/x", "./x", "../x", "~/x", "a/b/c", "x/", ".", "C:\\models"])
def test_names_that_can_only_be_paths(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "owner/name-1.5_x"])
def test_names_that_can_be_repositories(name: str) -> None:
    assert not looks_like_path(name)


def test_a_directory_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")
    assert is_local("owner/name")
    assert not is_local("owner/other")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"


def test_a_missing_path_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(SpeculatorsError, match="not there"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpeculatorsError, match="it is a file"):
        resolve(tmp_path / "file")


def test_a_repository_that_cannot_be_had_is_explained() -> None:
    with pytest.raises(SpeculatorsError, match="hub repository somebody/absent@v2 cannot be had") as caught:
        resolve("somebody/absent", revision="v2")
    assert "\n" not in str(caught.value)
    assert "HF_HUB_OFFLINE is set" in str(caught.value)
    with pytest.raises(SpeculatorsError, match="neither a directory nor a hub id"):
        resolve("not a name")


def test_a_downloaded_repository_is_found_without_a_network(tmp_path: Path) -> None:
    """A hub cache laid out as the hub's client keeps it: a reference that names a commit, and that commit's files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--somebody--draft"
    write_directory(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = "from speculators.formats.hub import resolve; print(resolve('somebody/draft'))"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert Path(run.stdout.strip()) == repository / "snapshots" / commit


@pytest.mark.parametrize("verifier", ["/models/verifier", "./verifier", "out/models/verifier"])
def test_a_verifier_given_as_a_path_is_not_pushed(tmp_path: Path, verifier: str) -> None:
    config = make_config(block={"verifier": {"name_or_path": verifier, "architectures": []}})
    with pytest.raises(FormatError, match="write the verifier's hub id before pushing") as caught:
        prepare(write_directory(tmp_path, config), "somebody/draft", family_config)
    assert caught.value.code == "F010"
    assert verifier in str(caught.value)


def test_a_relative_directory_is_a_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebody" / "verifier").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match="somebody/verifier"):
        prepare(write_directory(tmp_path / "draft"), "somebody/draft", family_config)


def test_what_does_not_validate_is_not_pushed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json is missing"):
        prepare(tmp_path, "somebody/draft", family_config)
    config = make_config(block={"verifier": {"architectures": []}})
    with pytest.raises(FormatError, match="name_or_path is missing"):
        prepare(write_directory(tmp_path / "nameless", config), "somebody/draft", family_config)
    tensors = make_tensors()
    del tensors["fc.weight"]
    with pytest.raises(FormatError, match=r"F018 missing-tensor: fc\.weight"):
        prepare(write_directory(tmp_path / "partial", tensors=tensors), "somebody/draft", family_config)
    config = make_config(speculators_model_type="xpress", block={"algorithm": "xpress"})
    with pytest.raises(FormatError, match="xpress"):
        prepare(write_directory(tmp_path / "unknown", config), "somebody/draft", family_config)


def test_measurements_inside_and_beside_the_directory_are_carded_and_uploaded(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "draft")
    (folder / "evaluation.json").write_text(json.dumps(REPORT))
    (tmp_path / "evaluation_chat.json").write_text(json.dumps(REPORT | {"acceptance_length": 1.5}))
    (tmp_path / "evaluation_other.json").write_text(json.dumps(REPORT | {"speculator": "out/another"}))
    (folder / "notes.txt").write_text("not a part of it")
    publication = prepare(folder, "somebody/draft", family_config)
    assert set(publication.files) == {"config.json", "model.safetensors", "evaluation.json", "evaluation_chat.json"}
    assert set(publication.sizes) == {*publication.files, "README.md"}
    lines = publication.card.splitlines()
    assert lines[:4] == ["---", "library_name: speculators", "pipeline_tag: text-generation", lines[3]]
    assert lines[3] == 'base_model: "somebody/verifier"'
    assert {'- "speculative-decoding"', '- "eagle3"', '- "vllm"', "vllm serve somebody/draft"} <= set(lines)
    assert {"| acceptance length | 2.457 |", "| acceptance length | 1.5 |", "| 2 | 0.4862 |"} <= set(lines)
    assert {"## Measured: evaluation", "## Measured: chat"} <= set(lines)
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match=r"evaluation\.json: "):
        prepare(folder, "somebody/draft", family_config)


def test_a_card_that_is_there_is_completed_and_otherwise_kept(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "draft")
    (folder / "README.md").write_text("# Mine\n\nvllm serve path/to/this/directory\n")
    (folder / "evaluation.json").write_text(json.dumps(REPORT))
    card = prepare(folder, "somebody/draft", family_config).card
    assert card.startswith(
        '---\nlibrary_name: speculators\npipeline_tag: text-generation\nbase_model: "somebody/verifier"'
    )
    assert "\n# Mine\n\nvllm serve somebody/draft\n\n## Measured: evaluation\n" in card
    (folder / "README.md").write_text(card)
    assert prepare(folder, "somebody/draft", family_config).card == card


UPLOAD = """
token = sys.argv[3]
publication = prepare(sys.argv[1], sys.argv[2], family_config)
attempt("refused", lambda: publish(publication, token="hf_wrong"))
attempt("guest", lambda: publish(publication, token="hf_guest"))
attempt("first", lambda: publish(publication, token=token, private=True))
attempt("again", lambda: publish(publication, token=token, private=True))
attempt("branch", lambda: publish(publication, token=token, revision="v2"))
"""


def test_a_directory_is_pushed_in_one_commit(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "draft")
    (folder / "evaluation.json").write_text(json.dumps(REPORT))
    with running_hub() as hub:
        found = with_client(hub, tmp_path / "home", UPLOAD, folder, "somebody/draft", OWNER)
        repository = hub.repositories["somebody/draft"]
        assert repository.private
        address = f"{hub.url}/somebody/draft/commit/"
        assert found["first"] == address + list(repository.commits)[1]
        assert found["branch"] == address + repository.branches["v2"]
        for name in ("refused", "guest"):
            assert (
                "draft could not be pushed to somebody/draft: the hub refused the token (HTTP 40"
                in found[name]["error"]
            )
    assert repository.messages[:2] == ["first", "Upload speculator"]
    files = repository.files("v2")
    assert files == repository.files("main")
    assert set(files) == {".gitattributes", "README.md", "config.json", "evaluation.json", "model.safetensors"}
    for name in ("config.json", "model.safetensors", "evaluation.json"):
        assert files[name] == (folder / name).read_bytes()
    assert b"| acceptance length | 2.457 |" in files["README.md"]
    assert hub.large_files.keys() == {next(iter(hub.large_files))}


def test_a_push_leaves_no_stale_weights_and_no_surprise(tmp_path: Path) -> None:
    """An older upload in two files would be read instead of the new one; what is to be private never goes public."""
    folder = write_directory(tmp_path / "draft")
    code = """
publication = prepare(sys.argv[1], "somebody/draft", family_config)
attempt("private", lambda: publish(publication, token="hf_owner", private=True))
attempt("public", lambda: publish(publication, token="hf_owner"))
"""
    old = dict.fromkeys(("model.safetensors.index.json", "model-00001-of-00002.safetensors", "notes.md"), b"old")
    with running_hub() as hub:
        repository = hub.add("somebody/draft", old)
        found = with_client(hub, tmp_path / "home", code, folder)
        assert "somebody/draft exists and is public" in found["private"]["error"]
        assert repository.messages == ["first", "Upload speculator"]
    assert set(repository.files()) == {"README.md", "config.json", "model.safetensors", "notes.md"}


def published(hub: FakeHub, folder: Path) -> dict[str, bytes]:
    """The files of a directory, in a public repository with a branch, and in a private and a gated one."""
    files = {path.name: path.read_bytes() for path in write_directory(folder).iterdir()}
    repository = hub.add("somebody/draft", files)
    repository.commit("v2", files | {"config.json": json.dumps(make_config(norm_output=True)).encode()}, "second")
    hub.add("somebody/secret", files, private=True)
    hub.add("somebody/gated", files, gated=True)
    hub.add("somebody/empty", {"config.json": files["config.json"]})
    return files


DOWNLOAD = """
def files(repo, **keywords):
    folder = resolve(repo, **keywords)
    return {path.name: path.stat().st_size for path in folder.iterdir()}

attempt("main", lambda: files("somebody/draft"))
attempt("v2", lambda: json.loads((resolve("somebody/draft", revision="v2") / "config.json").read_text())["norm_output"])
attempt("secret", lambda: files("somebody/secret", token="hf_owner"))
attempt("gated", lambda: files("somebody/gated", token="hf_owner"))
"""
REFUSALS = """
for read in (resolve, describe, fetch_config):
    attempt(f"absent {read.__name__}", lambda: str(read("somebody/absent")))
    attempt(f"hidden {read.__name__}", lambda: str(read("somebody/secret", token="hf_guest")))
    attempt(f"conditions {read.__name__}", lambda: str(read("somebody/gated", token="hf_guest")))
    attempt(f"revision {read.__name__}", lambda: str(read("somebody/draft", revision="v9")))
    attempt(f"name {read.__name__}", lambda: str(read("somebody/ draft")))
attempt("no weights", lambda: describe("somebody/empty"))
"""


def test_a_repository_is_downloaded_or_refused_with_the_reason(tmp_path: Path) -> None:
    with running_hub() as hub:
        files = published(hub, tmp_path / "draft")
        found = with_client(hub, tmp_path / "home", DOWNLOAD)
        # With a cache of its own: what the owner has downloaded lies open on the owner's machine.
        refused = with_client(hub, tmp_path / "other_home", REFUSALS)
    sizes = {name: len(content) for name, content in files.items()}
    assert found["main"] == found["secret"] == found["gated"] == sizes
    assert found["v2"] is True
    reasons = {
        "absent": "somebody/absent cannot be had: there is none of this name, or it is private",
        "hidden": "somebody/secret cannot be had: there is none of this name, or it is private",
        "conditions": f"somebody/gated cannot be had: it is gated; accept its conditions at {hub.url}/somebody/gated",
        "revision": "somebody/draft@v9 cannot be had: it has no revision 'v9'; give a branch, a tag or a commit",
        "name": "'somebody/ draft' is neither a directory nor a hub id",
    }
    for case, reason in reasons.items():
        for read in ("resolve", "describe", "fetch_config"):
            assert reason in refused[f"{case} {read}"]["error"], (case, read)
    assert "somebody/empty holds no readable safetensors" in refused["no weights"]["error"]


def test_one_file_is_fetched_where_it_is_there(tmp_path: Path) -> None:
    code = """
from speculators.formats.hub import fetch_file

attempt("there", lambda: fetch_file("somebody/draft", "config.json").read_text())
attempt("not there", lambda: fetch_file("somebody/draft", "speculative_config.json"))
attempt("no repository", lambda: str(fetch_file("somebody/absent", "config.json")))
"""
    with running_hub() as hub:
        hub.add("somebody/draft", {"config.json": b"{}"})
        found = with_client(hub, tmp_path / "home", code)
    assert found["there"] == "{}"
    assert found["not there"] is None
    assert "there is none of this name" in found["no repository"]["error"]


@pytest.mark.full
def test_a_served_draft_model_of_the_hub_is_found_by_its_file(tmp_path: Path) -> None:
    code = """
from speculators.runtime.infer import infer

attempt("drafts", lambda: [infer("somebody/pard", None).verifier, infer("somebody/pard", None).method])
attempt("plain", lambda: [infer("somebody/plain", None).verifier, infer("somebody/plain", None).method])
"""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "pard_token": 5}
    verifier = {"name_or_path": "somebody/large", "architectures": ["LlamaForCausalLM"]}
    told = {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
        "verifier": verifier,
    }
    files = {"config.json": json.dumps(config).encode()}
    with running_hub() as hub:
        hub.add("somebody/plain", files)
        hub.add("somebody/pard", files | {"speculative_config.json": json.dumps(told).encode()})
        found = with_client(hub, tmp_path / "home", code)
    assert found["drafts"] == ["somebody/large", "draft_model"]
    assert found["plain"] == ["somebody/plain", None]


def test_a_repository_is_described_without_its_weights(tmp_path: Path) -> None:
    code = """
config, headers = describe("somebody/large", revision="main")
found["config"] = config
found["headers"] = {name: [item.dtype, item.shape, item.end - item.start] for name, item in headers.items()}
"""
    tensors = make_tensors() | {"norm.weight": make_tensors()["norm.weight"].repeat(1 << 17)}
    folder = write_directory(tmp_path / "draft", tensors=tensors)
    with running_hub() as hub:
        hub.add("somebody/large", {path.name: path.read_bytes() for path in folder.iterdir()})
        found = with_client(hub, tmp_path / "home", code)
        assert hub.bytes_sent < 200_000 < (folder / "model.safetensors").stat().st_size
    assert found["config"] == make_config()
    assert found["headers"] == {
        name: [header.dtype, list(header.shape), header.end - header.start]
        for name, header in describe(folder)[1].items()
    }


def test_a_hub_that_cannot_be_reached_is_explained(tmp_path: Path) -> None:
    """What is in the cache is still served; what is not names the hub that was asked."""
    fetch = (
        'attempt("cached", lambda: str(resolve("somebody/draft"))); attempt("new", lambda: resolve("somebody/other"))'
    )
    push = 'attempt("push", lambda: publish(prepare(sys.argv[1], "somebody/draft", family_config), token="hf_owner"))'
    with running_hub() as hub:
        published(hub, tmp_path / "draft")
        before = with_client(hub, tmp_path / "home", fetch)
    after = with_client(hub, tmp_path / "home", f"{fetch}\n{push}", tmp_path / "draft")
    assert after["cached"] == before["cached"]
    assert f"{hub.url} cannot be reached, nor is it in the cache" in after["new"]["error"]
    assert "could not be pushed to somebody/draft" in after["push"]["error"]
    assert "cannot be reached" in after["push"]["error"]
    offline = with_client(hub, tmp_path / "home", fetch, HF_HUB_OFFLINE="1")
    assert offline["cached"] == before["cached"]
    assert "HF_HUB_OFFLINE is set and it is not in the cache" in offline["new"]["error"]


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(SpeculatorsError, match="is a directory, which has no revision 'v2'"):
        resolve(tmp_path, revision="v2")


def test_the_client_that_reads_may_not_write(tmp_path: Path) -> None:
    """A guest's token reads what is public, and its refusal to write names the status."""
    with running_hub() as hub:
        published(hub, tmp_path / "draft")
        code = 'attempt("read", lambda: fetch_config("somebody/draft", token=sys.argv[1])["architectures"])'
        assert with_client(hub, tmp_path / "home", code, GUEST)["read"] == ["Eagle3DraftModel"]
