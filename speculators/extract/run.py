"""The stages as functions: each can be used alone, and goes on where an earlier run of it stopped.

regenerate: prompts -> conversations by the verifier
prepare:    conversations -> token ids, loss masks, token counts
extract:    token ids -> the verifier's hidden states
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from speculators.errors import StoreError, VerifierError
from speculators.extract.conversations import ReadOptions, Sources, as_sources, read_rows
from speculators.extract.filling import FillResult, fill_store
from speculators.extract.fingerprint import verifier_fingerprint
from speculators.extract.prepared import MANIFEST, PreparedData, RowEncoder, prepare_rows
from speculators.extract.regenerate import RegenerateOptions, RegenerateResult, regenerate_rows
from speculators.extract.sources import MAX_ROW_BYTES
from speculators.extract.sourcing import ExtractOptions, open_source
from speculators.extract.store import HiddenStatesStore, StoreEstimate, StoreIdentity, StoreWriter
from speculators.extract.tokenize import ChatTokenizer, Turns, tokenizer_hash
from speculators.runtime.llm import LLM

NO_TEMPLATE = "none"


@dataclass(frozen=True)
class PrepareOptions:
    """How conversations become rows.

    Rows are cut at `max_length` tokens; `turns` is "all" answers or the "last" one; `template_options` go to the chat
    template by name; `limit` takes the first rows only, of those whose id the regular expression `match` is found in.
    Rows with fewer than `minimum_valid_tokens` learnt tokens are skipped and counted. A row that is malformed, refused
    by the template or longer than `max_row_bytes` is an error; `skip_bad_rows` counts it instead. `seed` draws the
    shares of weighted sources. `draft_vocab_size` writes `draft_vocab.safetensors` too.
    """

    max_length: int = 2048
    turns: Turns = "all"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    match: str | None = None
    minimum_valid_tokens: int = 1
    max_row_bytes: int = MAX_ROW_BYTES
    skip_bad_rows: bool = False
    seed: int = 0
    draft_vocab_size: int | None = None
    trust_remote_code: bool = False


def regenerate(
    model: str | Path,
    prompts: Sources,
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    progress: bool = True,
    **engine_keywords: Any,
) -> RegenerateResult:
    """Let a verifier answer every prompt; `model` may be a speculator, which makes its verifier's answers come faster.

    `engine_keywords` are those of `LLM` (dtype, max_num_seqs, max_model_len ...). See `regenerate_rows` for the file
    that is written, what a rerun keeps, and the errors.
    """
    llm = LLM(model, **engine_keywords)
    return regenerate_rows(llm.engine, prompts, output, options, progress=progress)


def prepare(
    verifier: str | Path,
    data: Sources,
    output: str | Path,
    options: PrepareOptions | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Turn conversations into rows of token ids and loss masks through the verifier's chat template.

    `data` is one or several files, folders, saved datasets or hub datasets, with weights (see `sources`). Where
    `output` holds the rows of the same sources, tokenizer and options already, they are taken as they are. Raises
    VerifierError without a chat template, DataError for a bad row (file and line) and where nothing can be learnt.
    """
    options, output = options or PrepareOptions(), Path(output)
    sources = as_sources(data)
    config = _load_config(verifier, options.trust_remote_code)
    tokenizer = load_tokenizer(verifier, options.trust_remote_code)
    chat = _chat(tokenizer, verifier, options)
    encoder = RowEncoder(
        chat,
        int(config.vocab_size),
        options.max_length,
        tokenizer,
        options.minimum_valid_tokens,
        options.skip_bad_rows,
    )
    request = {
        "verifier": Path(verifier).name,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": _template_hash(chat),
        "files": [file for source in sources for file in source.identity()],
        "vocab_size": encoder.vocab_size,
        **{key: value for key, value in asdict(options).items() if key in _ROW_OPTIONS},
    }
    prepared = _finished(output, request)
    if prepared is None:
        on_fault = encoder.fault if options.skip_bad_rows else None
        how = ReadOptions(options.limit, options.match, options.seed, options.max_row_bytes, on_fault)
        keep = _kept_ids(verifier, tokenizer, encoder.vocab_size)
        prepared = prepare_rows(
            read_rows(sources, options=how), encoder, output, request, always_keep=keep, progress=progress
        )
    if options.draft_vocab_size is not None:
        prepared.write_draft_vocab(options.draft_vocab_size)
    return prepared


def extract(
    verifier: str | Path,
    prepared: str | Path,
    output: str | Path,
    aux_layer_ids: Sequence[int],
    options: ExtractOptions | None = None,
    *,
    progress: bool = True,
) -> HiddenStatesStore:
    """Store the verifier's hidden states of prepared rows: the residual streams entering `aux_layer_ids`, and the last.

    Goes on with an unfinished store; a finished one is opened without loading the verifier. Raises StoreError for a
    store made for something else (naming both), for rows made with another tokenizer or template, for rows without
    states, and for a full disk.
    """
    extract_share(verifier, prepared, output, aux_layer_ids, options, progress=progress)
    return HiddenStatesStore.open(output)


def extract_share(
    verifier: str | Path,
    prepared: str | Path,
    output: str | Path,
    aux_layer_ids: Sequence[int],
    options: ExtractOptions | None = None,
    *,
    progress: bool = True,
    announce: Callable[[StoreEstimate], None] | None = None,
) -> FillResult:
    """Do this process's share of `extract`; `announce` is told the store's size before anything is computed."""
    options, data = options or ExtractOptions(), PreparedData(prepared)
    identity = store_identity(verifier, data, aux_layer_ids, options)
    with (
        StoreWriter(output, identity, data.lengths, shard_bytes=options.shard_bytes, share=options.share) as writer,
        ExitStack() as opened,
    ):
        if announce is not None:
            announce(writer.estimate)
        if not writer.missing:
            return FillResult(before=writer.num_rows_done)
        source = open_source(verifier, data, identity, options, opened, progress=progress)
        return fill_store(source, data, writer, skip_failed=options.skip_failed, progress=progress)


def store_identity(
    verifier: str | Path, data: PreparedData, aux_layer_ids: Sequence[int], options: ExtractOptions
) -> StoreIdentity:
    """What the states of these rows are; StoreError where the verifier's tokenizer or template made none of them."""
    config = _load_config(verifier, options.trust_remote_code)
    _check_rows(data, load_tokenizer(verifier, options.trust_remote_code), verifier)
    return StoreIdentity(
        verifier=str(verifier),
        verifier_fingerprint=verifier_fingerprint(verifier),
        # The last one is always stored, asked for or not.
        aux_layer_ids=tuple(sorted({*aux_layer_ids} - {int(config.num_hidden_layers)})),
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        dtype=options.store_dtype,
        template_hash=data.template_hash,
        rows_hash=data.rows_hash,
        aux_dtype=options.aux_dtype,
    )


_ROW_OPTIONS = (
    "max_length", "turns", "template_options", "limit", "match", "minimum_valid_tokens", "max_row_bytes",
    "skip_bad_rows", "seed",
)  # fmt: skip


def _finished(output: Path, request: dict[str, Any]) -> PreparedData | None:
    if not (output / MANIFEST).is_file():
        return None
    prepared = PreparedData(output)
    return prepared if prepared.manifest.get("request") == request else None


def _check_rows(data: PreparedData, tokenizer: PreTrainedTokenizerBase, verifier: str | Path) -> None:
    request = data.manifest["request"]
    chat = _chat(tokenizer, verifier, PrepareOptions(template_options=request["template_options"]))
    now = {"tokenizer_hash": tokenizer_hash(tokenizer), "template_hash": _template_hash(chat)}
    for key, value in now.items():
        if request[key] != value:
            what = "tokenizer" if key == "tokenizer_hash" else "chat template"
            raise StoreError(
                f"{data.directory} was prepared with the {what} {request[key][:12]}... of {request['verifier']}, but "
                f"{verifier} has {value[:12]}...; prepare the data again with this verifier"
            )


def _chat(
    tokenizer: PreTrainedTokenizerBase, verifier: str | Path, options: PrepareOptions
) -> ChatTokenizer | VerifierError:
    """What renders conversations, or why nothing can: rows of tokens do without."""
    try:
        return ChatTokenizer(
            tokenizer, name=str(verifier), turns=options.turns, template_options=options.template_options
        )
    except VerifierError as error:
        return error


def _template_hash(chat: ChatTokenizer | VerifierError) -> str:
    return NO_TEMPLATE if isinstance(chat, VerifierError) else chat.template_hash


def _load_config(verifier: str | Path, trust_remote_code: bool) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(str(verifier), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise VerifierError(f"the config of verifier {str(verifier)!r} cannot be read: {error}") from error
    text_config: PretrainedConfig = config.get_text_config()
    return text_config


def load_tokenizer(verifier: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a verifier's tokenizer; VerifierError where it cannot be read."""
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(verifier), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise VerifierError(f"the tokenizer of verifier {str(verifier)!r} cannot be read: {error}") from error
    return found


def _kept_ids(verifier: str | Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> set[int]:
    """Tokens that a draft can propose whatever the data says: ends of answers, and the markup of the chat template.

    The markup is every added token that the template names: tool calls, thinking, turns. Reserved tokens, of which some
    tokenizers have hundreds, stay out.
    """
    ids = set(tokenizer.all_special_ids)
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    ids.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip() in template)
    try:
        ends = GenerationConfig.from_pretrained(str(verifier)).eos_token_id
    except OSError:  # a verifier needs no generation_config.json
        ends = None
    ids.update([ends] if isinstance(ends, int) else ends or [])
    return {token for token in ids if token < vocab_size}
