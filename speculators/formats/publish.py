"""A speculator directory as a hub repository: what would be uploaded, what refuses to be, and the upload."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, errors

from speculators.errors import SpeculatorsError
from speculators.formats.card import completed_card, model_card, read_evaluations, title_of
from speculators.formats.checkpoint import CONFIG, INDEX, read_config, weight_files
from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import error_of, fault
from speculators.formats.hub import endpoint, explained, is_local
from speculators.formats.salvage import FamilyConfig
from speculators.formats.vllm import validate_directory

CARD = "README.md"


@dataclass(frozen=True)
class Publication:
    """What goes to `repo`: `files`, by their names there, and the text of the model card."""

    directory: Path
    repo: str
    files: Mapping[str, Path]
    card: str

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of everything that is uploaded, by name."""
        return {name: path.stat().st_size for name, path in self.files.items()} | {CARD: len(self.card.encode())}


def prepare(directory: str | os.PathLike[str], repo: str, family_config: FamilyConfig) -> Publication:
    """Check a speculator directory and gather what would be uploaded; nothing is sent.

    Uploaded are the configuration, the weights, the measurements (`evaluation*.json` in the directory or beside it) and
    a model card: the directory's own README.md, completed, or one that is written here. FormatError with the first
    fault's code where the directory does not validate, F010 where the verifier is known by a path alone.
    """
    folder = Path(directory)
    raw = read_config(folder)
    kind = raw.get("speculators_model_type")
    family = family_config(kind) if isinstance(kind, str) else None
    wrong = [item for item in validate_directory(folder, family_config) if item.level == "ERROR"]
    if wrong or family is None:
        raise error_of(wrong or [fault("unsupported-type", f"speculators_model_type is {kind!r}")], folder)
    config = family.from_json(raw, folder)
    refuse_local_verifier(config, folder)
    evaluations = read_evaluations(folder)
    files = {CONFIG: folder / CONFIG} | {path.name: path for path in weight_files(folder)}
    if (folder / INDEX).is_file():
        files[INDEX] = folder / INDEX
    for path in evaluations:
        files.setdefault(path.name, path)
    measured = {title_of(path): report for path, report in evaluations.items()}
    own = folder / CARD
    text = own.read_text(encoding="utf-8") if own.is_file() else None
    card = model_card(config, measured, repo=repo) if text is None else completed_card(text, config, measured, repo)
    return Publication(folder, repo, files, card)


def publish(
    publication: Publication, *, token: str | None = None, private: bool = False, revision: str | None = None
) -> str:
    """Upload in one commit, making the repository and the branch `revision` where there are none; returns its address.

    Weights of an earlier upload that are no longer part of the speculator are removed by the same commit: a reader
    would prefer a stale index. SpeculatorsError where the upload fails, or where the repository exists and is public
    though `private` was asked for.
    """
    repo = publication.repo
    api = huggingface_hub.HfApi(endpoint=endpoint(), token=token)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(CARD, publication.card.encode()),
        *(CommitOperationAdd(name, path) for name, path in publication.files.items()),
    ]
    with explained(repo, revision, pushing=publication.directory):
        existed = _create(api, repo, private)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        if existed:
            stale = sorted(_weights_there(api, repo, revision) - publication.files.keys())
            operations += [CommitOperationDelete(name) for name in stale]
        message = "Upload speculator"
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def refuse_local_verifier(config: SpeculatorConfig, source: object) -> None:
    """Raise FormatError where a configuration names its verifier by a path that means nothing on another machine."""
    verifier = config.verifier.name_or_path
    if is_local(verifier):
        text = f"verifier.name_or_path is the path {verifier!r}; write the verifier's hub id before pushing"
        raise error_of([fault("verifier-bare-path", text)], source)


def _create(api: huggingface_hub.HfApi, repo: str, private: bool) -> bool:
    """Make a repository; returns whether it was there already, and refuses a public one where privacy was asked for."""
    try:
        api.create_repo(repo, private=private, exist_ok=False)
    except errors.HfHubHTTPError as error:
        # 409 is "exists"; one may write to a repository of an organisation in which one may create none (403).
        if error.response.status_code not in (403, 409):
            raise
        try:
            info = api.model_info(repo)
        except errors.RepositoryNotFoundError:
            raise error from None
    else:
        return False
    if private and not info.private:
        raise SpeculatorsError(
            f"{repo} exists and is public; make it private on its page, push to another name, or leave --private out"
        )
    return True


def _weights_there(api: huggingface_hub.HfApi, repo: str, revision: str | None) -> set[str]:
    names = api.list_repo_files(repo, revision=revision)
    return {name for name in names if "/" not in name and name.endswith((".safetensors", INDEX))}
