"""From a repository id to a local directory, and what a repository says without its weights: the Hugging Face hub.

`HF_ENDPOINT` names another hub, `HF_TOKEN` who asks; both are read when a function is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from speculators.errors import SpeculatorsError
from speculators.formats.checkpoint import CONFIG, TensorHeader, read_config, read_headers
from speculators.formats.files import looks_like_path

CHECKPOINT_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "README.md"]


def is_local(path_or_repo: str | os.PathLike[str]) -> bool:
    """Whether a name means a directory here: it exists, or it is written as a path rather than as `owner/name`."""
    text = os.fspath(path_or_repo)
    return Path(text).expanduser().is_dir() or looks_like_path(text)


def resolve(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    token: str | None = None,
    patterns: Sequence[str] = CHECKPOINT_FILES,
) -> Path:
    """Return the directory that a path or hub id names, downloading a repository's files that fit the patterns.

    By default these are its configuration, weights and card.
    SpeculatorsError says which of the two it was taken for and why it could not be had. A `revision` of a local
    directory is refused: it has none.
    """
    local = _local_directory(path_or_repo)
    if local is not None:
        if revision is not None:
            raise SpeculatorsError(
                f"{local} is a directory, which has no revision {revision!r}; leave the revision out"
            )
        return local
    repo = os.fspath(path_or_repo)
    with explained(repo, revision):
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, token=token, endpoint=endpoint(), allow_patterns=list(patterns)
            )
        )


def fetch_config(repo: str, revision: str | None = None, token: str | None = None) -> dict[str, Any]:
    """Return the parsed `config.json` of a repository, without its weights; SpeculatorsError as from `resolve`."""
    with explained(repo, revision):
        path = huggingface_hub.hf_hub_download(repo, CONFIG, revision=revision, token=token, endpoint=endpoint())
    return read_config(Path(path).parent)


def fetch_file(repo: str, name: str, revision: str | None = None, token: str | None = None) -> Path | None:
    """Where a file of a repository lies, downloading it; None where there is none of that name (offline: in the cache).

    SpeculatorsError as from `resolve`.
    """
    with explained(repo, revision):
        try:
            path = huggingface_hub.hf_hub_download(repo, name, revision=revision, token=token, endpoint=endpoint())
        except errors.EntryNotFoundError:
            return None
    return Path(path)


def describe(
    path_or_repo: str | os.PathLike[str], revision: str | None = None, token: str | None = None
) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Return the parsed `config.json` and the header of every tensor of a directory or repository.

    Of a repository, only the configuration and the beginnings of its weight files are downloaded; offline, a copy in
    the cache is read. SpeculatorsError as from `resolve`, FormatError as from `read_config` and `read_headers`.
    """
    local = _local_directory(path_or_repo)
    if local is not None or constants.HF_HUB_OFFLINE:
        folder = local if local is not None and revision is None else resolve(path_or_repo, revision, token)
        return read_config(folder), read_headers(folder)
    repo = os.fspath(path_or_repo)
    with explained(repo, revision):
        api = huggingface_hub.HfApi(endpoint=endpoint(), token=token)
        # Configuration and weights of one commit, also where somebody pushes between the two requests.
        commit = api.model_info(repo, revision=revision).sha
        config = read_config(Path(api.hf_hub_download(repo, CONFIG, revision=commit)).parent)
        found = api.get_safetensors_metadata(repo, revision=commit)
    headers = {
        name: TensorHeader(info.dtype, tuple(info.shape), Path(file), *info.data_offsets)
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
        if found.weight_map.get(name) == file
    }
    return config, dict(sorted(headers.items()))


def cached_directory(repo: str) -> Path | None:
    """The folder in the hub's cache that has a repository's `config.json`; None where it is not there. Asks no hub."""
    if is_local(repo) or "/" not in repo:
        return None
    found = huggingface_hub.try_to_load_from_cache(repo, CONFIG)
    return Path(found).parent if isinstance(found, str) else None


def endpoint() -> str | None:
    """The hub that `HF_ENDPOINT` names now; None for the client's own default."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextmanager
def explained(repo: str, revision: str | None = None, pushing: object = None) -> Iterator[None]:
    """Turn what the hub's client raises about a repository into a SpeculatorsError that says what to do.

    `pushing` is what was to be uploaded; without it, something was to be downloaded.
    """
    where = f"{repo}@{revision}" if revision else repo
    failed = f"no directory {repo!r} here, and hub repository {where} cannot be had"
    if pushing is not None:
        failed = f"{pushing} could not be pushed to {where}"
    try:
        yield
    except (errors.HFValidationError, errors.HfUriError) as error:
        kind = "not a hub id" if pushing is not None else "neither a directory nor a hub id"
        raise SpeculatorsError(f"{repo!r} is {kind}: {one_line(error)}") from error
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError) as error:
        raise SpeculatorsError(f"hub repository {where} holds no readable safetensors: {one_line(error)}") from error
    except (OSError, ValueError, RuntimeError, CONNECTION_ERROR) as error:
        raise SpeculatorsError(f"{failed}: {_reason(error, repo, revision)}") from error


def _reason(error: BaseException, repo: str, revision: str | None) -> str:
    """Why the hub refused, and what to do about it; the cause counts where the client only says that it gave up."""
    chain = list(_causes(error))

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(item, kinds) for item in chain)

    status = next((item.response.status_code for item in chain if isinstance(item, errors.HfHubHTTPError)), None)
    page = f"{endpoint() or constants.ENDPOINT}/{repo}"
    if among(errors.GatedRepoError):
        reason = f"it is gated; accept its conditions at {page} and give the token of that account (HF_TOKEN)"
    elif among(errors.RevisionNotFoundError):
        reason = f"it has no revision {revision!r}; give a branch, a tag or a commit that is there"
    elif among(errors.RepositoryNotFoundError):
        reason = (
            "there is none of this name, or it is private; check the name, and give a token that may read it (HF_TOKEN)"
        )
    elif status in (401, 403):
        reason = f"the hub refused the token (HTTP {status}); give one that may do this (HF_TOKEN)"
    elif among(errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set and it is not in the cache; unset it, or give a local directory"
    elif "xet-write-token" in str(error):
        reason = "this hub has no Xet storage; set HF_HUB_DISABLE_XET=1"
    elif among(CONNECTION_ERROR) and status is None:
        hub = endpoint() or constants.ENDPOINT
        reason = f"{hub} cannot be reached, nor is it in the cache; check the network, or give a local directory"
    elif among(errors.EntryNotFoundError) and status is not None:
        reason = f"it lacks a file: {one_line(error)}"
    else:
        said = list(dict.fromkeys(one_line(item) for item in chain if str(item)))
        reason = f"{': '.join(said)}; check the name, the revision, the token and the network"
    return reason


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(error: BaseException) -> str:
    """The text of an exception without line breaks."""
    return " ".join(str(error).split())


def _local_directory(path_or_repo: str | os.PathLike[str]) -> Path | None:
    text = os.fspath(path_or_repo)
    local = Path(text).expanduser()
    if local.is_dir():
        return local
    if looks_like_path(text):
        kind = "a file" if local.exists() else "not there"
        raise SpeculatorsError(f"{text}: expected a directory, it is {kind}; check the path")
    return None


def _http_error() -> type[Exception]:
    """The base class of the hub client's connection errors, whichever HTTP library it is built on."""
    bases: tuple[type[Exception], ...] = errors.HfHubHTTPError.__mro__
    return next(base for base in bases if base.__name__ == "HTTPError")


CONNECTION_ERROR = _http_error()
