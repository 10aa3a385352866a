"""The collectives that one step of the decoder makes: what, how many, how large, over how many devices."""

from __future__ import annotations

from dataclasses import dataclass

from roofline.case import Case
from roofline.collectives import CollectiveModel

# What each device tells the others of its slice of the vocabulary, five 32-bit numbers a sequence: the best
# score, its token, that token's logit, and the largest logit and sum that a log-probability needs.
SAMPLER_BYTES = 20


@dataclass(frozen=True)
class Call:
    """`count` times the collective `op` on `nbytes` bytes over `devices` devices, for `purpose`."""

    purpose: str
    op: str
    count: int
    nbytes: float
    devices: int


def step_collectives(case: Case, tokens: int = 1) -> tuple[Call, ...]:
    """The calls of one step over `tokens` positions of each of `case.batch` sequences.

    Two sums a layer, after attention's output matrix and after the MLP's, `case.sum_bytes` a number; one
    after the embedding lookup, whose table is split over the vocabulary; one all-gather of each device's
    best token for the sampler (a top-k, top-p or min-p filter adds small sums of its own, not counted
    here). `case.collective` says what a sum is: an all-reduce ("psum"); a reduce-scatter, with an
    all-gather ahead of each norm that carries each share's sum of squares in f32 ("scatter", the hidden
    size padded to a multiple of tp); or an all-gather of the terms ("one_shot"). When tp does not divide
    the KV heads, `kv_seq` devices share a head: each layer then also gathers the slices of its q, k, v
    rows and exchanges the partial attention results, with the maximum and sum of each head (f32), all to
    all; both are padded to a multiple of `kv_seq`.
    A part that is replicated needs none of its calls. Activations are 16-bit, or f32 with f32 weights.
    `tokens` above 1 is a prefill, which samples from one position only and sums by all-reduce.
    """
    c, split = case.config, case.split
    if case.tp == 1:
        return ()
    rows, act_bytes = case.batch * tokens, 4 if case.weight_format.name == "f32" else 2
    form = case.collective if tokens == 1 else "psum"

    def added(purpose: str, count: int, number_bytes: int) -> Call:
        if form == "scatter":
            return Call(
                purpose, "reduce_scatter", count, float(rows * _up(c.hidden_size, case.tp) * number_bytes), case.tp
            )
        nbytes = float(rows * c.hidden_size * number_bytes)
        if form == "one_shot":
            return Call(purpose, "all_gather", count, nbytes * case.tp, case.tp)
        return Call(purpose, "all_reduce", count, nbytes, case.tp)

    calls = []
    if "embed" not in split.replicated:
        # One device has the row and the others add zeros, so it travels as an activation.
        calls.append(added("embedding", 1, act_bytes))
    if form == "scatter":
        share = _up(c.hidden_size, case.tp) // case.tp * act_bytes + 4
        calls.append(Call("norms", "all_gather", 2 * c.num_layers + 1, float(rows * share * case.tp), case.tp))
    if split.kv_seq > 1 and "kv" not in split.replicated:
        heads, members, group = c.num_kv_heads // split.kv_head, split.kv_seq, c.group_size
        qkv = float(rows * heads * _up((group + 2) * c.head_dim, members) * act_bytes)
        partial = float(rows * heads * (_up(group * c.head_dim, members) + members * 2 * group) * 4)
        if "qkv" not in split.replicated:
            calls.append(Call("q, k, v rows", "all_gather", c.num_layers, qkv, members))
        calls.append(Call("attention partials", "all_to_all", c.num_layers, partial, members))
    if "out" not in split.replicated:
        calls.append(added("attention output", c.num_layers, case.sum_bytes))
    if "down" not in split.replicated:
        calls.append(added("MLP output", c.num_layers, case.sum_bytes))
    vocabulary = "embed" if c.tie_word_embeddings else "head"
    if vocabulary not in split.replicated:
        gathered = float(case.batch * SAMPLER_BYTES * case.tp)
        calls.append(Call("sampler", "all_gather", 1, gathered, case.tp))
    return tuple(calls)


def _up(size: int, members: int) -> int:
    return -(-size // members) * members


def collectives_s(calls: tuple[Call, ...], model: CollectiveModel) -> float:
    """Seconds of all calls, one after another: each waits for the result of the one before."""
    return sum(call.count * model.time(call.op, call.nbytes, call.devices) for call in calls)
