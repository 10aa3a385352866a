"""The demo model in fewer bits: what it answers."""

from __future__ import annotations

import jax
import pytest

from decode.decoder import Decoder
from model.checkpoint.stored import stored_quantization
from model.quantize import Quantization, WeightFormat
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.decode.running import demo_model, run

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("name", ["int8", "int4", "stored"])
def test_the_capital_of_france(name: str) -> None:
    """Greedily: a whole sentence, and then the end of the turn. The first token is a near tie: its probability is 0.15.
    Activations rounded to one byte a value tip it to another answer in int4."""
    model = demo_model()
    assert model.source is not None
    if name == "stored":
        quantization = stored_quantization(model.source, model.config)
    else:
        quantization = Quantization.layers(WeightFormat.parse(name))
    layout = Layout(make_mesh(1, model.config.num_kv_heads))
    params = model.load_params(layout, "float32", progress=False, quantization=quantization)
    decoder = Decoder(model.config, params, layout, "float32", quantization=quantization)
    tokenizer = model.load_tokenizer()
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    (row,) = run(decoder, [prompt], 12, stop_token_ids=model.config.eos_token_ids)
    assert tokenizer.decode(row.tokens) == "The capital of France is Paris."
    assert row.tokens[-1] in model.config.eos_token_ids
    jax.clear_caches()
