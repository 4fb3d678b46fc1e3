"""From what a user names to what runs: verifier, draft, method and depth."""

from dataclasses import dataclass
from pathlib import Path

from speculators.errors import EngineError, SpeculatorsError
from speculators.formats.checkpoint import read_config
from speculators.formats.hub import fetch_config, is_local, resolve
from speculators.models.speculator import Speculator
from speculators.runtime.config import EXTRACT_METHOD, METHOD_OF_FAMILY, SpeculativeConfig


@dataclass
class Plan:
    """What `LLM` loads: the verifier's name, and with speculation the speculator and K.

    `layer_ids` are the capture ids whose states are extracted, where that is what was asked for.
    """

    verifier: str
    speculator: Speculator | None = None
    method: str | None = None
    num_speculative_tokens: int = 0
    draft_sample_method: str = "greedy"
    layer_ids: tuple[int, ...] = ()


def is_speculator(path_or_repo: str, revision: str | None = None) -> bool:
    """Whether a local folder or a hub repository is a speculator (its config.json has `speculators_config`)."""
    if is_local(path_or_repo):
        path = Path(path_or_repo)
        return (path / "config.json").is_file() and read_config(path).get("speculators_config") is not None
    try:
        return fetch_config(path_or_repo, revision).get("speculators_config") is not None
    except SpeculatorsError:
        # Whoever loads it as a verifier says what is wrong with it.
        return False


def infer(model: str, config: SpeculativeConfig | None, *, revision: str | None = None) -> Plan:
    """Decide what to run.

    A speculator directory as `model` brings its verifier, method and depth; keys of `config` win except method and
    model, which the directory fixes. Otherwise `model` is the verifier and `config.model` the speculator. Nothing is
    ever guessed from a path's name.
    """
    if config is not None and config.method == EXTRACT_METHOD:
        if is_speculator(model, revision):
            raise EngineError(
                f"speculative_config: method {EXTRACT_METHOD!r} reads a verifier, and {model!r} is a speculator; "
                "give the verifier as the model"
            )
        return Plan(verifier=model, method=EXTRACT_METHOD, layer_ids=config.layer_ids)
    if is_speculator(model, revision):
        return _of_speculator(model, config or SpeculativeConfig(), model, revision)
    if config is None:
        return Plan(verifier=model)
    if config.model is None:
        raise EngineError("speculative_config: give `model`, the speculator directory or hub id to draft with")
    return _of_speculator(config.model, config, None, config.revision, verifier=model)


def _of_speculator(
    path: str, config: SpeculativeConfig, fixed: str | None, revision: str | None, *, verifier: str | None = None
) -> Plan:
    directory = resolve(path, revision=revision)
    if not is_speculator(str(directory)):
        raise EngineError(
            f"speculative_config: model={path!r} is no speculator directory: its config.json has no speculators_config"
        )
    speculator = Speculator.from_pretrained(directory)
    family = speculator.config.speculators_model_type
    method = METHOD_OF_FAMILY.get(family)
    if method is None:
        raise EngineError(f"{path}: family {family!r} is not served here; these are: {sorted(METHOD_OF_FAMILY)}")
    if config.method is not None and config.method != method:
        raise EngineError(
            f"speculative_config: method={config.method!r}, but {path} is a speculator for method {method!r}; "
            "leave method out or give that one"
        )
    if fixed is not None and config.model is not None and config.model != fixed:
        raise EngineError(
            f"speculative_config: model={config.model!r}, but speculator {fixed!r} was given as the model "
            "to serve; give its verifier as the model, or leave speculative_config.model out"
        )
    depth = config.num_speculative_tokens or speculator.config.num_speculative_tokens
    most = speculator.config.max_speculative_tokens
    if most is not None and depth > most:
        raise EngineError(
            f"speculative_config: num_speculative_tokens={depth}, but a step of {path} drafts at most {most} tokens"
        )
    return Plan(
        verifier=verifier or speculator.config.verifier.name_or_path,
        speculator=speculator,
        method=method,
        num_speculative_tokens=depth,
        draft_sample_method=config.draft_sample_method,
    )
