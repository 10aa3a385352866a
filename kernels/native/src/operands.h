// What operations share of XLA's interface: errors, element types, and results that are rounded on their way out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace shardstream {

namespace ffi = xla::ffi;

inline ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("shardstream: " + what); }

inline bool IsNumber(ffi::DataType type) { return type == ffi::DataType::F32 || type == ffi::DataType::BF16; }
// A cache may hold bfloat16 as uint16.
inline bool IsStored(ffi::DataType type) { return IsNumber(type) || type == ffi::DataType::U16; }

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

// The buffers that remain after those a call names.
inline std::vector<ffi::AnyBuffer> All(const ffi::RemainingArgs& args) {
  std::vector<ffi::AnyBuffer> out;
  for (size_t i = 0; i < args.size(); ++i) {
    if (auto one = args.get<ffi::AnyBuffer>(i)) out.push_back(*one);
  }
  return out;
}
inline std::vector<ffi::AnyBuffer> All(const ffi::RemainingRets& rets) {
  std::vector<ffi::AnyBuffer> out;
  for (size_t i = 0; i < rets.size(); ++i) {
    if (auto one = rets.get<ffi::AnyBuffer>(i)) out.push_back(**one);
  }
  return out;
}

template <typename T>
const T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Calls run with a pointer of the buffer's own element type, float32 or bfloat16.
template <typename Run>
void WithType(const ffi::AnyBuffer& buffer, const Run& run) {
  if (buffer.element_type() == ffi::DataType::F32) {
    run(Data<float>(buffer));
  } else {
    run(Data<BFloat16>(buffer));
  }
}

// The buffer as float32, times factor: itself where nothing is to do, else a copy kept in `copy`.
inline const float* AsFloats(const ffi::AnyBuffer& buffer, std::vector<float>& copy, float factor = 1.0f) {
  if (buffer.element_type() == ffi::DataType::F32 && factor == 1.0f) return Data<float>(buffer);
  copy.resize(buffer.element_count());
  WithType(buffer, [&](auto* from) {
    for (size_t i = 0; i < copy.size(); ++i) copy[i] = Widen(from[i]) * factor;
  });
  return copy.data();
}

// `count` numbers of a buffer, from `begin` on, as float32.
inline void Widened(const ffi::AnyBuffer& buffer, int64_t begin, int64_t count, float* out) {
  WithType(buffer, [&](auto* from) {
    for (int64_t i = 0; i < count; ++i) out[i] = Widen(from[begin + i]);
  });
}

}  // namespace shardstream
