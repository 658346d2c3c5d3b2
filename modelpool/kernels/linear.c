/* Linear layers with weights of 4 or 8 bits and activations of 8, for CPUs of x86-64 and 64-bit Arm.
 *
 * A weight of 8 bits is a level from -128 to 127 times one float of its output. One of 4 bits is a
 * nibble from which such a level follows: nibble * scale - centre, both small integers of the output
 * and 32 inputs. A row of activations is quantised to bytes by its largest magnitude. Every sum is
 * exact in 32 bits, so that neither rows, threads nor the kernel can change a bit; what follows is
 * done element by element in float32, in one order. The results are those of oneDNN's int8 products
 * on the same levels, to the bit.
 *
 * Blocks of a GGUF file's 4-bit types are computed as they are: each group of 32 inputs is summed in
 * whole numbers, which fit float32, and groups are added in float32 in the order of the inputs.
 *
 * No kernel is chosen by the compiler's flags: each function says which instructions it needs, and
 * the caller asks what there is. Compile with -ffp-contract=off.
 */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "threads.h"

enum { GROUP = 32, CHUNK = 512, AHEAD = 4096 };
enum { AVX2 = 1, AVX_VNNI = 2, AVX512_VNNI = 4, AVX512_VNNI_256 = 8, NEON = 16, AMX = 32 };
enum { TILE_ROWS = 16 }; /* which tiles of AMX read, whether they count or not */

struct Weight {
  const uint8_t *nibbles;  /* [panels][groups][2][4][64]; NULL: `levels` are stored */
  const uint8_t *scales;   /* [panels][groups][32], from 1 to 17, of blocks to 63 or NULL: all 1 */
  const uint8_t *centres;  /* [panels][groups][32], of blocks also NULL: all 1 */
  const int8_t *levels;    /* [panels][2][inputs / 4][64]; NULL: `nibbles` are */
  const uint16_t *halves;  /* [panels][blocks][2][32] float16 that scales and centres count; or NULL */
  const int32_t *offsets;  /* [panels * 32] 128 times the sum of an output's levels, not of blocks */
  const float *units;      /* [panels * 32] a level's worth over 127 */
  const float *bias;       /* [panels * 32] or NULL */
  const Weight *next;      /* whose outputs follow in the same rows; or NULL */
  int64_t inputs;          /* with padding, a multiple of 64 */
  int64_t given;           /* of a row of activations */
  int64_t outputs;         /* a panel has 32, the last one perhaps fewer that count */
  int64_t block;           /* groups that share `halves` */
};

typedef struct {
  const Weight *weight;
  const char *x;
  char *y;
  int64_t rows, first, width; /* of a row of y: the weight's first output, and all of them */
  int64_t stride; /* of a row of `levels` */
  int x_is_bf16, y_is_bf16, threads, kernel, quantises;
  uint8_t *levels;   /* [rows][stride], around `zero` */
  uint8_t zero;      /* 128, or 0 where bytes have a sign: AVX2 and NEON */
  int32_t *sums;     /* AVX2, nibbles: [rows][groups] of the levels, minus, in both halves */
  float *totals;     /* blocks: [rows][groups] of the levels */
  int16_t *wide;     /* AVX2, levels: [rows][stride], the same as `levels` */
  float *largest;    /* [rows] */
  char *scratch;
  size_t scratch_bytes; /* of a thread */
} Job;

static inline int64_t multiple(int64_t size, int64_t of) { return (size + of - 1) / of * of; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t blocks_of(const Weight *w) {
  return (w->inputs / GROUP + w->block - 1) / w->block;
}

/* Not unpacked: up to `most` rows, since to unpack a panel twice or three times costs less than sums
 * that go through memory; and blocks, with any number. */
static inline int is_direct(const Job *job, int64_t most) {
  return job->weight->halves || (job->weight->nibbles && job->rows <= most);
}

static inline int32_t four_bytes(const uint8_t *bytes) {
  int32_t found;
  memcpy(&found, bytes, sizeof found);
  return found;
}

static inline char *row_of(const Job *job, int64_t row) {
  return job->y + (row * job->width + job->first) * (job->y_is_bf16 ? 2 : 4);
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

/* ---- a row of activations: loops that compilers turn into vectors */

VECTOR_INLINE float number(const void *x, int is_bf16, int64_t i) {
  if (!is_bf16) return ((const float *)x)[i];
  return of_bits((uint32_t)((const uint16_t *)x)[i] << 16);
}

/* The nearest level of x / largest, as `quantise_rows` has it: 128.5 + 127 * share, cut off. The
 * largest magnitude is found among bits, where a NaN is more than an infinity. */
VECTOR_INLINE float quantise_as(const int is_bf16, int64_t size, const void *x, uint8_t zero,
                                uint8_t *restrict levels) {
  uint32_t most = bits_of(LEAST);
  for (int64_t i = 0; i < size; i++) {
    const uint32_t magnitude = bits_of(number(x, is_bf16, i)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const float largest = of_bits(most);
  for (int64_t i = 0; i < size; i++) {
    const float share = number(x, is_bf16, i) / largest;
    levels[i] = (uint8_t)(int32_t)__builtin_fmaf(share, 127.0f, 128.5f) - 128 + zero;
  }
  return largest;
}

VECTOR_TARGET static void quantise(const Job *job, int64_t row) {
  const Weight *w = job->weight;
  const int64_t groups = w->inputs / GROUP;
  const char *x = job->x + row * w->given * (job->x_is_bf16 ? 2 : 4);
  uint8_t *levels = job->levels + row * job->stride;
  job->largest[row] = job->x_is_bf16 ? quantise_as(1, w->given, x, job->zero, levels)
                                     : quantise_as(0, w->given, x, job->zero, levels);
  memset(levels + w->given, job->zero, w->inputs - w->given);
  if (job->wide)
    for (int64_t i = 0; i < w->inputs; i++) job->wide[row * job->stride + i] = (int8_t)levels[i];
  if (!job->sums && !job->totals) return;
  for (int64_t g = 0; g < groups; g++) {
    int sum[2] = {0, 0};
    for (int k = 0; k < GROUP; k++) sum[k >> 1 & 1] += (int8_t)levels[g * GROUP + k];
    if (job->totals)
      job->totals[row * groups + g] = (float)(sum[0] + sum[1]);
    else
      job->sums[row * groups + g] =
          (int32_t)((uint32_t)-sum[1] << 16 | ((uint32_t)-sum[0] & 0xffff));
  }
}

#ifdef __x86_64__
#include "linear_x86.h"
#else
#include "linear_arm.h"
#endif

/* ---- threads */

Parallel in_parallel;
int (*thread_number)(void), (*thread_count)(void);

void sr_set_threads(void *parallel, void *number, void *count) {
  in_parallel = (Parallel)parallel;
  thread_number = (int (*)(void))number;
  thread_count = (int (*)(void))count;
}

/* Which kernels this CPU and its operating system have, as bits. */
int sr_kernels(void) { return kernels_of_cpu(); }

static void share(void *of) {
  const Job *job = of;
  const int several = job->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  if (job->quantises) {
    const int64_t end = job->rows * (number + 1) / count;
    for (int64_t m = job->rows * number / count; m < end; m++) quantise(job, m);
    return;
  }
  const int64_t panels = (job->weight->outputs + 31) / 32, end = panels * (number + 1) / count;
  for (int64_t p = panels * number / count; p < end; p++)
    run_panel(job, p, job->scratch + job->scratch_bytes * number);
}

static void run(Job *job) {
  if (job->threads > 1) in_parallel(share, job, job->threads, 0);
  else share(job);
}

static inline size_t padded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* The outputs of one weight, from `first` on in rows of `width`. Returns as `sr_linear`. */
static int product(const Weight *w, const void *x, int x_is_bf16, void *y, int y_is_bf16,
                   int64_t rows, int64_t first, int64_t width, int threads, int kernel) {
  const int64_t groups = w->inputs / GROUP;
  /* Rows a power of two apart would share few sets of the first cache. */
  const int64_t stride = w->inputs + 64;
  const int64_t held = multiple(rows, TILE_ROWS);
  const size_t of_levels = padded(held * stride), of_largest = padded(rows * sizeof(float));
  const int is_avx2 = kernel == AVX2, in_blocks = w->halves != NULL;
  const size_t of_groups = padded(rows * groups * sizeof(int32_t));
  const size_t of_sums = in_blocks || (is_avx2 && w->nibbles) ? of_groups : 0;
  const size_t of_wide = is_avx2 && w->levels ? padded(rows * stride * sizeof(int16_t)) : 0;
  const size_t of_thread = padded(CHUNK * 32 + held * 32 * sizeof(int32_t));
  char *memory = aligned_alloc(64, of_levels + of_largest + of_sums + of_wide + of_thread * threads);
  if (!memory) return 1;
  void *sums = memory + of_levels + of_largest;
  Job job = {
      .weight = w, .x = x, .y = y, .rows = rows, .first = first, .width = width, .stride = stride,
      .x_is_bf16 = x_is_bf16, .y_is_bf16 = y_is_bf16, .threads = threads, .kernel = kernel,
      .quantises = 1, .levels = (uint8_t *)memory,
      .zero = is_avx2 || in_blocks || kernel == NEON ? 0 : 128,
      .largest = (float *)(memory + of_levels), .sums = of_sums && !in_blocks ? sums : NULL,
      .totals = in_blocks ? sums : NULL, .wide = of_wide ? sums : NULL,
      .scratch = memory + of_levels + of_largest + of_sums + of_wide, .scratch_bytes = of_thread};
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

/* y [rows, outputs] = x [rows, given] times the weight, plus its bias, and so for those that follow
 * it. Returns 0; 1 without memory. The rows lie one behind the other. */
int sr_linear(const Weight *w, const void *x, int x_is_bf16, void *y, int y_is_bf16, int64_t rows,
              int threads, int kernel) {
  if (!in_parallel || threads < 1) threads = 1;
  int64_t width = 0, first = 0;
  for (const Weight *one = w; one; one = one->next) width += one->outputs;
  for (; w; first += w->outputs, w = w->next)
    if (product(w, x, x_is_bf16, y, y_is_bf16, rows, first, width, threads, kernel)) return 1;
  return 0;
}
