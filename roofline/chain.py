"""The whole chain for one model on one chip: from parameters to milliseconds, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from roofline.case import Case
from roofline.ceilings import decay, decode_ceiling, memory_fit, ridge, smallest_tp
from roofline.chips import Chip
from roofline.collectives import CollectiveModel
from roofline.dtypes import parse_kv_dtype
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.footprint import (
    kv_bytes_per_token,
    model_decode,
    model_prefill,
    parameters,
    streamed_bytes_per_device,
    weight_bytes_per_device,
)
from roofline.latency import Verdict, doubling, ideal_tpot_s, judge, scaling, tpot, ttft


def memory_wall(
    case: Case,
    chip: Chip,
    *,
    tps: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (0, 8_000, 32_000, 128_000),
    prompt_len: int = 2_000,
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
) -> dict[str, Any]:
    """Every quantity of the memory wall for `case`, ready for JSON. Bytes, bytes/s, seconds unless named.

    `case.tp` and `case.context` are not used: `ceiling` has a row for each of `contexts` on one device, and
    `latency` one for each of `tps` at the largest context, with the others in `by_context`. Weights are
    counted whole in `weight_bytes` and `ceiling` (parameters x bytes); `latency` reads what a step reads,
    which leaves out the rows of the embedding table that no token asked for. A model that does not fit is
    reported in `memory`, not refused: its ceiling is still true. `verdict` and `doubling` judge only the device
    counts on which it fits at the largest context; `stopped_by` is "memory" where there is none.
    Raises RooflineError for an empty list, a prompt of no tokens, or a compute rate the chip lacks.
    """
    for name, values in (("tp", tps), ("context", contexts)):
        if not values:
            raise RooflineError(f"the list of {name} is empty: give one value or more")
    efficiency = chip.efficiency if efficiency is None else efficiency
    tps, contexts = sorted(set(tps)), sorted(set(contexts))
    # Every case that will be asked about is made now, so that bad values are refused before any work.
    cases = {tp: case.at(tp=tp, context=contexts[-1]) for tp in tps}
    for context in contexts:
        case.at(context=context)
    config, weights, count = case.config, case.weight_format, case.parameter_count
    compute = "f32" if weights.name == "f32" else "bf16"
    kv_token = kv_bytes_per_token(config, case.kv_dtype)
    payload = count * weights.bytes_per_number
    stored = case.weight_scale * sum(weight_bytes_per_device(config, weights, keep=case.keep).values())
    scales = max(0.0, stored - payload) if weights.quantised else 0.0
    moved = payload + scales
    prefill = model_prefill(count, config, prompt_len, weights, case.kv_dtype)
    decode = model_decode(count, config, 0, weights, case.kv_dtype, case.batch)
    start = decode_ceiling(chip, moved, kv_token, 0, batch=case.batch)
    ceiling = []
    for row in decay(chip, moved, kv_token, contexts, batch=case.batch):
        work = model_decode(count, config, row.context, weights, case.kv_dtype, case.batch)
        ceiling.append(
            asdict(row) | {"share_of_start": row.tokens_per_s / start.tokens_per_s, "intensity": work.intensity}
        )
    steps = scaling(cases[tps[0]], chip, tps, efficiency, collectives)
    memory = [_memory(chip, here) for here in cases.values()]
    least = smallest_tp(chip, cases[tps[0]])
    latency = []
    for step in steps.steps:
        here = cases[step.tp]
        latency.append(
            {
                "tp": step.tp,
                "context": here.context,
                "tpot_ms": step.terms.total * 1e3,
                "terms_ms": step.terms.as_ms(),
                "tokens_per_s": case.batch / step.terms.total,
                "ideal_ms": ideal_tpot_s(here, chip) * 1e3,
                "gain": step.gain,
                "by_context": [
                    _at_context(here.at(context=context), chip, efficiency, collectives) for context in contexts
                ],
                "ttft_ms": (first := ttft(here, chip, prompt_len, efficiency, collectives)).total * 1e3,
                "ttft_terms_ms": first.as_ms(),
                "weight_bytes_per_device": case.weight_scale * sum(_held(here).values()),
            }
        )
    return {
        "params": count,
        "parameters": parameters(config),
        "weight_dtype": weights.name,
        "kv_dtype": parse_kv_dtype(case.kv_dtype).name,
        "batch": case.batch,
        "bytes_per_weight": weights.bytes_per_number,
        "weight_bytes": payload,
        "weight_scale_bytes": scales,
        "streamed_bytes": case.weight_scale * sum(streamed_bytes_per_device(config, weights, keep=case.keep).values()),
        "chip": {
            "name": chip.name,
            "flops_per_s": chip.flops(compute),
            "compute_dtype": compute,
            "bytes_per_s": chip.bandwidth(),
            "memory_bytes": chip.memory(),
            "measured": chip.measured,
            "interconnect": asdict(chip.interconnect),
            "notes": list(chip.notes),
        },
        "ridge_flops_per_byte": ridge(chip, compute),
        "prefill": _work(prefill) | {"prompt_len": prompt_len},
        "decode": _work(decode)
        | {
            "context": 0,
            "batch": case.batch,
            "ceiling_tokens_per_s": start.tokens_per_s,
            "ceiling_ms": start.ms_per_step,
        },
        "kv_bytes_per_token": kv_token,
        "ceiling": ceiling,
        "memory": memory,
        "smallest_tp_that_fits": least,
        "efficiency": asdict(efficiency),
        "collectives_measured": collectives is not None,
        "latency": latency,
        "verdict": _where_it_fits(steps, memory),
        # Measured collectives say nothing about device counts that were not measured.
        "doubling": None if collectives else _doubling(cases[tps[0]], chip, efficiency, least),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"pays_until": verdict.pays_until, "stopped_by": verdict.stopped_by, "text": verdict.text}


def _where_it_fits(steps: Verdict, memory: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on those of the counts whose devices hold the weights and the cache."""
    holding = {one["tp"] for one in memory if one["fits"]}
    short = ", ".join(str(one["tp"]) for one in memory if not one["fits"])
    if not short:
        return _verdict(steps)
    if not holding:
        return {"pays_until": None, "stopped_by": "memory", "text": f"tp = {short}: the model and its cache do not fit"}
    found = _verdict(judge({step.tp: step.terms for step in steps.steps if step.tp in holding}))
    if len(holding) == 1:
        found["text"] = f"only tp = {found['pays_until']} holds the model and its cache: nothing to compare"
    return found | {"text": f"{found['text']}; they do not fit at tp = {short}"}


def _doubling(case: Case, chip: Chip, efficiency: Efficiency, least: int | None) -> dict[str, Any] | None:
    """Doubling from the fewest devices that hold the case; None where those are more than are joined."""
    if least is None or least > (chip.interconnect.max_devices or least):
        return None
    return _verdict(doubling(case, chip, efficiency, start=least)) | {"from": least}


def _held(case: Case) -> dict[str, int]:
    return weight_bytes_per_device(case.config, case.dtype, case.tp, case.replicated, case.keep)


def _work(work: Any) -> dict[str, float]:
    return {
        "flops": work.flops,
        "linear_flops": work.linear_flops,
        "attention_flops": work.attention_flops,
        "bytes": work.bytes,
        "intensity": work.intensity,
    }


def _at_context(case: Case, chip: Chip, efficiency: Efficiency, collectives: CollectiveModel | None) -> dict[str, Any]:
    terms = tpot(case, chip, efficiency, collectives)
    return {"context": case.context, "tpot_ms": terms.total * 1e3, "terms_ms": terms.as_ms()}


def _memory(chip: Chip, case: Case) -> dict[str, Any]:
    fit = memory_fit(chip, case)
    return asdict(fit) | {
        "context": case.context,
        "batch": case.batch,
        "free_bytes": fit.free_bytes,
        "fits": fit.fits,
    }
