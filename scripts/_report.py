"""What a decode measurement says: time, the bytes a step must move, and how near that comes to the machine's limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decode.decoder import Decoder
from model.quantize import WIDE
from model.wording import number_of
from roofline.footprint import decode_work, kv_scale_bytes_per_device
from sharding.bandwidth import Bandwidth
from sharding.hlo import count_collectives


@dataclass(frozen=True)
class StepBytes:
    """Bytes one device must move for one decode step."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def step_bytes(decoder: Decoder, batch: int, context: int) -> StepBytes:
    """Weights that a step reads once, and the cache of ``batch`` rows that hold ``context`` positions."""
    names = {"float32": "f32", "bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}
    kv_dtype, tp = names[decoder.cache_dtype.name], decoder.layout.tp
    work = decode_work(
        decoder.config,
        context,
        batch=batch,
        dtype=names[decoder.dtype.name],
        kv_dtype=kv_dtype,
        tp=tp,
    )
    weights = int(work.weight_bytes)
    if decoder.quantization != WIDE:
        # What is held is what is read, save for the embedding table, of which a step reads a row for each token.
        weights = sum(
            leaf.addressable_shards[0].data.nbytes
            for path, leaf in zip(decoder.programs.paths, decoder.params, strict=True)
            if path[0] != "embed" or decoder.config.tie_word_embeddings
        )
    scales = kv_scale_bytes_per_device(decoder.config, context, kv_dtype, tp, batch)
    return StepBytes(weights, int(work.kv_bytes) + scales)


def held_weight_bytes(decoder: Decoder) -> int:
    """Bytes of parameters that one device really holds, padding included."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in decoder.params)


def step_facts(
    decoder: Decoder, moved: StepBytes, tpot_s: float | None, limit: Bandwidth, hlo_text: str
) -> dict[str, Any]:
    """The JSON fields that every decode measurement shares. Bandwidths are a device's, in GB/s (1e9 bytes)."""
    achieved = None if tpot_s is None else moved.total / tpot_s / 1e9
    return {
        "weight_bytes_per_device": held_weight_bytes(decoder),
        "step_bytes_per_device": moved.total,
        "step_weight_bytes_per_device": moved.weights,
        "step_cache_bytes_per_device": moved.cache,
        "achieved_gb_per_s": achieved,
        "limit_gb_per_s": limit.per_device / 1e9,
        "limit_samples_gb_per_s": [sample / 1e9 for sample in limit.samples],
        "limit_fraction": None if achieved is None else achieved / (limit.per_device / 1e9),
        "tp": decoder.layout.tp,
        "quantization": decoder.quantization.to_json(),
        "kv_dtype": decoder.cache_dtype.name,
        "collective": decoder.collectives.collective if decoder.layout.tp > 1 else None,
        "mesh": dict(decoder.layout.mesh.shape),
        "collectives_per_step": count_collectives(hlo_text),
    }


def report_lines(facts: dict[str, Any], timed: str = "TPOT") -> list[str]:
    """The short report of ``scripts.generate``, from its JSON fields. ``timed`` names what ``tpot_s`` times."""
    devices = facts["tp"]
    each = " a device" if devices > 1 else ""
    lines = [
        f"load      {facts['load_s']:.2f} s",
        f"compile   {facts['compile_s']:.2f} s ({facts['compile_cache']})",
        f"TTFT      {_ms(facts['ttft_s'])} for {_prompts(facts)}",
    ]
    if facts["tpot_s"] is None:
        return [*lines, f"{timed}      not measured: no token was decoded after the first"]
    spread = " to ".join(f"{one * 1e3:.1f}" for one in (min(facts["tpot_samples_s"]), max(facts["tpot_samples_s"])))
    rows = f" of {facts['batch']} rows" if facts["batch"] > 1 else ""
    return [
        *lines,
        f"{timed}      {_ms(facts['tpot_s'])} (median; {spread}), {facts['tokens_per_s']:.1f} tokens/s{rows} overall",
        f"bytes     {facts['step_bytes_per_device'] / 1e6:.1f} MB{each} that a step must move: weights "
        f"{facts['step_weight_bytes_per_device'] / 1e6:.1f}, cache {facts['step_cache_bytes_per_device'] / 1e6:.1f}",
        f"achieved  {facts['achieved_gb_per_s']:.1f} GB/s{each} of the {facts['limit_gb_per_s']:.1f} GB/s{each} that "
        f"this machine read in this run: {facts['limit_fraction']:.0%}",
        f"mesh      {_mesh(facts)}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _prompts(facts: dict[str, Any]) -> str:
    longest = max(one["prompt_tokens"] for one in facts["completions"])
    if facts["batch"] == 1:
        return f"a prompt of {number_of(longest, 'token')}"
    return f"{facts['batch']} prompts together, the longest of {number_of(longest, 'token')}"


def _mesh(facts: dict[str, Any]) -> str:
    counts = facts["collectives_per_step"]
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no collectives"
    shape = " x ".join(f"{size} {name}" for name, size in facts["mesh"].items())
    return f"{shape}; {told} a step"
