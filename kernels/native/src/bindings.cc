// The operations as XLA calls them: shapes and dtypes are checked, so that a wrong one is an error in Python.
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cached.h"
#include "operands.h"
#include "products.h"

namespace shardstream {
namespace {

// x [M, I] @ w [O, I]^T, plus what may be added -> [M, O]. `rest`, `arrays` and `group` as in Operands.
ffi::Error MatMul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                  int32_t arrays, int32_t group) {
  return Multiply(pool, {x, std::nullopt, 0.0f, All(rest), arrays, group}, *out);
}

// The same of x / rms(x) * norm [I].
ffi::Error NormedMatMul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> out, float eps, int32_t arrays, int32_t group) {
  return Multiply(pool, {x, norm, eps, All(rest), arrays, group}, *out);
}

// silu(n @ gate^T) * (n @ up^T) for n = x / rms(x) * norm [I] and w [2F, I], gate above up -> [M, F].
ffi::Error NormedGate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> out, float eps, int32_t arrays, int32_t group) {
  return MultiplyGate(pool, {x, norm, eps, All(rest), arrays, group}, *out);
}

// The attention of new positions, with the scales of keys and values as what remains.
ffi::Error CacheAttentionCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                              ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions,
                              ffi::Buffer<ffi::S32> offset, ffi::RemainingArgs beside,
                              ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::Buffer<ffi::F32>> max,
                              ffi::Result<ffi::Buffer<ffi::F32>> sum, int32_t stride) {
  return CacheAttention(pool, q, keys, values, layer, positions, offset, All(beside), out, max, sum, stride);
}

ffi::Error RopeAttentionCall(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::Buffer<ffi::F32> cos,
                             ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                             ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions, ffi::RemainingArgs beside,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                             ffi::Result<ffi::AnyBuffer> new_values, ffi::RemainingRets new_beside) {
  return RopeAttention(pool, heads, cos, sin, keys, values, layer, positions, All(beside), out, new_keys, new_values,
                       All(new_beside));
}

}  // namespace
}  // namespace shardstream

namespace ffi = xla::ffi;

#include "paged_bindings.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_matmul, shardstream::Guard<shardstream::MatMul>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("arrays")
                                  .Attr<int32_t>("group"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_normed_matmul, shardstream::Guard<shardstream::NormedMatMul>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("arrays")
                                  .Attr<int32_t>("group"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_normed_gate, shardstream::Guard<shardstream::NormedGate>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("arrays")
                                  .Attr<int32_t>("group"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_cache_attention, shardstream::Guard<shardstream::CacheAttentionCall>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("stride"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardstream_rope_attention, shardstream::Guard<shardstream::RopeAttentionCall>::Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets());
