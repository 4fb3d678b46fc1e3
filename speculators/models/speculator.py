"""A speculator: a draft model, its configuration and its vocabulary, as saved, loaded, trained and served."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.errors import FormatError, SpeculatorsError, UsageError, VerifierError
from speculators.formats.card import write_card
from speculators.formats.checkpoint import load_tensors, read_config, save_checkpoint
from speculators.formats.config import SpeculatorConfig
from speculators.formats.draft_model_file import no_speculator
from speculators.formats.faults import error_of, fault
from speculators.formats.hub import resolve
from speculators.formats.publish import prepare, publish
from speculators.formats.verifier_weights import VerifierWeights, load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES, family_config
from speculators.models.draft_model import DraftModel
from speculators.models.family import DraftFamily, VerifierShape

# What to do about a verifier without a draft of its own.
_OTHERS = "draft with a speculator that was made for it (method eagle3), or with a small model (method draft_model)"


def family_of(speculators_model_type: object, source: object) -> DraftFamily:
    """The family of a configuration's `speculators_model_type`; FormatError names the known ones."""
    family = FAMILIES.get(speculators_model_type) if isinstance(speculators_model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        slug = "unsupported-type" if speculators_model_type else "no-speculators-model-type"
        text = f"speculators_model_type is {speculators_model_type!r}; expected one of {known}"
        raise error_of([fault(slug, text)], source)
    return family


class Speculator:
    """Config and draft together; the one object that reads and writes speculator directories.

    Tensors that a directory leaves to the verifier (its embeddings, mostly) have no values until `attach_verifier`.
    """

    def __init__(self, config: SpeculatorConfig, draft: DraftModel, *, borrowed: frozenset[str] = frozenset()) -> None:
        self.config = config
        self.draft = draft
        self._borrowed = borrowed

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> Speculator:
        """Read a local directory or a hub repository, without touching its verifier.

        Floating-point tensors become `dtype` (as stored where None). FormatError names whatever in the directory is
        missing, unknown or of the wrong shape.
        """
        directory = resolve(path_or_repo, revision=revision, token=token)
        raw = read_config(directory)
        kind = raw.get("speculators_model_type")
        if kind is None and (found := no_speculator(directory)) is not None:
            raise error_of([found], directory)
        family = family_of(kind, directory)
        config = family.config.from_json(raw, directory)
        tensors = load_tensors(directory, config.expected_tensors())
        speculator = cls(config, family.model(config))
        speculator._fill(_with_vocabulary(tensors, config), torch.device(device), dtype)
        return speculator

    @classmethod
    def from_verifier(
        cls, path_or_repo: str | os.PathLike[str], family: str, *, revision: str | None = None, token: str | None = None
    ) -> Speculator:
        """The draft that a verifier's own checkpoint has, as stored there; embeddings and head are left to it.

        `family` is the draft's. It drafts one token a step for each of its layers unless told otherwise. VerifierError
        where the checkpoint has no such draft, or one of more layers than are known.
        """
        kind = family_of(family, "method")
        directory = resolve(path_or_repo, revision=revision, token=token)
        shape = VerifierShape.from_config_dict(read_config(directory), str(path_or_repo))
        count = kind.draft.native_layers(shape)
        most = kind.draft.most_native_layers
        if count is not None and count > most:
            raise VerifierError(
                f"verifier {path_or_repo} has {count} {family} layers of its own; drafts of up to {most} are known: "
                f"{_OTHERS}"
            )
        try:
            choice = kind.draft(num_speculative_tokens=count or 1)
            config = choice.resolve_native(shape, count) if (count or 1) > 1 else choice.resolve(shape)
        except UsageError as error:
            raise VerifierError(f"{error}; {_OTHERS}") from error
        speculator = cls(config, kind.model(config))
        found = speculator.draft.native_tensors(directory, load_verifier_weights(directory))
        if not found:
            lost = f"although its configuration says {count}" if count else "nor says its configuration that it has"
            raise VerifierError(f"verifier {path_or_repo} has no {family} layer among its tensors, {lost}: {_OTHERS}")
        speculator._take(found, directory, torch.device("cpu"), None)
        return speculator

    @classmethod
    def create(
        cls,
        config: SpeculatorConfig,
        weights: VerifierWeights,
        vocab: DraftVocab | None = None,
        *,
        seed: int = 0,
        start_from: Speculator | None = None,
    ) -> Speculator:
        """A float32 draft for training: trained parameters random from `seed`, the rest from the verifier.

        `vocab` must have the config's draft vocabulary size; None means the whole vocabulary. `start_from`, a
        speculator of the same family, gives all its own tensors and its vocabulary map instead (see `copy_from`).
        """
        if start_from is not None and vocab is None:
            vocab = start_from.vocab
        vocab = vocab or DraftVocab.full(config.verifier_vocab_size)
        if (vocab.draft_size, vocab.verifier_size) != (config.num_draft_ids, config.verifier_vocab_size):
            raise FormatError(
                f"the draft vocabulary keeps {vocab.draft_size} of {vocab.verifier_size} tokens; the config says "
                f"{config.num_draft_ids} of {config.verifier_vocab_size}"
            )
        family = family_of(config.speculators_model_type, "config")
        draft = family.model(config)
        draft.reset_parameters(torch.Generator().manual_seed(seed))
        speculator = cls(config, draft)
        if not vocab.is_full:
            speculator._fill(draft.vocabulary_tensors(vocab))
            # A head that has values already is the draft's own.
            if "lm_head.weight" in draft.missing_tensors():
                head = weights.lm_head.index_select(0, vocab.draft_ids.to(weights.lm_head.device))
                speculator._fill({"lm_head.weight": head.float()})
        speculator.attach_verifier(weights)
        draft.start_from_verifier(weights, vocab)
        speculator._borrowed -= {name for name, tensor in draft.named_parameters() if tensor.requires_grad}
        return speculator if start_from is None else speculator.copy_from(start_from)

    def copy_from(self, other: Speculator) -> Speculator:
        """Take every tensor of a speculator of this family, bit for bit, for a warm start; returns self.

        The vocabulary map is kept with the weights that belong to it, never rebuilt. What the other borrows from its
        verifier is left as it is here. FormatError names the first tensor that the two do not share, or share in
        another shape, and nothing is copied then; likewise where their vocabulary maps differ.
        """
        kind, found = self.config.speculators_model_type, other.config.speculators_model_type
        if kind != found:
            raise FormatError(f"a {kind} draft cannot start from a {found}; give a speculator of the same family")
        mine, theirs = self.draft.state_dict(), other.draft.state_dict()
        for name in sorted(mine.keys() | theirs.keys()):
            shapes = [list(side[name].shape) if name in side else None for side in (mine, theirs)]
            if shapes[0] != shapes[1]:
                has, gives = (f"is {shape}" if shape else "is not there" for shape in shapes)
                raise FormatError(
                    f"{name} {has} in the new draft and {gives} in the one to start from; give both the same shape"
                )
        ids = [side.vocab.draft_ids for side in (self, other)]
        if not torch.equal(ids[0], ids[1].to(ids[0].device)):
            raise FormatError(
                "the draft to start from keeps other tokens than the new one; leave the vocabulary out to take its map"
            )
        given = {name: theirs[name].clone() for name in theirs.keys() - other._borrowed if not theirs[name].is_meta}
        self._fill(given, self.draft.device, self.draft.dtype)
        self._borrowed -= given.keys()
        return self

    def take_native(self, directory: Path, weights: VerifierWeights) -> Speculator:
        """Take what a verifier's own checkpoint has of this draft (see `DraftModel.native_tensors`); returns self.

        FormatError where it has nothing, or another draft than this one.
        """
        found = self.draft.native_tensors(directory, weights)
        if not found:
            raise FormatError(
                f"{directory} has no {self.config.speculators_model_type} block of its own to start from; start from "
                "another speculator, or at random"
            )
        copies = {name: tensor.clone() for name, tensor in found.items()}
        self._take(copies, directory, self.draft.device, self.draft.dtype)
        return self

    def _take(
        self, found: Mapping[str, Tensor], directory: Path, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """Fill in a draft's own tensors; FormatError where they are not those of this one."""
        wanted = {name: spec.shape for name, spec in self.config.expected_tensors().items() if spec.required}
        got = {name: tuple(tensor.shape) for name, tensor in found.items()}
        for name in sorted(wanted.keys() | got.keys()):
            if wanted.get(name) != got.get(name):
                has, asked = (list(side[name]) if name in side else "no tensor" for side in (got, wanted))
                raise FormatError(f"{directory}: {name} is {has} there, expected {asked}; is it of this verifier?")
        self._fill(found, device, dtype)

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary; the full one where none is stored."""
        buffers = dict(self.draft.named_buffers())
        if "d2t" in buffers:
            return DraftVocab(buffers["d2t"], buffers["t2d"])
        ids_D = self.draft.verifier_ids_D
        size = self.config.verifier_vocab_size
        return DraftVocab.full(size) if ids_D is None else DraftVocab.from_ids(ids_D.tolist(), size)

    @property
    def borrowed(self) -> frozenset[str]:
        """Names of the tensors that are the verifier's, filled in by `attach_verifier`."""
        return self._borrowed

    @property
    def num_speculative_tokens(self) -> int:
        """How many tokens a step drafts unless told otherwise."""
        return self.config.num_speculative_tokens

    def attach_verifier(self, weights: VerifierWeights) -> Speculator:
        """Fill every tensor that the directory left to the verifier; returns self.

        Embeddings are shared, not copied, where they lie on the draft's device. SpeculatorsError where shapes differ:
        the weights are another verifier's.
        """
        missing = self.draft.missing_tensors()
        head = weights.lm_head.to(self.draft.dtype)
        sources = {"embed_tokens": weights.embed_tokens, "lm_head": head}
        found = {name: sources[source] for name, source in self.draft.borrows.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.draft.state_dict().items()}
        for name in missing:
            if name not in found or shapes[name] != tuple(found[name].shape):
                got = list(found[name].shape) if name in found else "nothing"
                raise SpeculatorsError(
                    f"{name} of the draft is {list(shapes[name])}, the verifier has {got}; attach the weights of "
                    f"{self.config.verifier.name_or_path!r}"
                )
        self._fill({name: found[name] for name in missing}, self.draft.device)
        self._borrowed |= frozenset(missing)
        return self

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Speculator:
        """The speculator on this device and in this dtype: self where nothing changes, else a copy sharing nothing."""
        device, dtype = torch.device(device), dtype or self.draft.dtype
        if self.draft.device == device and self.draft.dtype == dtype:
            return self
        present = {name: tensor for name, tensor in self.draft.state_dict().items() if not tensor.is_meta}
        copy = Speculator(self.config, type(self.draft)(self.config), borrowed=self._borrowed)
        copy._fill(present, device, dtype)
        copy.draft.train(self.draft.training)
        return copy

    def read_as(self, config: SpeculatorConfig) -> Speculator:
        """The same tensors, shared and not copied, under another configuration of the family.

        FormatError where that has other tensors, or they have other shapes.
        """
        mine, theirs = self.config.expected_tensors(), config.expected_tensors()
        if type(config) is not type(self.config) or mine != theirs:
            differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise FormatError(
                f"the other configuration has other tensors ({', '.join(differing) or 'another family'}); give one "
                "that changes what these mean alone"
            )
        present = {name: tensor for name, tensor in self.draft.state_dict().items() if not tensor.is_meta}
        other = Speculator(config, type(self.draft)(config), borrowed=self._borrowed)
        other._fill(present)
        other.draft.train(self.draft.training)
        return other

    def save_pretrained(self, directory: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors, atomically; float tensors are stored as `dtype`.

        Tensors borrowed from the verifier are left out where every reader takes the verifier's by itself (`ships`
        names the others); those that this object never got values for are left out too.
        """
        expected = self.config.expected_tensors()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.draft.state_dict().items():
            spec = expected.get(name)
            left_out = tensor.is_meta or (name in self._borrowed and name not in self.draft.ships)
            if spec is None or (left_out and not spec.required):
                continue
            if tensor.is_meta:
                self.draft.require_complete()
            kept = not tensor.is_floating_point() or spec.kind == "float32"
            tensors[name] = tensor.detach().to("cpu", tensor.dtype if kept else dtype).contiguous()
        save_checkpoint(directory, self.config.to_json(), tensors, expected)

    def push_to_hub(
        self,
        repo: str,
        *,
        token: str | None = None,
        private: bool = False,
        revision: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        evaluations: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """Save, write a model card and upload to a hub repository, all in one commit; returns its address.

        `evaluations` maps a title to a report of `runtime.evaluate`, for the card. `revision` is a branch, made where
        there is none. FormatError where the speculator would not validate or its verifier is known by a path alone,
        SpeculatorsError where the hub refuses.
        """
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "speculator"
            self.save_pretrained(folder, dtype)
            write_card(folder, self.config, evaluations, repo=repo)
            publication = prepare(folder, repo, family_config)
            return publish(publication, token=token, private=private, revision=revision)

    def _fill(
        self, tensors: Mapping[str, Tensor], device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        exact = {name for name, spec in self.config.expected_tensors().items() if spec.kind == "float32"}

        def placed(name: str, tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() and name not in exact else None)

        # assign keeps each parameter's requires_grad and gives parameters without storage their values.
        unknown = self.draft.load_state_dict(
            {name: placed(name, tensor) for name, tensor in tensors.items()}, strict=False, assign=True
        ).unexpected_keys
        if unknown:
            raise FormatError(f"the draft has no tensors named {', '.join(unknown)}; remove them from the checkpoint")


def _with_vocabulary(tensors: dict[str, Tensor], config: SpeculatorConfig) -> dict[str, Tensor]:
    """Check the vocabulary map, derive the mask where only the map is stored, drop the mask of a full vocabulary."""
    if "d2t" in tensors:
        vocab = DraftVocab.from_d2t(tensors["d2t"], config.verifier_vocab_size, tensors.get("t2d"))
        return {**tensors, "t2d": vocab.t2d}
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"}
