// Attention of new positions against a cache, as XLA calls it: alone, or with what comes before it in a decode step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "operands.h"

namespace shardstream {

constexpr int64_t kAlone = 1 << 16;  // bytes of keys and values that one thread reads sooner than it finds help

// What attention works on: B rows of T new positions, K heads of G queries of H numbers, and layer `at` of a cache
// [L, B, K, S, H].
struct Sides {
  int64_t B, T, K, G, H, L, S, at;

  int64_t Q() const { return T * G; }
  int64_t head(int64_t b, int64_t k) const { return ((at * B + b) * K + k) * S; }  // the first of its slots
  // Of the i-th query of a row and head, in [B, T, K, G].
  int64_t query(int64_t b, int64_t k, int64_t i) const { return ((b * T + i / G) * K + k) * G + i % G; }
};

inline ffi::Error CheckCache(Sides& sides, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values,
                             const std::vector<ffi::AnyBuffer>& beside, Scales& scales,
                             const ffi::Buffer<ffi::S32>& layer, const ffi::Buffer<ffi::S32>& positions) {
  const auto ks = keys.dimensions(), vs = values.dimensions();
  if (ks.size() != 5 || !std::equal(ks.begin(), ks.end(), vs.begin(), vs.end())) {
    return Wrong("keys and values must both be [L, B, K, S, H]");
  }
  sides.L = ks[0], sides.S = ks[3];
  if (ks[1] != sides.B || ks[2] != sides.K || ks[4] != sides.H) {
    return Wrong("the queries and the cache differ in rows, heads or head size");
  }
  if (auto error = CheckStored(keys, values, beside, scales); error.failure()) return error;
  if (layer.element_count() != 1 || static_cast<int64_t>(positions.element_count()) != sides.B * sides.T) {
    return Wrong("layer must be one number, positions one for each new position");
  }
  sides.at = *layer.typed_data();
  if (sides.at < 0 || sides.at >= sides.L) {
    return Wrong("layer " + std::to_string(sides.at) + " of a cache of " + std::to_string(sides.L));
  }
  return ffi::Error::Success();
}

// Every query against the slots it sees: seen(b, t) of them. fetch(b, k, i, to) writes a query, scaled, to `to` [H];
// emit(b, k, out, max, sum) takes a head's unnormalised out [Q, H], max [Q] and sum [Q].
template <typename Seen, typename Fetch, typename Emit>
void AttendEach(ffi::ThreadPool& pool, const Sides& sides, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values,
                const Scales& scales, const Seen& seen, const Fetch& fetch, const Emit& emit) {
  const int64_t B = sides.B, K = sides.K, H = sides.H, Q = sides.Q();
  std::vector<int64_t> each(B * Q), filled(B, 0);  // slots that each query sees, and the most of a row
  int64_t longest = 0;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < Q; ++i) {
      each[b * Q + i] = seen(b, i / sides.G);
      filled[b] = std::max(filled[b], each[b * Q + i]);
    }
    longest = std::max(longest, filled[b]);
  }
  const int64_t segments = std::max<int64_t>(1, (longest + kSegment - 1) / kSegment);
  // A partial result for each row, head and segment: out [Q, H], max [Q], sum [Q]. The first is where others merge.
  const int64_t step = Q * (H + 2);
  std::vector<float> parts(B * K * segments * step);
  WithStored(keys, [&](auto* base) {
    using C = std::remove_const_t<std::remove_pointer_t<decltype(base)>>;
    const C* other = Data<C>(values);
    const auto attend = [&](int64_t piece) {
      const int64_t segment = piece % segments, k = piece / segments % K, b = piece / segments / K;
      std::vector<float> rows(Q * H);
      for (int64_t i = 0; i < Q; ++i) fetch(b, k, i, rows.data() + i * H);
      const int64_t head = sides.head(b, k);
      const int64_t begin = segment * kSegment, end = std::min(filled[b], begin + kSegment);
      float* part = parts.data() + piece * step;
      Attend(rows.data(), Q, H, base + head * H, other + head * H, scales.At(head), begin, end, each.data() + b * Q,
             part, part + Q * H, part + Q * H + Q);
    };
    const int64_t pieces = B * K * segments;
    if (2 * B * K * longest * H * static_cast<int64_t>(sizeof(C)) < kAlone) {
      for (int64_t piece = 0; piece < pieces; ++piece) attend(piece);
    } else {
      Parallel(pool, pieces, attend);
    }
  });
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      float* whole = parts.data() + (b * K + k) * segments * step;
      for (int64_t segment = 1; segment < segments; ++segment) {
        const float* more = whole + segment * step;
        Merge(Q, H, more, more + Q * H, more + Q * H + Q, whole, whole + Q * H, whole + Q * H + Q);
      }
      emit(b, k, whole, whole + Q * H, whole + Q * H + Q);
    }
  }
}

// q [B, T, K, G, H] against layer `layer` of keys and values [L, B, K, S, H]; slot s holds position s * stride +
// offset, and the query at positions [B, T] sees positions up to its own. `beside` are the scales [L, B, K, S] of an
// int8 or fp8 cache. -> out like q, max and sum [B, T, K, G].
inline ffi::Error CacheAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                                 ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions,
                                 ffi::Buffer<ffi::S32> offset, const std::vector<ffi::AnyBuffer>& beside,
                                 ffi::Result<ffi::Buffer<ffi::F32>> out,
                                 ffi::Result<ffi::Buffer<ffi::F32>> max, ffi::Result<ffi::Buffer<ffi::F32>> sum,
                                 int32_t stride) {
  const auto qs = q.dimensions();
  if (qs.size() != 5) return Wrong("q must be [B, T, K, G, H]");
  Sides sides{qs[0], qs[1], qs[2], qs[3], qs[4], 0, 0, 0};
  if (!IsNumber(q.element_type())) return Wrong("q must be float32 or bfloat16");
  Scales scales;
  if (auto error = CheckCache(sides, keys, values, beside, scales, layer, positions); error.failure()) return error;
  if (offset.element_count() != 1 || stride < 1) return Wrong("offset must be one number, stride at least 1");
  const int64_t H = sides.H, queries = sides.B * sides.K * sides.Q();
  if (static_cast<int64_t>(out->element_count()) != queries * H ||
      static_cast<int64_t>(max->element_count()) != queries || sum->element_count() != max->element_count()) {
    return Wrong("out must be like q, max and sum like q without its last axis");
  }
  if (queries == 0) return ffi::Error::Success();
  const int64_t first = *offset.typed_data();
  std::vector<float> copy;
  const float* scaled = AsFloats(q, copy, 1.0f / std::sqrt(static_cast<float>(H)));
  AttendEach(
      pool, sides, keys, values, scales,
      [&](int64_t b, int64_t t) -> int64_t {
        const int64_t ahead = positions.typed_data()[b * sides.T + t] - first;
        return ahead < 0 ? 0 : std::min(sides.S, ahead / stride + 1);
      },
      [&](int64_t b, int64_t k, int64_t i, float* to) {
        const float* from = scaled + sides.query(b, k, i) * H;
        std::copy(from, from + H, to);
      },
      [&](int64_t b, int64_t k, const float* mixed, const float* top, const float* total) {
        for (int64_t i = 0; i < sides.Q(); ++i) {
          const int64_t to = sides.query(b, k, i);
          std::copy(mixed + i * H, mixed + (i + 1) * H, out->typed_data() + to * H);
          max->typed_data()[to] = top[i];
          sum->typed_data()[to] = total[i];
        }
      });
  return ffi::Error::Success();
}

// x [H] turned by the angles with cosines and sines [H / 2], times factor: number i goes with i + H / 2.
template <typename X>
inline void Rotate(const X* x, const float* cos, const float* sin, int64_t H, float factor, float* out) {
  const int64_t half = H / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = Widen(x[i]), second = Widen(x[i + half]);
    out[i] = (first * cos[i] - second * sin[i]) * factor;
    out[i + half] = (second * cos[i] + first * sin[i]) * factor;
  }
}

inline float RoundedLike(float x, float) { return x; }
inline float RoundedLike(float x, BFloat16) { return Widen(Narrow(x)); }

// Heads [B, T, K, G + 2, H], each K's queries, key and value, of new positions [B, T]: turns queries and keys by cos
// and sin [B, T, H / 2], stores keys and values in layer `layer` of a cache [L, B, K, S, H] whose slot s holds position
// s, and attends to it. -> out [B, T, K, G, H], and the cache, its scales too, in place. A position outside the cache is
// not stored.
inline ffi::Error RopeAttention(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::Buffer<ffi::F32> cos,
                                ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                                ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions,
                                const std::vector<ffi::AnyBuffer>& beside, ffi::Result<ffi::AnyBuffer> out,
                                ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                                const std::vector<ffi::AnyBuffer>& new_beside) {
  const auto hs = heads.dimensions(), os = out->dimensions();
  if (hs.size() != 5 || hs[3] < 2 || hs[4] % 2) return Wrong("heads must be [B, T, K, G + 2, H], H even");
  const int64_t B = hs[0], T = hs[1], K = hs[2], G = hs[3] - 2, H = hs[4], half = H / 2;
  if (!IsNumber(heads.element_type()) || out->element_type() != heads.element_type()) {
    return Wrong("heads and out must both be float32 or bfloat16");
  }
  Sides sides{B, T, K, G, H, 0, 0, 0};
  Scales scales;
  if (auto error = CheckCache(sides, keys, values, beside, scales, layer, positions); error.failure()) return error;
  if (static_cast<int64_t>(cos.element_count()) != B * T * half || sin.element_count() != cos.element_count()) {
    return Wrong("cos and sin must be [B, T, H / 2]");
  }
  if (os.size() != 5 || os[0] != B || os[1] != T || os[2] != K || os[3] != G || os[4] != H) {
    return Wrong("out must be [B, T, K, G, H]");
  }
  if (auto error = InPlace({keys, values}, {*new_keys, *new_values}); error.failure()) return error;
  if (auto error = InPlace(beside, new_beside); error.failure()) return error;
  if (auto error = CheckStored(*new_keys, *new_values, new_beside, scales); error.failure()) return error;
  WithType(heads, [&](auto* x) {
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    WithStored(keys, [&](auto* stored) {
      using C = std::remove_const_t<std::remove_pointer_t<decltype(stored)>>;
      std::vector<float> turned(H);
      for (int64_t bt = 0; bt < B * T; ++bt) {
        const int64_t slot = positions.typed_data()[bt];
        if (slot < 0 || slot >= sides.S) continue;
        for (int64_t k = 0; k < K; ++k) {
          const X* key = x + ((bt * K + k) * (G + 2) + G) * H;
          const int64_t at = sides.head(bt / T, k) + slot;
          const Scales beside_it = scales.At(at);
          Rotate(key, cos.typed_data() + bt * half, sin.typed_data() + bt * half, H, 1.0f, turned.data());
          for (float& number : turned) number = RoundedLike(number, X{});
          PutEntry(turned.data(), H, static_cast<C*>(new_keys->untyped_data()) + at * H, beside_it.keys);
          for (int64_t h = 0; h < H; ++h) turned[h] = Widen(key[H + h]);
          PutEntry(turned.data(), H, static_cast<C*>(new_values->untyped_data()) + at * H, beside_it.values);
        }
      }
    });
    if (B * K * sides.Q() == 0) return;
    const float factor = 1.0f / std::sqrt(static_cast<float>(H));
    AttendEach(
        pool, sides, *new_keys, *new_values, scales,
        [&](int64_t b, int64_t t) {
          return std::clamp<int64_t>(int64_t{positions.typed_data()[b * T + t]} + 1, 0, sides.S);
        },
        [&](int64_t b, int64_t k, int64_t i, float* to) {
          const int64_t bt = b * T + i / G;
          const X* query = x + ((bt * K + k) * (G + 2) + i % G) * H;
          Rotate(query, cos.typed_data() + bt * half, sin.typed_data() + bt * half, H, factor, to);
        },
        [&](int64_t b, int64_t k, const float* mixed, const float*, const float* total) {
          for (int64_t i = 0; i < sides.Q(); ++i) {
            X* to = static_cast<X*>(out->untyped_data()) + sides.query(b, k, i) * H;
            const float scale = total[i] > 0 ? 1.0f / total[i] : total[i];  // NaN stays one, nothing seen is 0
            for (int64_t h = 0; h < H; ++h) Put(mixed[i * H + h] * scale, to + h);
          }
        });
  });
  return ffi::Error::Success();
}

}  // namespace shardstream
