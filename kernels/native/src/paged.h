// Attention over a cache cut into pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "vectors.h"

namespace shardstream {

// Queries q [Q, H], scaled already, against slots [begin, end) of one head, begin a multiple of the page's S slots. The
// slots of page i lie at keys + table[i] * jump and values + table[i] * jump, their scales from table[i] * S on. Query i
// sees the slots before seen[i].
// Leaves the unnormalised out [Q, H], max [Q] and sum [Q].
template <typename C>
inline void AttendPages(const float* q, int64_t Q, int64_t H, const C* keys, const C* values, const Scales& scales,
                        const int32_t* table, int64_t jump, int64_t S, int64_t begin, int64_t end, const int64_t* seen, float* scores,
                        float* decay, float* out, float* max, float* sum) {
  std::fill(out, out + Q * H, 0.0f);
  std::fill(max, max + Q, kMasked);
  std::fill(sum, sum + Q, 0.0f);
  const int64_t stretch = std::min(S, kSlots);  // slots of one page worked on together
  const int64_t stretches = kSlots / stretch;
  for (int64_t start = begin; start < end;) {
    // As many stretches as fit in kSlots scores; a page longer than that takes several rounds.
    int64_t n = 0;
    int64_t from[kSlots], count[kSlots], used = 0;
    Scales beside[kSlots];
    while (used < stretches && start + n < end) {
      const int64_t slot = start + n, inside = slot % S;
      const int64_t take = std::min({stretch, S - inside, end - slot, kSlots - n});
      if (take <= 0) break;
      from[used] = table[slot / S] * jump + inside * H;
      count[used] = take;
      beside[used] = scales.At(table[slot / S] * S + inside);
      Rows(keys + from[used], take, 0, take, q, Q, H, scores + n, kSlots);
      for (int64_t i = 0; i < Q; ++i) Rescale(scores + i * kSlots + n, beside[used].keys, take);
      n += take;
      ++used;
    }
    for (int64_t i = 0; i < Q; ++i) {
      float* row = scores + i * kSlots;
      const int64_t visible = std::clamp<int64_t>(seen[i] - start, 0, n);
      float top = max[i];
      for (int64_t s = 0; s < visible; ++s) top = std::max(top, row[s]);
      for (int64_t s = 0; s < visible; ++s) row[s] -= top;
      std::fill(row + visible, row + kSlots, kMasked);
      Floats total = {};
      for (int64_t s = 0; s < kSlots; s += kLanes) {
        const Floats weight = Exp(Load(row + s));
        Store(row + s, weight);
        total += weight;
      }
      decay[i] = Exp(Splat(std::min(0.0f, max[i] - top)))[0];
      sum[i] = sum[i] * decay[i] + Sum(total);
      max[i] = top;
    }
    int64_t done = 0;
    for (int64_t u = 0; u < used; ++u) {
      const C* v = values + from[u];
      for (int64_t i = 0; i < Q; ++i) {
        const int64_t visible = std::clamp<int64_t>(seen[i] - start - done, 0, count[u]);
        Rescale(scores + i * kSlots + done, beside[u].values, visible);
      }
      for (int64_t i = 0; i < Q; i += 4) {
        const float* p = scores + i * kSlots + done;
        switch (std::min<int64_t>(4, Q - i)) {
          case 1: Weigh<1>(v, count[u], H, p, decay + i, out + i * H); break;
          case 2: Weigh<2>(v, count[u], H, p, decay + i, out + i * H); break;
          case 3: Weigh<3>(v, count[u], H, p, decay + i, out + i * H); break;
          default: Weigh<4>(v, count[u], H, p, decay + i, out + i * H);
        }
      }
      if (u == 0) std::fill(decay, decay + Q, 1.0f);  // the stretches after the first add to it
      done += count[u];
    }
    start += n;
  }
}

}  // namespace shardstream
