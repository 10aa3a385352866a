// Products of bytes in tiles (Intel AMX): a block of 32 values of 16 rows of weights with as much of 16 rows of
// activations is one instruction for the first bytes and one for the second. Then each block's sums take their scales,
// which is most of the work; the sums are exact, as those of quantized.h, and so are the bytes they are of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "quantized.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define SHARDSTREAM_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace shardstream {

constexpr int64_t kTile = 16;   // rows of either side in a tile
constexpr int64_t kFewest = 8;  // activation rows from which on tiles are faster

// Whether this process has tiles: Linux gives them to one that asks, unless a signal stack is too small for them.
inline bool MayTile() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return may;
}

// A block of 32 values of 16 rows of activations, four neighbours together as the instruction takes them.
struct alignas(64) TiledBlock {
  int8_t values[2][kScaled / 4][kTile][4];  // a value is scale * (first + second / kFiner)
  float scales[kTile];
  float sums[kTile];  // of the values as they were, for the weights' offsets
};

// Rows of activations as bytes, 16 of them side by side: each is set, and then they are arranged. Rows past the last
// are zeros.
struct TiledActivations {
  int64_t blocks;                         // a row
  std::vector<TiledBlock> values;         // [M / 16, blocks]
  std::vector<int8_t> bytes;              // [M, 2, blocks * 32], until then
  std::vector<float> scales, block_sums;  // [M, blocks], likewise

  TiledActivations(int64_t M, int64_t I)
      : blocks((I + kScaled - 1) / kScaled),
        values((M + kTile - 1) / kTile * blocks),
        bytes((M + kTile - 1) / kTile * kTile * blocks * 2 * kScaled),
        scales(bytes.size() / (2 * kScaled)),
        block_sums(scales.size()) {}

  // Row m from x [I].
  void Set(int64_t m, const float* x, int64_t I) {
    int8_t* to = bytes.data() + m * 2 * blocks * kScaled;
    for (int64_t b = 0; b < blocks; ++b) {
      float padded[kScaled];
      const float* from = x + b * kScaled;
      if (I - b * kScaled < kScaled) {
        std::fill(std::copy(from, x + I, padded), padded + kScaled, 0.0f);
        from = padded;
      }
      scales[m * blocks + b] = ToBytes(from, to + b * kScaled, to + (blocks + b) * kScaled);
      block_sums[m * blocks + b] = Sum(Load(from) + Load(from + kLanes));
    }
  }

  void Arrange() {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto gather = [](void* to, Ints bytes, const void* from) {
      _mm512_store_si512(to, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), 0xffff, (__m512i)bytes, from, 1));
    };
    const auto apart = [&](int64_t size) { return lanes * static_cast<int>(size); };
    const Ints by_byte = apart(2 * blocks * kScaled), by_float = apart(blocks * 4);
    for (int64_t tile = 0; tile * blocks < static_cast<int64_t>(values.size()); ++tile) {
      for (int64_t b = 0; b < blocks; ++b) {
        TiledBlock& block = values[tile * blocks + b];
        const int64_t at = tile * kTile * blocks + b;
        gather(block.scales, by_float, scales.data() + at);
        gather(block.sums, by_float, block_sums.data() + at);
        const int8_t* from = bytes.data() + (tile * kTile * 2 * blocks + b) * kScaled;
        for (int which = 0; which < 2; ++which, from += blocks * kScaled) {
          for (int64_t k = 0; k < kScaled / 4; ++k) gather(block.values[which][k], by_byte, from + 4 * k);
        }
      }
    }
  }
};

// Tiles 0 to 3 are sums, of two blocks in turn; 4 is of weights, 5 and 6 of activations.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, kScaled, 64, 64};  // of a row
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kScaled / 4, kScaled / 4};
};

// The first `count` rows of w from `row` on as bytes, [16, stride], of which the last block of each is filled up.
template <int kBits, bool kGrouped>
inline void Unpack(const Quantized<kBits, kGrouped>& w, int64_t row, int64_t count, int8_t* out, int64_t stride) {
  const int64_t bytes = w.row_bytes();
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* from = w.values + (row + r) * bytes;
    int8_t* to = out + r * stride;
    for (int64_t at = 0; at < bytes; at += kBytes, to += kChunk<kBits>) {
      const Bytes raw = bytes - at < kBytes ? LoadBytes(from + at, bytes - at) : LoadBytes(from + at);
      if constexpr (kBits == 8) {
        std::memcpy(to, &raw, sizeof raw);
      } else {
        const __m512i low = (__m512i)((raw & 15) - 8);
        const __m512i high = (__m512i)((Bytes)(((Words)raw >> 4) & 0x0f0f0f0f) - 8);
        // The 16 low nibbles of each block are its first values.
        const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = first + 4;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(to + kBytes, _mm512_permutex2var_epi64(low, second, high));
      }
    }
  }
  __asm__ volatile("" ::: "memory");  // compilers do not know that tiles are loaded from it
}

// Sixteen rows of sixteen floats to columns: pairs, then fours, then the quarters of each.
inline void Transpose(Floats* rows) {
  __m512 pairs[kTile], fours[kTile];
  for (int64_t i = 0; i < kTile; i += 2) {
    pairs[i] = _mm512_maskz_unpacklo_ps(0xffff, (__m512)rows[i], (__m512)rows[i + 1]);
    pairs[i + 1] = _mm512_maskz_unpackhi_ps(0xffff, (__m512)rows[i], (__m512)rows[i + 1]);
  }
  for (int64_t i = 0; i < kTile; i += 4) {
    for (int64_t j = 0; j < 2; ++j) {
      const __m512d one = (__m512d)pairs[i + j], other = (__m512d)pairs[i + 2 + j];
      fours[i + 2 * j] = (__m512)_mm512_maskz_unpacklo_pd(0xff, one, other);
      fours[i + 2 * j + 1] = (__m512)_mm512_maskz_unpackhi_pd(0xff, one, other);
    }
  }
  for (int64_t j = 0; j < 4; ++j) {
    const __m512 even[2] = {_mm512_maskz_shuffle_f32x4(0xffff, fours[j], fours[4 + j], 0x88),
                            _mm512_maskz_shuffle_f32x4(0xffff, fours[8 + j], fours[12 + j], 0x88)};
    const __m512 odd[2] = {_mm512_maskz_shuffle_f32x4(0xffff, fours[j], fours[4 + j], 0xdd),
                           _mm512_maskz_shuffle_f32x4(0xffff, fours[8 + j], fours[12 + j], 0xdd)};
    rows[j] = (Floats)_mm512_maskz_shuffle_f32x4(0xffff, even[0], even[1], 0x88);
    rows[4 + j] = (Floats)_mm512_maskz_shuffle_f32x4(0xffff, odd[0], odd[1], 0x88);
    rows[8 + j] = (Floats)_mm512_maskz_shuffle_f32x4(0xffff, even[0], even[1], 0xdd);
    rows[12 + j] = (Floats)_mm512_maskz_shuffle_f32x4(0xffff, odd[0], odd[1], 0xdd);
  }
}

// `a`: 16 rows of weights, `stride` bytes apart; with 16 rows of activations: out[m * ldo + o] for m < M, o < O.
// scales, offsets: of the weights, [blocks, 16] where they are grouped, else [16]; offsets may be null.
template <bool kGrouped>
inline void TileProduct(const int8_t* a, int64_t stride, const TiledBlock* x, int64_t blocks, const float* scales,
                        const float* offsets, int64_t M, int64_t O, float* out, int64_t ldo) {
  alignas(64) int32_t sums[2][2][kTile][kTile];
  Floats totals[kTile] = {};
  const auto load = [&](int64_t b) {
    _tile_loadd(4, a + b * kScaled, stride);
    _tile_loadd(5, x[b].values[0], 64);
    _tile_loadd(6, x[b].values[1], 64);
  };
  const auto even = [&](int64_t b) {
    load(b);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 5);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 6);
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
  };
  const auto odd = [&](int64_t b) {
    load(b);
    _tile_zero(2);
    _tile_dpbssd(2, 4, 5);
    _tile_zero(3);
    _tile_dpbssd(3, 4, 6);
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  };
  const auto scale = [&](int64_t b, const auto& of) {
    const Floats step = Load(x[b].scales), fine = step * (1 / kFiner);
    const float* own = scales + b * kTile;
#pragma GCC unroll 16
    for (int64_t o = 0; o < kTile; ++o) {
      const Floats first = __builtin_convertvector(*reinterpret_cast<const Ints*>(of[0][o]), Floats);
      const Floats second = __builtin_convertvector(*reinterpret_cast<const Ints*>(of[1][o]), Floats);
      const Floats value = first * step + second * fine;
      totals[o] += kGrouped ? value * own[o] : value;
    }
  };
  // While one block's sums take their scales, the next one's are made.
  even(0);
  for (int64_t b = 0; b < blocks; b += 2) {
    if (b + 1 < blocks) odd(b + 1);
    scale(b, sums[0]);
    if (b + 2 < blocks) even(b + 2);
    if (b + 1 < blocks) scale(b + 1, sums[1]);
  }
  Floats rows[kTile];
#pragma GCC unroll 16
  for (int64_t o = 0; o < kTile; ++o) rows[o] = kGrouped ? totals[o] : totals[o] * scales[o];
  if (offsets) {
    for (int64_t b = 0; b < blocks; ++b) {
      const Floats sum = Load(x[b].sums);
      const float* own = offsets + (kGrouped ? b * kTile : 0);
#pragma GCC unroll 16
      for (int64_t o = 0; o < kTile; ++o) rows[o] += sum * own[o];
    }
  }
  Transpose(rows);
  const auto mask = static_cast<__mmask16>((1 << O) - 1);
  for (int64_t m = 0; m < M; ++m) _mm512_mask_storeu_ps(out + m * ldo, mask, (__m512)rows[m]);
}

// The scales (or offsets) of 16 rows from `row` on, `count` of them there, in the order of their use: [blocks, 16].
inline void SpreadTile(const Numbers& numbers, int64_t row, int64_t count, int64_t groups, int64_t times,
                       int64_t blocks, std::vector<float>& by_row, std::vector<float>& out) {
  SpreadScales(numbers, row, count, groups, times, blocks, by_row.data());
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t r = 0; r < kTile; ++r) out[b * kTile + r] = by_row[r * blocks + b];
  }
}

// Rows [begin, end) of w with all M rows of x, to out[m * ldo + row - begin].
template <int kBits, bool kGrouped>
inline void Rows(const Quantized<kBits, kGrouped>& w, int64_t begin, int64_t end, const TiledActivations& x, int64_t M,
                 float* out, int64_t ldo) {
  const int64_t blocks = x.blocks, times = kGrouped ? w.group / kScaled : 1, each = kGrouped ? blocks : 1;
  const int64_t stride = (w.row_bytes() + kBytes - 1) / kBytes * kChunk<kBits>;
  std::vector<float> by_row(kTile * each + kSlack), scales(kTile * each), offsets(w.offsets.data ? kTile * each : 0);
  std::vector<int8_t> wide(kTile * stride);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t row = begin; row < end; row += kTile) {
    const int64_t count = std::min(kTile, end - row);
    SpreadTile(w.scales, row, count, w.groups(), times, each, by_row, scales);
    if (w.offsets.data) SpreadTile(w.offsets, row, count, w.groups(), times, each, by_row, offsets);
    Unpack(w, row, count, wide.data(), stride);
    for (int64_t m = 0; m < M; m += kTile) {
      TileProduct<kGrouped>(wide.data(), stride, x.values.data() + m / kTile * blocks, blocks, scales.data(),
                            w.offsets.data ? offsets.data() : nullptr, std::min(kTile, M - m), count,
                            out + m * ldo + row - begin, ldo);
    }
  }
  _tile_release();
}

}  // namespace shardstream

#endif
