"""How much memory a conversion holds: drafts of 3 GB in shards, read and written tensor by tensor.

    python benchmarks/convert_memory.py [--case eagle3 --case ...] [--shard-mib 640] [--folder /tmp]

Each case is a checkpoint of random numbers in its producer's layout, in as many shards as it takes. Another process
converts it, and what of its memory no file stands behind (RssAnon) is sampled every other millisecond, Python and torch
included. A draft whose own tensors are stacked (experts) or decoded (float8) would need several times its shards if
whole tensors, or the whole draft, were held.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from process_memory import anonymous_bytes

RESULT = Path(__file__).resolve().parent / "results" / "convert_memory.json"
LIMIT = 1.5
_PERIOD = 0.002

Shapes = dict[str, tuple[int, ...]]
VERIFIER: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
# Qwen3-Next-80B's own configuration, as far as its MTP block depends on it.
MOE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


def gated(prefix: str, hidden: int, inner: int) -> Shapes:
    """Gate, up and down."""
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def attention(prefix: str, config: dict[str, Any], read: int, *, gate: bool = False) -> Shapes:
    """The four projections of attention over `read` numbers."""
    size = config["head_dim"]
    wide, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}q_proj.weight": (2 * wide if gate else wide, read),
        f"{prefix}k_proj.weight": (narrow, read),
        f"{prefix}v_proj.weight": (narrow, read),
        f"{prefix}o_proj.weight": (config["hidden_size"], wide),
    }


def eagle3() -> tuple[dict[str, Any], dict[str, Any], Shapes]:
    """An EAGLE-3 draft with its own embeddings for a verifier of 32 billion parameters."""
    hidden, inner = VERIFIER["hidden_size"], VERIFIER["intermediate_size"]
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes: Shapes = {
        "embed_tokens.weight": (VERIFIER["vocab_size"], hidden),
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (32000, hidden),
        "norm.weight": (hidden,),
        **{f"midlayer.{name}.weight": (hidden,) for name in norms},
        **attention("midlayer.self_attn.", VERIFIER, 2 * hidden),
        **gated("midlayer.mlp.", hidden, inner),
        "d2t": (32000,),
    }
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    return {**VERIFIER, **own, "draft_vocab_size": 32000}, VERIFIER, shapes


def mtp() -> tuple[dict[str, Any], dict[str, Any], Shapes]:
    """Qwen3-Next's own MTP block, whose 512 experts become two tensors."""
    hidden, layer = MOE["hidden_size"], "mtp.layers.0."
    shapes: Shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        **{f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        **attention(f"{layer}self_attn.", MOE, hidden, gate=True),
        **{f"{layer}self_attn.{name}_norm.weight": (MOE["head_dim"],) for name in "qk"},
        f"{layer}mlp.gate.weight": (MOE["num_experts"], hidden),
        f"{layer}mlp.shared_expert_gate.weight": (1, hidden),
        **gated(f"{layer}mlp.shared_expert.", hidden, MOE["shared_expert_intermediate_size"]),
    }
    for expert in range(MOE["num_experts"]):
        shapes |= gated(f"{layer}mlp.experts.{expert}.", hidden, MOE["moe_intermediate_size"])
    return MOE, MOE, shapes


def mtp_float8() -> tuple[dict[str, Any], dict[str, Any], Shapes]:
    """The same, its experts in float8 with a scale for each block of 128 x 128."""
    config, _, shapes = mtp()
    scales = {
        f"{name}_scale_inv": tuple(-(-side // 128) for side in shape)
        for name, shape in shapes.items()
        if ".experts." in name
    }
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**config, "quantization_config": settings}
    return config, config, shapes | scales


CASES = {"eagle3": eagle3, "mtp": mtp, "mtp-float8": mtp_float8}


def drawn(name: str, shape: tuple[int, ...], shapes: Shapes, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the dtype that such a tensor has."""
    if name == "d2t":
        return torch.arange(shape[0]) // 64 * 64
    if name.endswith("_scale_inv"):
        return torch.rand(shape, generator=generator) + 0.5
    numbers = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    return numbers.to(torch.float8_e4m3fn) if f"{name}_scale_inv" in shapes else numbers


def parts(shapes: Shapes, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors, as many together as fit into a shard; a larger one has a shard to itself."""
    generator, part, size = torch.Generator().manual_seed(0), {}, 0
    for name, shape in shapes.items():
        tensor = drawn(name, shape, shapes, generator)
        if part and size + tensor.nbytes > shard_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def write(folder: Path, config: dict[str, Any], shapes: Shapes, shard_bytes: int) -> list[int]:
    """Write a sharded checkpoint; returns the sizes of its shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map, sizes = {}, []
    for number, part in enumerate(parts(shapes, shard_bytes)):
        file = folder / f"model-{number:05}.safetensors"
        save_file(part, file)
        weight_map |= dict.fromkeys(part, file.name)
        sizes.append(file.stat().st_size)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return sizes


def sampled(command: list[str]) -> tuple[int, int]:
    """The most anonymous memory that a command has had, and how often it was looked at."""
    with subprocess.Popen(command) as process:
        most, count = 0, 0
        while process.poll() is None:
            try:
                most = max(most, anonymous_bytes(process.pid))
            except (OSError, RuntimeError):  # it has just ended
                break
            count += 1
            time.sleep(_PERIOD)
    if process.returncode:
        raise SystemExit(f"the conversion ended with {process.returncode}")
    return most, count


def measure(case: str, folder: Path, shard_bytes: int) -> dict[str, Any]:
    """Write a case's checkpoint, convert it in another process, and say what that held."""
    config, verifier, shapes = CASES[case]()
    sizes = write(folder / "source", config, shapes, shard_bytes)
    (folder / "verifier").mkdir()
    (folder / "verifier" / "config.json").write_text(json.dumps(verifier), encoding="utf-8")
    places = [str(folder / name) for name in ("source", "verifier", "ours")]
    started = time.perf_counter()
    most, count = sampled([sys.executable, __file__, "--convert", *places])
    seconds = time.perf_counter() - started
    written = (folder / "ours" / "model.safetensors").stat().st_size
    return {
        "case": case,
        "draft_mib": round(sum(sizes) / 2**20, 1),
        "shards": len(sizes),
        "largest_shard_mib": round(max(sizes) / 2**20, 1),
        "written_mib": round(written / 2**20, 1),
        "imports_mib": round(json.loads((folder / "imports.json").read_text(encoding="utf-8")) / 2**20, 1),
        "anonymous_peak_mib": round(most / 2**20, 1),
        "peak_over_largest_shard": round(most / max(sizes), 3),
        "samples": count,
        "seconds": round(seconds, 1),
    }


def convert_here(source: str, verifier: str, out: str) -> None:
    """What the measured process does."""
    from speculators.convert.options import ConversionVerifier
    from speculators.convert.run import convert

    torch.set_num_threads(1)
    (Path(out).parent / "imports.json").write_text(str(anonymous_bytes()), encoding="utf-8")
    convert(source, out, verifier=ConversionVerifier(verifier))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--shard-mib", type=int, default=640)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert is not None:
        convert_here(*args.convert)
        return 0
    rows = []
    for case in args.case or CASES:
        folder = Path(tempfile.mkdtemp(prefix="convert-memory-", dir=args.folder))
        try:
            rows.append(measure(case, folder, args.shard_mib * 2**20))
        finally:
            shutil.rmtree(folder)
        print(json.dumps(rows[-1]), flush=True)
    args.out.write_text(json.dumps({"limit": LIMIT, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["peak_over_largest_shard"] <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
