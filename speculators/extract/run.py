"""The stages as functions: each can be used alone, and goes on where an earlier run of it stopped.

regenerate: prompts -> conversations by the verifier
prepare:    conversations -> token ids, loss masks, token counts
extract:    token ids -> the verifier's hidden states
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from speculators.errors import StoreError, VerifierError
from speculators.extract.conversations import read_rows
from speculators.extract.fingerprint import verifier_fingerprint
from speculators.extract.local import extract_rows
from speculators.extract.prepared import MANIFEST, PreparedData, RowEncoder, prepare_rows
from speculators.extract.regenerate import RegenerateOptions, RegenerateResult, regenerate_rows
from speculators.extract.shards import sha256_of
from speculators.extract.store import DEFAULT_SHARD_BYTES, HiddenStatesStore, StoreIdentity, StoreWriter
from speculators.extract.tokenize import ChatTokenizer, Turns, tokenizer_hash
from speculators.runtime.llm import LLM
from speculators.runtime.verifier import Verifier

NO_TEMPLATE = "none"
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class PrepareOptions:
    """How conversations become rows.

    Rows are cut at `max_length` tokens; `turns` is "all" answers or the "last" one; `template_options` go to the chat
    template by name; `limit` takes the first rows only, of those whose id the regular expression `match` is found in.
    `draft_vocab_size` writes `draft_vocab.safetensors` too.
    """

    max_length: int = 2048
    turns: Turns = "all"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    match: str | None = None
    draft_vocab_size: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ExtractOptions:
    """How hidden states are computed and stored.

    `dtype` is what the verifier computes in, `store_dtype` what is written; a pass takes `batch_tokens` tokens, padding
    included, and a shard about `shard_bytes` bytes.
    """

    dtype: str = "auto"
    store_dtype: str = "bfloat16"
    batch_tokens: int = 4096
    shard_bytes: int = DEFAULT_SHARD_BYTES
    device: str | None = None
    trust_remote_code: bool = False


def regenerate(
    model: str | Path,
    prompts: Paths,
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
    data: Paths,
    output: str | Path,
    options: PrepareOptions | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Turn conversations into rows of token ids and loss masks through the verifier's chat template.

    Where `output` holds the rows of the same files, tokenizer and options already, they are taken as they are. Raises
    VerifierError without a chat template, DataError for a bad row (file and line) and where nothing can be learnt.
    """
    options, output = options or PrepareOptions(), Path(output)
    files = [Path(data)] if isinstance(data, (str, Path)) else [Path(path) for path in data]
    config = _load_config(verifier, options.trust_remote_code)
    tokenizer = _load_tokenizer(verifier, options.trust_remote_code)
    chat = _chat(tokenizer, verifier, options)
    encoder = RowEncoder(chat, int(config.vocab_size), options.max_length)
    request = {
        "verifier": Path(verifier).name,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": _template_hash(chat),
        "files": [{"name": path.name, "sha256": sha256_of(path)} for path in files if path.is_file()],
        "vocab_size": encoder.vocab_size,
        **{key: value for key, value in asdict(options).items() if key in _ROW_OPTIONS},
    }
    prepared = _finished(output, request)
    if prepared is None:
        rows = read_rows(files, options.limit, options.match)
        prepared = prepare_rows(rows, encoder, output, request, progress=progress)
    if options.draft_vocab_size is not None:
        prepared.write_draft_vocab(options.draft_vocab_size, _ending_ids(verifier, tokenizer, encoder.vocab_size))
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
    store made for something else (naming both), for rows made with another tokenizer or template, and for a full disk.
    """
    options, data = options or ExtractOptions(), PreparedData(prepared)
    config = _load_config(verifier, options.trust_remote_code)
    _check_rows(data, _load_tokenizer(verifier, options.trust_remote_code), verifier)
    identity = StoreIdentity(
        verifier=str(verifier),
        verifier_fingerprint=verifier_fingerprint(verifier),
        aux_layer_ids=tuple(sorted(set(aux_layer_ids))),
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        dtype=options.store_dtype,
        template_hash=data.template_hash,
        rows_hash=data.rows_hash,
    )
    with StoreWriter(output, identity, data.lengths, shard_bytes=options.shard_bytes) as writer:
        if writer.missing:
            model = Verifier.from_pretrained(
                verifier, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
            )
            extract_rows(model, data, writer, batch_tokens=options.batch_tokens, progress=progress)
    return HiddenStatesStore.open(output)


_ROW_OPTIONS = ("max_length", "turns", "template_options", "limit", "match")


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


def _load_tokenizer(verifier: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(verifier), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise VerifierError(f"the tokenizer of verifier {str(verifier)!r} cannot be read: {error}") from error
    return found


def _ending_ids(verifier: str | Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> set[int]:
    """Tokens that a draft can propose whatever the data says: those that end an answer, and special ones."""
    ids = set(tokenizer.all_special_ids)
    try:
        ends = GenerationConfig.from_pretrained(str(verifier)).eos_token_id
    except OSError:  # a verifier needs no generation_config.json
        ends = None
    ids.update([ends] if isinstance(ends, int) else ends or [])
    return {token for token in ids if token < vocab_size}
