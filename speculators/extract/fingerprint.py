"""What tells one verifier from another without reading all of its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers.utils.hub import cached_file

from speculators.errors import VerifierError

# Keys of config.json that say who wrote the file, not what the model computes.
_IGNORED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"})
_WEIGHTS = ("*.safetensors", "*.bin")
_BLOCKS, _BLOCK_BYTES = 64, 4096


def verifier_fingerprint(name_or_path: str | Path) -> str:
    """SHA-256 over a verifier's configuration and, per weight file, its size and 64 blocks spread evenly over it.

    A hub id is looked up in the local cache, where loading the verifier has put it. Raises VerifierError where there is
    no configuration or no weights.
    """
    directory = verifier_directory(name_or_path)
    digest = hashlib.sha256()
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in _IGNORED}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        files = next((found for pattern in _WEIGHTS if (found := sorted(directory.glob(pattern)))), [])
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                for block in range(_BLOCKS):
                    stream.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                    digest.update(stream.read(_BLOCK_BYTES))
    except (OSError, ValueError) as error:
        raise VerifierError(f"verifier {name_or_path} cannot be read: {error}") from error
    if not files:
        raise VerifierError(f"verifier {directory} has no weights; expected *.safetensors beside its config.json")
    return digest.hexdigest()


def verifier_directory(name_or_path: str | Path) -> Path:
    """The folder that holds a verifier: itself, or where the hub's cache has put it; VerifierError where neither is."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        config = cached_file(str(name_or_path), "config.json")
    except (OSError, ValueError) as error:
        raise VerifierError(
            f"verifier {str(name_or_path)!r} is no local folder and no hub id that can be reached: {error}"
        ) from error
    assert config is not None
    return Path(config).parent
