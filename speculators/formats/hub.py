"""From a repository id to a local directory, and back: the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub

from speculators.errors import FormatError, SpeculatorsError
from speculators.formats.checkpoint import CONFIG, read_config, weight_files
from speculators.formats.faults import error_of, fault
from speculators.formats.files import looks_like_path

CHECKPOINT_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "README.md"]


def is_local(path_or_repo: str | os.PathLike[str]) -> bool:
    """Whether a name means a directory here: it exists, or it is written as a path rather than as `owner/name`."""
    text = os.fspath(path_or_repo)
    return Path(text).expanduser().is_dir() or looks_like_path(text)


def resolve(path_or_repo: str | os.PathLike[str], revision: str | None = None, token: str | None = None) -> Path:
    """Return the directory that a path or hub id names, downloading configuration, weights and card of a repository.

    SpeculatorsError says which of the two it was taken for and why it could not be had.
    """
    text = os.fspath(path_or_repo)
    local = Path(text).expanduser()
    if local.is_dir():
        return local
    if looks_like_path(text):
        kind = "a file" if local.exists() else "not there"
        raise SpeculatorsError(f"{text}: expected a directory, it is {kind}; check the path")
    try:
        return Path(
            huggingface_hub.snapshot_download(text, revision=revision, token=token, allow_patterns=CHECKPOINT_FILES)
        )
    except ValueError as error:
        raise SpeculatorsError(f"{text!r} is neither a directory nor a hub id: {_line(error)}") from error
    except OSError as error:
        where = f"{text}@{revision}" if revision else text
        hint = "check the name, the revision, the token and the network, or give a local directory"
        text = f"no directory {text!r} here, and hub repository {where} cannot be had: {_line(error)}; {hint}"
        raise SpeculatorsError(text) from error


def push(directory: str | os.PathLike[str], repo: str, token: str | None = None, private: bool = False) -> str:
    """Upload a speculator directory and return the address of the commit.

    FormatError F010 where `verifier.name_or_path` is a path: nobody else could serve that. SpeculatorsError where the
    upload fails.
    """
    folder = Path(directory)
    weights = [file.name for file in weight_files(folder)]
    refuse_local_verifier(read_config(folder), folder)
    named = {CONFIG, *weights, "model.safetensors.index.json", "README.md", "evaluation.json"}
    try:
        huggingface_hub.create_repo(repo, token=token, private=private, exist_ok=True)
        commit = huggingface_hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            token=token,
            allow_patterns=sorted(named),
            commit_message="Upload speculator",
        )
    except (OSError, ValueError, _http_error()) as error:
        raise SpeculatorsError(
            f"{folder} could not be pushed to {repo}: {_line(error)}; check the name and the token"
        ) from error
    return str(commit.commit_url)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _http_error() -> type[Exception]:
    """Return the base class of the hub client's connection errors, whichever HTTP library it is built on."""
    bases: tuple[type[Exception], ...] = huggingface_hub.errors.HfHubHTTPError.__mro__
    return next(base for base in bases if base.__name__ == "HTTPError")


def refuse_local_verifier(config: dict[str, Any], source: object) -> None:
    """Raise FormatError where a configuration names its verifier by a path that means nothing on another machine."""
    verifier = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    if not isinstance(verifier, str) or not verifier:
        raise error_of([fault("no-verifier", "speculators_config.verifier.name_or_path is missing")], source)
    if is_local(verifier):
        raise _bare_path(verifier, source)


def _bare_path(verifier: str, source: object) -> FormatError:
    text = f"verifier.name_or_path is the path {verifier!r}; write the verifier's hub id before pushing"
    return error_of([fault("verifier-bare-path", text)], source)
