// Sixteen sums of four products of bytes each, in what the CPU has for it: AVX-512 VNNI, AVX-VNNI, AVX2, NEON's dot
// product, or plain vectors. The library is compiled on the CPU that runs it.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace shardstream {

constexpr int64_t kBytes = 64;

typedef int8_t Bytes __attribute__((vector_size(64), aligned(1), may_alias));

inline Bytes LoadBytes(const void* p) { return *static_cast<const Bytes*>(p); }

// The first `count` bytes, and zeros: nothing beyond them is read.
inline Bytes LoadBytes(const void* p, int64_t count) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_maskz_loadu_epi8(count >= kBytes ? ~__mmask64{0} : (__mmask64{1} << count) - 1, p);
#else
  Bytes out = {};
  std::memcpy(&out, p, count < kBytes ? count : kBytes);
  return out;
#endif
}

// Dot(sum, w, x): lane l of sum plus w[4l] x[4l] + ... + w[4l + 3] x[4l + 3], for x within -127 and 127. Where
// kUnsigned, w is of unsigned bytes (0 to 255): the caller adds an offset to its weights, and takes what that adds up
// to off the sum it begins with.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr bool kUnsigned = true;

inline Ints Dot(Ints sum, Bytes w, Bytes x) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }

#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
constexpr bool kUnsigned = true;

inline __m256i Dot(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
constexpr bool kUnsigned = false;

// The instruction multiplies unsigned by signed bytes and adds pairs, to 16 bits: |w| times x with w's sign. Two such
// products are at most 2 * 128 * 127, which fits.
inline __m256i Dot(__m256i sum, __m256i w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

inline Ints Dot(Ints sum, Bytes w, Bytes x) {
  __m256i sums[2], ws[2], xs[2];
  std::memcpy(sums, &sum, sizeof sum);
  std::memcpy(ws, &w, sizeof w);
  std::memcpy(xs, &x, sizeof x);
  for (int half = 0; half < 2; ++half) sums[half] = Dot(sums[half], ws[half], xs[half]);
  std::memcpy(&sum, sums, sizeof sum);
  return sum;
}

#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool kUnsigned = false;

inline Ints Dot(Ints sum, Bytes w, Bytes x) {
  int32x4_t sums[4];
  int8x16_t ws[4], xs[4];
  std::memcpy(sums, &sum, sizeof sum);
  std::memcpy(ws, &w, sizeof w);
  std::memcpy(xs, &x, sizeof x);
  for (int part = 0; part < 4; ++part) sums[part] = vdotq_s32(sums[part], ws[part], xs[part]);
  std::memcpy(&sum, sums, sizeof sum);
  return sum;
}

#else
constexpr bool kUnsigned = false;

inline Ints Dot(Ints sum, Bytes w, Bytes x) {
  typedef int16_t Products __attribute__((vector_size(128), may_alias));
  typedef int32_t Pairs __attribute__((vector_size(128), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(128), may_alias));
  typedef uint64_t Fours __attribute__((vector_size(128), may_alias));
  const Products products = __builtin_convertvector(w, Products) * __builtin_convertvector(x, Products);
  const Pairs pairs = ((Pairs)((Bits)products << 16) >> 16) + ((Pairs)products >> 16);
  const Fours fours = (Fours)pairs + ((Fours)pairs >> 32);  // right in its lower half
  return sum + (Ints)__builtin_convertvector(fours, Words);
}
#endif

}  // namespace shardstream
