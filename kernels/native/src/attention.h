// A few query positions against the filled part of a cache: online softmax (Milakov and Gimelshein, 2018) over blocks
// of slots, each key and value read once for all the queries of its head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "matmul.h"
#include "scaled.h"
#include "vectors.h"

namespace shardstream {

constexpr int64_t kSlots = 64;       // slots whose scores are held at a time
constexpr int64_t kSegment = 512;    // slots a thread takes at a time
constexpr float kMasked = -1e30f;    // the running maximum of a query that has seen nothing

// out [Q, H] = out * decay [Q] + p [Q, kSlots] @ v [n, H], the first n slots.
template <int Q, typename C>
inline void Weigh(const C* v, int64_t n, int64_t H, const float* p, const float* decay, float* out) {
  constexpr int kWide = 4;
  int64_t h = 0;
  for (; h + kWide * kLanes <= H; h += kWide * kLanes) {
    Floats sums[Q][kWide];
    for (int q = 0; q < Q; ++q) {
      for (int c = 0; c < kWide; ++c) sums[q][c] = Load(out + q * H + h + c * kLanes) * decay[q];
    }
    for (int64_t s = 0; s < n; ++s) {
      for (int c = 0; c < kWide; ++c) {
        const Floats value = Load(v + s * H + h + c * kLanes);
        for (int q = 0; q < Q; ++q) sums[q][c] += value * p[q * kSlots + s];
      }
    }
    for (int q = 0; q < Q; ++q) {
      for (int c = 0; c < kWide; ++c) Store(out + q * H + h + c * kLanes, sums[q][c]);
    }
  }
  for (; h + kLanes <= H; h += kLanes) {
    for (int q = 0; q < Q; ++q) {
      Floats total = Load(out + q * H + h) * decay[q];
      for (int64_t s = 0; s < n; ++s) total += Load(v + s * H + h) * p[q * kSlots + s];
      Store(out + q * H + h, total);
    }
  }
  for (; h < H; ++h) {
    for (int q = 0; q < Q; ++q) {
      float total = out[q * H + h] * decay[q];
      for (int64_t s = 0; s < n; ++s) total += Widen(v[s * H + h]) * p[q * kSlots + s];
      out[q * H + h] = total;
    }
  }
}

// row [n] times what the stored numbers of its slots are divided by, if they are.
inline void Rescale(float* row, const float* scales, int64_t n) {
  if (scales == nullptr) return;
  for (int64_t s = 0; s < n; ++s) row[s] *= scales[s];
}

// Queries q [Q, H], scaled already, against slots [begin, end) of one head's keys and values [S, H] and the scales beside
// them. Query i sees the slots before seen[i]. Leaves the unnormalised out [Q, H], max [Q] and sum [Q].
template <typename C>
inline void Attend(const float* q, int64_t Q, int64_t H, const C* keys, const C* values, const Scales& scales,
                   int64_t begin, int64_t end, const int64_t* seen, float* out, float* max, float* sum) {
  std::fill(out, out + Q * H, 0.0f);
  std::fill(max, max + Q, kMasked);
  std::fill(sum, sum + Q, 0.0f);
  std::vector<float> scores(Q * kSlots), decay(Q);
  for (int64_t start = begin; start < end; start += kSlots) {
    const int64_t n = std::min(kSlots, end - start);
    const Scales here = scales.At(start);
    Rows(keys, end, start, start + n, q, Q, H, scores.data(), kSlots);
    for (int64_t i = 0; i < Q; ++i) {
      float* row = scores.data() + i * kSlots;
      const int64_t visible = std::clamp<int64_t>(seen[i] - start, 0, n);
      Rescale(row, here.keys, visible);
      float top = max[i];
      for (int64_t s = 0; s < visible; ++s) top = std::max(top, row[s]);
      for (int64_t s = 0; s < visible; ++s) row[s] -= top;
      // Exp of far below zero is exactly zero, which is what a slot beyond the query's position weighs.
      std::fill(row + visible, row + kSlots, kMasked);
      Floats total = {};
      for (int64_t s = 0; s < kSlots; s += kLanes) {
        const Floats weight = Exp(Load(row + s));
        Store(row + s, weight);
        total += weight;
      }
      Floats fade = Exp(Splat(std::min(0.0f, max[i] - top)));
      decay[i] = fade[0];
      sum[i] = sum[i] * decay[i] + Sum(total);
      max[i] = top;
      Rescale(row, here.values, visible);
    }
    for (int64_t i = 0; i < Q; i += 4) {
      const C* v = values + start * H;
      const float* p = scores.data() + i * kSlots;
      switch (std::min<int64_t>(4, Q - i)) {
        case 1: Weigh<1>(v, n, H, p, decay.data() + i, out + i * H); break;
        case 2: Weigh<2>(v, n, H, p, decay.data() + i, out + i * H); break;
        case 3: Weigh<3>(v, n, H, p, decay.data() + i, out + i * H); break;
        default: Weigh<4>(v, n, H, p, decay.data() + i, out + i * H);
      }
    }
  }
}

// Adds the partial result `more` to `into`, both of Q queries: the log-sum-exp merge.
inline void Merge(int64_t Q, int64_t H, const float* more, const float* more_max, const float* more_sum, float* out,
                  float* max, float* sum) {
  for (int64_t i = 0; i < Q; ++i) {
    const float top = std::max(max[i], more_max[i]);
    const float here = std::exp(max[i] - top), there = std::exp(more_max[i] - top);
    for (int64_t h = 0; h < H; ++h) out[i * H + h] = out[i * H + h] * here + more[i * H + h] * there;
    sum[i] = sum[i] * here + more_sum[i] * there;
    max[i] = top;
  }
}

}  // namespace shardstream
