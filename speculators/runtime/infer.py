"""From what a user names to what runs: verifier, draft, method and depth."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speculators.errors import EngineError, SpeculatorsError
from speculators.formats.checkpoint import read_config, read_headers
from speculators.formats.draft_model_file import DRAFT_MODEL_FILE, DraftModelFile, read_draft_model_file
from speculators.formats.hub import fetch_config, fetch_file, is_local, resolve
from speculators.models.speculator import Speculator
from speculators.runtime.additional import AdditionalConfig
from speculators.runtime.config import (
    LOOKUP_METHODS,
    METHOD_OF_FAMILY,
    OWN_CHECKPOINT_METHODS,
    SpeculativeConfig,
)
from speculators.runtime.config_rules import EXTRACT_METHOD, NGRAM_METHODS
from speculators.runtime.recognise import (
    LOOK_ALIKES,
    DraftKind,
    method_of_tensors,
    names_mask_token,
    native_kind,
    recognise,
)

logger = logging.getLogger(__name__)

_WHERE = "speculative_config"
_NGRAM_MODELS = ("ngram", "[ngram]")
_CLASS_METHOD, _MODEL_METHOD = "custom_class", "draft_model"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass
class Plan:
    """What `LLM` loads: the verifier's name and, with speculation, its whole configuration with nothing left to guess.

    In `config`, method and depth are known, `model` is what drafts (None where nothing is read for it), and
    `parallel_drafting` says how the draft was made. `speculator` is there where the draft is one of our directories.
    `verifier_revision` is the commit of the verifier's repository that was asked for. `assistant`: what drafts reads
    the verifier's own keys and values.
    """

    verifier: str
    config: SpeculativeConfig | None = None
    speculator: Speculator | None = None
    verifier_revision: str | None = None
    assistant: bool = False
    additional: AdditionalConfig = field(default_factory=AdditionalConfig)

    @property
    def method(self) -> str | None:
        """How drafts are made; None without speculation."""
        return None if self.config is None else self.config.method

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts a step at most, K; 0 where nothing is drafted."""
        if self.config is None or self.config.method == EXTRACT_METHOD:
            return 0
        return self.config.num_speculative_tokens or 0

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Capture ids whose states are extracted, where that is what was asked for."""
        return () if self.config is None else self.config.layer_ids


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


def draft_model_file(path_or_repo: str, revision: str | None = None) -> DraftModelFile | None:
    """What a folder or hub repository says of the language model in it that drafts; None where it does not say so.

    Of a repository the file is asked for only where its config.json is that of a language model with a mask token.
    """
    if is_local(path_or_repo):
        file = Path(path_or_repo).expanduser() / DRAFT_MODEL_FILE
        return read_draft_model_file(file) if file.is_file() else None
    try:
        raw = fetch_config(path_or_repo, revision)
    except SpeculatorsError:
        # Whoever loads it as a verifier says what is wrong with it.
        return None
    if raw.get("speculators_config") is not None or not names_mask_token(raw):
        return None
    found = fetch_file(path_or_repo, DRAFT_MODEL_FILE, revision)
    return None if found is None else read_draft_model_file(found)


def infer(
    model: str,
    config: SpeculativeConfig | None,
    additional: AdditionalConfig | None = None,
    *,
    revision: str | None = None,
) -> Plan:
    """Decide what to run.

    A speculator directory as `model` brings its verifier, method and depth, and so does a language model beside a
    `speculative_config.json`; keys of `config` win except method and model, which the directory fixes: others are
    reset, with a warning. Otherwise `model` is the verifier, and `config.model` what drafts. The method is the one
    given, else that of the speculator's type, else that of the architecture, else an error; nothing is ever guessed
    from a path's name. The depth is the one given, else the file's proposal, else what the architecture drafts, else an
    error.
    """
    plan = _plan(model, config, revision)
    if plan.verifier == model:
        plan.verifier_revision = revision
    if additional is not None:
        add(plan, additional, None if config is None else config.num_speculative_tokens)
    return plan


def add(plan: Plan, additional: AdditionalConfig, num_speculative_tokens: int | None) -> None:
    """Give a plan its additional configuration, with `num_speculative_tokens` as the user asked for it.

    The depth of trees takes the place of the depth that a draft's file proposes. EngineError where the two sides
    disagree.
    """
    additional.check_against(plan.config)
    plan.additional, tree = additional, additional.tree_drafting
    if tree is not None and plan.config is not None:
        if num_speculative_tokens not in (None, tree.depth):
            raise EngineError(
                f"additional_config.tree_drafting: depth={tree.depth} with {_WHERE}'s num_speculative_tokens="
                f"{num_speculative_tokens}: expected the same number, or no num_speculative_tokens"
            )
        plan.config = replace(plan.config, num_speculative_tokens=tree.depth)


def _plan(model: str, config: SpeculativeConfig | None, revision: str | None) -> Plan:
    locked = is_speculator(model, revision)
    drafting = None if locked else draft_model_file(model, revision)
    if config is not None and config.method == EXTRACT_METHOD:
        if locked or drafting is not None:
            raise EngineError(
                f"{_WHERE}: method {EXTRACT_METHOD!r} reads a verifier, and {model!r} is a speculator; "
                "give the verifier as the model"
            )
        return Plan(model, config)
    if locked:
        return _locked(model, config or SpeculativeConfig(), revision)
    if drafting is not None:
        fixed = _fixed(model, drafting.method, config or SpeculativeConfig())
        fixed = replace(fixed, revision=fixed.revision or revision)
        return _with_files(drafting.verifier.name_or_path, drafting.method, fixed, None)
    if config is None:
        return Plan(model)
    method = config.method or _method_without_files(config)
    if method in LOOKUP_METHODS:
        return Plan(model, _looking_up(method, config))
    if method == _CLASS_METHOD:
        return Plan(model, _of_class(config))
    return _with_files(model, method, config, revision)


def _locked(model: str, config: SpeculativeConfig, revision: str | None) -> Plan:
    """A speculator as the model to serve: it fixes method and model, and the user the rest."""
    speculator, kind = _read(model, config.revision or revision)
    fixed = _fixed(model, kind.method, config)
    return _of_speculator(speculator.config.verifier.name_or_path, model, speculator, kind, fixed)


def _fixed(model: str, method: str, config: SpeculativeConfig) -> SpeculativeConfig:
    """The user's configuration with what the directory that is served fixes."""
    for name, fixed in (("method", method), ("model", model)):
        given = getattr(config, name)
        if given not in (None, fixed):
            logger.warning(
                "%s: %s=%r is reset to %r, which the speculator %s that is served fixes",
                _WHERE,
                name,
                given,
                fixed,
                model,
            )
    return replace(config, method=method, model=model)


def _with_files(model: str, method: str | None, config: SpeculativeConfig, revision: str | None) -> Plan:
    """A draft that is read from files: a speculator, another's draft, a language model, or the verifier's own."""
    source, of_source = config.model, config.revision
    own = source in (None, model) and method in OWN_CHECKPOINT_METHODS
    if source is None:
        if method not in OWN_CHECKPOINT_METHODS:
            asked = f"method={method!r} with no model" if method else "neither method nor model is given"
            raise EngineError(f"{_WHERE}: {asked}; give `model`, the speculator directory or hub id to draft with")
        source, of_source = model, revision
    raw = _config_json(source, of_source)
    if raw.get("speculators_config") is not None:
        speculator, kind = _read(source, of_source)
        _agree(method, kind, source, raw)
        return _of_speculator(model, source, speculator, kind, replace(config, method=kind.method, model=source))
    kind = native_kind(raw, method, source) if own and method is not None else recognise(raw, source)
    method = method or kind.method
    if not own:
        _agree(method, kind, source, raw)
        if is_local(source):
            _check_tensors(method, Path(source), source)
    told = None if own else draft_model_file(source, of_source)
    if told is not None:
        kind = replace(kind, depth=told.num_speculative_tokens)
        if config.parallel_drafting is None:
            config = replace(config, parallel_drafting=told.parallel_drafting)
    depth = _depth(config, kind, source)
    parallel = _parallel(config, kind, source, always=False)
    return Plan(
        model,
        replace(config, method=method, model=source, num_speculative_tokens=depth, parallel_drafting=parallel),
        assistant=kind.assistant,
    )


def _method_without_files(config: SpeculativeConfig) -> str | None:
    model = config.model
    if model in _NGRAM_MODELS:
        return NGRAM_METHODS[0]
    if model is not None and _DOTTED.fullmatch(model) and not is_local(model):
        return _CLASS_METHOD
    return None


def _looking_up(method: str, config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration of a method that drafts from the text alone."""
    if config.model not in (None, method, f"[{method}]", *_NGRAM_MODELS):
        raise EngineError(f"{_WHERE}: method {method!r} reads no model, got model={config.model!r}; leave model out")
    depth = config.num_speculative_tokens
    if depth is None and method not in NGRAM_METHODS:
        depth = config.suffix_decoding_max_tree_depth
    return replace(config, method=method, model=None, num_speculative_tokens=_known(depth, method))


def _of_class(config: SpeculativeConfig) -> SpeculativeConfig:
    if config.model is None or not _DOTTED.fullmatch(config.model):
        raise EngineError(
            f"{_WHERE}: method {_CLASS_METHOD!r} with model={config.model!r}: expected the dotted path of a "
            "class, such as package.module.Class"
        )
    depth = _known(config.num_speculative_tokens, _CLASS_METHOD)
    return replace(config, method=_CLASS_METHOD, num_speculative_tokens=depth)


def _config_json(source: str, revision: str | None) -> Mapping[str, Any]:
    return read_config(Path(source)) if is_local(source) else fetch_config(source, revision)


def _read(source: str, revision: str | None) -> tuple[Speculator, DraftKind]:
    directory = resolve(source, revision=revision)
    kind = recognise(read_config(directory), source)
    _check_tensors(kind.method, directory, source)
    return Speculator.from_pretrained(directory), kind


def _check_tensors(method: str, directory: Path, source: str) -> None:
    """Refuse tensors of a draft that looks like this method's, whatever the configuration says.

    Only headers are read; nothing is, where no weights lie.
    """
    if method not in LOOK_ALIKES or not any(directory.glob("*.safetensors")):
        return
    shapes = {name: header.shape for name, header in read_headers(directory).items()}
    found = method_of_tensors(shapes)
    if found not in (None, method):
        raise EngineError(
            f"{_WHERE}: method={method!r}, but the tensors of {source} are those of a draft for method {found!r}: "
            f"fc.weight is {list(shapes.get('fc.weight') or shapes['model.fc.weight'])}; give that method, and a "
            "config.json that says the same"
        )


def _agree(method: str | None, kind: DraftKind, source: str, raw: Mapping[str, Any]) -> None:
    """Refuse a method that the draft's files contradict; a plain language model's configuration contradicts none."""
    if method in (None, kind.method) or (kind.method == _MODEL_METHOD and method in METHOD_OF_FAMILY.values()):
        return
    what = f"a speculator for method {kind.method!r}" if kind.family else f"for method {kind.method!r}"
    named = raw.get("model_type") or raw.get("architectures")
    said = "" if kind.family else f" (its config.json says {named!r})"
    raise EngineError(f"{_WHERE}: method={method!r}, but {source} is {what}{said}; leave method out or give that one")


def _of_speculator(
    verifier: str, source: str, speculator: Speculator, kind: DraftKind, config: SpeculativeConfig
) -> Plan:
    most = speculator.config.max_speculative_tokens
    kind = replace(kind, depth=speculator.config.num_speculative_tokens, most=most)
    config.check_draft_vocab(speculator.config.num_draft_ids)
    parallel = _parallel(config, kind, source, always=kind.mask_token_id is not None)
    depth = _depth(config, kind, source)
    return Plan(verifier, replace(config, num_speculative_tokens=depth, parallel_drafting=parallel), speculator)


def _depth(config: SpeculativeConfig, kind: DraftKind, source: str) -> int:
    depth = _known(config.num_speculative_tokens or kind.depth, source)
    if kind.most is not None and depth > kind.most:
        raise EngineError(
            f"{_WHERE}: num_speculative_tokens={depth}, but a step of {source} drafts at most {kind.most} tokens"
        )
    if kind.blocks is not None and depth > kind.blocks and depth % kind.blocks:
        raise EngineError(
            f"{_WHERE}: num_speculative_tokens={depth}, but the {kind.blocks} blocks of {source} draft in turn; "
            f"expected at most {kind.blocks}, or a multiple of it"
        )
    return depth


def _known(depth: int | None, source: str) -> int:
    if depth is None:
        raise EngineError(
            f"{_WHERE}: num_speculative_tokens is missing, and {source} does not say how many tokens a step drafts; "
            "give it"
        )
    return depth


def _parallel(config: SpeculativeConfig, kind: DraftKind, source: str, *, always: bool) -> bool:
    """Whether all tokens of a step are drafted in one pass; `always`: the draft was made for nothing else."""
    asked = config.parallel_drafting
    if asked and kind.mask_token_id is None:
        raise EngineError(
            f"{_WHERE}: parallel_drafting=True, but the config.json of {source} names no mask token (mask_token_id, "
            "pard_token or ptd_token_id) to stand for tokens that are still to be drafted; leave parallel_drafting out"
        )
    if asked is False and always:
        logger.warning("%s: parallel_drafting=False is reset to True, for which %s was made", _WHERE, source)
    return always or bool(asked)
