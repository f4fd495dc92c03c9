// y = x W^T + bias, with W in blocks of 8-bit numbers and x rounded to such blocks on the way in.
//
// Rules
//   1. A block is 32 numbers along the input with one float32 scale: value = scale * integer,
//      integers from -127 to 127. Rows of x and rows of W are cut into blocks alike.
//   2. Inside a block the products are summed in int32, which is exact. Across blocks they are
//      summed in float32, in the order of the input, each by one fused multiply-add:
//      y = fma(scale_w * scale_x, float(sum), y), from y = 0. The bias comes last.
//      A block of x that one number towers over (the sum of its integers' magnitudes is below 508:
//      the mean is less than an eighth of the largest) is followed by a second block of the same
//      kind, for what the first one rounded away: integers of a 254th of its scale.
//   3. So a number of y depends on its own row of x and its own row of W, on nothing else: not on
//      the other rows, not on the threads, not on which of the three variants below computed it.
//   4. A block of x with a NaN or an infinity makes its whole row of y NaN. One whose largest
//      number is below 1e-30 counts as zeros.
//
// Theory of operation
//   A decode step reads every weight once for a few rows: what counts is to read little (8 bits)
//   and in order, and with more rows, to do much per read. Weights lie as 16 rows of W side by
//   side, [group][block][quad][lane][4]: one 64-byte line holds four consecutive inputs of 16
//   outputs, and multiplies with four bytes of x, broadcast. The sixteen sums of a block end up in
//   the lanes of one register, so that the scales cost one multiplication for 512 products.
//   VNNI multiplies unsigned with signed bytes, so weights are stored with 128 added, and each
//   block of x brings -128 times the sum of its integers, to begin the sum with.
//
// engine/int8.py packs the weights, checks a build of this against torch, and calls it.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace {

constexpr int kBlock = 32;
constexpr int kQuads = kBlock / 4;
constexpr int kLanes = 16;
constexpr int kWeightBytes = kBlock * kLanes;
constexpr int kZero = 128;  // what a stored weight of 0 is
constexpr float kLargest = 127.0f;
constexpr int kPeaked = 508;      // 127 * 32 / 8
constexpr float kFiner = 254.0f;  // half a step of the scale is 127 finer ones
constexpr std::int64_t kFewRows = 8;  // rounded in 4 us
constexpr float kSmallest = 1e-30f;  // 127 divided by much less is no float32 any more

struct Integers {
  std::int8_t quads[kQuads][4];
  float scale;
  std::int32_t start;  // -128 * sum of the integers
};

// One block of x. int8.py reckons with its 80 bytes.
struct Block {
  Integers coarse, fine;  // fine.scale is 0 where there is no second block
};
static_assert(sizeof(Block) == 80, "engine/int8.py allocates 80 bytes for a block");

std::uint32_t bits(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

float from_bits(std::uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

void round_block(const float* x, Block* block) {
  // Magnitudes as integers: in their order NaN is above infinity, so that neither gets lost.
  std::int32_t top = 0;
  for (int i = 0; i < kBlock; i++) {
    const std::int32_t magnitude = static_cast<std::int32_t>(bits(x[i]) & 0x7fffffffu);
    top = magnitude > top ? magnitude : top;
  }
  const float largest = from_bits(static_cast<std::uint32_t>(top));
  const bool finite = top < 0x7f800000;
  if (!finite || largest < kSmallest) {
    std::memset(block, 0, sizeof *block);
    if (!finite) block->coarse.scale = std::nanf("");
    return;
  }
  const float inverse = kLargest / largest;
  // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits.
  constexpr float kRound = 12582912.0f;
  std::int8_t* out = &block->coarse.quads[0][0];
  std::int32_t sum = 0, magnitudes = 0;
  for (int i = 0; i < kBlock; i++) {
    const float shifted = x[i] * inverse + kRound;
    const std::int32_t integer = static_cast<std::int32_t>(bits(shifted) - bits(kRound));
    out[i] = static_cast<std::int8_t>(integer);
    sum += integer;
    magnitudes += integer < 0 ? -integer : integer;
  }
  block->coarse.scale = largest / kLargest;
  block->coarse.start = -kZero * sum;
  block->fine.scale = 0.0f;
  if (magnitudes >= kPeaked) return;
  std::int8_t* rest = &block->fine.quads[0][0];
  sum = 0;
  for (int i = 0; i < kBlock; i++) {
    const float shifted = (x[i] * inverse - static_cast<float>(out[i])) * kFiner + kRound;
    const std::int32_t integer = static_cast<std::int32_t>(bits(shifted) - bits(kRound));
    rest[i] = static_cast<std::int8_t>(integer);
    sum += integer;
  }
  block->fine.scale = block->coarse.scale / kFiner;
  block->fine.start = -kZero * sum;
}

// Rows of x that one pass over a group of weights takes: as many as the registers hold.
#if defined(__AVX512VNNI__)
constexpr int kRows = 8;
#else
constexpr int kRows = 2;
#endif

// What a variant needs: sixteen sums in `Sums`, and one step of them. The step multiplies one
// block of weights with the same block of `Rows` rows, whose integers are `stride` blocks apart.
#if defined(__AVX512VNNI__)
struct Sums {
  __m512 lanes = _mm512_setzero_ps();
  void store(float* to) const { _mm512_storeu_ps(to, lanes); }
};

template <int Rows>
inline void step(const Integers* x, std::int64_t stride, const std::uint8_t* w,
                 const float* scales, Sums* y) {
  __m512i dot[Rows];
  for (int r = 0; r < Rows; r++) dot[r] = _mm512_set1_epi32(x[r * stride].start);
  for (int q = 0; q < kQuads; q++) {
    const __m512i weights = _mm512_loadu_si512(w + q * 4 * kLanes);
    for (int r = 0; r < Rows; r++) {
      std::int32_t quad;
      std::memcpy(&quad, x[r * stride].quads[q], sizeof quad);
      dot[r] = _mm512_dpbusd_epi32(dot[r], weights, _mm512_set1_epi32(quad));
    }
  }
  const __m512 scale = _mm512_loadu_ps(scales);
  for (int r = 0; r < Rows; r++) {
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x[r * stride].scale));
    y[r].lanes = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dot[r]), y[r].lanes);
  }
}
#elif defined(__AVX2__) && defined(__FMA__)
struct Sums {
  __m256 lanes[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  void store(float* to) const {
    _mm256_storeu_ps(to, lanes[0]);
    _mm256_storeu_ps(to + 8, lanes[1]);
  }
};

template <int Rows>
inline void step(const Integers* x, std::int64_t stride, const std::uint8_t* w,
                 const float* scales, Sums* y) {
  const __m256i ones = _mm256_set1_epi16(1), zero = _mm256_set1_epi8(static_cast<char>(kZero));
  __m256i dot[Rows][2];
  for (int r = 0; r < Rows; r++) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
  for (int q = 0; q < kQuads; q++) {
    for (int half = 0; half < 2; half++) {
      const auto* line = reinterpret_cast<const __m256i*>(w + q * 4 * kLanes + half * 32);
      const __m256i weights = _mm256_xor_si256(_mm256_loadu_si256(line), zero);
      const __m256i magnitudes = _mm256_abs_epi8(weights);
      for (int r = 0; r < Rows; r++) {
        std::int32_t quad;
        std::memcpy(&quad, x[r * stride].quads[q], sizeof quad);
        // Unsigned times signed without overflow: |w| * (x with the sign of w); two products of
        // at most 127 * 127 fit into 16 bits.
        const __m256i signs = _mm256_sign_epi8(_mm256_set1_epi32(quad), weights);
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signs);
        dot[r][half] = _mm256_add_epi32(dot[r][half], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int half = 0; half < 2; half++) {
    const __m256 scale = _mm256_loadu_ps(scales + 8 * half);
    for (int r = 0; r < Rows; r++) {
      const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x[r * stride].scale));
      __m256& lanes = y[r].lanes[half];
      lanes = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot[r][half]), lanes);
    }
  }
}
#else
struct Sums {
  float lanes[kLanes] = {};
  void store(float* to) const { std::memcpy(to, lanes, sizeof lanes); }
};

template <int Rows>
inline void step(const Integers* x, std::int64_t stride, const std::uint8_t* w,
                 const float* scales, Sums* y) {
  for (int r = 0; r < Rows; r++) {
    const Integers& block = x[r * stride];
    std::int32_t dot[kLanes];
    for (int lane = 0; lane < kLanes; lane++) dot[lane] = block.start;
    for (int q = 0; q < kQuads; q++)
      for (int lane = 0; lane < kLanes; lane++)
        for (int i = 0; i < 4; i++)
          dot[lane] +=
              static_cast<std::int32_t>(w[(q * kLanes + lane) * 4 + i]) * block.quads[q][i];
    for (int lane = 0; lane < kLanes; lane++)
      y[r].lanes[lane] = std::fma(scales[lane] * block.scale, static_cast<float>(dot[lane]),
                                  y[r].lanes[lane]);
  }
}
#endif

// Sixteen outputs of `Rows` rows: to[row][lane]. `x` points at the first row's blocks.
template <int Rows>
void tile(const Block* x, std::int64_t blocks, const std::uint8_t* w, const float* scales,
          float (*to)[kLanes]) {
  Sums y[Rows];
  const std::int64_t stride = blocks * (sizeof(Block) / sizeof(Integers));
  for (std::int64_t b = 0; b < blocks; b++, w += kWeightBytes, scales += kLanes) {
    step<Rows>(&x[b].coarse, stride, w, scales, y);
    // Which blocks are peaked is the same for every group of outputs: a processor foresees it.
    for (int r = 0; r < Rows; r++) {
      const Integers& fine = x[r * blocks + b].fine;
      if (fine.scale != 0.0f) step<1>(&fine, 0, w, scales, y + r);
    }
  }
  for (int r = 0; r < Rows; r++) y[r].store(to[r]);
}

struct Product {
  const Block* x;
  std::int64_t rows, blocks, outputs;
  const std::uint8_t* weights;
  const float* scales;
  const float* bias;  // or null
  float* y;           // [rows, outputs]
};

template <int Rows>
void rows_of_group(const Product& p, std::int64_t row, std::int64_t group) {
  float sums[Rows][kLanes];
  tile<Rows>(p.x + row * p.blocks, p.blocks, p.weights + group * p.blocks * kWeightBytes,
             p.scales + group * p.blocks * kLanes, sums);
  const std::int64_t first = group * kLanes;
  // The last group may be padded.
  const std::int64_t width = p.outputs - first < kLanes ? p.outputs - first : kLanes;
  for (int r = 0; r < Rows; r++) {
    float* y = p.y + (row + r) * p.outputs + first;
    for (std::int64_t lane = 0; lane < width; lane++)
      y[lane] = sums[r][lane] + (p.bias ? p.bias[first + lane] : 0.0f);
  }
}

void group_of_outputs(const Product& p, std::int64_t group) {
  std::int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows) rows_of_group<kRows>(p, row, group);
#if defined(__AVX512VNNI__)
  if (row + 4 <= p.rows) rows_of_group<4>(p, row, group), row += 4;
  if (row + 2 <= p.rows) rows_of_group<2>(p, row, group), row += 2;
#endif
  if (row < p.rows) rows_of_group<1>(p, row, group);
}

}  // namespace

// x [rows, 32 * blocks] to y [rows, outputs], both contiguous; `scratch` holds rows * blocks
// blocks of 80 bytes, aligned to 4. `weights` and `scales` as int8.py packs them.
extern "C" void triolet_int8_linear(const float* x, std::int64_t rows, std::int64_t blocks,
                                    std::int64_t outputs, const std::uint8_t* weights,
                                    const float* scales, const float* bias, float* y,
                                    void* scratch, std::int32_t threads) {
  Block* rounded = static_cast<Block*>(scratch);
  const Product product{rounded, rows, blocks, outputs, weights, scales, bias, y};
  const std::int64_t groups = (outputs + kLanes - 1) / kLanes;
  (void)threads;  // without OpenMP there is one
  // Threads that wait for each other cost more than a few rows do, on a busy machine by far.
  const bool together = rows > kFewRows;
  if (!together)
    for (std::int64_t i = 0; i < rows * blocks; i++) round_block(x + i * kBlock, rounded + i);
  // The same count of threads in all parallel regions of torch and here keeps one team of them.
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (together) {
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < rows * blocks; i++) round_block(x + i * kBlock, rounded + i);
    }
#pragma omp for schedule(static) nowait
    for (std::int64_t group = 0; group < groups; group++) group_of_outputs(product, group);
  }
}
