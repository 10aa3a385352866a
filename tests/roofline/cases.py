"""Models and tables that several tests of the arithmetic use."""

import json
from dataclasses import replace
from pathlib import Path

from model.config import LlamaConfig
from model.presets import PRESETS
from roofline.case import Case
from roofline.fit import Measurement

LLAMA_70B = PRESETS["llama-3-70b"]
LLAMA_8B = PRESETS["llama-3.1-8b"]
LLAMA_7B = PRESETS["llama-2-7b"]
SMOL = PRESETS["smollm2-135m"]

# Five KV heads and sizes that divide by nothing, with both kinds of bias: every padding path at once.
ODD = LlamaConfig(
    vocab_size=101,
    hidden_size=36,
    intermediate_size=50,
    num_layers=2,
    num_heads=15,
    num_kv_heads=5,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
)

# Llama-2-70B is Llama-3-70B with the older vocabulary.
LLAMA_2_70B = replace(LLAMA_70B, vocab_size=32000, max_position_embeddings=4096, bos_token_id=1, eos_token_ids=(2,))

_DATA = Path(__file__).parent / "data"


def gpt_fast_rows() -> list[Measurement]:
    """The published table in data/gpt_fast_a100.json as measurements."""
    table = json.loads((_DATA / "gpt_fast_a100.json").read_text())
    models = {**PRESETS, "llama-2-70b": LLAMA_2_70B}
    rows = []
    for row in table["rows"]:
        dtype = table["int4"] if row["dtype"] == "int4" else row["dtype"]
        case = Case(
            models[row["model"]],
            dtype=dtype,
            tp=row["tp"],
            context=table["context"],
            replicated=tuple(table["replicated"]),
            keep=tuple(table["keep"]),
            sum_bytes=table["sum_bytes"],
        )
        label = f"{row['model']} {row['dtype']} x {row['tp']}"
        rows.append(Measurement.from_tokens_per_s(case, row["tokens_per_s"], label))
    return rows
