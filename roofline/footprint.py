"""Bytes and operations of a Llama: what each device holds, and what a prefill or a decode step moves.

Letters: B batch, T prompt positions, s context positions, D hidden, N query heads, K KV heads,
G = N / K, H head size, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import gcd, prod

from model.config import LlamaConfig
from roofline.dtypes import BF16, DType, parse_dtype, parse_kv_dtype
from roofline.errors import RooflineError

# Parts of a model, in the order a step meets them. "kv" is the cache: it can be replicated too.
PARTS = ("embed", "qkv", "out", "gate_up", "down", "norm", "bias", "head")


@dataclass(frozen=True)
class Split:
    """How tensor parallelism divides a model: `tp = kv_head x kv_seq`.

    `kv_head = gcd(tp, K)` devices divide the KV heads, and for each of those `kv_seq` devices divide
    the positions of the cache. `replicated` names parts that every device holds whole (`PARTS`, or
    "kv" for a cache that is not divided by position).
    """

    tp: int
    kv_head: int
    kv_seq: int
    replicated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: LlamaConfig, tp: int, replicated: Collection[str] = ()) -> Split:
        """The factorisation for `config`. Raises RooflineError for tp < 1 or an unknown part."""
        if tp < 1:
            raise RooflineError(f"tp is {tp}: it must be 1 or more")
        check_parts("replicated", replicated, (*PARTS, "kv"))
        kv_head = gcd(tp, config.num_kv_heads)
        return cls(tp, kv_head, tp // kv_head, frozenset(replicated))

    def axis(self, name: str | None) -> int:
        """Devices that divide a dimension with this logical axis name (None: not divided)."""
        both = self.kv_head * self.kv_seq
        sizes = {"vocab": both, "ff": both, "kv_heads": self.kv_head}
        sizes |= {"head_rows": self.kv_seq, "head_columns": self.kv_seq}
        return 1 if name is None else sizes[name]


def check_parts(what: str, given: Collection[str], known: Collection[str] = PARTS) -> None:
    """Raise RooflineError if `given` has a name that is not in `known`."""
    if isinstance(given, str) or (unknown := [name for name in given if name not in known]):
        listed = given if isinstance(given, str) else ", ".join(map(repr, unknown))
        raise RooflineError(f"{what}: {listed} is not a list of known parts: {', '.join(known)}")


@dataclass(frozen=True)
class Tensor:
    """One parameter: shape [*out, *in], logical axis of each dimension, and how many layers have it.

    `contracted` is the number of trailing dimensions that a matmul sums over (0: a vector).
    """

    part: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    contracted: int
    copies: int = 1

    def numbers(self) -> int:
        """Parameters in all layers, padding not counted."""
        return prod(self.shape) * self.copies

    def local_shape(self, split: Split) -> tuple[int, ...]:
        """The slice one device holds: each dimension rounded up to a multiple of its devices."""
        if self.part in split.replicated:
            return self.shape
        return tuple(-(-size // split.axis(axis)) for size, axis in zip(self.shape, self.axes, strict=True))

    def local_bytes(self, split: Split, dtype: DType) -> int:
        """Bytes of that slice over all layers, zero padding and quantisation scales included."""
        shape = self.local_shape(split)
        if not self.contracted:
            plain = BF16 if dtype.quantised else dtype
            return prod(shape) * plain.bits // 8 * self.copies
        return dtype.matrix_bytes(shape[: -self.contracted], shape[-self.contracted :]) * self.copies


def tensors(config: LlamaConfig) -> tuple[Tensor, ...]:
    """Every parameter of the model, in the shapes and with the axes that the runtime stores."""
    c = config
    d, k, gh, rows = c.hidden_size, c.num_kv_heads, c.group_size * c.head_dim, (c.group_size + 2) * c.head_dim
    ff, v, layers = c.intermediate_size, c.vocab_size, c.num_layers
    found = [
        Tensor("embed", (v, d), ("vocab", None), 1),
        Tensor("qkv", (k, rows, d), ("kv_heads", "head_rows", None), 1, layers),
        Tensor("out", (d, k, gh), (None, "kv_heads", "head_columns"), 2, layers),
        Tensor("gate_up", (2, ff, d), (None, "ff", None), 1, layers),
        Tensor("down", (d, ff), (None, "ff"), 1, layers),
        Tensor("norm", (d,), (None,), 0, 2 * layers + 1),
    ]
    if c.attention_bias:
        found.append(Tensor("bias", (k, rows), ("kv_heads", "head_rows"), 0, layers))
        found.append(Tensor("bias", (d,), (None,), 0, layers))
    if c.mlp_bias:
        found.append(Tensor("bias", (2, ff), (None, "ff"), 0, layers))
        found.append(Tensor("bias", (d,), (None,), 0, layers))
    if not c.tie_word_embeddings:
        found.append(Tensor("head", (v, d), ("vocab", None), 1))
    return tuple(found)


def parameters(config: LlamaConfig) -> dict[str, int]:
    """Parameters of each part; the sum is `config.parameter_count()`."""
    counts: dict[str, int] = {}
    for tensor in tensors(config):
        counts[tensor.part] = counts.get(tensor.part, 0) + tensor.numbers()
    return counts


def weight_bytes_per_device(
    config: LlamaConfig,
    dtype: str | DType = "bf16",
    tp: int = 1,
    replicated: Collection[str] = (),
    keep: Collection[str] = (),
) -> dict[str, int]:
    """Bytes of each part that one device holds at tensor parallel degree `tp`.

    Dimensions that do not divide are zero-padded to the next multiple and the padding is counted;
    norms and the biases of row-parallel matrices are whole on every device. With a quantised `dtype`
    vectors stay bf16, and so do the parts named in `keep`.
    """
    split, dtype = Split.of(config, tp, replicated), parse_dtype(dtype)
    check_parts("keep", keep)
    held: dict[str, int] = {}
    for tensor in tensors(config):
        kept = BF16 if dtype.quantised and tensor.part in keep else dtype
        held[tensor.part] = held.get(tensor.part, 0) + tensor.local_bytes(split, kept)
    return held


def streamed_bytes_per_device(
    config: LlamaConfig,
    dtype: str | DType = "bf16",
    tp: int = 1,
    replicated: Collection[str] = (),
    keep: Collection[str] = (),
    rows: int = 1,
) -> dict[str, int]:
    """Bytes of each part that one device reads in a step over `rows` tokens.

    All that it holds, except the embedding table: of that a step reads one row for each token. A tied
    table is read whole, as the LM head.
    """
    parsed = parse_dtype(dtype)
    read = weight_bytes_per_device(config, parsed, tp, replicated, keep)
    if not config.tie_word_embeddings:
        table = BF16 if parsed.quantised and "embed" in keep else parsed
        read["embed"] = min(read["embed"], table.matrix_bytes((rows,), (config.hidden_size,)))
    return read


def kv_bytes_per_token(config: LlamaConfig, kv_dtype: str | DType = "bf16") -> float:
    """Cache bytes of one position of one sequence: `2 (K and V) x L x K x H x bytes`."""
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * parse_kv_dtype(kv_dtype).bytes_per_number


def kv_bytes_per_device(
    config: LlamaConfig,
    positions: int,
    kv_dtype: str | DType = "bf16",
    tp: int = 1,
    batch: int = 1,
    replicated: Collection[str] = (),
) -> float:
    """Cache bytes that one device holds for `batch` sequences of `positions` positions.

    Heads are divided over `kv_head` devices and positions, rounded up, over `kv_seq`: the bytes fall as
    1 / tp even when tp is greater than the number of KV heads. With "kv" replicated positions stay whole.
    """
    split = Split.of(config, tp, replicated)
    heads = config.num_kv_heads // split.kv_head
    local = positions if "kv" in split.replicated else -(-positions // split.kv_seq)
    per_position = 2 * config.num_layers * heads * config.head_dim
    return batch * local * per_position * parse_kv_dtype(kv_dtype).bytes_per_number


def kv_scale_bytes_per_device(
    config: LlamaConfig, positions: int, kv_dtype: str | DType = "bf16", tp: int = 1, batch: int = 1
) -> int:
    """Bytes of the scales beside a cache of int8 or fp8: 4 for each position of each head, for K and for V.

    The textbook formulas of this package leave them out; what a real cache holds and reads includes them.
    """
    if parse_kv_dtype(kv_dtype).bits != 8:
        return 0
    split = Split.of(config, tp, ())
    return batch * -(-positions // split.kv_seq) * 2 * config.num_layers * (config.num_kv_heads // split.kv_head) * 4


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one prefill or one decode step, on one device of `tp`.

    `linear_flops` are those of the weight matrices, `attention_flops` those of scores and weighted
    values. `activation_bytes` is the residual stream written once by each half of a layer; at decode it
    is too small to count and is 0.
    """

    linear_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """All operations."""
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, operations per byte."""
        return self.flops / self.bytes


def _matmul_flops(config: LlamaConfig, split: Split, tokens: int, head_tokens: int) -> float:
    """`2 x tokens x parameters` of the matrices a device holds; the LM head only for `head_tokens`."""
    total = 0.0
    for tensor in tensors(config):
        if not tensor.contracted:
            continue
        used = {"embed": head_tokens if config.tie_word_embeddings else 0, "head": head_tokens}
        weights = prod(tensor.local_shape(split)) * tensor.copies
        total += 2.0 * used.get(tensor.part, tokens) * weights
    return total


def decode_work(
    config: LlamaConfig,
    context: int,
    *,
    batch: int = 1,
    dtype: str | DType = "bf16",
    kv_dtype: str | DType = "bf16",
    tp: int = 1,
    replicated: Collection[str] = (),
    keep: Collection[str] = (),
) -> Work:
    """One decode step: a token for each of `batch` sequences that already hold `context` positions.

    Operations: 2 per matrix weight and token, and `4 x L x N x H x s` for attention (a multiply and an
    add for each score and each weighted value). Bytes: the streamed weights once, the cache once.
    """
    split = Split.of(config, tp, replicated)
    local = context if "kv" in split.replicated else -(-context // split.kv_seq)
    heads = config.num_heads // split.kv_head
    return Work(
        linear_flops=_matmul_flops(config, split, batch, batch),
        attention_flops=4.0 * batch * config.num_layers * heads * config.head_dim * local,
        weight_bytes=sum(streamed_bytes_per_device(config, dtype, tp, replicated, keep, batch).values()),
        kv_bytes=kv_bytes_per_device(config, context, kv_dtype, tp, batch, replicated),
    )


def prefill_work(
    config: LlamaConfig,
    prompt_len: int,
    *,
    batch: int = 1,
    dtype: str | DType = "bf16",
    kv_dtype: str | DType = "bf16",
    tp: int = 1,
    replicated: Collection[str] = (),
    keep: Collection[str] = (),
) -> Work:
    """One prefill of `batch` prompts of `prompt_len` tokens, logits for the last position only.

    Operations: 2 per matrix weight and token (the head once a prompt), and causal attention over
    `T (T + 1) / 2` pairs at `4 x L x N x H` each. Bytes: the weights once, the cache written once, and
    the residual stream `2 x L x B x T x D` in 16 bits, written once by each half of a layer.
    """
    split = Split.of(config, tp, replicated)
    tokens, heads = batch * prompt_len, config.num_heads / split.kv_head
    pairs = batch * prompt_len * (prompt_len + 1) / 2 / split.kv_seq
    if "kv" in split.replicated:
        pairs *= split.kv_seq
    return Work(
        linear_flops=_matmul_flops(config, split, tokens, batch),
        attention_flops=4.0 * pairs * config.num_layers * heads * config.head_dim,
        weight_bytes=sum(streamed_bytes_per_device(config, dtype, tp, replicated, keep, tokens).values()),
        kv_bytes=kv_bytes_per_device(config, prompt_len, kv_dtype, tp, batch, replicated),
        activation_bytes=2.0 * config.num_layers * tokens * config.hidden_size * 2,
    )


def model_prefill(params: float, config: LlamaConfig, prompt_len: int, dtype: DType, kv_dtype: str | DType) -> Work:
    """The textbook prefill of a model of `params` weights: every weight used for every token.

    Operations `2 P T` plus causal attention; bytes `P x bytes per weight + T x cache + residual stream`.
    This is the form that names a model by its parameter count; `prefill_work` counts part by part.
    """
    pairs = prompt_len * (prompt_len + 1) / 2
    return Work(
        linear_flops=2.0 * params * prompt_len,
        attention_flops=4.0 * pairs * config.num_layers * config.num_heads * config.head_dim,
        weight_bytes=params * dtype.bytes_per_number,
        kv_bytes=prompt_len * kv_bytes_per_token(config, kv_dtype),
        activation_bytes=2.0 * config.num_layers * prompt_len * config.hidden_size * 2,
    )


def model_decode(
    params: float, config: LlamaConfig, context: int, dtype: DType, kv_dtype: str | DType, batch: int = 1
) -> Work:
    """The textbook decode step: `2 P B` operations plus attention over `P x bytes + B s x cache` bytes."""
    return Work(
        linear_flops=2.0 * params * batch,
        attention_flops=4.0 * batch * context * config.num_layers * config.num_heads * config.head_dim,
        weight_bytes=params * dtype.bytes_per_number,
        kv_bytes=batch * context * kv_bytes_per_token(config, kv_dtype),
    )
