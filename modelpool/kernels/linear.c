/* Linear layers with weights of 4 or 8 bits and activations of 8, for x86-64 CPUs.
 *
 * A weight of 8 bits is a level from -128 to 127 times one float of its output. One of 4 bits is a
 * nibble from which such a level follows: nibble * scale - centre, both small integers of the output
 * and 32 inputs. A row of activations is quantised to bytes by its largest magnitude. Every sum is
 * exact in 32 bits, so that neither rows, threads nor the kernel can change a bit; what follows is
 * done element by element in float32, in one order. The results are those of oneDNN's int8 products
 * on the same levels, to the bit.
 *
 * No kernel is chosen by the compiler's flags: each function says which instructions it needs, and
 * the caller asks what there is. Compile with -ffp-contract=off.
 */

#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "threads.h"

enum { GROUP = 32, CHUNK = 512, AHEAD = 4096 };
enum { AVX2 = 1, AVX_VNNI = 2, AVX512_VNNI = 4, AVX512_VNNI_256 = 8 };

struct Weight {
  const uint8_t *nibbles;  /* [panels][groups][2][4][64]; NULL: `levels` are stored */
  const uint8_t *scales;   /* [panels][groups][32], from 1 to 17 */
  const uint8_t *centres;  /* [panels][groups][32] */
  const int8_t *levels;    /* [panels][2][inputs / 4][64]; NULL: `nibbles` are */
  const int32_t *offsets;  /* [panels * 32] 128 times the sum of an output's levels */
  const float *units;      /* [panels * 32] a level's worth over 127 */
  const float *bias;       /* [panels * 32] or NULL */
  int64_t inputs;          /* with padding, a multiple of 64 */
  int64_t given;           /* of a row of activations */
  int64_t outputs;         /* a panel has 32, the last one perhaps fewer that count */
};

typedef struct {
  const Weight *weight;
  const char *x;
  char *y;
  int64_t rows;
  int64_t stride; /* of a row of `levels` */
  int x_is_bf16, y_is_bf16, threads, kernel, quantises;
  uint8_t *levels;   /* [rows][stride], around 128; around 0 for AVX2 */
  int32_t *sums;     /* [rows][groups] of the levels, minus, in both halves; for AVX2 */
  float *largest;    /* [rows] */
  char *scratch;
  size_t scratch_bytes; /* of a thread */
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int32_t four_bytes(const uint8_t *bytes) {
  int32_t found;
  memcpy(&found, bytes, sizeof found);
  return found;
}

static inline char *row_of(const Job *job, int64_t row) {
  return job->y + row * job->weight->outputs * (job->y_is_bf16 ? 2 : 4);
}

static inline void store_outputs(const Weight *w, const float *outputs, int count, int64_t output,
                                 void *y, int is_bf16) {
  const int64_t end = least(count, w->outputs - output);
  if (is_bf16)
    for (int64_t i = 0; i < end; i++) ((uint16_t *)y)[output + i] = to_bf16(outputs[i]);
  else if (end > 0)
    memcpy((float *)y + output, outputs, end * sizeof *outputs);
}

/* What is left of `largest` where there is a NaN or an infinity: such a row has no finite output. */
static const float LEAST = 1e-30f;

/* ---- a row of activations, with AVX2 */

#define AVX2_TARGET __attribute__((target("avx2,fma")))
#define AVX2_INLINE __attribute__((target("avx2,fma"), always_inline)) static inline

AVX2_INLINE __m256 eight(const void *x, int is_bf16, int64_t i) {
  if (!is_bf16) return _mm256_loadu_ps((const float *)x + i);
  const __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

AVX2_INLINE __m256 up_to_eight(const void *x, int is_bf16, int64_t i, int64_t count) {
  if (count >= 8) return eight(x, is_bf16, i);
  char last[32] = {0};
  const int64_t size = is_bf16 ? 2 : 4;
  memcpy(last, (const char *)x + i * size, count * size);
  return eight(last, is_bf16, 0);
}

/* The nearest level of x / largest, as `quantise_rows` has it: 128.5 + 127 * share, cut off. */
AVX2_TARGET static void quantise(const Weight *w, const void *x, int is_bf16, uint8_t *levels,
                                 int32_t *sums, float *largest) {
  const int64_t given = w->given;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 most = _mm256_set1_ps(LEAST), odd = _mm256_setzero_ps();
  for (int64_t i = 0; i < given; i += 8) {
    const __m256 plain = up_to_eight(x, is_bf16, i, given - i);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(plain, plain, _CMP_UNORD_Q));
    most = _mm256_max_ps(most, _mm256_andnot_ps(sign, plain));
  }
  float each[8];
  _mm256_storeu_ps(each, most);
  *largest = each[0];
  for (int i = 1; i < 8; i++) *largest = each[i] > *largest ? each[i] : *largest;
  if (_mm256_movemask_ps(odd)) *largest = __builtin_nanf("");
  const int zero = sums ? 0 : 128;
  const __m256 half = _mm256_set1_ps(128.5f), most_level = _mm256_set1_ps(127.0f);
  const __m256 by = _mm256_set1_ps(*largest);
  memset(levels + given, zero, w->inputs - given);
  for (int64_t i = 0; i < given; i += 8) {
    const __m256 share = _mm256_div_ps(up_to_eight(x, is_bf16, i, given - i), by);
    __m256i level = _mm256_cvttps_epi32(_mm256_fmadd_ps(share, most_level, half));
    level = _mm256_sub_epi32(level, _mm256_set1_epi32(128 - zero));
    int32_t found[8];
    _mm256_storeu_si256((__m256i *)found, level);
    const int64_t end = least(8, given - i);
    for (int64_t k = 0; k < end; k++) levels[i + k] = (uint8_t)found[k];
  }
  if (!sums) return;
  for (int64_t g = 0; g < w->inputs / GROUP; g++) {
    int sum[2] = {0, 0};
    for (int k = 0; k < GROUP; k++) sum[k >> 1 & 1] += (int8_t)levels[g * GROUP + k];
    sums[g] = (int32_t)((uint32_t)-sum[1] << 16 | ((uint32_t)-sum[0] & 0xffff));
  }
}

/* ---- VNNI, with vectors of 512 bits and of 256 */

#define MOST_FEW 8
#define MOST_ROWS 12
#define V __m512i
#define VF __m512
#define LANES 16
#define VECTORS 2
#define NAME(x) x##_512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define ZERO _mm512_setzero_si512
#define LOAD(p) _mm512_load_si512((const void *)(p))
#define LOADU(p) _mm512_loadu_si512((const void *)(p))
#define STORE(p, v) _mm512_storeu_si512((void *)(p), v)
#define WIDEN(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define OR _mm512_or_si512
#define AND _mm512_and_si512
#define SHIFT_LEFT _mm512_slli_epi32
#define SHIFT_RIGHT16 _mm512_srli_epi16
#define MUL16 _mm512_mullo_epi16
#define SUB8 _mm512_sub_epi8
#define SUB32 _mm512_sub_epi32
#define SET8 _mm512_set1_epi8
#define SET32 _mm512_set1_epi32
#define DOT _mm512_dpbusd_epi32
#define TO_FLOAT _mm512_cvtepi32_ps
#define MULF _mm512_mul_ps
#define ADDF _mm512_add_ps
#define SETF _mm512_set1_ps
#define LOADF _mm512_loadu_ps
#define STOREF _mm512_storeu_ps
#include "vnni_panel.h"
#undef MOST_FEW
#undef MOST_ROWS
#undef V
#undef VF
#undef LANES
#undef VECTORS
#undef NAME
#undef TARGET
#undef ZERO
#undef LOAD
#undef LOADU
#undef STORE
#undef WIDEN
#undef OR
#undef AND
#undef SHIFT_LEFT
#undef SHIFT_RIGHT16
#undef MUL16
#undef SUB8
#undef SUB32
#undef SET8
#undef SET32
#undef DOT
#undef TO_FLOAT
#undef MULF
#undef ADDF
#undef SETF
#undef LOADF
#undef STOREF

/* Sixteen registers leave room for fewer rows. */
#define MOST_FEW 4
#define MOST_ROWS 4
#define V __m256i
#define VF __m256
#define LANES 8
#define VECTORS 4
#define ZERO _mm256_setzero_si256
#define LOAD(p) _mm256_load_si256((const __m256i *)(p))
#define LOADU(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define WIDEN(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define OR _mm256_or_si256
#define AND _mm256_and_si256
#define SHIFT_LEFT _mm256_slli_epi32
#define SHIFT_RIGHT16 _mm256_srli_epi16
#define MUL16 _mm256_mullo_epi16
#define SUB8 _mm256_sub_epi8
#define SUB32 _mm256_sub_epi32
#define SET8 _mm256_set1_epi8
#define SET32 _mm256_set1_epi32
#define TO_FLOAT _mm256_cvtepi32_ps
#define MULF _mm256_mul_ps
#define ADDF _mm256_add_ps
#define SETF _mm256_set1_ps
#define LOADF _mm256_loadu_ps
#define STOREF _mm256_storeu_ps

#define NAME(x) x##_avx
#define TARGET __attribute__((target("avx2,fma,avxvnni")))
#define DOT _mm256_dpbusd_avx_epi32
#include "vnni_panel.h"
#undef NAME
#undef TARGET
#undef DOT

/* The same under the instructions of AVX-512, for tests on CPUs without those of AVX-VNNI. */
#define NAME(x) x##_256
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512vl,avx512vnni")))
#define DOT _mm256_dpbusd_epi32
#include "vnni_panel.h"

/* ---- AVX2 alone: nibbles times bytes leave room for eight sums in 16 bits */

AVX2_INLINE void avx2_finish(const Weight *w, __m256i sum, int64_t output, float largest, void *y,
                             int is_bf16) {
  __m256 found = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(w->units + output));
  found = _mm256_mul_ps(found, _mm256_set1_ps(largest));
  if (w->bias) found = _mm256_add_ps(found, _mm256_loadu_ps(w->bias + output));
  float outputs[8];
  _mm256_storeu_ps(outputs, found);
  store_outputs(w, outputs, 8, output, y, is_bf16);
}

AVX2_INLINE __m256i avx2_twice(const uint8_t *of_outputs) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)of_outputs));
  return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
}

/* `count` rows with eight outputs from `eighth` * 8 of a panel on. */
AVX2_INLINE void avx2_nibbles(const int count, const Job *job, int64_t panel, int eighth,
                              int64_t m0, __m256i *sums) {
  const Weight *w = job->weight;
  const int64_t groups = w->inputs / GROUP;
  const uint8_t *nibbles = w->nibbles + panel * groups * 512 + eighth / 2 * 256 + eighth % 2 * 32;
  const uint8_t *scales = w->scales + panel * groups * 32 + eighth * 8;
  const uint8_t *centres = w->centres + panel * groups * 32 + eighth * 8;
  const __m256i low = _mm256_set1_epi8(15);
  for (int64_t g = 0; g < groups; g++, nibbles += 512, scales += 32, centres += 32) {
    __m256i short_sums[4];
    for (int m = 0; m < count; m++) short_sums[m] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __builtin_prefetch(nibbles + j * 64 + AHEAD);
      const __m256i packed = _mm256_load_si256((const __m256i *)(nibbles + j * 64));
      const __m256i first = _mm256_and_si256(packed, low);
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const uint8_t *x = job->levels + (m0 + m) * job->stride + g * GROUP + j * 8;
        const __m256i a = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four_bytes(x)));
        const __m256i b = _mm256_maddubs_epi16(second, _mm256_set1_epi32(four_bytes(x + 4)));
        short_sums[m] = _mm256_add_epi16(short_sums[m], _mm256_add_epi16(a, b));
      }
    }
    const __m256i scale = avx2_twice(scales), centre = avx2_twice(centres);
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) {
      const __m256i minus = _mm256_set1_epi32(job->sums[(m0 + m) * groups + g]);
      const __m256i scaled = _mm256_madd_epi16(short_sums[m], scale);
      const __m256i taken = _mm256_madd_epi16(minus, centre);
      sums[m] = _mm256_add_epi32(sums[m], _mm256_add_epi32(scaled, taken));
    }
  }
}

/* The same with levels, which need 16 bits each: bytes times bytes have no room for a sum. */
AVX2_INLINE void avx2_levels(const int count, const Job *job, int64_t panel, int eighth, int64_t m0,
                             __m256i *sums) {
  const Weight *w = job->weight;
  const int8_t *levels = w->levels + panel * w->inputs * 32 + eighth / 2 * w->inputs * 16;
  __m256i parts[4][2];
  levels += eighth % 2 * 32;
  for (int m = 0; m < count; m++) parts[m][0] = parts[m][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < w->inputs; k += 4, levels += 64) {
    const __m256i packed = _mm256_load_si256((const __m256i *)levels);
    const __m256i a = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(packed));
    const __m256i b = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(packed, 1));
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) {
      const uint8_t *x = job->levels + (m0 + m) * job->stride + k;
      const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(four_bytes(x)));
      const __m256i each = _mm256_broadcastq_epi64(wide);
      parts[m][0] = _mm256_add_epi32(parts[m][0], _mm256_madd_epi16(a, each));
      parts[m][1] = _mm256_add_epi32(parts[m][1], _mm256_madd_epi16(b, each));
    }
  }
  for (int m = 0; m < count; m++) {
    const __m256i pairs = _mm256_hadd_epi32(parts[m][0], parts[m][1]);
    sums[m] = _mm256_permute4x64_epi64(pairs, 0xd8);
  }
}

#define AVX2_ROWS(count)                                                                         \
  case count:                                                                                    \
    if (w->nibbles) avx2_nibbles(count, job, panel, eighth, m0, sums);                           \
    else avx2_levels(count, job, panel, eighth, m0, sums);                                       \
    break

AVX2_TARGET static void panel_avx2(const Job *job, int64_t panel) {
  const Weight *w = job->weight;
  for (int64_t m0 = 0; m0 < job->rows; m0 += 4) {
    const int count = least(job->rows - m0, 4);
    for (int eighth = 0; eighth < 4; eighth++) {
      __m256i sums[4];
      for (int m = 0; m < 4; m++) sums[m] = _mm256_setzero_si256();
      switch (count) { AVX2_ROWS(1); AVX2_ROWS(2); AVX2_ROWS(3); AVX2_ROWS(4); }
      for (int m = 0; m < count; m++)
        avx2_finish(w, sums[m], panel * 32 + eighth * 8, job->largest[m0 + m],
                    row_of(job, m0 + m), job->y_is_bf16);
    }
  }
}

/* ---- threads */

Parallel in_parallel;
int (*thread_number)(void), (*thread_count)(void);

void sr_set_threads(void *parallel, void *number, void *count) {
  in_parallel = (Parallel)parallel;
  thread_number = (int (*)(void))number;
  thread_count = (int (*)(void))count;
}

/* Which kernels this CPU and its operating system have, as bits. */
int sr_kernels(void) {
  __builtin_cpu_init();
  int found = 0;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  found |= AVX2;
  unsigned a = 7, b = 0, c = 1, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (a >> 4 & 1) found |= AVX_VNNI;
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    found |= AVX512_VNNI | AVX512_VNNI_256;
  return found;
}

static void run_panel(const Job *job, int64_t panel, char *scratch) {
  /* Unpacking a panel twice or three times costs less than sums that go through memory. */
  const int is_few = job->weight->nibbles != NULL;
  switch (job->kernel) {
    case AVX512_VNNI:
      if (is_few && job->rows <= 24) few_512(job, panel);
      else many_512(job, panel, scratch);
      break;
    case AVX_VNNI:
      if (is_few && job->rows <= 4) few_avx(job, panel);
      else many_avx(job, panel, scratch);
      break;
    case AVX512_VNNI_256:
      if (is_few && job->rows <= 4) few_256(job, panel);
      else many_256(job, panel, scratch);
      break;
    default:
      panel_avx2(job, panel);
  }
}

static void share(void *of) {
  const Job *job = of;
  const int several = job->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  const Weight *w = job->weight;
  if (job->quantises) {
    const int64_t end = job->rows * (number + 1) / count, groups = w->inputs / GROUP;
    const int64_t row_bytes = w->given * (job->x_is_bf16 ? 2 : 4);
    for (int64_t m = job->rows * number / count; m < end; m++)
      quantise(w, job->x + m * row_bytes, job->x_is_bf16, job->levels + m * job->stride,
               job->sums ? job->sums + m * groups : NULL, job->largest + m);
    return;
  }
  const int64_t panels = (w->outputs + 31) / 32, end = panels * (number + 1) / count;
  for (int64_t p = panels * number / count; p < end; p++)
    run_panel(job, p, job->scratch + job->scratch_bytes * number);
}

static void run(Job *job) {
  if (job->threads > 1) in_parallel(share, job, job->threads, 0);
  else share(job);
}

static inline size_t padded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* y [rows, outputs] = x [rows, given] times the weight, plus its bias. Returns 0; 1 without memory.
 * The rows lie one behind the other. */
int sr_linear(const Weight *w, const void *x, int x_is_bf16, void *y, int y_is_bf16, int64_t rows,
              int threads, int kernel) {
  if (!in_parallel || threads < 1) threads = 1;
  const int64_t groups = w->inputs / GROUP;
  /* Rows a power of two apart would share few sets of the first cache. */
  const int64_t stride = w->inputs + 64;
  const size_t of_levels = padded(rows * stride), of_largest = padded(rows * sizeof(float));
  const size_t of_sums = kernel == AVX2 ? padded(rows * groups * sizeof(int32_t)) : 0;
  const size_t of_thread = padded(CHUNK * 32 + rows * 32 * sizeof(int32_t));
  char *memory = aligned_alloc(64, of_levels + of_largest + of_sums + of_thread * threads);
  if (!memory) return 1;
  Job job = {
      .weight = w, .x = x, .y = y, .rows = rows, .stride = stride, .x_is_bf16 = x_is_bf16, .y_is_bf16 = y_is_bf16,
      .threads = threads, .kernel = kernel, .quantises = 1, .levels = (uint8_t *)memory,
      .largest = (float *)(memory + of_levels),
      .sums = of_sums ? (int32_t *)(memory + of_levels + of_largest) : NULL,
      .scratch = memory + of_levels + of_largest + of_sums, .scratch_bytes = of_thread};
  if (rows * w->inputs < 1 << 15) {
    job.threads = 1;
    run(&job);
    job.threads = threads;
  } else
    run(&job);
  job.quantises = 0;
  run(&job);
  free(memory);
  return 0;
}
