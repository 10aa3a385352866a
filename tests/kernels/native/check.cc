// Every native operation, called as XLA calls it, over odd shapes in heap blocks of exactly their size: what the
// sanitizers watch. Results are compared with float64; the exit status is 1 where one differs.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "bindings.cc"

namespace shardstream {
namespace {

constexpr double kUnit = 1.0 / (1 << 24);  // half a unit in the last place of float32, relative

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "check failed: %s\n", what.c_str());
  std::exit(1);
}

void Expect(bool holds, const std::string& what) {
  if (!holds) Fail(what);
}

// What XLA's intra-operation pool is: tasks, and threads that take them.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    more_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    more_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      more_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

Pool* the_pool = nullptr;  // what the C interface below stands for

// The pool as a handler sees it, through XLA's C interface.
ffi::ThreadPool AsXla() {
  static const XLA_FFI_Api* api = [] {
    static XLA_FFI_Api made = {};
    made.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      the_pool->Schedule([task = args->task, data = args->data] { task(data); });
      return nullptr;
    };
    made.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = the_pool->num_threads();
      return nullptr;
    };
    return &made;
  }();
  static ffi::DiagnosticEngine diagnostic;
  return *ffi::CtxDecoding<ffi::ThreadPool>::Decode(api, nullptr, diagnostic);
}

// An array in a block of exactly its size, and the same numbers in float64.
class Array {
 public:
  Array(XLA_FFI_DataType type, std::vector<int64_t> shape) : type_(type), shape_(std::move(shape)) {
    for (const int64_t side : shape_) count_ *= side;
    width_ = type == XLA_FFI_DataType_F32 || type == XLA_FFI_DataType_S32  ? 4
             : type == XLA_FFI_DataType_S8 || type == XLA_FFI_DataType_U8 ? 1
                                                                          : 2;
    block_ = std::unique_ptr<char[]>(new char[count_ * width_]);
    raw_ = {};
    raw_.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    raw_.dtype = type;
    raw_.data = block_.get();
    raw_.rank = static_cast<int64_t>(shape_.size());
    raw_.dims = shape_.data();
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  Array& Random(std::mt19937& from, double spread = 1.0) {
    std::normal_distribution<double> normal(0.0, spread);
    for (int64_t i = 0; i < count_; ++i) Set(i, static_cast<float>(normal(from)));
    return *this;
  }
  Array& Fill(float value) {
    for (int64_t i = 0; i < count_; ++i) Set(i, value);
    return *this;
  }
  void Set(int64_t i, float value) {
    switch (type_) {
      case XLA_FFI_DataType_F32: At<float>()[i] = value; break;
      case XLA_FFI_DataType_S8: PutScaled(value, At<int8_t>() + i); break;
      case XLA_FFI_DataType_U8: PutScaled(value, At<Fp8>() + i); break;
      default: At<BFloat16>()[i] = Narrow(value);
    }
  }
  // Random bits, the number they are small: a scale of any type, or quantised values.
  Array& Bits(std::mt19937& from) {
    for (int64_t i = 0; i < count_ * width_; ++i) At<uint8_t>()[i] = static_cast<uint8_t>(from());
    if (type_ == XLA_FFI_DataType_F16) {
      for (int64_t i = 0; i < count_; ++i) At<uint16_t>()[i] &= 0xbfff;  // below 2, subnormal ones among them
    }
    return *this;
  }
  double Get(int64_t i) const {
    switch (type_) {
      case XLA_FFI_DataType_F32: return At<float>()[i];
      case XLA_FFI_DataType_F16: return Widen(At<Half>()[i]);
      case XLA_FFI_DataType_S8: return At<int8_t>()[i];
      case XLA_FFI_DataType_U8: return Widen(At<Fp8>()[i]);
      default: return Widen(At<BFloat16>()[i]);
    }
  }
  template <typename T>
  T* At() const {
    return reinterpret_cast<T*>(block_.get());
  }
  int64_t count() const { return count_; }
  XLA_FFI_DataType type() const { return type_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  // Elements i..i+n become those of `from` at j..j+n, bit by bit; it is of the same type.
  void Copy(int64_t i, const Array& from, int64_t j, int64_t n) {
    std::memcpy(At<char>() + i * width_, from.At<char>() + j * width_, n * width_);
  }
  bool Same(int64_t i, const Array& other, int64_t j, int64_t n) const {
    return std::memcmp(At<char>() + i * width_, other.At<char>() + j * width_, n * width_) == 0;
  }
  // Half a unit in the last place of the type, relative.
  double unit() const { return type_ == XLA_FFI_DataType_F32 ? kUnit : 1.0 / 256; }
  ffi::AnyBuffer buffer() const { return ffi::AnyBuffer(&raw_); }
  template <ffi::DataType type>
  ffi::Buffer<type> typed() const {
    return ffi::Buffer<type>(&raw_);
  }

 private:
  XLA_FFI_DataType type_;
  std::vector<int64_t> shape_;
  int64_t count_ = 1, width_ = 0;
  std::unique_ptr<char[]> block_;
  XLA_FFI_Buffer raw_;
};

// The relative error of a float32 sum of I products in 16 lanes: roundings that one term goes through.
double SumError(int64_t I) { return kUnit * static_cast<double>(I / kLanes + 32); }

void Near(double found, double expected, double bound, const char* what, int64_t i) {
  if (std::isnan(expected) ? std::isnan(found) : std::abs(found - expected) <= bound) return;
  char text[200];
  std::snprintf(text, sizeof text, "%s: value %lld is %.9g, not %.9g within %.3g", what, static_cast<long long>(i),
                found, expected, bound);
  Fail(text);
}

void Ok(const ffi::Error& error) { Expect(error.success(), error.message()); }

constexpr XLA_FFI_DataType kF32 = XLA_FFI_DataType_F32, kBF16 = XLA_FFI_DataType_BF16, kU16 = XLA_FFI_DataType_U16,
                           kF16 = XLA_FFI_DataType_F16;

// [M, I] in float64, normed where there is a scale.
std::vector<double> Wide(const Array& x, int64_t M, int64_t I, const Array* scale, double eps) {
  std::vector<double> out(M * I);
  for (int64_t m = 0; m < M; ++m) {
    double square = 0;
    for (int64_t i = 0; i < I; ++i) square += x.Get(m * I + i) * x.Get(m * I + i);
    for (int64_t i = 0; i < I; ++i) {
      const double factor = scale ? scale->Get(i) / std::sqrt(square / static_cast<double>(I) + eps) : 1.0;
      out[m * I + i] = x.Get(m * I + i) * factor;
    }
  }
  return out;
}

struct Sum64 {
  double value = 0, size = 0;  // of the terms, and of their absolute values
};

// A weight [O, I], wide (group < 0) or quantised, as arrays and in float64.
struct Weight {
  std::vector<std::unique_ptr<Array>> arrays;
  int32_t group = 0;
  std::vector<double> wide;

  Weight(std::mt19937& random, int64_t O, int64_t I, XLA_FFI_DataType type) : wide(O * I) {
    arrays.push_back(std::make_unique<Array>(type, std::vector<int64_t>{O, I}));
    arrays[0]->Random(random);
    for (int64_t i = 0; i < O * I; ++i) wide[i] = arrays[0]->Get(i);
  }
  Weight(std::mt19937& random, int64_t O, int64_t I, int bits, int32_t group, bool offsets, XLA_FFI_DataType type)
      : group(group), wide(O * I) {
    const int64_t size = group ? group : std::max<int64_t>(I, 1), groups = group ? (I + size - 1) / size : 1;
    const auto values = bits == 8 ? XLA_FFI_DataType_S8 : XLA_FFI_DataType_U8;
    arrays.push_back(std::make_unique<Array>(values, std::vector<int64_t>{O, I * bits / 8}));
    arrays[0]->Bits(random);
    for (int i = 0; i < (offsets ? 2 : 1); ++i) {
      arrays.push_back(std::make_unique<Array>(type, std::vector<int64_t>{O, groups}));
      type == XLA_FFI_DataType_F16 ? arrays.back()->Bits(random) : arrays.back()->Random(random);
    }
    for (int64_t i = 0; i < O * I; ++i) {
      const int64_t row = i / I, column = i % I, at = row * groups + column / size;
      double q;
      if (bits == 8) {
        q = arrays[0]->Get(i);
      } else {
        const uint8_t byte = arrays[0]->At<uint8_t>()[row * I / 2 + column / 32 * 16 + column % 16];
        q = (column % 32 < 16 ? byte & 15 : byte >> 4) - 8;
      }
      wide[i] = q * arrays[1]->Get(at) + (offsets ? arrays[2]->Get(at) : 0.0);
    }
  }
  bool quantised() const { return arrays.size() > 1; }
  Operands operands(const Array& x, const Array* norm, float eps) const {
    Operands of{x.buffer(), std::nullopt, eps, {}, static_cast<int32_t>(arrays.size()), group};
    if (norm) of.norm = norm->buffer();
    for (const auto& array : arrays) of.rest.push_back(array->buffer());
    return of;
  }
};

// Row m of x [M, I] with a row of the weight. `size` counts what rounding x to bytes may add, in the units of
// SumError(I): half a step of 1/127 of the largest magnitude in a block of 32.
Sum64 Total(const double* x, const Weight& w, int64_t row, int64_t I) {
  Sum64 sum;
  double largest = 0;
  for (int64_t i = 0; i < I; ++i) {
    if (i % 32 == 0) {
      largest = 0;
      for (int64_t j = i; j < std::min(I, i + 32); ++j) largest = std::max(largest, std::abs(x[j]));
    }
    const double weight = w.wide[row * I + i];
    sum.value += x[i] * weight;
    sum.size += std::abs(x[i] * weight);
    // The offset's part is of x as it was; a weight's own is not told apart here.
    if (w.quantised()) sum.size += largest / 127 * 0.5001 * std::abs(weight) / SumError(I);
  }
  return sum;
}

void Products(std::mt19937& random, int64_t M, int64_t O, int64_t I, const Weight& w, XLA_FFI_DataType xt,
              XLA_FFI_DataType ot) {
  const float eps = 1e-5f;
  Array x(xt, {M, I}), scale(xt, {I}), added(ot, {M, O}), out(ot, {M, O});
  x.Random(random), scale.Random(random), added.Random(random, 100.0);
  ffi::ThreadPool pool = AsXla();
  for (int form = 0; form < 3; ++form) {
    const bool normed = form == 1, adds = form == 2;
    out.Fill(std::numeric_limits<float>::quiet_NaN());
    Operands of = w.operands(x, normed ? &scale : nullptr, eps);
    if (adds) of.rest.push_back(added.buffer());
    Ok(Multiply(pool, of, out.buffer()));
    const auto rows = Wide(x, M, I, normed ? &scale : nullptr, eps);
    for (int64_t i = 0; i < M * O; ++i) {
      const auto sum = Total(rows.data() + i / O * I, w, i % O, I);
      const double expected = sum.value + (adds ? added.Get(i) : 0.0);
      const double bound = (normed ? 3 : 1) * SumError(I) * sum.size + out.unit() * 1.01 * std::abs(expected) + 1e-25;
      Near(out.Get(i), expected, bound, normed ? "normed product" : "product", i);
    }
  }
}

void Gates(std::mt19937& random, int64_t M, int64_t F, int64_t I, const Weight& w, XLA_FFI_DataType xt) {
  const float eps = 1e-5f;
  Array x(xt, {M, I}), scale(xt, {I}), out(xt, {M, F});
  x.Random(random), scale.Random(random, 4.0);
  out.Fill(std::numeric_limits<float>::quiet_NaN());
  ffi::ThreadPool pool = AsXla();
  Ok(MultiplyGate(pool, w.operands(x, &scale, eps), out.buffer()));
  const auto rows = Wide(x, M, I, &scale, eps);
  for (int64_t i = 0; i < M * F; ++i) {
    const double* row = rows.data() + i / F * I;
    const auto gate = Total(row, w, i % F, I), up = Total(row, w, F + i % F, I);
    const double silu = gate.value / (1.0 + std::exp(-gate.value));
    const double gate_error = 3 * SumError(I) * gate.size, up_error = 3 * SumError(I) * up.size;
    // |silu'| <= 1.1; the exponential, its division and two products are good for ten units.
    const double bound = 1.1 * gate_error * (std::abs(up.value) + up_error) + std::abs(silu) * up_error +
                         (10 * kUnit + out.unit()) * std::abs(silu * up.value) + 1e-30;
    Near(out.Get(i), silu * up.value, bound, "gate", i);
  }
}

// Scales beside keys or values of int8 and fp8: of any size, none too small.
struct Beside {
  Array scales;
  bool on;

  Beside(std::mt19937& random, XLA_FFI_DataType type, std::vector<int64_t> shape)
      : scales(kF32, std::move(shape)), on(type == XLA_FFI_DataType_S8 || type == XLA_FFI_DataType_U8) {
    for (int64_t i = 0; i < scales.count(); ++i) scales.Set(i, 0.001f + static_cast<float>(random() % 1000) / 2e5f);
  }
  double At(int64_t i) const { return on ? scales.Get(i) : 1.0; }
};

std::vector<ffi::AnyBuffer> Both(const Beside& keys, const Beside& values) {
  if (!keys.on) return {};
  return {keys.scales.buffer(), values.scales.buffer()};
}

struct AttentionCase {
  int64_t B, T, K, G, H, S;
  int32_t stride, offset;
};

void Attention(std::mt19937& random, const AttentionCase& c, XLA_FFI_DataType qt, XLA_FFI_DataType ct) {
  const int64_t L = 2, layer = 1, B = c.B, T = c.T, K = c.K, G = c.G, H = c.H, S = c.S;
  Array q(qt, {B, T, K, G, H}), keys(ct, {L, B, K, S, H}), values(ct, {L, B, K, S, H});
  Array at(XLA_FFI_DataType_S32, {}), first(XLA_FFI_DataType_S32, {}), positions(XLA_FFI_DataType_S32, {B, T});
  Array out(kF32, {B, T, K, G, H}), max(kF32, {B, T, K, G}), sum(kF32, {B, T, K, G});
  Beside of_keys(random, ct, {L, B, K, S}), of_values(random, ct, {L, B, K, S});
  const double spread = of_keys.on ? 100 : 1;
  q.Random(random), keys.Random(random, spread), values.Random(random, spread);
  *at.At<int32_t>() = layer;
  *first.At<int32_t>() = c.offset;
  // Rows of very different lengths: nothing yet, past the end, and anything between.
  const int32_t capacity = static_cast<int32_t>(S) * c.stride;
  std::vector<int64_t> filled(B, 0);
  const auto seen = [&](int64_t b, int64_t t) -> int64_t {
    const int64_t ahead = int64_t{positions.At<int32_t>()[b * T + t]} - c.offset;
    return ahead < 0 ? 0 : std::min(S, ahead / c.stride + 1);
  };
  for (int64_t b = 0; b < B; ++b) {
    const int32_t start = b == 0 ? capacity - static_cast<int32_t>(T) : b == 1 ? -1 : capacity / 3;
    for (int64_t t = 0; t < T; ++t) positions.At<int32_t>()[b * T + t] = start + static_cast<int32_t>(t);
    for (int64_t t = 0; t < T; ++t) filled[b] = std::max(filled[b], seen(b, t));
  }
  // What no query of a row may see, and the other layer, would show.
  const float poison = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < keys.count(); ++i) {
    const int64_t s = i / H % S, b = i / H / S / K % B, l = i / H / S / K / B;
    if (l == layer && s < filled[b]) continue;
    keys.Set(i, poison);
    values.Set(i, poison);
    of_keys.scales.Set(i / H, poison);
    of_values.scales.Set(i / H, poison);
  }
  out.Fill(poison), max.Fill(poison), sum.Fill(poison);
  Ok(CacheAttention(AsXla(), q.buffer(), keys.buffer(), values.buffer(), at.typed<ffi::S32>(),
                    positions.typed<ffi::S32>(), first.typed<ffi::S32>(), Both(of_keys, of_values),
                    out.typed<ffi::F32>(), max.typed<ffi::F32>(), sum.typed<ffi::F32>(), c.stride));
  for (int64_t row = 0; row < B * T * K * G; ++row) {
    const int64_t k = row / G % K, t = row / G / K % T, b = row / G / K / T, n = seen(b, t);
    const int64_t head = ((layer * B + b) * K + k) * S * H;
    if (n == 0) {
      Expect(sum.Get(row) == 0 && max.Get(row) == static_cast<double>(kMasked), "a query that sees nothing");
      for (int64_t h = 0; h < H; ++h) Expect(out.Get(row * H + h) == 0, "a query that sees nothing");
      continue;
    }
    std::vector<double> scores(n);
    double top = -1e300, score_error = 0, total = 0;
    for (int64_t s = 0; s < n; ++s) {
      double size = 0;
      for (int64_t h = 0; h < H; ++h) {
        const double key = keys.Get(head + s * H + h) * of_keys.At(head / H + s);
        const double term = q.Get(row * H + h) * key / std::sqrt(static_cast<double>(H));
        scores[s] += term;
        size += std::abs(term);
      }
      score_error = std::max(score_error, SumError(H) * size);
      top = std::max(top, scores[s]);
    }
    Near(max.Get(row), top, score_error, "largest score", row);
    for (const double score : scores) total += std::exp(score - top);
    // A weight is off by its score's error and a few units; a sum by a rounding for each slot and block of a segment.
    const int64_t roundings = std::min(n, kSegment) + 80 + n / kSegment * 8;
    const double relative = 2 * score_error + kUnit * static_cast<double>(roundings);
    Near(sum.Get(row) * std::exp(max.Get(row) - top), total, relative * total, "sum", row);
    for (int64_t h = 0; h < H; ++h) {
      double expected = 0, size = 0;
      for (int64_t s = 0; s < n; ++s) {
        const double value = values.Get(head + s * H + h) * of_values.At(head / H + s);
        const double term = std::exp(scores[s] - top) / total * value;
        expected += term;
        size += std::abs(term);
      }
      Near(out.Get(row * H + h) / sum.Get(row), expected, 2 * relative * size, "attention", row * H + h);
    }
  }
}

// Turning, storing and attending in one call, against turning here and attending to the cache that came back.
void Turning(std::mt19937& random, int64_t B, int64_t T, int64_t K, int64_t G, int64_t H, int64_t S,
             XLA_FFI_DataType xt, XLA_FFI_DataType ct) {
  const int64_t L = 2, layer = 1;
  Array heads(xt, {B, T, K, G + 2, H}), keys(ct, {L, B, K, S, H}), values(ct, {L, B, K, S, H});
  Array cos(kF32, {B, T, H / 2}), sin(kF32, {B, T, H / 2}), out(xt, {B, T, K, G, H});
  Array at(XLA_FFI_DataType_S32, {}), zero(XLA_FFI_DataType_S32, {}), positions(XLA_FFI_DataType_S32, {B, T});
  Beside of_keys(random, ct, {L, B, K, S}), of_values(random, ct, {L, B, K, S});
  const double spread = of_keys.on ? 100 : 1;
  heads.Random(random), keys.Random(random, spread), values.Random(random, spread);
  *at.At<int32_t>() = layer, *zero.At<int32_t>() = 0;
  for (int64_t i = 0; i < cos.count(); ++i) {
    cos.Set(i, static_cast<float>(std::cos(i))), sin.Set(i, static_cast<float>(std::sin(i)));
  }
  // The last slots of the first row, then the first ones, and some that are past the end, which are not stored.
  for (int64_t i = 0; i < B * T; ++i) {
    const int64_t b = i / T, start = b == 0 ? S - T : b == 1 ? 0 : S - 1;
    positions.At<int32_t>()[i] = static_cast<int32_t>(std::max<int64_t>(0, start) + i % T);
  }
  std::vector<double> expected_keys(keys.count()), expected_values(keys.count());
  const auto key = [&](int64_t i) { return keys.Get(i) * of_keys.At(i / H); };
  const auto value = [&](int64_t i) { return values.Get(i) * of_values.At(i / H); };
  for (int64_t i = 0; i < keys.count(); ++i) expected_keys[i] = key(i), expected_values[i] = value(i);
  const auto turned = [&](int64_t bt, int64_t head, int64_t h) {
    const int64_t half = H / 2, pair = h < half ? h + half : h - half, angle = bt * half + h % half;
    return heads.Get(head * H + h) * cos.Get(angle) + (h < half ? -1 : 1) * heads.Get(head * H + pair) * sin.Get(angle);
  };
  Array q(kF32, {B, T, K, G, H});
  for (int64_t bt = 0; bt < B * T; ++bt) {
    const int64_t slot = positions.At<int32_t>()[bt];
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t head = (bt * K + k) * (G + 2);
        for (int64_t g = 0; g < G; ++g) q.Set(((bt * K + k) * G + g) * H + h, turned(bt, head + g, h));
        if (slot >= S) continue;
        const int64_t to = (((layer * B + bt / T) * K + k) * S + slot) * H + h;
        expected_keys[to] = turned(bt, head + G, h);
        expected_values[to] = heads.Get((head + G + 1) * H + h);
      }
    }
  }
  Ok(RopeAttention(AsXla(), heads.buffer(), cos.typed<ffi::F32>(), sin.typed<ffi::F32>(), keys.buffer(),
                   values.buffer(), at.typed<ffi::S32>(), positions.typed<ffi::S32>(), Both(of_keys, of_values),
                   out.buffer(), keys.buffer(), values.buffer(), Both(of_keys, of_values)));
  // Rounded to the heads' type, then to the cache's; a turned number is a sum of two products of about 1.
  for (int64_t i = 0; i < keys.count(); ++i) {
    // int8 is off by half a step of its scale, fp8 by 1/16 of itself or half of the smallest step.
    const auto step = [&](double stored, double scale) {
      return ct == XLA_FFI_DataType_S8 ? 0.5001 * scale
             : of_keys.on              ? std::abs(stored) / 15 + scale / 1000
                                       : 0.0;
    };
    const double wide = of_keys.on ? kUnit * 4 : keys.unit();
    Near(key(i), expected_keys[i],
         2.1 * std::max(heads.unit(), wide) * std::abs(expected_keys[i]) + 16 * kUnit + step(key(i), of_keys.At(i / H)),
         "stored key", i);
    Near(value(i), expected_values[i],
         2.1 * wide * std::abs(expected_values[i]) + step(value(i), of_values.At(i / H)), "stored value", i);
  }
  Array plain(kF32, {B, T, K, G, H}), max(kF32, {B, T, K, G}), sum(kF32, {B, T, K, G});
  Ok(CacheAttention(AsXla(), q.buffer(), keys.buffer(), values.buffer(), at.typed<ffi::S32>(),
                    positions.typed<ffi::S32>(), zero.typed<ffi::S32>(), Both(of_keys, of_values),
                    plain.typed<ffi::F32>(), max.typed<ffi::F32>(), sum.typed<ffi::F32>(), 1));
  // Its queries were turned in another order of roundings: a score of numbers around 1 is off by less than 1e-4.
  for (int64_t i = 0; i < out.count(); ++i) {
    const double expected = plain.Get(i) / sum.Get(i / H);
    Near(out.Get(i), expected, out.unit() * std::abs(expected) + 1e-3, "turned attention", i);
  }
}

struct PagedCase {
  int64_t rows, tiles, tile, K, G, H, page, P;  // single tokens, tiles of tokens, and pages of each sequence
  int32_t stride, offset;                       // of attention alone
};

// A cache in pages, and the contiguous caches of its sequences with the same bits.
struct Cut {
  static constexpr int64_t L = 2, layer = 1;
  const PagedCase& c;
  int64_t B, S, pages;
  Array keys, values, tables, at;
  Beside of_keys, of_values;

  Cut(std::mt19937& random, const PagedCase& c, XLA_FFI_DataType type)
      : c(c), B(c.rows + c.tiles), S(c.P * c.page), pages(B * c.P + 1), keys(type, {L, pages, c.K, c.page, c.H}),
        values(type, {L, pages, c.K, c.page, c.H}), tables(XLA_FFI_DataType_S32, {B, c.P}),
        at(XLA_FFI_DataType_S32, {}), of_keys(random, type, {L, 1, c.K, pages * c.page}),
        of_values(random, type, {L, 1, c.K, pages * c.page}) {
    const double spread = of_keys.on ? 100 : 1;
    keys.Random(random, spread), values.Random(random, spread);
    *at.At<int32_t>() = layer;
    std::vector<int32_t> order(pages);  // the last is nobody's
    for (int64_t i = 0; i < pages; ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    std::copy(order.begin(), order.begin() + B * c.P, tables.At<int32_t>());
  }
  int64_t tokens(int64_t b) const { return b < c.rows ? 1 : c.tile; }
  int64_t first(int64_t b) const { return b < c.rows ? b : c.rows + (b - c.rows) * c.tile; }
  int64_t page(int64_t b, int64_t s) const { return tables.At<int32_t>()[b * c.P + s / c.page]; }
  int64_t slot(int64_t b, int64_t k, int64_t s) const {
    return ((layer * pages + page(b, s)) * c.K + k) * c.page + s % c.page;
  }
  int64_t scale(int64_t b, int64_t k, int64_t s) const {
    return ((layer * c.K + k) * pages + page(b, s)) * c.page + s % c.page;
  }
  // Everything but the slots before filled[b] of each sequence would show.
  void Poison(const std::vector<int64_t>& filled) {
    Array clean_keys(keys.type(), keys.shape()), clean_values(keys.type(), keys.shape());
    Array key_scales(kF32, of_keys.scales.shape()), value_scales(kF32, of_keys.scales.shape());
    clean_keys.Copy(0, keys, 0, keys.count()), clean_values.Copy(0, values, 0, keys.count());
    key_scales.Copy(0, of_keys.scales, 0, key_scales.count());
    value_scales.Copy(0, of_values.scales, 0, value_scales.count());
    const float poison = std::numeric_limits<float>::quiet_NaN();
    keys.Fill(poison), values.Fill(poison), of_keys.scales.Fill(poison), of_values.scales.Fill(poison);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t k = 0; k < c.K; ++k) {
        for (int64_t s = 0; s < filled[b]; ++s) {
          const int64_t i = slot(b, k, s) * c.H, j = scale(b, k, s);
          keys.Copy(i, clean_keys, i, c.H), values.Copy(i, clean_values, i, c.H);
          of_keys.scales.Copy(j, key_scales, j, 1), of_values.scales.Copy(j, value_scales, j, 1);
        }
      }
    }
  }
};

// One sequence of a Cut in a cache of its own.
struct Whole {
  Array keys, values;
  Beside of_keys, of_values;

  Whole(std::mt19937& random, const Cut& cut, int64_t b)
      : keys(cut.keys.type(), {Cut::L, 1, cut.c.K, cut.S, cut.c.H}),
        values(cut.keys.type(), {Cut::L, 1, cut.c.K, cut.S, cut.c.H}),
        of_keys(random, cut.keys.type(), {Cut::L, 1, cut.c.K, cut.S}),
        of_values(random, cut.keys.type(), {Cut::L, 1, cut.c.K, cut.S}) {
    keys.Fill(0), values.Fill(0);
    Each(cut, b, [&](int64_t to, int64_t from, int64_t scale) {
      keys.Copy(to * cut.c.H, cut.keys, from * cut.c.H, cut.c.H);
      values.Copy(to * cut.c.H, cut.values, from * cut.c.H, cut.c.H);
      of_keys.scales.Copy(to, cut.of_keys.scales, scale, 1);
      of_values.scales.Copy(to, cut.of_values.scales, scale, 1);
    });
  }
  // run(slot here, slot there, its scale there)
  template <typename Run>
  static void Each(const Cut& cut, int64_t b, const Run& run) {
    for (int64_t k = 0; k < cut.c.K; ++k) {
      for (int64_t s = 0; s < cut.S; ++s) {
        run((Cut::layer * cut.c.K + k) * cut.S + s, cut.slot(b, k, s), cut.scale(b, k, s));
      }
    }
  }
};

// Where the tokens of a sequence are: the last slots, the first ones, or some between.
int32_t Start(const Cut& cut, int64_t b) {
  const int64_t most = std::max<int64_t>(0, cut.S - cut.tokens(b));
  return static_cast<int32_t>(b % 3 == 0 ? most : b % 3 == 1 ? 0 : most / 2);
}

// Attention through tables, against the same over the contiguous caches: sums are taken in another order.
void Paged(std::mt19937& random, const PagedCase& c, XLA_FFI_DataType qt, XLA_FFI_DataType ct) {
  Cut cut(random, c, ct);
  const int64_t K = c.K, G = c.G, H = c.H;
  Array first(XLA_FFI_DataType_S32, {});
  *first.At<int32_t>() = c.offset;
  std::vector<int64_t> filled(cut.B);
  for (int64_t b = 0; b < cut.B; ++b) filled[b] = Start(cut, b) + cut.tokens(b);
  cut.Poison(filled);
  for (const bool tiled : {false, true}) {  // as a step does: its rows, then its tiles
    const int64_t begin = tiled ? c.rows : 0, B = tiled ? c.tiles : c.rows, T = tiled ? c.tile : 1;
    Array q(qt, {B, T, K, G, H}), positions(XLA_FFI_DataType_S32, {B, T}), tables(XLA_FFI_DataType_S32, {B, c.P});
    Array out(kF32, {B, T, K, G, H}), max(kF32, {B, T, K, G}), sum(kF32, {B, T, K, G});
    q.Random(random);
    tables.Copy(0, cut.tables, begin * c.P, B * c.P);
    for (int64_t n = 0; n < B * T; ++n) {
      positions.At<int32_t>()[n] = (Start(cut, begin + n / T) + static_cast<int32_t>(n % T)) * c.stride + c.offset;
    }
    const auto call = [&](const Array& queries, const Array& places, const Cut& from, Array& to, Array& top, Array& all) {
      return PagedAttention(AsXla(), queries.buffer(), from.keys.buffer(), from.values.buffer(),
                            tables.typed<ffi::S32>(), from.at.typed<ffi::S32>(), places.typed<ffi::S32>(),
                            first.typed<ffi::S32>(), Both(from.of_keys, from.of_values), to.typed<ffi::F32>(),
                            top.typed<ffi::F32>(), all.typed<ffi::F32>(), c.stride);
    };
    Ok(call(q, positions, cut, out, max, sum));
    for (int64_t b = 0; b < B; ++b) {
      const Whole whole(random, cut, begin + b);
      Array own(qt, {1, T, K, G, H}), at(XLA_FFI_DataType_S32, {1, T});
      Array plain(kF32, {1, T, K, G, H}), top(kF32, {1, T, K, G}), all(kF32, {1, T, K, G});
      own.Copy(0, q, b * own.count(), own.count());
      at.Copy(0, positions, b * T, T);
      Ok(CacheAttention(AsXla(), own.buffer(), whole.keys.buffer(), whole.values.buffer(), cut.at.typed<ffi::S32>(),
                        at.typed<ffi::S32>(), first.typed<ffi::S32>(), Both(whole.of_keys, whole.of_values),
                        plain.typed<ffi::F32>(), top.typed<ffi::F32>(), all.typed<ffi::F32>(), c.stride));
      for (int64_t i = 0; i < plain.count(); ++i) {
        const int64_t row = i / H, there = b * top.count() + row;
        Near(max.Get(there), top.Get(row), 1e-5, "largest score over pages", there);
        Near(sum.Get(there), all.Get(row), 1e-5 * all.Get(row), "sum over pages", there);
        Near(out.Get(b * plain.count() + i) / sum.Get(there), plain.Get(i) / all.Get(row), 1e-5, "paged attention", i);
      }
    }
    if (B * T == 0 || G * H == 0) continue;
    const int32_t page = tables.At<int32_t>()[0];
    for (const int32_t bad : {-1, static_cast<int32_t>(cut.pages)}) {
      tables.At<int32_t>()[0] = bad;
      Expect(call(q, positions, cut, out, max, sum).failure(), "a page that is none");
    }
    tables.At<int32_t>()[0] = page;
  }
}

// Turning, storing and attending through tables, against the same on the contiguous caches: what is stored is equal.
void PagedTurning(std::mt19937& random, const PagedCase& c, XLA_FFI_DataType xt, XLA_FFI_DataType ct) {
  Cut cut(random, c, ct);
  const int64_t K = c.K, G = c.G, H = c.H, N = c.rows + c.tiles * c.tile;
  Array heads(xt, {1, N, K, G + 2, H}), cos(kF32, {1, N, H / 2}), sin(kF32, {1, N, H / 2});
  Array positions(XLA_FFI_DataType_S32, {N}), out(xt, {1, N, K, G, H});
  heads.Random(random);
  for (int64_t i = 0; i < cos.count(); ++i) {
    cos.Set(i, static_cast<float>(std::cos(i))), sin.Set(i, static_cast<float>(std::sin(i)));
  }
  std::vector<int64_t> filled(cut.B);
  for (int64_t b = 0; b < cut.B; ++b) {
    filled[b] = Start(cut, b);
    for (int64_t t = 0; t < cut.tokens(b); ++t) {  // the second half of every other tile is padding
      const bool padding = b >= c.rows && b % 2 && 2 * t >= c.tile;
      positions.At<int32_t>()[cut.first(b) + t] = padding ? -1 : Start(cut, b) + static_cast<int32_t>(t);
    }
  }
  cut.Poison(filled);
  std::vector<std::unique_ptr<Whole>> wholes;
  for (int64_t b = 0; b < cut.B; ++b) wholes.push_back(std::make_unique<Whole>(random, cut, b));
  const auto call = [&] {
    return PagedExtend(AsXla(), heads.buffer(), cos.typed<ffi::F32>(), sin.typed<ffi::F32>(), cut.keys.buffer(),
                       cut.values.buffer(), cut.tables.typed<ffi::S32>(), cut.at.typed<ffi::S32>(),
                       positions.typed<ffi::S32>(), Both(cut.of_keys, cut.of_values), out.buffer(), cut.keys.buffer(),
                       cut.values.buffer(), Both(cut.of_keys, cut.of_values), static_cast<int32_t>(c.rows),
                       static_cast<int32_t>(c.tile));
  };
  Ok(call());
  for (int64_t b = 0; b < cut.B; ++b) {
    const int64_t T = cut.tokens(b), from = cut.first(b);
    Whole& whole = *wholes[b];
    Array own(xt, {1, T, K, G + 2, H}), c1(kF32, {1, T, H / 2}), s1(kF32, {1, T, H / 2});
    Array at(XLA_FFI_DataType_S32, {1, T}), plain(xt, {1, T, K, G, H});
    own.Copy(0, heads, from * K * (G + 2) * H, own.count());
    c1.Copy(0, cos, from * (H / 2), c1.count()), s1.Copy(0, sin, from * (H / 2), s1.count());
    at.Copy(0, positions, from, T);
    Ok(RopeAttention(AsXla(), own.buffer(), c1.typed<ffi::F32>(), s1.typed<ffi::F32>(), whole.keys.buffer(),
                     whole.values.buffer(), cut.at.typed<ffi::S32>(), at.typed<ffi::S32>(),
                     Both(whole.of_keys, whole.of_values), plain.buffer(), whole.keys.buffer(), whole.values.buffer(),
                     Both(whole.of_keys, whole.of_values)));
    Whole::Each(cut, b, [&](int64_t here, int64_t there, int64_t scale) {
      Expect(whole.keys.Same(here * H, cut.keys, there * H, H), "a key stored in a page");
      Expect(whole.values.Same(here * H, cut.values, there * H, H), "a value stored in a page");
      if (!cut.of_keys.on) return;
      Expect(whole.of_keys.scales.Same(here, cut.of_keys.scales, scale, 1), "its scale");
      Expect(whole.of_values.scales.Same(here, cut.of_values.scales, scale, 1), "its scale");
    });
    for (int64_t i = 0; i < plain.count(); ++i) {
      const double expected = plain.Get(i), found = out.Get(from * K * G * H + i);
      Near(found, expected, 2 * out.unit() * std::abs(expected) + 1e-5, "turned attention over pages", i);
    }
  }
  if (N == 0) return;
  positions.At<int32_t>()[0] = static_cast<int32_t>(cut.S);
  Expect(call().failure(), "a position past the tables");
}

// Single entries to their pages and slots; one past either end is not stored.
void PagedWriting(std::mt19937& random, int64_t H, XLA_FFI_DataType type) {
  const int64_t L = 2, pages = 3, K = 2, S = 4, N = 5;
  Array cache(type, {L, pages, K, S, H}), fresh(type, {N, K, H}), expected(type, {L, pages, K, S, H});
  Array page(XLA_FFI_DataType_S32, {N}), slot(XLA_FFI_DataType_S32, {N}), at(XLA_FFI_DataType_S32, {});
  cache.Random(random, 100), fresh.Random(random, 100);
  expected.Copy(0, cache, 0, cache.count());
  const int32_t where[N][2] = {{2, 3}, {0, 0}, {3, 1}, {-1, 2}, {1, 4}};
  for (int64_t n = 0; n < N; ++n) page.At<int32_t>()[n] = where[n][0], slot.At<int32_t>()[n] = where[n][1];
  *at.At<int32_t>() = 1;
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      expected.Copy((((pages + where[n][0]) * K + k) * S + where[n][1]) * H, fresh, (n * K + k) * H, H);
    }
  }
  const auto call = [&] {
    return PagedWrite(cache.buffer(), fresh.buffer(), page.typed<ffi::S32>(), slot.typed<ffi::S32>(),
                      at.typed<ffi::S32>(), cache.buffer());
  };
  Ok(call());
  Expect(cache.Same(0, expected, 0, cache.count()), "entries written to pages");
  *at.At<int32_t>() = 2;
  Expect(call().failure(), "a layer that is none");
}

// Every number of fp8, read one by one and sixteen at a time, and stored again; and the nearest one of what is between.
void Eighths() {
  double before = 0;
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const int exponent = bits >> 3 & 15;
    const double fraction = bits & 7, sign = bits & 0x80 ? -1 : 1;
    const double size = (bits & 0x7f) == 0x7f ? std::nan("")
                        : exponent == 0       ? std::ldexp(fraction, -9)
                                              : std::ldexp(8 + fraction, exponent - 10);
    Fp8 eighth[kLanes] = {};
    eighth[3].bits = static_cast<uint8_t>(bits);
    for (const double found : {double{Widen(eighth[3])}, double{Load(eighth)[3]}}) {
      Expect(std::isnan(size) ? std::isnan(found) : found == sign * size, "fp8 " + std::to_string(bits));
    }
    if ((bits & 0x7f) == 0) before = 0;
    if (std::isnan(size)) continue;
    Fp8 stored;
    PutScaled(static_cast<float>(sign * size), &stored);
    Expect(stored.bits == bits, "fp8 " + std::to_string(bits) + " stored");
    if (size == 0) continue;
    const float middle = static_cast<float>((before + size) / 2);
    for (const float off : {0.999f, 1.0f, 1.001f}) {
      PutScaled(static_cast<float>(sign) * middle * off, &stored);
      const bool up = off > 1 || (off == 1 && bits % 2 == 0);  // of two as near, the even one
      Expect(stored.bits == bits - !up, "fp8 below " + std::to_string(bits));
    }
    before = size;
  }
}

void Halves() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = bits >> 10 & 31;
    const double fraction = bits & 0x3ff, sign = bits & 0x8000 ? -1 : 1;
    const double size = exponent == 31  ? (fraction ? std::nan("") : HUGE_VAL)
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(1024 + fraction, exponent - 25);
    Half half[kLanes] = {};
    half[3].bits = static_cast<uint16_t>(bits);
    for (const double found : {double{Widen(half[3])}, double{Load(half)[3]}}) {
      Expect(std::isnan(size) ? std::isnan(found) : found == sign * size, "float16 " + std::to_string(bits));
    }
  }
}

void Bytewise() {
  std::mt19937 random(3);
  float x[32];
  int8_t bytes[32], finer[32];
  for (const float size : {1e-28f, 1.0f, 3e38f}) {
    for (float& value : x) value = size * (static_cast<float>(random() % 20001) / 10000.0f - 1.0f);
    const double scale = ToBytes(x, bytes, finer);
    for (int i = 0; i < 32; ++i) {
      Near(scale * bytes[i], x[i], 0.5001 * scale, "byte", i);
      Near(scale * (bytes[i] + finer[i] / 254.0), x[i], 0.5001 / 254 * scale + 1e-7 * std::fabs(x[i]), "both bytes", i);
    }
  }
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    x[31] = bad;
    Expect(std::isnan(ToBytes(x, bytes, finer)), "what is not finite makes the scale NaN");
    for (const int8_t byte : bytes) Expect(byte == 0, "and the bytes zero");
  }
  std::fill(x, x + 32, 1e-31f);
  Expect(ToBytes(x, bytes, finer) == 0 && bytes[0] == 0 && finer[0] == 0, "too small is zero");
  // The largest products there are.
  for (const int extreme : {-127, 127}) {
    const Bytes w = Bytes{} + static_cast<int8_t>(kUnsigned ? 255 : -128);
    const Ints sum = Dot(Ints{} + 5, w, Bytes{} + static_cast<int8_t>(extreme));
    for (int64_t l = 0; l < kLanes; ++l) Expect(sum[l] == 5 + 4 * (kUnsigned ? 255 : -128) * extreme, "extreme bytes");
  }
}

void Exponentials() {
  for (double x = -100; x <= 0; x += 1.0 / 1024) {
    const float single = static_cast<float>(x);
    const double found = Exp(Splat(single))[3], expected = single < -87.0f ? 0.0 : std::exp(double{single});
    Near(found, expected, 4 * kUnit * expected, "exponential", static_cast<int64_t>(x * 1024));
  }
  Expect(Exp(Splat(-std::numeric_limits<float>::infinity()))[0] == 0, "exponential of -inf");
  Expect(std::isnan(Exp(Splat(std::numeric_limits<float>::quiet_NaN()))[0]), "exponential of NaN");
}

void Rounding() {
  const auto rounded = [](uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return Narrow(x).bits;
  };
  Expect(rounded(0x3f808000) == 0x3f80 && rounded(0x3f818000) == 0x3f82, "a tie goes to the even one");
  Expect(rounded(0x3f808001) == 0x3f81 && rounded(0x3f807fff) == 0x3f80, "to the nearest");
  Expect(rounded(0x7f7fffff) == 0x7f80 && rounded(0xff800000) == 0xff80, "too large, and infinite");
  Expect((rounded(0x7f800001) & 0x7fff) > 0x7f80 && (rounded(0xffffffff) & 0x7fff) > 0x7f80, "NaN");
  Expect(rounded(0x80000000) == 0x8000 && rounded(0x00000001) == 0, "zeros");
}

// Keeps its tasks until it is asked to run them: helpers that all come late.
struct LatePool {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> task) { tasks.push_back(std::move(task)); }
};

// Takes one task, then has no memory for more.
struct FullPool {
  Pool& pool;
  int taken = 0;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> task) {
    if (taken++) throw std::bad_alloc();
    pool.Schedule(std::move(task));
  }
};

void Loops(Pool& pool) {
  for (const int64_t pieces : {0, 1, 2, 3, 7, 1000}) {
    std::vector<int> runs(pieces, 0);
    Parallel(pool, pieces, [&](int64_t i) { ++runs[i]; });
    for (const int count : runs) Expect(count == 1, "each piece runs once");
    FullPool full{pool};
    Parallel(full, pieces, [&](int64_t i) { ++runs[i]; });
    for (const int count : runs) Expect(count == 2, "each piece runs once where tasks cannot be made");
  }
  LatePool late;
  {
    const auto gone = std::make_unique<std::vector<int>>(100, 0);
    Parallel(late, 100, [&](int64_t i) { ++(*gone)[i]; });
    for (const int count : *gone) Expect(count == 1, "each piece runs once though nobody helps");
  }
  for (auto& task : late.tasks) task();  // touches neither the loop nor its operands, which are gone
  Expect(Busy() == 0, "nobody is counted as busy after");
}

// A piece that throws, on whichever thread: the caller gets it, and no thread is inside a piece when it does.
void Throwing(Pool& pool) {
  for (int64_t bad = 0; bad < 100; ++bad) {
    std::string caught;
    {
      std::vector<int> runs(100, 0);
      try {
        Parallel(pool, 100, [&](int64_t i) {
          ++runs[i];
          if (i % 50 == bad % 50) throw std::runtime_error("piece " + std::to_string(i));
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      for (const int count : runs) Expect(count <= 1, "no piece runs twice");
    }
    Expect(caught == "piece " + std::to_string(bad % 50) || caught == "piece " + std::to_string(bad % 50 + 50),
           "the caller catches what a piece threw, not \"" + caught + "\"");
  }
  while (Busy() != 0) std::this_thread::yield();  // a helper that is on its way out
}

// Several devices of one process, each in its own thread, on one pool.
void AtOnce() {
  std::vector<std::thread> devices;
  for (unsigned device = 0; device < 4; ++device) {
    devices.emplace_back([device] {
      std::mt19937 random(device);
      for (int i = 0; i < 5; ++i) {
        const int64_t M = 1 + device;
        Products(random, M, 40, 95, Weight(random, 40, 95, kBF16), kF32, kF32);
        Products(random, M, 40, 96, Weight(random, 40, 96, 4, 32, true, kF32), kF32, kF32);
        Gates(random, M, 40, 33, Weight(random, 80, 33, kBF16), kBF16);
        Turning(random, 2, 1, 2, 3, 16, 600, kF32, kBF16);
        Attention(random, {2, 1, 2, 3, 17, 600, 1, 0}, kF32, kBF16);
        if (i == 0) PagedTurning(random, {1, 1, 3, 2, 3, 16, 32, 18, 1, 0}, kF32, kBF16);
      }
    });
  }
  for (auto& device : devices) device.join();
}

ffi::Error Throws(int what) {
  if (what == 0) throw std::bad_alloc();
  if (what == 1) throw std::runtime_error("a reason");
  return ffi::Error::Success();
}

void Refusals() {
  Expect(Guard<Throws>::Run(0).errc() == ffi::ErrorCode::kResourceExhausted, "no memory is an error");
  Expect(Guard<Throws>::Run(1).message() == "shardstream: a reason", "an exception is an error");
  Expect(Guard<Throws>::Run(2).success(), "nothing thrown is no error");
  Array x(kF32, {2, 5}), w(kF32, {3, 6}), out(kF32, {2, 3}), bits(kU16, {3, 5});
  ffi::ThreadPool pool = AsXla();
  const auto refused = [&](std::vector<ffi::AnyBuffer> rest, int32_t arrays, int32_t group) {
    return Multiply(pool, {x.buffer(), std::nullopt, 0.0f, std::move(rest), arrays, group}, out.buffer()).failure();
  };
  Expect(refused({w.buffer()}, 1, 0), "sizes that differ");
  Expect(refused({bits.buffer()}, 1, 0), "a weight of uint16");
  Array values(XLA_FFI_DataType_S8, {3, 5}), packed(XLA_FFI_DataType_U8, {3, 2}), scales(kF32, {3, 1}), two(kF32, {3, 2});
  Expect(refused({values.buffer(), two.buffer()}, 2, 0), "two scales where there is one");
  Expect(refused({values.buffer(), scales.buffer()}, 2, 16), "a group of 16");
  Expect(refused({values.buffer(), scales.buffer(), bits.buffer()}, 3, 0), "offsets of uint16");
  Expect(refused({packed.buffer(), scales.buffer()}, 2, 0), "4 bits in a row of 5");
}

void Shapes() {
  std::mt19937 random(7);
  for (const auto& [O, I] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {7, 8}, {9, 15}, {8, 16}, {17, 17}, {33, 9}, {16, 33}, {40, 95}, {3, 0}, {0, 3}}) {
    for (const int64_t M : {0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16}) {
      for (const auto wt : {kF32, kBF16}) {
        Products(random, M, O, I, Weight(random, O, I, wt), kF32, M % 2 ? kF32 : kBF16);
        Products(random, M, O, I, Weight(random, O, I, wt), kBF16, M % 3 ? kF32 : kBF16);
        Gates(random, M, O, I, Weight(random, 2 * O, I, wt), M % 2 ? kF32 : kBF16);
      }
    }
  }
  Products(random, 67, 17, 33, Weight(random, 17, 33, kBF16), kF32, kF32);
  // Of 8 bits any number of columns goes; chunks are 64 of them, or 128 of 4 bits.
  for (const auto& [O, I] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {9, 31}, {8, 32}, {17, 64}, {10, 65}, {8, 96}, {3, 128}, {9, 160}, {1, 576}, {3, 0}, {0, 32}}) {
    for (const int64_t M : {0, 1, 2, 3, 5, 8, 17}) {
      const auto type = M % 3 == 0 ? kF16 : M % 3 == 1 ? kF32 : kBF16;
      for (const int32_t group : {0, 32, 64, 128}) {
        for (const int bits : {8, 4}) {
          if (bits == 4 && I % 32) continue;
          const bool offsets = (M + group / 32) % 2;
          Products(random, M, O, I, Weight(random, O, I, bits, group, offsets, type), M % 2 ? kF32 : kBF16, kF32);
        }
      }
      Gates(random, M, O, I, Weight(random, 2 * O, I, 8, 32, M % 2, type), kF32);
    }
  }
  Products(random, 70, 17, 96, Weight(random, 17, 96, 4, 32, true, kF16), kF32, kF32);
  Turning(random, 1, 1, 1, 1, 2, 1, kF32, kF32);
  Turning(random, 3, 2, 2, 3, 16, 70, kF32, kU16);
  Turning(random, 3, 1, 1, 4, 64, 600, kBF16, kBF16);
  Turning(random, 2, 5, 3, 0, 6, 7, kBF16, kF32);
  Turning(random, 3, 2, 2, 3, 20, 70, kF32, XLA_FFI_DataType_S8);
  Turning(random, 3, 1, 1, 4, 64, 90, kBF16, XLA_FFI_DataType_U8);
  const std::vector<AttentionCase> cases = {
      {1, 1, 1, 1, 1, 1, 1, 0},    {3, 1, 2, 3, 5, 65, 1, 0},     {3, 3, 1, 8, 16, 64, 1, 0},
      {2, 16, 1, 1, 17, 63, 3, 2}, {3, 2, 1, 3, 80, 600, 1, 0},   {2, 1, 1, 5, 96, 1100, 4, 3},
      {3, 1, 1, 2, 4, 0, 1, 0},    {1, 1, 2, 4, 128, 513, 1, 0},  {1, 1, 1, 1, 0, 5, 1, 0},
      {0, 1, 1, 1, 4, 5, 1, 0},    {1, 1, 1, 3, 33, 70, 1, -40},  {1, 2, 1, 0, 4, 5, 1, 0},
  };
  for (const auto& c : cases) {
    if (c.B == 0 || c.H == 0) {
      Attention(random, c, kF32, kF32);
      continue;
    }
    Attention(random, c, kF32, kF32);
    Attention(random, c, kBF16, kBF16);
    Attention(random, c, kF32, kU16);
    Attention(random, c, kF32, XLA_FFI_DataType_S8);
    Attention(random, c, kBF16, XLA_FFI_DataType_U8);
  }
  // Pages shorter than what is worked on together, longer ones, and more than one segment of them.
  for (const PagedCase& c : std::vector<PagedCase>{{1, 0, 1, 1, 1, 2, 1, 1, 1, 0},
                                                   {4, 2, 4, 2, 3, 20, 16, 5, 1, 0},
                                                   {1, 2, 16, 1, 4, 32, 16, 34, 3, 2},
                                                   {1, 1, 5, 3, 2, 18, 96, 2, 2, 1},
                                                   {0, 1, 2, 2, 1, 16, 600, 2, 1, 0},
                                                   {3, 0, 4, 2, 5, 6, 7, 3, 1, 0}}) {
    for (const auto& [xt, ct] : std::vector<std::pair<XLA_FFI_DataType, XLA_FFI_DataType>>{
             {kF32, kF32}, {kBF16, kU16}, {kF32, XLA_FFI_DataType_S8}, {kBF16, XLA_FFI_DataType_U8}}) {
      Paged(random, c, xt, ct);
      PagedTurning(random, c, xt, ct);
    }
  }
  for (const int64_t H : {1, 5, 64}) {
    for (const auto type : {kF32, kU16, XLA_FFI_DataType_S8}) PagedWriting(random, H, type);
  }
}

}  // namespace
}  // namespace shardstream

// Without an argument everything; with "threads" what several threads do together.
int main(int count, char**) {
  using namespace shardstream;
  for (const int threads : {3, 1}) {
    Pool pool(threads);
    the_pool = &pool;
    Loops(pool);
    Throwing(pool);
    AtOnce();
    if (count == 1 && threads == 3) {
      Exponentials();
      Rounding();
      Eighths();
      Halves();
      Bytewise();
      Refusals();
      Shapes();
    }
  }
  std::puts("every check holds");
}
