// Weight rows times a few activation rows: each weight is read from memory once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace shardstream {

constexpr int64_t kBlock = 8;       // weight rows worked on together, so that one load of x serves them all
constexpr int64_t kPiece = 131072;  // bytes of weights a thread takes at a time
constexpr int64_t kRounded = 16;    // rows of a piece are a multiple of it: of every block and tile there is

// R rows of w [R, I] with M rows of x [M, I]: out[m * ldo + r]. Where `ahead` is set, the bytes `ahead` elements
// further on are asked for: the next block, which the hardware's prefetcher finds too late in rows this short.
template <int R, int M, typename W>
inline void Tile(const W* w, const float* x, int64_t I, float* out, int64_t ldo, int64_t ahead) {
  constexpr int kSplit = M == 1 ? 2 : 1;  // two sums a row hide the latency of an addition
  constexpr int64_t kLine = 64 / sizeof(W);
  Floats sums[R][M][kSplit] = {};
  int64_t i = 0;
  for (; i + kLanes * kSplit <= I; i += kLanes * kSplit) {
    for (int r = 0; r < R; ++r) {
      for (int s = 0; s < kSplit; ++s) {
        const int64_t at = r * I + i + s * kLanes;
        if (ahead && at % kLine < kLanes) {
          // Into the second-level cache (the last argument), which keeps more reads in flight than the first.
          const char* next = reinterpret_cast<const char*>(w) + (at + ahead) * static_cast<int64_t>(sizeof(W));
          __builtin_prefetch(next, 0, 2);
        }
        const Floats weight = Load(w + at);
        for (int m = 0; m < M; ++m) sums[r][m][s] += weight * Load(x + m * I + i + s * kLanes);
      }
    }
  }
  for (; i + kLanes <= I; i += kLanes) {
    for (int r = 0; r < R; ++r) {
      for (int m = 0; m < M; ++m) sums[r][m][0] += Load(w + r * I + i) * Load(x + m * I + i);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      Floats both = sums[r][m][0];
      for (int s = 1; s < kSplit; ++s) both += sums[r][m][s];
      float total = Sum(both);
      for (int64_t j = i; j < I; ++j) total += Widen(w[r * I + j]) * x[m * I + j];
      out[m * ldo + r] = total;
    }
  }
}

// One block of R weight rows with all M rows of x, four at a time: the block stays in the cache between them.
template <int R, typename W>
inline void Block(const W* w, const float* x, int64_t M, int64_t I, float* out, int64_t ldo, int64_t ahead) {
  constexpr int kHalf = R > 1 ? R / 2 : 1;
  for (int64_t m = 0; m < M; m += 4) {
    const int64_t left = std::min<int64_t>(4, M - m);
    const float* rows = x + m * I;
    float* to = out + m * ldo;
    const int64_t next = m == 0 ? ahead : 0;
    if (left == 1) {
      Tile<R, 1>(w, rows, I, to, ldo, next);
      continue;
    }
    for (int half = 0; half < R; half += kHalf) {
      const W* part = w + half * I;
      if (left == 2) Tile<kHalf, 2>(part, rows, I, to + half, ldo, next);
      if (left == 3) Tile<kHalf, 3>(part, rows, I, to + half, ldo, next);
      if (left == 4) Tile<kHalf, 4>(part, rows, I, to + half, ldo, next);
    }
  }
}

// Rows [begin, end) of w [O, I] with x [M, I], to out[m * ldo + row - begin]. Rows after `end` are asked for too: they
// are what this thread most likely does next.
template <typename W>
inline void Rows(const W* w, int64_t O, int64_t begin, int64_t end, const float* x, int64_t M, int64_t I, float* out,
                 int64_t ldo) {
  int64_t row = begin;
  for (; row + kBlock <= end; row += kBlock) {
    Block<kBlock>(w + row * I, x, M, I, out + row - begin, ldo, row + 2 * kBlock <= O ? kBlock * I : 0);
  }
  for (; row < end; ++row) Block<1>(w + row * I, x, M, I, out + row - begin, ldo, 0);
}

// How many weight rows of `bytes` each a thread takes at a time: kPiece, but at least four pieces where there are
// enough rows, so that threads finish together.
inline int64_t RowsPerPiece(int64_t rows, int64_t bytes) {
  const int64_t size = std::min(kPiece / std::max<int64_t>(bytes, 1), rows / 4);
  return std::max(kRounded, size / kRounded * kRounded);
}

}  // namespace shardstream
