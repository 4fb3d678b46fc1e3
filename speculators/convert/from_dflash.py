"""DFlash drafts as z-lab, SpecForge, NVIDIA's ModelOpt and DeepSpec write them.

What the drafters that build on DFlash share is here too: `BlockReader` turns such a source into the keys of a config,
and plans the tensors that it has in common with the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.convert.decoder_layer import decoder_layer
from speculators.convert.dequantise import dequantise
from speculators.convert.detect import WRAPPERS
from speculators.convert.dtypes import settle_dtype
from speculators.convert.from_dflash_settings import (
    BlockSettings,
    explicit_causality,
    note_unread_keys,
    refuse_unknown_drafters,
    sees_later_slots,
    with_windows,
)
from speculators.convert.layer_ids import block_default, read_layer_ids
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, LayerIdReading, Ledger, PlannedTensor
from speculators.convert.source import TORCH_OF_DTYPE, SourceCheckpoint, SourceTensor, load_pickle
from speculators.convert.vocabulary import plan_vocabulary
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import error_of, fault
from speculators.models.choices import completed
from speculators.models.dflash.config import BlockDraftConfig, DFlashConfig

OPTIONS = (
    *("aux_layer_ids", "layer_ids_mean", "d2t_holds", "speculative_tokens", "mask_token_id", "block_size"),
    *("sample_from_anchor", "sliding_window_non_causal", "dtype"),
)
MASK_FILE = "mask_embedding.pt"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
# Whose blocks predict the token after each slot's own.
NEXT_TOKEN_DRAFTERS = re.compile("DSpark")
# Names that engines read as others.
_OTHER_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_FUSED = re.compile(r"(layers\.\d+\.self_attn)\.qkv_proj\.(weight|bias)")
_CONFIDENCE = "confidence_head."
_ROWS_AT_ONCE = 4096


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for a DFlash draft's tensors; FormatError names what it cannot be converted for."""
    options.require_only("a DFlash draft", *OPTIONS)
    reader = BlockReader(source, verifier, options)
    if reader.settings.count("markov_rank"):
        raise error_of(
            [fault("missing-tensor", "markov_rank is above 0, but there is no markov_head.markov_w1.weight")],
            source.directory,
        )
    for name in [name for name in reader.ledger.left if name.startswith(_CONFIDENCE)]:
        if reader.settings.flag("enable_confidence_head", "use_confidence_head"):
            reader.ledger.drop(name, "a DFlash draft has no confidence head; the tokens it drafts do not depend on one")
    return reader.finish(DFlashConfig, "dflash", sliding_window_non_causal=reader.sees_later_slots())


class BlockReader:
    """A source of DFlash's backbone, whoever wrote it: its settings, and its tensors one after another."""

    def __init__(self, source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> None:
        source = renamed(source.without_prefixes(*WRAPPERS), _OTHER_NAMES)
        self.config, self.verifier, self.options = source.config, verifier, options
        self.settings = BlockSettings(source.config)
        refuse_unknown_drafters(source.config, self.settings, source.tensors)
        self.ledger = Ledger(source)
        dequantise(self.ledger, source.config)
        note_unread_keys(source.config, verifier.shape.raw, self.ledger.note)
        self._require_verifier()
        self.layer = self._layer()
        self.ids = self._layer_ids()

    def finish(self, kind: type[BlockDraftConfig], family: str, **fields: Any) -> CheckpointPlan:
        """Plan what every block drafter has, and whatever else of the source `kind` expects; `fields` are its keys."""
        self._plan_fc()
        self._split_fused()
        mask_token_id = self._mask_token_id()
        drafted = self._plan_vocabulary(mask_token_id)
        shape, block_size = self.verifier.shape, self.settings.required(self.options.block_size, "block_size", least=2)
        from_anchor = self._sample_from_anchor()
        own_width = self.layer.hidden_size != shape.hidden_size
        if from_anchor and kind is DFlashConfig:
            self.ledger.note(
                "its slots predict the next token (sample_from_anchor), which vLLM refuses of DFlash drafts"
            )
        config = completed(
            kind,
            self.options.speculative_tokens or (block_size if from_anchor else block_size - 1),
            shape,
            transformer_layer_config=self.layer,
            draft_vocab_size=drafted,
            target_hidden_size=shape.hidden_size if own_width else None,
            aux_hidden_state_layer_ids=sorted(self.ids.written),
            block_size=block_size,
            mask_token_id=mask_token_id,
            sample_from_anchor=from_anchor,
            **fields,
        )
        self.ledger.copy_all(config.expected_tensors())
        dtype = settle_dtype(self.ledger, self.options.dtype)
        return self.ledger.finish(family, config.model_copy(update={"dtype": dtype}), self.ids)

    def sees_later_slots(self) -> bool:
        """What `sliding_window_non_causal` is where one policy holds for all layers."""
        causal = explicit_causality(self.settings, self.options)
        return sees_later_slots(causal, self.layer.layer_types, self.ledger.note)

    def _require_verifier(self) -> None:
        said, layers = self.settings.count("num_target_layers"), self.verifier.shape.num_hidden_layers
        if said is not None and said != layers:
            text = f"num_target_layers is {said}; {self.verifier.name_or_path} has {layers} layers"
            raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's draft?")], "config.json")
        width, found = self.config.get("target_hidden_size"), self.verifier.shape.hidden_size
        if width not in (None, found):
            text = f"target_hidden_size is {width!r}; states of {self.verifier.name_or_path} have {found} numbers"
            raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's draft?")], "config.json")

    def _layer(self) -> DecoderConfig:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if self.config.get("rope_theta") is None and "rope_theta" not in rope:
            text = "no rope_theta is written, and engines differ about the default of such a draft; write it"
            raise error_of([fault("missing-key", text)], "config.json")
        shapes = dict(self._unfused_shapes())
        config = with_windows(self.config, self.settings, len(shapes))
        return decoder_layer(
            config, shapes, first_layer="layers.0", verifier=self.verifier.shape, note=self.ledger.note
        )

    def _unfused_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Shapes by name, a fused projection as the three that it is made of."""
        for name, tensor in self.ledger.source.tensors.items():
            match = _FUSED.fullmatch(name)
            if match is None:
                yield name, tensor.shape
                continue
            for part, rows in self._fused_rows(tensor).items():
                yield f"{match[1]}.{part}_proj.{match[2]}", (rows, *tensor.shape[1:])

    def _fused_rows(self, tensor: SourceTensor) -> dict[str, int]:
        heads, shared, size = (
            self.config.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if not isinstance(heads, int) or not isinstance(shared, int) or not isinstance(size, int):
            text = f"{tensor.name} is fused; num_attention_heads, num_key_value_heads and head_dim say how, write them"
            raise error_of([fault("missing-key", text)], "config.json")
        rows = {"q": heads * size, "k": shared * size, "v": shared * size}
        if tensor.shape[0] != sum(rows.values()):
            text = f"{tensor.name} has shape {list(tensor.shape)}; expected {sum(rows.values())} rows"
            raise error_of([fault("tensor-shape", text)], self.ledger.source.directory)
        return rows

    def _layer_ids(self) -> LayerIdReading:
        shape, fc = self.verifier.shape, self.ledger.source.shape("fc.weight")
        if fc is None or len(fc) != 2:
            raise error_of([fault("missing-tensor", f"fc.weight is {fc}; expected a matrix")], "checkpoint")
        count, rest = divmod(fc[1], shape.hidden_size)
        if rest or not count:
            text = f"fc.weight has {fc[1]} columns, no multiple of the {shape.hidden_size} of a state of the verifier's"
            raise error_of([fault("fc-width", text)], "checkpoint")
        default = block_default(shape.num_hidden_layers, count)
        reading = read_layer_ids(self.config, self.options, default, shape.num_hidden_layers)
        if reading.source == "default":
            self.ledger.note(f"no layer ids are written; taken as DFlash's own choice, depths {list(default)}")
        if len(set(reading.written)) != len(reading.written):
            text = f"{reading.source} means depths {list(reading.written)}, one of them twice; engines feed each once"
            raise error_of([fault("layer-ids", text)], "config.json")
        if len(reading.written) != count:
            text = f"{reading.source} has {len(reading.written)} layers; by its width fc.weight reads {count}"
            raise error_of([fault("fc-width", text)], "config.json")
        if max(reading.written) == shape.num_hidden_layers and reading.source != "the user's choice":
            text = (
                f"{reading.source} names the verifier's last layer, whose state DFlash's and DeepSpec's training takes "
                "after the final norm, and no engine feeds so; if this draft was trained on the state before it, give "
                "aux_layer_ids"
            )
            raise error_of([fault("layer-ids", text)], "config.json")
        return reading

    def _plan_fc(self) -> None:
        """Copy `fc`, its blocks of columns in the order of depth: that is how engines lay the states side by side."""
        written = self.ids.written
        order = sorted(range(len(written)), key=written.__getitem__)
        if order == list(range(len(written))):
            self.ledger.copy("fc.weight")
            return
        fc = self.ledger.take("fc.weight")
        made = PlannedTensor(fc.shape, fc.dtype, partial(_reordered, fc, tuple(order)))
        self.ledger.plan("fc.weight", made, f"{fc.name}, columns in the order of depths {sorted(written)}")

    def _split_fused(self) -> None:
        for name in [name for name in self.ledger.left if _FUSED.fullmatch(name)]:
            match = _FUSED.fullmatch(name)
            assert match is not None
            fused, start = self.ledger.take(name), 0
            for part, rows in self._fused_rows(fused).items():
                made = PlannedTensor((rows, *fused.shape[1:]), fused.dtype, partial(_rows, fused, start, rows))
                self.ledger.plan(
                    f"{match[1]}.{part}_proj.{match[2]}", made, f"rows {start} to {start + rows} of {name}"
                )
                start += rows

    def _plan_vocabulary(self, mask_token_id: int) -> int:
        """Take embeddings, head and maps, and return how many tokens the draft proposes.

        Embeddings and head are kept only where they are not the verifier's; a mask token's own embedding is put in.
        """
        ledger, vocab = self.ledger, self.layer.vocab_size
        sizes = [ledger.source.shape(name) for name in (HEAD, "d2t")]
        drafted = next((shape[0] for shape in sizes if shape), vocab)
        said = self.config.get("draft_vocab_size")
        if said not in (None, drafted):
            text = f"draft_vocab_size is {said!r}; by the tensors the draft proposes {drafted} tokens"
            raise error_of([fault("contradiction", text)], "config.json")
        plan_vocabulary(ledger, drafted, vocab, self.options.d2t_holds)
        mask = ledger.take_file(MASK_FILE)
        if mask is not None:
            self._plan_mask_embedding(mask, mask_token_id)
        if ledger.has(HEAD) and drafted == vocab and mask is None and not ledger.has(EMBEDDINGS):
            ledger.note("a head is stored without embeddings; the verifier's are used")
        if self.verifier.is_here and (ledger.has(EMBEDDINGS) or ledger.has(HEAD)):
            weights = self.verifier.weights
            for name, theirs in ((EMBEDDINGS, weights.embed_tokens), (HEAD, weights.lm_head)):
                if ledger.has(name) and _is_same(ledger.stored(name), theirs):
                    ledger.drop(name, "equal to the verifier's, which is used")
        return drafted

    def _plan_mask_embedding(self, file: Path, mask_token_id: int) -> None:
        """The verifier's embeddings, or the draft's own, with one row of the file's."""
        row = _mask_embedding(file, mask_token_id, self.layer.hidden_size)
        if self.ledger.has(EMBEDDINGS):
            own = self.ledger.take(EMBEDDINGS)
            table = PlannedTensor.copy(own)
            of = own.name
        else:
            theirs = self.verifier.weights.embed_tokens
            dtype = self.ledger.planned["fc.weight"].dtype
            table = PlannedTensor(tuple(theirs.shape), dtype, partial(theirs.to, TORCH_OF_DTYPE[dtype]))
            of = "the verifier's embeddings"
        if table.shape != (self.layer.vocab_size, self.layer.hidden_size):
            text = f"{of} are {list(table.shape)}; a mask token's embedding of {len(row)} has no place in them"
            raise error_of([fault("tensor-shape", text)], self.ledger.source.directory)
        made = replace(table, make=partial(_with_row, table, mask_token_id, row))
        self.ledger.plan(EMBEDDINGS, made, f"{of}, row {mask_token_id} from {file.name}")

    def _mask_token_id(self) -> int:
        return self.settings.required(self.options.mask_token_id, "mask_token_id", "dspark_noise_token_id")

    def _sample_from_anchor(self) -> bool:
        if self.options.sample_from_anchor is not None:
            return self.options.sample_from_anchor
        said = self.settings.flag("sample_from_anchor", "shift_label")
        if said is not None:
            return said
        named = [*(self.config.get("architectures") or ()), self.settings.get("projector_type") or ""]
        return any(NEXT_TOKEN_DRAFTERS.search(str(name)) or name == "dspark" for name in named)


def renamed(source: SourceCheckpoint, names: Mapping[str, str]) -> SourceCheckpoint:
    """The same under other names; a tensor whose other name is taken keeps its own, which nothing then knows."""
    named = {
        name if names.get(name, name) in source.tensors else names[name]: tensor
        for name, tensor in source.tensors.items()
    }
    return replace(source, tensors=named)


def _reordered(fc: SourceTensor, order: tuple[int, ...]) -> Tensor:
    parts = fc.read().chunk(len(order), 1)
    return torch.cat([parts[index] for index in order], 1)


def _rows(fused: SourceTensor, start: int, count: int) -> Tensor:
    return fused.read()[start : start + count]


def _with_row(table: PlannedTensor, index: int, row: Tensor) -> Tensor:
    made = table.make().clone()
    made[index] = row.to(made.dtype)
    return made


def _is_same(mine: SourceTensor, theirs: Tensor) -> bool:
    """Whether a table has the verifier's numbers, rounded to its own dtype."""
    if mine.shape != tuple(theirs.shape):
        return False
    table = mine.read()
    return all(
        torch.equal(part, theirs[start : start + len(part)].to(part.dtype))
        for start, part in zip(range(0, len(table), _ROWS_AT_ONCE), table.split(_ROWS_AT_ONCE), strict=True)
    )


def _mask_embedding(file: Path, mask_token_id: int, width: int) -> Tensor:
    """The embedding [H] of a file that holds it alone, or beside the mask token's id."""
    found = load_pickle(file)
    row, said = (found.get("embedding"), found.get("mask_token_id")) if isinstance(found, dict) else (found, None)
    if said is not None and int(said) != mask_token_id:
        text = f"{file.name} is for token {int(said)}, the configuration's mask_token_id is {mask_token_id}"
        raise error_of([fault("mask-token-id", text)], file.parent)
    if not isinstance(row, Tensor) or row.numel() != width or not row.is_floating_point():
        got = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
        raise error_of([fault("tensor-shape", f"{file.name} holds {got}; expected {width} numbers")], file.parent)
    return row.flatten()
