"""Random valid blocks of each ggml type, and their values worked out one by one in float64.

Written from the block layouts of ggml's quantisation types; shares nothing with the `gguf` package.
"""

from __future__ import annotations

import numpy as np

# type: (values in a block, bytes in a block, where its float16 scales stand)
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Stored bytes [rows, bytes of a row], all random but for the scales, which are ordinary numbers."""
    values, size, scales = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    for at in scales:
        numbers = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def decode(kind: str, stored: np.ndarray) -> np.ndarray:
    """Values [rows, columns] in float64 of stored bytes [rows, bytes of a row]."""
    values, size, _ = BLOCKS[kind]
    blocks = [_DECODERS[kind](bytes(block)) for block in stored.reshape(-1, size)]
    return np.array(blocks, np.float64).reshape(stored.shape[0], stored.shape[1] // size * values)


def _half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def _nibbles(packed: bytes) -> list[int]:
    """Low nibbles first, then high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def _q4_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 8) for q in _nibbles(block[2:])]


def _q4_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _nibbles(block[4:])]


def _fifth_bits(block: bytes, at: int) -> list[int]:
    bits = int.from_bytes(block[at : at + 4], "little")
    return [(bits >> i & 1) << 4 for i in range(32)]


def _q5_0(block: bytes) -> list[float]:
    pairs = zip(_nibbles(block[6:]), _fifth_bits(block, 2), strict=True)
    return [_half(block, 0) * ((low | high) - 16) for low, high in pairs]


def _q5_1(block: bytes) -> list[float]:
    pairs = zip(_nibbles(block[8:]), _fifth_bits(block, 4), strict=True)
    return [_half(block, 0) * (low | high) + _half(block, 2) for low, high in pairs]


def _q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def _scales_and_minima(packed: bytes) -> list[tuple[int, int]]:
    """The eight 6-bit pairs that Q4_K and Q5_K keep in 12 bytes."""
    pairs = []
    for j in range(8):
        if j < 4:
            pairs.append((packed[j] & 63, packed[j + 4] & 63))
        else:
            low = packed[j + 4]
            pairs.append(((low & 15) | (packed[j - 4] >> 6) << 4, (low >> 4) | (packed[j] >> 6) << 4))
    return pairs


def _k_values(block: bytes, quants: list[int]) -> list[float]:
    scale, minimum = _half(block, 0), _half(block, 2)
    pairs = _scales_and_minima(block[4:16])
    return [scale * pairs[i // 32][0] * q - minimum * pairs[i // 32][1] for i, q in enumerate(quants)]


def _q4_k(block: bytes) -> list[float]:
    packed = block[16:]
    return _k_values(block, [q for c in range(4) for q in _nibbles(packed[32 * c : 32 * c + 32])])


def _q5_k(block: bytes) -> list[float]:
    high, packed = block[16:48], block[48:]
    quants = []
    for part in range(8):  # 32 values each: low nibbles of a 32-byte run, then its high ones
        run = packed[32 * (part // 2) : 32 * (part // 2) + 32]
        for i, byte in enumerate(run):
            quants.append((byte >> 4 * (part % 2) & 15) | (high[i] >> part & 1) << 4)
    return _k_values(block, quants)


def _q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    values = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, at = divmod(within, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
        two = high[32 * half + at] >> 2 * quarter & 3
        values.append(_half(block, 208) * float(scales[i // 16]) * ((nibble | two << 4) - 32))
    return values


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
