// The paged operations as XLA calls them. Included by bindings.cc, whose helpers it uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "paged.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace shardstream {
namespace {

// q [B, T, K, G, H] against layer `layer` of keys and values [L, pages, K, S, H], tile b over the pages in tables
// [B, P]; slot s of the i-th of them holds position (i * S + s) * stride + offset, and the query at positions [B, T]
// sees positions up to its own. -> out like q, max and sum [B, T, K, G].
ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                          ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions,
                          ffi::Buffer<ffi::S32> offset, ffi::Result<ffi::Buffer<ffi::F32>> out,
                          ffi::Result<ffi::Buffer<ffi::F32>> max, ffi::Result<ffi::Buffer<ffi::F32>> sum,
                          int32_t stride) {
  const auto qs = q.dimensions(), ks = keys.dimensions(), vs = values.dimensions(), ts = tables.dimensions();
  if (qs.size() != 5 || ks.size() != 5 || !std::equal(ks.begin(), ks.end(), vs.begin(), vs.end())) {
    return Wrong("q must be [B, T, K, G, H], keys and values both [L, pages, K, S, H]");
  }
  const int64_t B = qs[0], T = qs[1], K = qs[2], G = qs[3], H = qs[4], Q = T * G;
  const int64_t L = ks[0], N = ks[1], S = ks[3];
  if (ks[2] != K || ks[4] != H || S < 1) return Wrong("q and the cache differ in heads or head size");
  if (ts.size() != 2 || ts[0] != B) return Wrong("tables must be [B, P]");
  if (!IsNumber(q.element_type()) || !IsStored(keys.element_type()) || keys.element_type() != values.element_type()) {
    return Wrong("q must be float32 or bfloat16, keys and values both one of these or uint16, which holds bfloat16");
  }
  if (layer.element_count() != 1 || offset.element_count() != 1 ||
      static_cast<int64_t>(positions.element_count()) != B * T || stride < 1) {
    return Wrong("layer and offset must be one number, positions one for each query, stride at least 1");
  }
  if (static_cast<int64_t>(out->element_count()) != B * Q * K * H ||
      static_cast<int64_t>(max->element_count()) != B * Q * K || sum->element_count() != max->element_count()) {
    return Wrong("out must be like q, max and sum like q without its last axis");
  }
  const int64_t at = *layer.typed_data(), first = *offset.typed_data(), P = ts[1];
  if (at < 0 || at >= L) return Wrong("layer " + std::to_string(at) + " of a cache of " + std::to_string(L));
  if (B * Q * K == 0) return ffi::Error::Success();

  std::vector<int64_t> seen(B * Q), filled(B, 0);  // slots that each query sees, and the most of a tile
  int64_t longest = 0;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < Q; ++i) {
      const int64_t ahead = positions.typed_data()[b * T + i / G] - first;
      seen[b * Q + i] = ahead < 0 ? 0 : std::min(P * S, ahead / stride + 1);
      filled[b] = std::max(filled[b], seen[b * Q + i]);
    }
    for (int64_t i = 0; i * S < filled[b]; ++i) {
      const int64_t page = tables.typed_data()[b * P + i];
      if (page < 0 || page >= N) return Wrong("page " + std::to_string(page) + " of " + std::to_string(N));
    }
    longest = std::max(longest, filled[b]);
  }
  std::vector<float> copy;
  const float* scaled = AsFloats(q, copy, 1.0f / std::sqrt(static_cast<float>(H)));
  // Segments are the same whatever else is in the batch, so a tile's result does not depend on its neighbours.
  const int64_t length = std::max<int64_t>(1, kSegment / S) * S;
  const int64_t segments = std::max<int64_t>(1, (longest + length - 1) / length);
  const int64_t step = Q * (H + 2);  // a partial result: out [Q, H], max [Q], sum [Q]
  std::vector<float> parts(segments > 1 ? B * K * segments * step : 0);
  const auto store = [&](const float* part, int64_t b, int64_t k) {
    for (int64_t i = 0; i < Q; ++i) {
      const int64_t to = ((b * T + i / G) * K + k) * G + i % G;
      std::copy(part + i * H, part + (i + 1) * H, out->typed_data() + to * H);
      max->typed_data()[to] = part[Q * H + i];
      sum->typed_data()[to] = part[Q * H + Q + i];
    }
  };
  WithType(keys, [&](auto* base) {
    using C = std::remove_const_t<std::remove_pointer_t<decltype(base)>>;
    const C* other = Data<C>(values);
    Parallel(pool, B * K * segments, [&](int64_t piece) {
      const int64_t segment = piece % segments, k = piece / segments % K, b = piece / segments / K;
      std::vector<float> work(Q * (H + kSlots + 1) + (segments > 1 ? 0 : step));
      float *rows = work.data(), *scores = rows + Q * H, *decay = scores + Q * kSlots;
      float* part = segments > 1 ? parts.data() + piece * step : decay + Q;
      for (int64_t i = 0; i < Q; ++i) {
        const float* from = scaled + (((b * T + i / G) * K + k) * G + i % G) * H;
        std::copy(from, from + H, rows + i * H);
      }
      const int64_t head = (at * N * K + k) * S * H;
      const int64_t begin = segment * length, end = std::min(filled[b], begin + length);
      AttendPages(rows, Q, H, base + head, other + head, tables.typed_data() + b * P, K * S * H, S, begin, end,
                  seen.data() + b * Q, scores, decay, part, part + Q * H, part + Q * H + Q);
      if (segments == 1) store(part, b, k);
    });
  });
  if (segments == 1) return ffi::Error::Success();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      float* whole = parts.data() + (b * K + k) * segments * step;
      for (int64_t segment = 1; segment * length < filled[b]; ++segment) {
        const float* more = whole + segment * step;
        Merge(Q, H, more, more + Q * H, more + Q * H + Q, whole, whole + Q * H, whole + Q * H + Q);
      }
      store(whole, b, k);
    }
  }
  return ffi::Error::Success();
}

// new [N, K, ...] to layer `layer` of cache [L, pages, K, S, ...], each at its own page and slot; a page outside the
// cache is skipped. The cache is written in place.
ffi::Error PagedWrite(ffi::AnyBuffer cache, ffi::AnyBuffer fresh, ffi::Buffer<ffi::S32> pages,
                      ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> out) {
  const auto cs = cache.dimensions(), ns = fresh.dimensions();
  if (cs.size() < 4 || ns.size() != cs.size() - 2 || cs[2] != ns[1] ||
      !std::equal(cs.begin() + 4, cs.end(), ns.begin() + 2, ns.end())) {
    return Wrong("the cache must be [L, pages, K, S, ...] and what is new [N, K, ...]");
  }
  if (cache.element_type() != fresh.element_type() || out->element_type() != cache.element_type() ||
      out->element_count() != cache.element_count()) {
    return Wrong("the cache, what is new and the result must be of one dtype, the result like the cache");
  }
  const int64_t N = ns[0], K = cs[2], S = cs[3];
  if (static_cast<int64_t>(pages.element_count()) != N || static_cast<int64_t>(slots.element_count()) != N ||
      layer.element_count() != 1) {
    return Wrong("pages and slots must be one number for each new position, layer one");
  }
  const int64_t at = *layer.typed_data();
  if (at < 0 || at >= cs[0]) return Wrong("layer " + std::to_string(at) + " of a cache of " + std::to_string(cs[0]));
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != cache.untyped_data()) std::memcpy(to, cache.untyped_data(), cache.size_bytes());
  const auto* from = static_cast<const char*>(fresh.untyped_data());
  int64_t row = static_cast<int64_t>(ffi::ByteWidth(cache.element_type()));
  for (size_t axis = 4; axis < cs.size(); ++axis) row *= cs[axis];
  for (int64_t n = 0; n < N; ++n) {
    const int64_t page = pages.typed_data()[n], slot = slots.typed_data()[n];
    if (page < 0 || page >= cs[1] || slot < 0 || slot >= S) continue;
    for (int64_t k = 0; k < K; ++k) {
      std::memcpy(to + (((at * cs[1] + page) * K + k) * S + slot) * row, from + (n * K + k) * row, row);
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace shardstream

XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_paged_attention, shardstream::Guard<shardstream::PagedAttention>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("stride"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_paged_write, shardstream::Guard<shardstream::PagedWrite>::Run,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
