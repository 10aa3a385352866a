// Products with weights of 8 and 4 bits. A row of activations is brought to bytes first, a block of 32 values to a
// scale, so that products are of bytes and their sums exact; the scales of both sides join a block's sum in float32.
// One byte a value is not enough: on a small model it changes what is said. A second one holds what rounding to the
// first left over, and costs nothing where memory is what is waited for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "dot.h"
#include "matmul.h"
#include "vectors.h"

namespace shardstream {

constexpr int64_t kScaled = 32;         // activations that share a scale, and the least that weights may
constexpr int64_t kPrefetched = 6144;  // bytes asked for ahead of their use, at least

// The sizes of weights of kBits: values in a chunk, which is 64 bytes of them, and blocks of activations.
template <int kBits>
constexpr int64_t kChunk = kBytes * 8 / kBits;
template <int kBits>
constexpr int64_t kBlocks = kChunk<kBits> / kScaled;

// Activations in the order of a chunk of weights. 8 bits: 64 values as they are. 4 bits: 4 blocks, whose first halves
// (the low nibbles) come before their second ones. So lane l of a sum belongs to block l * blocks / 16.
template <int kBits>
struct alignas(64) Chunk {
  int8_t values[2][8 / kBits][kBytes];  // a value is scale * (first + second / kFiner)
  int32_t start[2][kLanes];             // what a sum begins with: minus what the weights' offset adds to it
  float scales[kLanes];                 // of the lane's block
};

// Steps of a second byte in one of the first: half a step is 127 of them.
constexpr float kFiner = 254;

// What makes bytes unsigned, and the nibbles' own zero.
template <int kBits>
constexpr int kZero = kBits == 8 ? 128 : 8;

inline uint32_t Largest(Words x) {
  typedef uint32_t Eight __attribute__((vector_size(32), may_alias));
  typedef uint32_t Four __attribute__((vector_size(16), may_alias));
  Eight eight[2];
  std::memcpy(eight, &x, sizeof x);
  eight[0] = eight[0] > eight[1] ? eight[0] : eight[1];
  Four four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] = four[0] > four[1] ? four[0] : four[1];
  return std::max(std::max(four[0][0], four[0][1]), std::max(four[0][2], four[0][3]));
}

// 32 floats to two bytes each, within -127 and 127, and the scale: a value is off by at most half a step of the second.
// What is not finite makes the scale NaN; a block below 1e-30 is zeros.
inline float ToBytes(const float* x, int8_t* first, int8_t* second) {
  typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
  const Floats parts[2] = {Load(x), Load(x + kLanes)};
  const Words sizes[2] = {(Words)parts[0] & 0x7fffffff, (Words)parts[1] & 0x7fffffff};
  const uint32_t bits = Largest(sizes[0] > sizes[1] ? sizes[0] : sizes[1]);
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const bool finite = bits < 0x7f800000u, zero = bits < 0x0da24260u;  // 1e-30
  const float inverse = finite && !zero ? 127.0f / largest : 0.0f;
  const Floats magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  for (int part = 0; part < 2; ++part) {
    const Floats scaled = finite ? parts[part] * inverse : Floats{}, sum = scaled + magic;
    const Floats rest = (scaled - (sum - magic)) * kFiner + magic;
    *reinterpret_cast<Sixteen*>(first + part * kLanes) = __builtin_convertvector((Ints)sum - 0x4b400000, Sixteen);
    *reinterpret_cast<Sixteen*>(second + part * kLanes) = __builtin_convertvector((Ints)rest - 0x4b400000, Sixteen);
  }
  return !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0.0f : largest / 127.0f;
}

// Rows of activations as bytes, and the sums of what they were for the weights' offsets.
template <int kBits>
struct Activations {
  int64_t chunks;                    // a row
  std::vector<Chunk<kBits>> values;  // [M, chunks]
  int64_t groups;                    // a row
  std::vector<float> sums;           // [M, groups], or empty where there are no offsets

  Activations(int64_t M, int64_t I, int64_t groups, bool offsets)
      : chunks((I + kChunk<kBits> - 1) / kChunk<kBits>),
        values(M * chunks),
        groups(groups),
        sums(offsets ? M * groups : 0) {}

  // Row m from x [I], whose groups for the offsets have `group` values.
  void Set(int64_t m, const float* x, int64_t I, int64_t group) {
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t begin = c * kChunk<kBits>;
      float padded[kChunk<kBits>];
      const float* from = x + begin;
      if (I - begin < kChunk<kBits>) {
        std::fill(std::copy(from, x + I, padded), padded + kChunk<kBits>, 0.0f);
        from = padded;
      }
      SetChunk(values[m * chunks + c], from);
    }
    for (int64_t g = 0; g < groups && !sums.empty(); ++g) {
      const int64_t begin = g * group, end = std::min(I, begin + group);
      Floats lanes = {};
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) lanes += Load(x + i);
      float total = Sum(lanes);
      for (; i < end; ++i) total += x[i];
      sums[m * groups + g] = total;
    }
  }

 private:
  static void SetChunk(Chunk<kBits>& chunk, const float* x) {
    constexpr int64_t kPer = kLanes / kBlocks<kBits>;  // lanes a block
    for (int64_t b = 0; b < kBlocks<kBits>; ++b) {
      int8_t bytes[2][kScaled];
      const float scale = ToBytes(x + b * kScaled, bytes[0], bytes[1]);
      std::fill(chunk.scales + b * kPer, chunk.scales + (b + 1) * kPer, scale);
      for (int which = 0; which < 2; ++which) {
        const int8_t* block = bytes[which];
        auto& values = chunk.values[which];
        if constexpr (kBits == 8) {
          std::copy(block, block + kScaled, values[0] + b * kScaled);
        } else {
          std::copy(block, block + kScaled / 2, values[0] + b * kScaled / 2);
          std::copy(block + kScaled / 2, block + kScaled, values[1] + b * kScaled / 2);
        }
      }
    }
    for (int which = 0; which < 2; ++which) {
      Ints sums = {};
      if (kUnsigned) {
        for (const auto& part : chunk.values[which]) {
          sums = Dot(sums, Bytes{} + static_cast<int8_t>(kZero<kBits>), LoadBytes(part));
        }
      }
      const Ints start = -sums;
      std::memcpy(chunk.start[which], &start, sizeof start);
    }
  }
};

// Numbers of any of the types that scales come in.
struct Numbers {
  enum class Type { kFloat, kHalf, kBFloat16 };
  Type type;
  const void* data;  // null: none

  template <typename Run>
  void With(const Run& run) const {
    switch (type) {
      case Type::kFloat: return run(static_cast<const float*>(data));
      case Type::kHalf: return run(static_cast<const Half*>(data));
      default: return run(static_cast<const BFloat16*>(data));
    }
  }
  int64_t width() const { return type == Type::kFloat ? 4 : 2; }
};

// Weights [O, I] of kBits. kGrouped: with a scale for each `group` values of a row; else one for all of it.
template <int kBits, bool kGrouped>
struct Quantized {
  const uint8_t* values;
  Numbers scales, offsets;  // [O, groups]; offsets may be none
  int64_t O, I, group;

  int64_t row_bytes() const { return I * kBits / 8; }
  int64_t groups() const { return kGrouped ? (I + group - 1) / group : 1; }
};

// The first `count` of 16 numbers, and zeros: nothing beyond them is read.
template <typename S>
inline Floats LoadFirst(const S* p, int64_t count) {
  if (count >= kLanes) return Load(p);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<__mmask16>((1 << count) - 1);
  if constexpr (sizeof(S) == 4) return (Floats)_mm512_maskz_loadu_ps(mask, p);
  S some[kLanes];
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, p);
  std::memcpy(some, &bits, sizeof some);
#else
  S some[kLanes] = {};
  std::copy(p, p + count, some);
#endif
  return Load(some);
}

// 16 numbers, each `times` times: the part-th 16 of what that makes. `times` is 1, 2 or 4.
inline Floats Repeated(Floats x, int64_t times, int64_t part) {
#ifdef __AVX512F__
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Words from = (lanes + static_cast<uint32_t>(part * kLanes)) >> static_cast<uint32_t>(times / 2);
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)from, (__m512)x);
#else
  if (times == 1) return x;
  float in[kLanes], out[kLanes];
  std::memcpy(in, &x, sizeof x);
  for (int64_t i = 0; i < kLanes; ++i) out[i] = in[(part * kLanes + i) / times];
  return Load(out);
#endif
}

constexpr int64_t kSlack = 4 * kLanes;  // numbers that SpreadScales may write past what it is asked for

// The scales of `count` rows from `row` on as float32, each for `times` blocks of activations: [count, blocks], zero
// beyond a row's own.
inline void SpreadScales(const Numbers& scales, int64_t row, int64_t count, int64_t groups, int64_t times,
                         int64_t blocks, float* out) {
  scales.With([&](auto* from) {
    for (int64_t r = 0; r < count; ++r) {
      auto* line = from + (row + r) * groups;
      float* to = out + r * blocks;
      for (int64_t g = 0; g < groups; g += kLanes, to += times * kLanes) {
        const Floats some = LoadFirst(line + g, groups - g);
        for (int64_t part = 0; part < times; ++part) Store(to + part * kLanes, Repeated(some, times, part));
      }
    }
  });
}

// kCount numbers, each on its share of the lanes; four may be read.
template <int64_t kCount>
inline Floats Spread(const float* each) {
#ifdef __AVX512F__
  const __m512i lanes = kCount == 4 ? _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0)
                                    : _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, lanes, _mm512_castps128_ps512(_mm_loadu_ps(each)));
#else
  typedef float Four __attribute__((vector_size(16), may_alias));
  Four fours[4];
  for (int64_t i = 0; i < 4; ++i) fours[i] = Four{} + each[i * kCount / 4];
  Floats out;
  std::memcpy(&out, fours, sizeof out);
  return out;
#endif
}

// Asks for what lies at p, which may be past the end of anything, for the second-level cache: it keeps more reads in
// flight than the first.
inline void Ask(uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void*>(p), 0, 2); }

// R rows of w from `row` on with rows m to m + M of x: out[m * ldo + r]. scales: those of the rows, [R, blocks]. Where
// `ahead` is set, what lies so many bytes further on is asked for.
template <int R, int M, int kBits, bool kGrouped>
inline void Tile(const Quantized<kBits, kGrouped>& w, int64_t row, const float* scales, const Activations<kBits>& x,
                 int64_t m, float* out, int64_t ldo, int64_t ahead) {
  const int64_t bytes = w.row_bytes(), blocks = x.chunks * kBlocks<kBits>;
  const uint8_t* rows = w.values + row * bytes;
  const Chunk<kBits>* chunks = x.values.data() + m * x.chunks;
  Floats sums[R][M] = {};
  const auto step = [&](int64_t c, auto&& load) {
    for (int r = 0; r < R; ++r) {
      const uint8_t* at = rows + r * bytes + c * kBytes;
      if (ahead) Ask(reinterpret_cast<uintptr_t>(at) + ahead);
      const Bytes raw = load(at);
      Bytes parts[8 / kBits];
      if constexpr (kBits == 8) {
        parts[0] = kUnsigned ? raw ^ static_cast<int8_t>(-128) : raw;
      } else {
        parts[0] = raw & 15;
        parts[1] = (Bytes)(((Words)raw >> 4) & 0x0f0f0f0f);
        if (!kUnsigned) {
          parts[0] -= 8;
          parts[1] -= 8;
        }
      }
      Floats scale = {};
      if (kGrouped) scale = Spread<kBlocks<kBits>>(scales + r * blocks + c * kBlocks<kBits>);
      for (int k = 0; k < M; ++k) {
        const Chunk<kBits>& chunk = chunks[k * x.chunks + c];
        Ints both[2] = {};
        for (int which = 0; which < 2; ++which) {
          Ints& sum = both[which];
          if (kUnsigned) std::memcpy(&sum, chunk.start[which], sizeof sum);
          for (int part = 0; part < 8 / kBits; ++part) {
            sum = Dot(sum, parts[part], LoadBytes(chunk.values[which][part]));
          }
        }
        const Floats factor = kGrouped ? scale * Load(chunk.scales) : Load(chunk.scales);
        const Floats first = __builtin_convertvector(both[0], Floats), second = __builtin_convertvector(both[1], Floats);
        sums[r][k] += (first + second * (1 / kFiner)) * factor;
      }
    }
  };
  const int64_t whole = bytes / kBytes, left = bytes % kBytes;
  for (int64_t c = 0; c < whole; ++c) step(c, [](const uint8_t* at) { return LoadBytes(at); });
  if (left) step(whole, [left](const uint8_t* at) { return LoadBytes(at, left); });
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < M; ++k) out[k * ldo + r] = kGrouped ? Sum(sums[r][k]) : Sum(sums[r][k]) * scales[r];
  }
}

// What the offsets of w's rows [begin, end) add to `out`.
template <int kBits, bool kGrouped>
inline void AddOffsets(const Quantized<kBits, kGrouped>& w, int64_t begin, int64_t end, const Activations<kBits>& x,
                       int64_t m, int64_t M, float* out, int64_t ldo) {
  const int64_t groups = w.groups();
  w.offsets.With([&](auto* offsets) {
    for (int64_t row = begin; row < end; ++row) {
      auto* of = offsets + row * groups;
      for (int64_t k = m; k < M; ++k) {
        const float* sums = x.sums.data() + k * groups;
        Floats lanes = {};
        int64_t g = 0;
        for (; g + kLanes <= groups; g += kLanes) lanes += Load(of + g) * Load(sums + g);
        float total = Sum(lanes);
        for (; g < groups; ++g) total += Widen(of[g]) * sums[g];
        out[k * ldo + row - begin] += total;
      }
    }
  });
}

// Rows [begin, end) of w with rows [m, M) of x, to out[m * ldo + row - begin].
template <int kBits, bool kGrouped>
inline void Rows(const Quantized<kBits, kGrouped>& w, int64_t begin, int64_t end, const Activations<kBits>& x,
                 int64_t m, int64_t M, float* out, int64_t ldo) {
  const int64_t groups = w.groups(), bytes = w.row_bytes();
  const int64_t blocks = kGrouped ? x.chunks * kBlocks<kBits> : 1, times = kGrouped ? w.group / kScaled : 1;
  const int64_t ahead = std::max(kPrefetched, kBlock * bytes);
  // Of a block of rows, with zeros for what a last chunk lacks.
  std::vector<float> scales(kBlock * blocks + kSlack);
  for (int64_t row = begin; row < end;) {
    const int64_t count = end - row >= kBlock ? kBlock : 1;
    const auto base = reinterpret_cast<uintptr_t>(w.scales.data);
    const int64_t width = w.scales.width() * groups;
    if (count == kBlock) {
      // The scales of the rows whose values are asked for meanwhile.
      const int64_t next = (row + std::max<int64_t>(kBlock, bytes ? ahead / bytes : 0)) * width;
      for (int64_t i = 0; i < kBlock * width; i += 64) Ask(base + next + i);
    }
    SpreadScales(w.scales, row, count, groups, times, blocks, scales.data());
    for (int64_t k = m; k < M;) {
      float* to = out + k * ldo + row - begin;
      const int64_t further = k == m && count == kBlock ? ahead : 0;
      const int64_t left = count == 1 ? 1 : std::min<int64_t>(4, M - k);
      if (count == 1) {
        Tile<1, 1>(w, row, scales.data(), x, k, to, ldo, further);
      } else if (left == 1) {
        Tile<kBlock, 1>(w, row, scales.data(), x, k, to, ldo, further);
      } else {
        constexpr int kHalf = kBlock / 2;
        for (int half = 0; half < kBlock; half += kHalf) {
          const float* of = scales.data() + half * blocks;
          if (left == 2) Tile<kHalf, 2>(w, row + half, of, x, k, to + half, ldo, further);
          if (left == 3) Tile<kHalf, 3>(w, row + half, of, x, k, to + half, ldo, further);
          if (left == 4) Tile<kHalf, 4>(w, row + half, of, x, k, to + half, ldo, further);
        }
      }
      k += left;
    }
    row += count;
  }
  if (w.offsets.data) AddOffsets(w, begin, end, x, m, M, out, ldo);
}

}  // namespace shardstream
