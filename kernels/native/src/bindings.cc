// The operations as XLA calls them: shapes and dtypes are checked here, so that a wrong one is an error in Python.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "norm.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace shardstream {
namespace {

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("shardstream: " + what); }

bool IsNumber(ffi::DataType type) { return type == ffi::DataType::F32 || type == ffi::DataType::BF16; }
// A cache may hold bfloat16 as uint16.
bool IsStored(ffi::DataType type) { return IsNumber(type) || type == ffi::DataType::U16; }

// The handler with what it throws (memory that cannot be had, above all) as an error in Python: XLA is compiled without
// exceptions, and one that reached it would end the process.
template <auto handler>
struct Guard;

template <typename... Args, ffi::Error (*handler)(Args...)>
struct Guard<handler> {
  static ffi::Error Run(Args... args) {
    try {
      return handler(std::move(args)...);
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "shardstream: out of memory");
    } catch (const std::exception& error) {
      return ffi::Error::Internal(std::string("shardstream: ") + error.what());
    }
  }
};

template <typename T>
const T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Calls run with a pointer of the buffer's own element type.
template <typename Run>
void WithType(const ffi::AnyBuffer& buffer, const Run& run) {
  if (buffer.element_type() == ffi::DataType::F32) {
    run(Data<float>(buffer));
  } else {
    run(Data<BFloat16>(buffer));
  }
}

// The buffer as float32, times factor: itself where nothing is to do, else a copy kept in `copy`.
const float* AsFloats(const ffi::AnyBuffer& buffer, std::vector<float>& copy, float factor = 1.0f) {
  if (buffer.element_type() == ffi::DataType::F32 && factor == 1.0f) return Data<float>(buffer);
  copy.resize(buffer.element_count());
  WithType(buffer, [&](auto* from) {
    for (size_t i = 0; i < copy.size(); ++i) copy[i] = Widen(from[i]) * factor;
  });
  return copy.data();
}

// Where an operation writes its float32 results: the output itself, or a copy that Finish rounds into it.
class Output {
 public:
  explicit Output(ffi::Result<ffi::AnyBuffer>& buffer) : buffer_(*buffer) {
    if (buffer_.element_type() != ffi::DataType::F32) copy_.resize(buffer_.element_count());
  }
  float* data() { return copy_.empty() ? static_cast<float*>(buffer_.untyped_data()) : copy_.data(); }
  void Finish() {
    auto* to = static_cast<BFloat16*>(buffer_.untyped_data());
    for (size_t i = 0; i < copy_.size(); ++i) to[i] = Narrow(copy_[i]);
  }

 private:
  ffi::AnyBuffer& buffer_;
  std::vector<float> copy_;
};

ffi::Error CheckProduct(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const ffi::AnyBuffer& out, int64_t outputs) {
  const auto xs = x.dimensions(), ws = w.dimensions(), os = out.dimensions();
  if (xs.size() != 2 || ws.size() != 2 || os.size() != 2) return Wrong("x, w and out must have two axes");
  if (xs[1] != ws[1]) return Wrong("x and w differ in their last axis");
  if (os[0] != xs[0] || os[1] != outputs) return Wrong("out must have a row for each of x and a column for each of w");
  if (!IsNumber(x.element_type()) || !IsNumber(w.element_type()) || !IsNumber(out.element_type())) {
    return Wrong("x, w and out must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

ffi::Error CheckScale(const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale) {
  if (scale.dimensions().size() != 1 || scale.dimensions()[0] != x.dimensions()[1] || !IsNumber(scale.element_type())) {
    return Wrong("the norm's scale must be float32 or bfloat16, one for each column of x");
  }
  return ffi::Error::Success();
}

// x [M, I] -> x / rms(x) * scale in `copy`.
const float* Normed(const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale, float eps, std::vector<float>& copy) {
  const int64_t M = x.dimensions()[0], I = x.dimensions()[1];
  std::vector<float> wide;
  const float* from = AsFloats(x, wide);
  copy.resize(M * I);
  WithType(scale, [&](auto* weights) {
    for (int64_t m = 0; m < M; ++m) RmsNorm(from + m * I, weights, I, eps, copy.data() + m * I);
  });
  return copy.data();
}

void Product(ffi::ThreadPool& pool, const float* x, int64_t M, const ffi::AnyBuffer& w, float* out) {
  const int64_t O = w.dimensions()[0], I = w.dimensions()[1];
  WithType(w, [&](auto* weights) {
    const int64_t size = RowsPerPiece(O, I * sizeof(*weights));
    Parallel(pool, (O + size - 1) / size, [&](int64_t piece) {
      const int64_t begin = piece * size, end = std::min(O, begin + size);
      Rows(weights, O, begin, end, x, M, I, out + begin, O);
    });
  });
}

// x [M, I] @ w [O, I]^T -> [M, O].
ffi::Error MatMul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  if (w.dimensions().size() != 2) return Wrong("w must have two axes");
  if (auto error = CheckProduct(x, w, *out, w.dimensions()[0]); error.failure()) return error;
  if (out->element_count() == 0) return ffi::Error::Success();
  std::vector<float> copy;
  Output to(out);
  Product(pool, AsFloats(x, copy), x.dimensions()[0], w, to.data());
  to.Finish();
  return ffi::Error::Success();
}

// The same of x / rms(x) * scale [I].
ffi::Error NormedMatMul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer w,
                        ffi::Result<ffi::AnyBuffer> out, float eps) {
  if (w.dimensions().size() != 2) return Wrong("w must have two axes");
  if (auto error = CheckProduct(x, w, *out, w.dimensions()[0]); error.failure()) return error;
  if (auto error = CheckScale(x, scale); error.failure()) return error;
  if (out->element_count() == 0) return ffi::Error::Success();
  std::vector<float> copy;
  Output to(out);
  Product(pool, Normed(x, scale, eps, copy), x.dimensions()[0], w, to.data());
  to.Finish();
  return ffi::Error::Success();
}

// silu(n @ gate^T) * (n @ up^T) for n = x / rms(x) * scale [I] and w [2F, I], gate above up -> [M, F].
ffi::Error NormedGate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer w,
                      ffi::Result<ffi::AnyBuffer> out, float eps) {
  if (w.dimensions().size() != 2 || w.dimensions()[0] % 2) return Wrong("w must have two axes, the first even");
  const int64_t F = w.dimensions()[0] / 2, I = w.dimensions()[1];
  if (auto error = CheckProduct(x, w, *out, F); error.failure()) return error;
  if (auto error = CheckScale(x, scale); error.failure()) return error;
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t M = x.dimensions()[0];
  std::vector<float> copy;
  const float* rows = Normed(x, scale, eps, copy);
  Output to(out);
  float* gates = to.data();
  WithType(w, [&](auto* weights) {
    const int64_t size = RowsPerPiece(F, 2 * I * sizeof(*weights));
    Parallel(pool, (F + size - 1) / size, [&](int64_t piece) {
      const int64_t begin = piece * size, end = std::min(F, begin + size), count = end - begin;
      std::vector<float> up(M * count);
      Rows(weights, F, begin, end, rows, M, I, gates + begin, F);
      Rows(weights + F * I, F, begin, end, rows, M, I, up.data(), count);
      for (int64_t m = 0; m < M; ++m) Gate(gates + m * F + begin, up.data() + m * count, count);
    });
  });
  to.Finish();
  return ffi::Error::Success();
}

// q [B, T, K, G, H] against layer `layer` of keys and values [L, B, K, S, H]; slot s holds position s * stride +
// offset, and the query at positions [B, T] sees positions up to its own. -> out like q, max and sum [B, T, K, G].
ffi::Error CacheAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                          ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> offset,
                          ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::Buffer<ffi::F32>> max,
                          ffi::Result<ffi::Buffer<ffi::F32>> sum, int32_t stride) {
  const auto qs = q.dimensions(), ks = keys.dimensions(), vs = values.dimensions();
  if (qs.size() != 5 || ks.size() != 5 || !std::equal(ks.begin(), ks.end(), vs.begin(), vs.end())) {
    return Wrong("q must be [B, T, K, G, H], keys and values both [L, B, K, S, H]");
  }
  const int64_t B = qs[0], T = qs[1], K = qs[2], G = qs[3], H = qs[4], L = ks[0], S = ks[3], Q = T * G;
  if (ks[1] != B || ks[2] != K || ks[4] != H) return Wrong("q and the cache differ in rows, heads or head size");
  if (!IsNumber(q.element_type()) || !IsStored(keys.element_type()) || keys.element_type() != values.element_type()) {
    return Wrong("q must be float32 or bfloat16, keys and values both one of these or uint16, which holds bfloat16");
  }
  if (layer.element_count() != 1 || offset.element_count() != 1 ||
      static_cast<int64_t>(positions.element_count()) != B * T || stride < 1) {
    return Wrong("layer and offset must be one number, positions one for each query, stride at least 1");
  }
  if (static_cast<int64_t>(out->element_count()) != B * T * K * G * H ||
      static_cast<int64_t>(max->element_count()) != B * T * K * G || sum->element_count() != max->element_count()) {
    return Wrong("out must be like q, max and sum like q without its last axis");
  }
  const int64_t at = *layer.typed_data(), first = *offset.typed_data();
  if (at < 0 || at >= L) return Wrong("layer " + std::to_string(at) + " of a cache of " + std::to_string(L));
  if (B * Q * K == 0) return ffi::Error::Success();

  std::vector<int64_t> seen(B * Q), filled(B, 0);  // slots that each query sees, and the most of a row
  int64_t longest = 0;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < Q; ++i) {
      const int64_t ahead = positions.typed_data()[b * T + i / G] - first;
      seen[b * Q + i] = ahead < 0 ? 0 : std::min(S, ahead / stride + 1);
      filled[b] = std::max(filled[b], seen[b * Q + i]);
    }
    longest = std::max(longest, filled[b]);
  }
  std::vector<float> copy;
  const float* scaled = AsFloats(q, copy, 1.0f / std::sqrt(static_cast<float>(H)));
  const int64_t segments = std::max<int64_t>(1, (longest + kSegment - 1) / kSegment);
  // A partial result for each row, head and segment: out [Q, H], max [Q], sum [Q]. The first is where others merge.
  const int64_t step = Q * (H + 2);
  std::vector<float> parts(B * K * segments * step);
  WithType(keys, [&](auto* base) {
    using C = std::remove_const_t<std::remove_pointer_t<decltype(base)>>;
    const C* other = Data<C>(values);
    Parallel(pool, B * K * segments, [&](int64_t piece) {
      const int64_t segment = piece % segments, k = piece / segments % K, b = piece / segments / K;
      std::vector<float> rows(Q * H);
      for (int64_t i = 0; i < Q; ++i) {
        const float* from = scaled + (((b * T + i / G) * K + k) * G + i % G) * H;
        std::copy(from, from + H, rows.data() + i * H);
      }
      const int64_t head = ((at * B + b) * K + k) * S * H;
      const int64_t begin = segment * kSegment, end = std::min(filled[b], begin + kSegment);
      float* part = parts.data() + piece * step;
      Attend(rows.data(), Q, H, base + head, other + head, begin, end, seen.data() + b * Q, part, part + Q * H,
             part + Q * H + Q);
    });
  });
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      float* whole = parts.data() + (b * K + k) * segments * step;
      for (int64_t segment = 1; segment < segments; ++segment) {
        const float* more = whole + segment * step;
        Merge(Q, H, more, more + Q * H, more + Q * H + Q, whole, whole + Q * H, whole + Q * H + Q);
      }
      for (int64_t i = 0; i < Q; ++i) {
        const int64_t to = ((b * T + i / G) * K + k) * G + i % G;
        std::copy(whole + i * H, whole + (i + 1) * H, out->typed_data() + to * H);
        max->typed_data()[to] = whole[Q * H + i];
        sum->typed_data()[to] = whole[Q * H + Q + i];
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace shardstream

#include "paged_bindings.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_matmul, shardstream::Guard<shardstream::MatMul>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_normed_matmul, shardstream::Guard<shardstream::NormedMatMul>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_normed_gate, shardstream::Guard<shardstream::NormedGate>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_cache_attention, shardstream::Guard<shardstream::CacheAttention>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("stride"));
