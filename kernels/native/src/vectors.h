// Sixteen floats at a time, in the vector extension that gcc and clang share: the compiler maps it to whatever the
// CPU has (AVX-512, AVX2, NEON), so one source serves all.
#pragma once

#include <cstdint>
#include <cstring>

namespace shardstream {

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

// The upper half of a float32, as XLA stores it.
struct BFloat16 {
  uint16_t bits;
};

inline Floats Load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline Floats Load(const BFloat16* p) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
}

inline float Widen(float x) { return x; }

inline float Widen(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

// To the nearest, ties to even, as XLA rounds; a NaN stays one.
inline BFloat16 Narrow(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if (x != x) return {static_cast<uint16_t>((word >> 16) | 0x40)};
  return {static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

inline void Store(float* p, Floats x) { *reinterpret_cast<Floats*>(p) = x; }

inline Floats Splat(float x) { return Floats{} + x; }

inline float Sum(Floats x) {
  typedef float Eight __attribute__((vector_size(32), may_alias));
  typedef float Four __attribute__((vector_size(16), may_alias));
  Eight eight[2];
  std::memcpy(eight, &x, sizeof x);
  eight[0] += eight[1];
  Four four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// e^x for x <= 0, within 2 units in the last place of float32; exactly 0 below about -87.
inline Floats Exp(Floats x) {
  // x = n ln2 + r with |r| <= ln2 / 2; ln2 in two parts, so that n times the first is exact.
  const Floats clamped = x < -87.0f ? Splat(-87.0f) : x;
  const Floats scaled = clamped * 1.44269504f;
  const Floats magic = Splat(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const Floats sum = scaled + magic;
  const Floats n = sum - magic;
  const Floats r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  // Taylor to the seventh power; the first term left out, r^8 / 8!, is under 6e-9.
  Floats p = Splat(1.0f / 5040.0f);
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // The low bits of the sum are n; converting n itself would be undefined where x is NaN.
  const Words exponent = (reinterpret_cast<const Words&>(sum) + 127) << 23;
  const Floats power = reinterpret_cast<const Floats&>(exponent);
  return x < -87.0f ? Splat(0.0f) : p * power;
}

}  // namespace shardstream
