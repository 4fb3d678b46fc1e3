"""A speculator: a draft model, its configuration and its vocabulary, as saved, loaded, trained and served."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculators.errors import FormatError, SpeculatorsError
from speculators.formats.checkpoint import load_tensors, read_config, save_checkpoint
from speculators.formats.config import SpeculatorConfig
from speculators.formats.hub import push, resolve
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.draft_model import DraftModel
from speculators.models.family import DraftFamily


def family_of(speculators_model_type: object, source: object) -> DraftFamily:
    """The family of a configuration's `speculators_model_type`; FormatError names the known ones."""
    family = FAMILIES.get(speculators_model_type) if isinstance(speculators_model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise FormatError(f"{source}: speculators_model_type is {speculators_model_type!r}; expected one of {known}")
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
        family = family_of(raw.get("speculators_model_type"), directory)
        config = family.config.from_json(raw, directory)
        tensors = load_tensors(directory, config.expected_tensors())
        speculator = cls(config, family.model(config))
        speculator._fill(_with_vocabulary(tensors, config), torch.device(device), dtype)
        return speculator

    @classmethod
    def create(
        cls, config: SpeculatorConfig, weights: VerifierWeights, vocab: DraftVocab | None = None, *, seed: int = 0
    ) -> Speculator:
        """A fresh float32 draft for training: trained parameters random from `seed`, the rest from the verifier.

        `vocab` must have the config's draft vocabulary size; None means the whole vocabulary.
        """
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
            head = weights.lm_head.index_select(0, vocab.draft_ids.to(weights.lm_head.device))
            speculator._fill({"d2t": vocab.d2t, "t2d": vocab.t2d, "lm_head.weight": head.float()})
        speculator.attach_verifier(weights)
        draft.start_from_verifier(weights, vocab)
        return speculator

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary; the full one where none is stored."""
        buffers = dict(self.draft.named_buffers())
        if "d2t" in buffers:
            return DraftVocab(buffers["d2t"], buffers["t2d"])
        return DraftVocab.full(self.config.verifier_vocab_size)

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

    def save_pretrained(self, directory: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors, atomically; float tensors are stored as `dtype`.

        Tensors borrowed from the verifier are left out wherever engines take the verifier's by themselves.
        """
        expected = self.config.expected_tensors()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.draft.state_dict().items():
            spec = expected.get(name)
            if spec is None or ((tensor.is_meta or name in self._borrowed) and not spec.required):
                continue
            if tensor.is_meta:
                self.draft.require_complete()
            value = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
            tensors[name] = value.contiguous()
        save_checkpoint(directory, self.config.to_json(), tensors, expected)

    def push_to_hub(
        self, repo: str, *, token: str | None = None, private: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> str:
        """Save and upload to a hub repository; returns its address. A verifier known only by a path is refused."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "speculator", dtype)
            return push(Path(folder) / "speculator", repo, token=token, private=private)

    def _fill(
        self, tensors: Mapping[str, Tensor], device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        # assign keeps each parameter's requires_grad and gives parameters without storage their values.
        unknown = self.draft.load_state_dict(
            {name: placed(tensor) for name, tensor in tensors.items()}, strict=False, assign=True
        ).unexpected_keys
        if unknown:
            raise FormatError(f"the draft has no tensors named {', '.join(unknown)}; remove them from the checkpoint")


def _with_vocabulary(tensors: dict[str, Tensor], config: SpeculatorConfig) -> dict[str, Tensor]:
    """Check the vocabulary map, derive the mask where only the map is stored, drop the mask of a full vocabulary."""
    if "d2t" in tensors:
        vocab = DraftVocab.from_d2t(tensors["d2t"], config.verifier_vocab_size, tensors.get("t2d"))
        return {**tensors, "t2d": vocab.t2d}
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"}
