// Sixteen floats at a time, in the vector extension that gcc and clang share: the compiler maps it to whatever the
// CPU has (AVX-512, AVX2, NEON), so one source serves all.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace shardstream {

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t Unsigned16 __attribute__((vector_size(16), aligned(1), may_alias));

// The upper half of a float32, as XLA stores it.
struct BFloat16 {
  uint16_t bits;
};

// IEEE's float16.
struct Half {
  uint16_t bits;
};

// A sign, four bits of exponent (bias 7), three of fraction; no infinity, and NaN where all seven are ones.
struct Fp8 {
  uint8_t bits;
};

inline Floats Load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline Floats Load(const BFloat16* p) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
}

inline Floats Load(const Half* p) {
#ifdef __AVX512F__
  __m256i bits;
  std::memcpy(&bits, p, sizeof bits);
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, bits);  // all of them: gcc warns of the plain form
#else
  const Words word = __builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Words);
  const Words exponent = (word >> 10) & 31, fraction = word & 0x3ff;
  // A normal number's exponent grows by 112; that of infinity and NaN, all ones, by as much again. A subnormal one is
  // its fraction in units of 2^-24.
  const Words wide = ((word & 0x7fff) << 13) + (112u << 23) + (exponent == 31 ? Words{} + (112u << 23) : Words{});
  const Floats small = __builtin_convertvector((Ints)fraction, Floats) * 5.9604644775390625e-8f;
  return (Floats)((exponent == 0 ? (Words)small : wide) | (word & 0x8000) << 16);
#endif
}

inline float Widen(float x) { return x; }

inline float Widen(Half x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff, sign = (x.bits & 0x8000u) << 16;
  const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;
  uint32_t wide = ((x.bits & 0x7fffu) << 13) + ((exponent == 31 ? 224u : 112u) << 23);
  if (exponent == 0) std::memcpy(&wide, &small, sizeof wide);
  wide |= sign;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
#endif
}

inline float Widen(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

inline float Widen(int8_t x) { return x; }

inline Floats Load(const int8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Sixteen*>(p), Ints), Floats);
}

inline Floats Load(const Fp8* p) {
  const Words word = __builtin_convertvector(*reinterpret_cast<const Unsigned16*>(p), Words);
  const Words size = word & 0x7f;
  // A normal number's exponent grows by 120. A subnormal one is its fraction in units of 2^-9.
  const Words wide = size == 0x7f ? Words{} + 0x7fc00000u : (size << 20) + (120u << 23);
  const Floats small = __builtin_convertvector((Ints)size, Floats) * 0.001953125f;
  return (Floats)((size < 8 ? (Words)small : wide) | (word & 0x80) << 24);
}

inline float Widen(Fp8 x) {
  const uint32_t size = x.bits & 0x7fu;
  uint32_t wide = size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23);
  const float small = static_cast<float>(size) * 0.001953125f;
  if (size < 8) std::memcpy(&wide, &small, sizeof wide);
  wide |= (x.bits & 0x80u) << 24;
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
