// The paged operations as XLA calls them. Included by bindings.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cached.h"
#include "operands.h"
#include "paged.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace shardstream {

// A cache cut into pages: layer `at` of keys and values [L, N, K, S, H], through tables [B, P].
struct Pages {
  int64_t L, N, K, S, H, at, B, P;
  const int32_t* tables;

  int64_t slot(int64_t page, int64_t k, int64_t s) const { return (((at * N + page) * K + k) * S + s) * H; }
  // Its scale, in [L, 1, K, pages * S].
  int64_t scale(int64_t page, int64_t k, int64_t s) const { return ((at * K + k) * N + page) * S + s; }
};

inline ffi::Error CheckPages(Pages& pages, int64_t K, int64_t H, const ffi::AnyBuffer& keys,
                             const ffi::AnyBuffer& values, const std::vector<ffi::AnyBuffer>& beside, Scales& scales,
                             const ffi::Buffer<ffi::S32>& tables, const ffi::Buffer<ffi::S32>& layer) {
  const auto ks = keys.dimensions(), vs = values.dimensions(), ts = tables.dimensions();
  if (ks.size() != 5 || !std::equal(ks.begin(), ks.end(), vs.begin(), vs.end())) {
    return Wrong("keys and values must both be [L, pages, K, S, H]");
  }
  if (ks[2] != K || ks[4] != H || ks[3] < 1) return Wrong("the queries and the cache differ in heads or head size");
  if (auto error = CheckStored(keys, values, beside, scales); error.failure()) return error;
  if (ts.size() != 2 || layer.element_count() != 1) return Wrong("tables must be [B, P], layer one number");
  pages = {ks[0], ks[1], K, ks[3], H, *layer.typed_data(), ts[0], ts[1], tables.typed_data()};
  if (pages.at < 0 || pages.at >= pages.L) {
    return Wrong("layer " + std::to_string(pages.at) + " of a cache of " + std::to_string(pages.L));
  }
  return ffi::Error::Success();
}

// Tokens begin..begin+count, all of the sequence in row `table` of the tables, of which `filled` slots are seen.
struct PageTile {
  int64_t begin, count, table, filled;
};

// Every query against the slots it sees: seen[token] of them. fetch(token, k, g, to) writes a query, scaled, to `to`
// [H]; emit(token, k, g, out, max, sum) takes its unnormalised out [H]. A tile's result does not depend on the others:
// its slots are cut into segments of one length, whatever else there is.
template <typename Fetch, typename Emit>
ffi::Error AttendTiles(ffi::ThreadPool& pool, const Pages& pages, int64_t G, const ffi::AnyBuffer& keys,
                       const ffi::AnyBuffer& values, const Scales& scales, std::vector<PageTile>& tiles,
                       const std::vector<int64_t>& seen, const Fetch& fetch, const Emit& emit) {
  struct Piece {
    int64_t tile, k, begin, part;
  };
  const int64_t K = pages.K, H = pages.H, S = pages.S, length = std::max<int64_t>(1, kSegment / S) * S;
  std::vector<Piece> pieces;
  std::vector<int64_t> first(tiles.size());  // where a tile's partial results begin
  int64_t size = 0, slots = 0;
  for (size_t t = 0; t < tiles.size(); ++t) {
    PageTile& tile = tiles[t];
    tile.filled = 0;
    for (int64_t i = 0; i < tile.count; ++i) tile.filled = std::max(tile.filled, seen[tile.begin + i]);
    for (int64_t i = 0; i * S < tile.filled; ++i) {
      const int64_t page = pages.tables[tile.table * pages.P + i];
      if (page < 0 || page >= pages.N) return Wrong("page " + std::to_string(page) + " of " + std::to_string(pages.N));
    }
    first[t] = size;
    slots += tile.filled;
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t begin = 0; begin == 0 || begin < tile.filled; begin += length) {
        pieces.push_back({static_cast<int64_t>(t), k, begin, size});
        size += tile.count * G * (H + 2);  // out [Q, H], max [Q], sum [Q]
      }
    }
  }
  std::vector<float> parts(size);
  WithStored(keys, [&](auto* base) {
    using C = std::remove_const_t<std::remove_pointer_t<decltype(base)>>;
    const C* other = Data<C>(values);
    const auto attend = [&](int64_t index) {
      const Piece& piece = pieces[index];
      const PageTile& tile = tiles[piece.tile];
      const int64_t Q = tile.count * G;
      float* part = parts.data() + piece.part;
      std::vector<float> work(Q * (H + kSlots + 1));
      std::vector<int64_t> each(Q);
      float *rows = work.data(), *scores = rows + Q * H, *decay = scores + Q * kSlots;
      for (int64_t i = 0; i < Q; ++i) {
        each[i] = seen[tile.begin + i / G];
        if (tile.filled) fetch(tile.begin + i / G, piece.k, i % G, rows + i * H);
      }
      const int64_t head = pages.slot(0, piece.k, 0);
      AttendPages(rows, Q, H, base + head, other + head, scales.At(pages.scale(0, piece.k, 0)),
                  pages.tables + tile.table * pages.P, K * S * H, S, piece.begin, std::min(tile.filled, piece.begin + length), each.data(), scores, decay, part, part + Q * H,
                  part + Q * H + Q);
    };
    const int64_t count = static_cast<int64_t>(pieces.size());
    if (2 * K * slots * H * static_cast<int64_t>(sizeof(C)) < kAlone) {
      for (int64_t index = 0; index < count; ++index) attend(index);
    } else {
      Parallel(pool, count, attend);
    }
  });
  for (size_t p = 0; p < pieces.size();) {
    const PageTile& tile = tiles[pieces[p].tile];
    const int64_t k = pieces[p].k, Q = tile.count * G;
    float* whole = parts.data() + pieces[p].part;
    for (++p; p < pieces.size() && pieces[p].begin > 0; ++p) {
      const float* more = parts.data() + pieces[p].part;
      Merge(Q, H, more, more + Q * H, more + Q * H + Q, whole, whole + Q * H, whole + Q * H + Q);
    }
    for (int64_t i = 0; i < Q; ++i) {
      emit(tile.begin + i / G, k, i % G, whole + i * H, whole[Q * H + i], whole[Q * H + Q + i]);
    }
  }
  return ffi::Error::Success();
}

// q [B, T, K, G, H] against pages, tile b over those in tables [B, P]; slot s of the i-th of them holds position (i * S +
// s) * stride + offset, and the query at positions [B, T] sees positions up to its own. `beside` are the scales
// [L, 1, K, pages * S] of an int8 or fp8 cache. -> out like q, max and sum [B, T, K, G].
inline ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                                 ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> layer,
                                 ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> offset,
                                 const std::vector<ffi::AnyBuffer>& beside, ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::Buffer<ffi::F32>> max,
                                 ffi::Result<ffi::Buffer<ffi::F32>> sum, int32_t stride) {
  const auto qs = q.dimensions();
  if (qs.size() != 5 || !IsNumber(q.element_type())) {
    return Wrong("q must be [B, T, K, G, H] in float32 or bfloat16");
  }
  const int64_t B = qs[0], T = qs[1], K = qs[2], G = qs[3], H = qs[4], tokens = B * T;
  Pages pages;
  Scales scales;
  if (auto error = CheckPages(pages, K, H, keys, values, beside, scales, tables, layer); error.failure()) return error;
  if (pages.B != B) return Wrong("tables must be [B, P]");
  if (offset.element_count() != 1 || static_cast<int64_t>(positions.element_count()) != tokens || stride < 1) {
    return Wrong("offset must be one number, positions one for each query, stride at least 1");
  }
  if (static_cast<int64_t>(out->element_count()) != tokens * K * G * H ||
      static_cast<int64_t>(max->element_count()) != tokens * K * G || sum->element_count() != max->element_count()) {
    return Wrong("out must be like q, max and sum like q without its last axis");
  }
  std::vector<int64_t> seen(tokens);
  for (int64_t n = 0; n < tokens; ++n) {
    const int64_t ahead = int64_t{positions.typed_data()[n]} - *offset.typed_data();
    seen[n] = ahead < 0 ? 0 : std::min(pages.P * pages.S, ahead / stride + 1);
  }
  std::vector<PageTile> tiles;
  for (int64_t b = 0; b < B; ++b) tiles.push_back({b * T, T, b, 0});
  std::vector<float> copy;
  const float* scaled = AsFloats(q, copy, 1.0f / std::sqrt(static_cast<float>(H)));
  return AttendTiles(
      pool, pages, G, keys, values, scales, tiles, seen,
      [&](int64_t n, int64_t k, int64_t g, float* to) {
        const float* from = scaled + ((n * K + k) * G + g) * H;
        std::copy(from, from + H, to);
      },
      [&](int64_t n, int64_t k, int64_t g, const float* mixed, float top, float total) {
        const int64_t to = (n * K + k) * G + g;
        std::copy(mixed, mixed + H, out->typed_data() + to * H);
        max->typed_data()[to] = top;
        sum->typed_data()[to] = total;
      });
}

// What a step does between two products, over pages: heads [1, N, K, G + 2, H] are turned by cos and sin [1, N, H / 2],
// keys and values stored at positions [N] (-1: padding), and the queries attend. The first `rows` tokens are a tile
// each, the others in tiles of `tile`; tables has a row for each tile. -> out [1, N, K, G, H], and the cache, in place.
inline ffi::Error PagedExtend(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::Buffer<ffi::F32> cos,
                              ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                              ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> layer,
                              ffi::Buffer<ffi::S32> positions, const std::vector<ffi::AnyBuffer>& beside,
                              ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                              ffi::Result<ffi::AnyBuffer> new_values, const std::vector<ffi::AnyBuffer>& new_beside,
                              int32_t rows, int32_t tile) {
  const auto hs = heads.dimensions(), os = out->dimensions();
  if (hs.size() != 5 || hs[0] != 1 || hs[3] < 2 || hs[4] % 2) return Wrong("heads must be [1, N, K, G + 2, H], H even");
  const int64_t N = hs[1], K = hs[2], G = hs[3] - 2, H = hs[4], half = H / 2;
  if (!IsNumber(heads.element_type()) || out->element_type() != heads.element_type()) {
    return Wrong("heads and out must both be float32 or bfloat16");
  }
  if (os.size() != 5 || os[0] != 1 || os[1] != N || os[2] != K || os[3] != G || os[4] != H) {
    return Wrong("out must be [1, N, K, G, H]");
  }
  if (static_cast<int64_t>(cos.element_count()) != N * half || sin.element_count() != cos.element_count() ||
      static_cast<int64_t>(positions.element_count()) != N) {
    return Wrong("cos and sin must be [1, N, H / 2], positions [N]");
  }
  Pages pages;
  Scales scales;
  if (auto error = CheckPages(pages, K, H, keys, values, beside, scales, tables, layer); error.failure()) return error;
  if (rows < 0 || rows > N || tile < 1 || (N - rows) % tile || pages.B != rows + (N - rows) / tile) {
    return Wrong("tables must have a row for each of the rows and tiles");
  }
  if (auto error = InPlace({keys, values}, {*new_keys, *new_values}); error.failure()) return error;
  if (auto error = InPlace(beside, new_beside); error.failure()) return error;
  if (auto error = CheckStored(*new_keys, *new_values, new_beside, scales); error.failure()) return error;
  const auto row_of = [&](int64_t n) { return n < rows ? n : rows + (n - rows) / tile; };
  std::vector<int64_t> seen(N);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t position = positions.typed_data()[n];
    seen[n] = std::clamp<int64_t>(position + 1, 0, pages.P * pages.S);
    if (position >= pages.P * pages.S) return Wrong("position " + std::to_string(position) + " is past the tables");
    if (position < 0) continue;
    const int64_t page = pages.tables[row_of(n) * pages.P + position / pages.S];
    if (page < 0 || page >= pages.N) return Wrong("page " + std::to_string(page) + " of " + std::to_string(pages.N));
  }
  std::vector<PageTile> tiles;
  for (int64_t n = 0; n < N; n += n < rows ? 1 : tile) tiles.push_back({n, n < rows ? 1 : tile, row_of(n), 0});
  ffi::Error error = ffi::Error::Success();
  WithType(heads, [&](auto* x) {
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
    WithStored(keys, [&](auto* stored) {
      using C = std::remove_const_t<std::remove_pointer_t<decltype(stored)>>;
      std::vector<float> turned(H);
      for (int64_t n = 0; n < N; ++n) {
        const int64_t position = positions.typed_data()[n];
        if (position < 0) continue;
        const int64_t page = pages.tables[row_of(n) * pages.P + position / pages.S];
        for (int64_t k = 0; k < K; ++k) {
          const X* key = x + ((n * K + k) * (G + 2) + G) * H;
          const int64_t at = pages.slot(page, k, position % pages.S);
          const Scales beside_it = scales.At(pages.scale(page, k, position % pages.S));
          Rotate(key, cos.typed_data() + n * half, sin.typed_data() + n * half, H, 1.0f, turned.data());
          for (float& number : turned) number = RoundedLike(number, X{});
          PutEntry(turned.data(), H, static_cast<C*>(new_keys->untyped_data()) + at, beside_it.keys);
          for (int64_t h = 0; h < H; ++h) turned[h] = Widen(key[H + h]);
          PutEntry(turned.data(), H, static_cast<C*>(new_values->untyped_data()) + at, beside_it.values);
        }
      }
    });
    const float factor = 1.0f / std::sqrt(static_cast<float>(H));
    error = AttendTiles(
        pool, pages, G, *new_keys, *new_values, scales, tiles, seen,
        [&](int64_t n, int64_t k, int64_t g, float* to) {
          const X* query = x + ((n * K + k) * (G + 2) + g) * H;
          Rotate(query, cos.typed_data() + n * half, sin.typed_data() + n * half, H, factor, to);
        },
        [&](int64_t n, int64_t k, int64_t g, const float* mixed, float, float total) {
          X* to = static_cast<X*>(out->untyped_data()) + ((n * K + k) * G + g) * H;
          const float scale = total > 0 ? 1.0f / total : total;  // NaN stays one, nothing seen is 0
          for (int64_t h = 0; h < H; ++h) Put(mixed[h] * scale, to + h);
        });
  });
  return error;
}

// new [N, K, ...] to layer `layer` of cache [L, pages, K, S, ...], each at its own page and slot; a page outside the
// cache is skipped. The cache is written in place.
inline ffi::Error PagedWrite(ffi::AnyBuffer cache, ffi::AnyBuffer fresh, ffi::Buffer<ffi::S32> pages,
                             ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> layer,
                             ffi::Result<ffi::AnyBuffer> out) {
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

// The two as XLA calls them, with the scales as what remains.
inline ffi::Error PagedAttentionCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                                     ffi::AnyBuffer values, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> layer,
                                     ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> offset,
                                     ffi::RemainingArgs beside, ffi::Result<ffi::Buffer<ffi::F32>> out,
                                     ffi::Result<ffi::Buffer<ffi::F32>> max, ffi::Result<ffi::Buffer<ffi::F32>> sum,
                                     int32_t stride) {
  return PagedAttention(pool, q, keys, values, tables, layer, positions, offset, All(beside), out, max, sum, stride);
}

inline ffi::Error PagedExtendCall(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::Buffer<ffi::F32> cos,
                                  ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                                  ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> layer,
                                  ffi::Buffer<ffi::S32> positions, ffi::RemainingArgs beside,
                                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                                  ffi::Result<ffi::AnyBuffer> new_values, ffi::RemainingRets new_beside, int32_t rows,
                                  int32_t tile) {
  return PagedExtend(pool, heads, cos, sin, keys, values, tables, layer, positions, All(beside), out, new_keys,
                     new_values, All(new_beside), rows, tile);
}

}  // namespace shardstream

XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_paged_attention, shardstream::Guard<shardstream::PagedAttentionCall>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("stride"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_paged_extend, shardstream::Guard<shardstream::PagedExtendCall>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int32_t>("rows")
                                  .Attr<int32_t>("tile"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_paged_write, shardstream::Guard<shardstream::PagedWrite>::Run,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
