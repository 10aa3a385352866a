// Products of a few activation rows with a weight [O, I], wide or quantised: plain, of normed rows, and gated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "matmul.h"
#include "norm.h"
#include "operands.h"
#include "quantized.h"
#include "tiles.h"

namespace shardstream {

constexpr int64_t kTogether = 64;      // activation rows that a thread's piece of the weight is multiplied with at a time
constexpr int64_t kShared = 1 << 15;   // activations from which on preparing them is shared between threads

// The operands of a product. `rest` is a wide weight alone, or a quantised one's values, scales and perhaps offsets
// (see kernels/quantized.py); then perhaps what is added to the product, [M, O].
struct Operands {
  ffi::AnyBuffer x;
  std::optional<ffi::AnyBuffer> norm;  // [I], where x is normed first
  float eps;
  std::vector<ffi::AnyBuffer> rest;
  int32_t arrays;  // of `rest`, that are the weight
  int32_t group;   // values that share a scale; 0 is a whole row

  int64_t M() const { return x.dimensions()[0]; }
  int64_t I() const { return x.dimensions()[1]; }
  int64_t O() const { return rest[0].dimensions()[0]; }
  const ffi::AnyBuffer* added() const { return static_cast<int32_t>(rest.size()) > arrays ? &rest.back() : nullptr; }
};

inline ffi::Error CheckQuantized(const Operands& of) {
  const auto &values = of.rest[0], &scales = of.rest[1];
  const int64_t I = of.I();
  const bool packed = values.element_type() == ffi::DataType::U8;
  if (!packed && values.element_type() != ffi::DataType::S8) return Wrong("quantised values must be int8 or uint8");
  if (of.group != 0 && of.group != 32 && of.group != 64 && of.group != 128) {
    return Wrong("a group must be 32, 64 or 128 values, or 0 for a whole row, not " + std::to_string(of.group));
  }
  if (packed && I % 32) return Wrong("x must have a multiple of 32 columns for weights of 4 bits");
  if (values.dimensions()[1] != (packed ? I / 2 : I)) return Wrong("x and w differ in their last axis");
  const int64_t groups = of.group == 0 ? 1 : (I + of.group - 1) / of.group;
  for (int32_t i = 1; i < of.arrays; ++i) {
    const auto shape = of.rest[i].dimensions();
    if (shape.size() != 2 || shape[0] != of.O() || shape[1] != groups) {
      return Wrong("scales and offsets must have a row for each of w and a column for each group");
    }
    const auto type = of.rest[i].element_type();
    if ((!IsNumber(type) && type != ffi::DataType::F16) || type != scales.element_type()) {
      return Wrong("scales and offsets must both be float16, bfloat16 or float32");
    }
  }
  return ffi::Error::Success();
}

// gate: w is gate above up.
inline ffi::Error Check(const Operands& of, const ffi::AnyBuffer& out, bool gate = false) {
  const auto xs = of.x.dimensions(), os = out.dimensions();
  if (of.arrays < 1 || of.arrays > 3 || static_cast<int32_t>(of.rest.size()) < of.arrays ||
      static_cast<int32_t>(of.rest.size()) > of.arrays + 1) {
    return Wrong("a weight is 1 to 3 arrays, and one more may be added to the product");
  }
  if (gate && of.added()) return Wrong("nothing can be added to a gate");
  const auto ws = of.rest[0].dimensions();
  if (gate && (ws.size() != 2 || ws[0] % 2)) return Wrong("w must have two axes, the first even");
  if (ws.size() != 2) return Wrong("w must have two axes");
  if (xs.size() != 2 || os.size() != 2) return Wrong("x, w and out must have two axes");
  if (os[0] != xs[0] || os[1] != (gate ? ws[0] / 2 : ws[0])) {
    return Wrong("out must have a row for each of x and a column for each of w");
  }
  if (!IsNumber(of.x.element_type()) || !IsNumber(out.element_type())) {
    return Wrong("x and out must be float32 or bfloat16");
  }
  if (of.arrays > 1) {
    if (auto error = CheckQuantized(of); error.failure()) return error;
  } else {
    if (!IsNumber(of.rest[0].element_type())) return Wrong("w must be float32 or bfloat16");
    if (xs[1] != ws[1]) return Wrong("x and w differ in their last axis");
  }
  if (of.norm && (of.norm->dimensions().size() != 1 || of.norm->dimensions()[0] != xs[1] ||
                  !IsNumber(of.norm->element_type()))) {
    return Wrong("the norm's scale must be float32 or bfloat16, one for each column of x");
  }
  if (const auto* added = of.added()) {
    const auto as = added->dimensions();
    if (!std::equal(as.begin(), as.end(), os.begin(), os.end()) || !IsNumber(added->element_type())) {
      return Wrong("what is added must be float32 or bfloat16, and like out");
    }
  }
  return ffi::Error::Success();
}

// Calls run(m, row) with each row of x, normed where it is to be, in float32.
template <typename Run>
void ForRows(ffi::ThreadPool& pool, const Operands& of, const Run& run) {
  const int64_t M = of.M(), I = of.I();
  const auto one = [&](int64_t m) {
    std::vector<float> wide, normed;
    const float* row = Data<float>(of.x) + m * I;
    if (of.x.element_type() != ffi::DataType::F32) {
      wide.resize(I);
      Widened(of.x, m * I, I, wide.data());
      row = wide.data();
    }
    if (of.norm) {
      normed.resize(I);
      WithType(*of.norm, [&](auto* scale) { RmsNorm(row, scale, I, of.eps, normed.data()); });
      row = normed.data();
    }
    run(m, row);
  };
  if (M * I >= kShared) {
    Parallel(pool, M, one);
  } else {
    for (int64_t m = 0; m < M; ++m) one(m);
  }
}

// A product that is ready to run: rows [begin, end) of the weight with every row of x.
template <typename W>
struct Wide {
  const W* w;
  const float* x;
  int64_t O, M, I;

  int64_t row_bytes() const { return I * sizeof(W); }
  void Run(int64_t begin, int64_t end, float* out, int64_t ldo) const {
    for (int64_t m = 0; m < M; m += kTogether) {
      Rows(w, O, begin, end, x + m * I, std::min(kTogether, M - m), I, out + m * ldo, ldo);
    }
  }
};

template <int kBits, bool kGrouped>
struct Narrowed {
  Quantized<kBits, kGrouped> w;
  const Activations<kBits>& x;
  int64_t M;

  int64_t row_bytes() const { return w.row_bytes() + w.groups() * w.scales.width(); }
  void Run(int64_t begin, int64_t end, float* out, int64_t ldo) const {
    for (int64_t m = 0; m < M; m += kTogether) Rows(w, begin, end, x, m, std::min(M, m + kTogether), out, ldo);
  }
};

#ifdef SHARDSTREAM_TILES
template <int kBits, bool kGrouped>
struct Tiled {
  Quantized<kBits, kGrouped> w;
  const TiledActivations& x;
  int64_t M;

  int64_t row_bytes() const { return w.row_bytes() + w.groups() * w.scales.width(); }
  void Run(int64_t begin, int64_t end, float* out, int64_t ldo) const { Rows(w, begin, end, x, M, out, ldo); }
};
#endif

inline Numbers AsNumbers(const ffi::AnyBuffer& buffer) {
  const auto type = buffer.element_type();
  return {type == ffi::DataType::F32   ? Numbers::Type::kFloat
          : type == ffi::DataType::F16 ? Numbers::Type::kHalf
                                       : Numbers::Type::kBFloat16,
          buffer.untyped_data()};
}

template <int kBits, bool kGrouped, typename Run>
void WithQuantized(ffi::ThreadPool& pool, const Operands& of, const Run& run) {
  const Numbers offsets = of.arrays > 2 ? AsNumbers(of.rest[2]) : Numbers{};
  const int64_t group = kGrouped ? of.group : std::max<int64_t>(1, of.I());
  const Quantized<kBits, kGrouped> w{Data<uint8_t>(of.rest[0]), AsNumbers(of.rest[1]), offsets, of.O(), of.I(), group};
#ifdef SHARDSTREAM_TILES
  if (of.M() >= kFewest && of.I() > 0 && MayTile()) {
    TiledActivations x(of.M(), of.I());
    ForRows(pool, of, [&](int64_t m, const float* row) { x.Set(m, row, of.I()); });
    x.Arrange();
    return run(Tiled<kBits, kGrouped>{w, x, of.M()});
  }
#endif
  Activations<kBits> x(of.M(), of.I(), w.groups(), offsets.data != nullptr);
  ForRows(pool, of, [&](int64_t m, const float* row) { x.Set(m, row, of.I(), group); });
  run(Narrowed<kBits, kGrouped>{w, x, of.M()});
}

// Calls run with the product, once x is in the form that the weight is multiplied with.
template <typename Run>
void WithProduct(ffi::ThreadPool& pool, const Operands& of, const Run& run) {
  if (of.arrays > 1) {
    const bool wide = of.rest[0].element_type() == ffi::DataType::S8, grouped = of.group != 0;
    if (wide && grouped) WithQuantized<8, true>(pool, of, run);
    if (wide && !grouped) WithQuantized<8, false>(pool, of, run);
    if (!wide && grouped) WithQuantized<4, true>(pool, of, run);
    if (!wide && !grouped) WithQuantized<4, false>(pool, of, run);
    return;
  }
  std::vector<float> copy;
  const float* x = Data<float>(of.x);
  if (of.norm || of.x.element_type() != ffi::DataType::F32) {
    copy.resize(of.M() * of.I());
    ForRows(pool, of, [&](int64_t m, const float* row) { std::copy(row, row + of.I(), copy.data() + m * of.I()); });
    x = copy.data();
  }
  WithType(of.rest[0], [&](auto* w) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    run(Wide<W>{w, x, of.O(), of.M(), of.I()});
  });
}

// Columns [begin, end) of out [M, O] from rows [M, end - begin], with what is added, rounded to out's type.
inline void Put(const float* rows, int64_t M, int64_t begin, int64_t end, const ffi::AnyBuffer* added,
                ffi::AnyBuffer& out) {
  const int64_t O = out.dimensions()[1], count = end - begin;
  const auto put = [&](auto* to, auto&& make) {
    for (int64_t m = 0; m < M; ++m) {
      const float* row = rows + m * count;
      auto* line = to + m * O + begin;
      if (added) {
        WithType(*added, [&](auto* more) {
          for (int64_t j = 0; j < count; ++j) line[j] = make(row[j] + Widen(more[m * O + begin + j]));
        });
      } else {
        for (int64_t j = 0; j < count; ++j) line[j] = make(row[j]);
      }
    }
  };
  if (out.element_type() == ffi::DataType::F32) {
    put(static_cast<float*>(out.untyped_data()), [](float v) { return v; });
  } else {
    put(static_cast<BFloat16*>(out.untyped_data()), [](float v) { return Narrow(v); });
  }
}

// out [M, O] = x @ w^T, plus what is added.
inline ffi::Error Multiply(ffi::ThreadPool& pool, const Operands& of, ffi::AnyBuffer out) {
  if (auto error = Check(of, out); error.failure()) return error;
  if (out.element_count() == 0) return ffi::Error::Success();
  const int64_t O = of.O(), M = of.M();
  const bool direct = out.element_type() == ffi::DataType::F32 && !of.added();
  WithProduct(pool, of, [&](const auto& product) {
    const int64_t size = RowsPerPiece(O, product.row_bytes());
    Parallel(pool, (O + size - 1) / size, [&](int64_t piece) {
      const int64_t begin = piece * size, end = std::min(O, begin + size);
      if (direct) return product.Run(begin, end, static_cast<float*>(out.untyped_data()) + begin, O);
      std::vector<float> rows(M * (end - begin));
      product.Run(begin, end, rows.data(), end - begin);
      Put(rows.data(), M, begin, end, of.added(), out);
    });
  });
  return ffi::Error::Success();
}

// out [M, F] = silu(x @ gate^T) * (x @ up^T) for w [2F, I], gate above up.
inline ffi::Error MultiplyGate(ffi::ThreadPool& pool, const Operands& of, ffi::AnyBuffer out) {
  if (auto error = Check(of, out, true); error.failure()) return error;
  if (out.element_count() == 0) return ffi::Error::Success();
  const int64_t F = of.O() / 2, M = of.M();
  WithProduct(pool, of, [&](const auto& product) {
    const int64_t size = RowsPerPiece(F, 2 * product.row_bytes());
    Parallel(pool, (F + size - 1) / size, [&](int64_t piece) {
      const int64_t begin = piece * size, end = std::min(F, begin + size), count = end - begin;
      std::vector<float> gates(M * count), up(M * count);
      product.Run(begin, end, gates.data(), count);
      product.Run(F + begin, F + end, up.data(), count);
      Gate(gates.data(), up.data(), M * count);
      Put(gates.data(), M, begin, end, nullptr, out);
    });
  });
  return ffi::Error::Success();
}

}  // namespace shardstream
