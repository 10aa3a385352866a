// RMSNorm (Zhang and Sennrich, 2019) of one row, and the gate of SwiGLU (Shazeer, 2020).
#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace shardstream {

// x [I] / rms(x) * scale [I], all in float32.
template <typename W>
inline void RmsNorm(const float* x, const W* scale, int64_t I, float eps, float* out) {
  Floats squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= I; i += 4 * kLanes) {
    for (int s = 0; s < 4; ++s) {
      const Floats v = Load(x + i + s * kLanes);
      squares[s] += v * v;
    }
  }
  float total = Sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < I; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(I) + eps);
  for (i = 0; i + kLanes <= I; i += kLanes) Store(out + i, Load(x + i) * factor * Load(scale + i));
  for (; i < I; ++i) out[i] = x[i] * factor * Widen(scale[i]);
}

// silu(gate) * up, to gate.
inline void Gate(float* gate, const float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    // 1 / (1 + e^-g) from e^-|g|, which cannot overflow.
    const Floats g = Load(gate + i);
    const Floats decay = Exp(g < 0.0f ? g : -g);
    const Floats sigmoid = (g < 0.0f ? decay : Splat(1.0f)) / (1.0f + decay);
    Store(gate + i, g * sigmoid * Load(up + i));
  }
  for (; i < count; ++i) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

}  // namespace shardstream
