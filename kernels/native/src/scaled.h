// Caches of int8 and fp8 (float8_e4m3fn): each position of each head is stored divided by a scale of its own, a float32
// kept beside it. A scale multiplies a whole score, or a whole softmax weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "operands.h"
#include "vectors.h"

namespace shardstream {

// To the nearest, ties to even: |x| is at most the largest number (448) and what a division may round up.
inline void PutScaled(float x, Fp8* to) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  const uint32_t sign = word >> 24 & 0x80;
  word &= 0x7fffffff;
  const float size = std::fabs(x);
  uint32_t bits;
  if (size != size) {
    bits = 0x7f;
  } else if (size < 0.015625f) {
    bits = static_cast<uint32_t>(std::nearbyint(size * 512.0f));  // subnormal: in units of 2^-9
  } else {
    bits = std::min<uint32_t>(((word + 0x7ffff + (word >> 20 & 1)) >> 20) - (120u << 3), 0x7e);
  }
  to->bits = static_cast<uint8_t>(sign | bits);
}

inline void PutScaled(float x, int8_t* to) {
  *to = x == x ? static_cast<int8_t>(std::clamp(std::nearbyint(x), -127.0f, 127.0f)) : 0;
}

template <typename C>
constexpr bool kWithScales = std::is_same_v<C, int8_t> || std::is_same_v<C, Fp8>;
template <typename C>
constexpr float kLargest = std::is_same_v<C, int8_t> ? 127.0f : 448.0f;

inline void Put(float x, float* to) { *to = x; }
inline void Put(float x, BFloat16* to) { *to = Narrow(x); }

// Stores x [H] at `to` as `kernels.cache_attention.scaled.quantize` does, and its scale where the cache has scales.
template <typename C>
inline void PutEntry(const float* x, int64_t H, C* to, float* scale) {
  if constexpr (kWithScales<C>) {
    float most = 0;
    for (int64_t h = 0; h < H; ++h) {
      const float size = std::fabs(x[h]);
      if (size > most || size != size) most = size;  // nothing is more than NaN, which so stays
    }
    *scale = most * (1.0f / kLargest<C>);  // XLA divides so, by constants and by one number for many
    // Zeros, and numbers so small that their scale would be denormal, are stored as zeros.
    const float by = *scale < std::numeric_limits<float>::min() ? 0.0f : 1.0f / *scale;
    for (int64_t h = 0; h < H; ++h) PutScaled(x[h] * by, to + h);
  } else {
    for (int64_t h = 0; h < H; ++h) Put(x[h], to + h);
  }
}

// Scales of keys and of values, from some slot on; null where the cache has none.
struct Scales {
  float* keys = nullptr;
  float* values = nullptr;

  explicit operator bool() const { return keys != nullptr; }
  Scales At(int64_t slot) const { return keys ? Scales{keys + slot, values + slot} : *this; }
};

inline bool IsScaled(ffi::DataType type) {
  return type == ffi::DataType::S8 || type == ffi::DataType::U8 || type == ffi::DataType::F8E4M3FN;
}

// Whether keys, values and the scales beside them (two, or none) go together; sets `scales`.
inline ffi::Error CheckStored(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values,
                              const std::vector<ffi::AnyBuffer>& beside, Scales& scales) {
  const auto type = keys.element_type();
  if (type != values.element_type() || !(IsStored(type) || IsScaled(type))) {
    return Wrong("keys and values must both be float32, bfloat16 or uint16, which holds bfloat16, or int8, fp8 or "
                 "uint8, which holds fp8");
  }
  if (beside.size() != (IsScaled(type) ? 2 : 0)) {
    return Wrong("int8 and fp8 caches go with the scales of keys and of values, others with none");
  }
  if (beside.empty()) return ffi::Error::Success();
  const auto sides = keys.dimensions();
  for (const auto& one : beside) {
    if (one.element_type() != ffi::DataType::F32 ||
        static_cast<int64_t>(one.element_count() * sides[4]) != static_cast<int64_t>(keys.element_count())) {
      return Wrong("scales must be float32, one for each position and head");
    }
  }
  scales = {static_cast<float*>(beside[0].untyped_data()), static_cast<float*>(beside[1].untyped_data())};
  return ffi::Error::Success();
}

// Calls run with a pointer of what the cache holds.
template <typename Run>
void WithStored(const ffi::AnyBuffer& cache, const Run& run) {
  switch (cache.element_type()) {
    case ffi::DataType::S8: return run(Data<int8_t>(cache));
    case ffi::DataType::U8:
    case ffi::DataType::F8E4M3FN: return run(Data<Fp8>(cache));
    default: WithType(cache, run);
  }
}

// The buffers that a call gives back are those it was given: XLA gives them one place (see the calls' aliases), or what
// was given is copied there.
inline ffi::Error InPlace(const std::vector<ffi::AnyBuffer>& given, const std::vector<ffi::AnyBuffer>& back) {
  if (given.size() != back.size()) return Wrong("the scales that come back must be those that were given");
  for (size_t i = 0; i < given.size(); ++i) {
    if (back[i].element_type() != given[i].element_type() || back[i].element_count() != given[i].element_count()) {
      return Wrong("the cache that comes back must be like the one that was given");
    }
    if (back[i].untyped_data() != given[i].untyped_data()) {
      std::memcpy(back[i].untyped_data(), given[i].untyped_data(), given[i].size_bytes());
    }
  }
  return ffi::Error::Success();
}

}  // namespace shardstream
