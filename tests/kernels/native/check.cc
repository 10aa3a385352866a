// Every native operation, called as XLA calls it, over odd shapes in heap blocks of exactly their size: what the
// sanitizers watch. Results are compared with float64; the exit status is 1 where one differs.
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
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
    width_ = type == XLA_FFI_DataType_F32 || type == XLA_FFI_DataType_S32 ? 4 : 2;
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
    if (type_ == XLA_FFI_DataType_F32) {
      At<float>()[i] = value;
    } else {
      At<BFloat16>()[i] = Narrow(value);
    }
  }
  double Get(int64_t i) const { return type_ == XLA_FFI_DataType_F32 ? At<float>()[i] : Widen(At<BFloat16>()[i]); }
  template <typename T>
  T* At() const {
    return reinterpret_cast<T*>(block_.get());
  }
  int64_t count() const { return count_; }
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
  std::snprintf(text, sizeof text, "%s: value %lld is %.9g, not %.9g within %.3g", what, static_cast<long long>(i), found,
                expected, bound);
  Fail(text);
}

void Ok(const ffi::Error& error) { Expect(error.success(), error.message()); }

constexpr XLA_FFI_DataType kF32 = XLA_FFI_DataType_F32, kBF16 = XLA_FFI_DataType_BF16, kU16 = XLA_FFI_DataType_U16;

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

Sum64 Dot(const double* x, const Array& w, int64_t row, int64_t I) {
  Sum64 sum;
  for (int64_t i = 0; i < I; ++i) {
    sum.value += x[i] * w.Get(row * I + i);
    sum.size += std::abs(x[i] * w.Get(row * I + i));
  }
  return sum;
}

void Products(std::mt19937& random, int64_t M, int64_t O, int64_t I, XLA_FFI_DataType xt, XLA_FFI_DataType wt,
              XLA_FFI_DataType ot) {
  const float eps = 1e-5f;
  Array x(xt, {M, I}), scale(wt, {I}), w(wt, {O, I}), out(ot, {M, O});
  x.Random(random), scale.Random(random), w.Random(random);
  for (const bool normed : {false, true}) {
    out.Fill(std::numeric_limits<float>::quiet_NaN());
    Ok(normed ? NormedMatMul(AsXla(), x.buffer(), scale.buffer(), w.buffer(), out.buffer(), eps)
              : MatMul(AsXla(), x.buffer(), w.buffer(), out.buffer()));
    const auto rows = Wide(x, M, I, normed ? &scale : nullptr, eps);
    for (int64_t i = 0; i < M * O; ++i) {
      const auto sum = Dot(rows.data() + i / O * I, w, i % O, I);
      const double bound = (normed ? 3 : 1) * SumError(I) * sum.size + out.unit() * std::abs(sum.value);
      Near(out.Get(i), sum.value, bound, normed ? "normed product" : "product", i);
    }
  }
}

void Gates(std::mt19937& random, int64_t M, int64_t F, int64_t I, XLA_FFI_DataType xt, XLA_FFI_DataType wt) {
  const float eps = 1e-5f;
  Array x(xt, {M, I}), scale(wt, {I}), w(wt, {2 * F, I}), out(xt, {M, F});
  x.Random(random), scale.Random(random, 4.0), w.Random(random);
  out.Fill(std::numeric_limits<float>::quiet_NaN());
  Ok(NormedGate(AsXla(), x.buffer(), scale.buffer(), w.buffer(), out.buffer(), eps));
  const auto rows = Wide(x, M, I, &scale, eps);
  for (int64_t i = 0; i < M * F; ++i) {
    const double* row = rows.data() + i / F * I;
    const auto gate = Dot(row, w, i % F, I), up = Dot(row, w, F + i % F, I);
    const double silu = gate.value / (1.0 + std::exp(-gate.value));
    const double gate_error = 3 * SumError(I) * gate.size, up_error = 3 * SumError(I) * up.size;
    // |silu'| <= 1.1; the exponential, its division and two products are good for ten units.
    const double bound = 1.1 * gate_error * (std::abs(up.value) + up_error) + std::abs(silu) * up_error +
                         (10 * kUnit + out.unit()) * std::abs(silu * up.value) + 1e-30;
    Near(out.Get(i), silu * up.value, bound, "gate", i);
  }
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
  q.Random(random), keys.Random(random), values.Random(random);
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
  }
  out.Fill(poison), max.Fill(poison), sum.Fill(poison);
  Ok(CacheAttention(AsXla(), q.buffer(), keys.buffer(), values.buffer(), at.typed<ffi::S32>(),
                    positions.typed<ffi::S32>(), first.typed<ffi::S32>(), out.typed<ffi::F32>(), max.typed<ffi::F32>(),
                    sum.typed<ffi::F32>(), c.stride));
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
        const double term = q.Get(row * H + h) * keys.Get(head + s * H + h) / std::sqrt(static_cast<double>(H));
        scores[s] += term;
        size += std::abs(term);
      }
      score_error = std::max(score_error, SumError(H) * size);
      top = std::max(top, scores[s]);
    }
    Near(max.Get(row), top, score_error, "largest score", row);
    for (const double score : scores) total += std::exp(score - top);
    // A weight is off by its score's error and a few units; a sum by a rounding for each slot and block of a segment.
    const double relative = 2 * score_error + kUnit * static_cast<double>(std::min(n, kSegment) + 80 + n / kSegment * 8);
    Near(sum.Get(row) * std::exp(max.Get(row) - top), total, relative * total, "sum", row);
    for (int64_t h = 0; h < H; ++h) {
      double expected = 0, size = 0;
      for (int64_t s = 0; s < n; ++s) {
        const double term = std::exp(scores[s] - top) / total * values.Get(head + s * H + h);
        expected += term;
        size += std::abs(term);
      }
      Near(out.Get(row * H + h) / sum.Get(row), expected, 2 * relative * size, "attention", row * H + h);
    }
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
        Products(random, 1 + device, 40, 95, kF32, kBF16, kF32);
        Gates(random, 1 + device, 40, 33, kBF16, kBF16);
        Attention(random, {2, 1, 2, 3, 17, 600, 1, 0}, kF32, kBF16);
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
  Expect(MatMul(AsXla(), x.buffer(), w.buffer(), out.buffer()).failure(), "sizes that differ");
  Expect(MatMul(AsXla(), x.buffer(), bits.buffer(), out.buffer()).failure(), "a weight of uint16");
}

void Shapes() {
  std::mt19937 random(7);
  for (const auto& [O, I] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {7, 8}, {9, 15}, {8, 16}, {17, 17}, {33, 9}, {16, 33}, {40, 95}, {3, 0}, {0, 3}}) {
    for (const int64_t M : {0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16}) {
      for (const auto wt : {kF32, kBF16}) {
        Products(random, M, O, I, kF32, wt, M % 2 ? kF32 : kBF16);
        Products(random, M, O, I, kBF16, wt, M % 3 ? kF32 : kBF16);
        Gates(random, M, O, I, M % 2 ? kF32 : kBF16, wt);
      }
    }
  }
  const std::vector<AttentionCase> cases = {
      {1, 1, 1, 1, 1, 1, 1, 0},   {3, 1, 2, 3, 5, 65, 1, 0},     {3, 3, 1, 8, 16, 64, 1, 0},  {2, 16, 1, 1, 17, 63, 3, 2},
      {3, 2, 1, 3, 80, 600, 1, 0}, {2, 1, 1, 5, 96, 1100, 4, 3}, {1, 1, 2, 4, 128, 513, 1, 0}, {3, 1, 1, 2, 4, 0, 1, 0},
      {1, 1, 1, 1, 0, 5, 1, 0},    {0, 1, 1, 1, 4, 5, 1, 0},     {1, 2, 1, 0, 4, 5, 1, 0},     {1, 1, 1, 3, 33, 70, 1, -40}};
  for (const auto& c : cases) {
    if (c.B == 0 || c.H == 0) {
      Attention(random, c, kF32, kF32);
      continue;
    }
    Attention(random, c, kF32, kF32);
    Attention(random, c, kBF16, kBF16);
    Attention(random, c, kF32, kU16);
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
      Refusals();
      Shapes();
    }
  }
  std::puts("every check holds");
}
