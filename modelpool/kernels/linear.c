/* Linear layers with weights of 4 to 8 bits and activations of 8.
 *
 * Activations are quantised to levels from -127 to 127, each group of 32 inputs by its largest
 * magnitude; for W8A8 checkpoints, which were made so, each row by its own. A weight is a whole
 * number of 4, 5, 6 or 8 bits minus `zero`, times small whole numbers and float16 of its output and
 * group, minus a least value of the group. Sums within a group are exact whole numbers. What follows
 * is done in float32, group by group in the order of the inputs; the last product is fused to the
 * sum, with one rounding, as every CPU has it. So neither rows, threads nor the kernel can change a
 * bit. With one scale a row all of a row is summed in whole numbers, to the bits of oneDNN's int8
 * products.
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

enum { GROUP = 32, AHEAD = 4096, ROWS_AT_ONCE = 4, ROWS_OF_TILE = 64, GROUPS_AT_ONCE = 8 };
enum { AVX2 = 1, AVX_VNNI = 2, AVX512_VNNI = 4, NEON = 8, PLAIN = 16 };
enum { NIBBLES, FIVE_BITS, SIX_BITS, BYTES }; /* forms of a weight; of six bits in two parts */

/* Panels of 32 outputs; in a half panel, 16 outputs, four inputs of each lie side by side. */
struct Weight {
  const uint8_t *nibbles;  /* [panels][groups][2][4][64], eight inputs each; NULL: `bytes` */
  const uint8_t *fifths;   /* [panels][groups][2][4][2][8] bits of what nibbles lack; or NULL */
  const uint8_t *sixths;   /* the same; only with fifths and two parts */
  const uint8_t *bytes;    /* [panels][2][inputs / 4][64] */
  const int8_t *scales;    /* [panels][groups][parts][32], times the sum of a part; NULL: 1 */
  const uint8_t *centres;  /* [panels][groups][32], times the sum of activations; NULL: see `bases` */
  const uint16_t *steps;   /* [panels][blocks][32] float16, times the scales; NULL: 1 */
  const uint16_t *bases;   /* the same, times the centres; NULL: 1, without centres 0 */
  const float *units;      /* [panels * 32] over 127 */
  const float *bias;       /* [panels * 32] or NULL */
  const Weight *next;      /* whose outputs follow in the same rows; or NULL */
  int64_t inputs;          /* with padding, a multiple of 64 */
  int64_t given;           /* of a row of activations */
  int64_t outputs;         /* a panel has 32, the last one perhaps fewer that count */
  int64_t block;           /* groups that share steps and bases */
  int64_t parts;           /* of a group: 1, or 2 of 16 inputs each */
  int64_t zero;            /* that a stored number has more; with bytes 128 */
  int64_t is_by_row;       /* activations have one scale for each row; only with bytes and units */
};

typedef struct {
  const Weight *weight, *end; /* from the one on, until the other */
  const char *x;
  char *y;
  int64_t rows, first, width; /* of a row of y: the weight's first output, and all of them */
  int64_t stride, groups; /* of a row of `levels`; and of the others */
  int x_is_bf16, y_is_bf16, threads, kernel, quantises;
  int8_t *levels;  /* [rows][stride] */
  int32_t *totals; /* [rows][groups][2] sums of 16 levels each; by row: [0][0] of all */
  int32_t *taken;  /* of each weight [rows][groups][parts] its zero times these sums, negative */
  float *largest;  /* [rows][groups], by row the first */
  float *lowered;  /* [rows][groups] this times the sum of the group */
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int32_t four_bytes(const void *bytes) {
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

/* Where the parts of a panel begin. */
typedef struct {
  const uint8_t *nibbles, *fifths, *sixths, *bytes, *centres;
  const int8_t *scales;
  const uint16_t *steps, *bases;
} Panel;

static inline Panel panel_of(const Weight *w, int64_t panel) {
  const int64_t groups = w->inputs / GROUP, blocks = (groups + w->block - 1) / w->block;
  return (Panel){
      .nibbles = w->nibbles ? w->nibbles + panel * groups * 512 : NULL,
      .fifths = w->fifths ? w->fifths + panel * groups * 128 : NULL,
      .sixths = w->sixths ? w->sixths + panel * groups * 128 : NULL,
      .bytes = w->bytes ? w->bytes + panel * w->inputs * 32 : NULL,
      .scales = w->scales ? w->scales + panel * groups * w->parts * 32 : NULL,
      .centres = w->centres ? w->centres + panel * groups * 32 : NULL,
      .steps = w->steps ? w->steps + panel * blocks * 32 : NULL,
      .bases = w->bases ? w->bases + panel * blocks * 32 : NULL};
}

/* A group of a panel, unpacked for many rows. */
typedef struct {
  uint8_t numbers[GROUP * 32];
  float steps[32], bases[32];
} Group;

/* What is left of `largest` where there is a NaN or an infinity: such a row has no finite output. */
static const float LEAST = 1e-30f;

/* ---- a row of activations: loops that compilers turn into vectors */

VECTOR_INLINE float number(const void *x, int is_bf16, int64_t i) {
  if (!is_bf16) return ((const float *)x)[i];
  return of_bits((uint32_t)((const uint16_t *)x)[i] << 16);
}

/* The bits of the largest magnitude of a group: as numbers a NaN's are more than an infinity's. */
VECTOR_INLINE uint32_t most_of(const int is_bf16, const void *x) {
  uint32_t most[8];
  for (int i = 0; i < 8; i++) most[i] = bits_of(LEAST);
  for (int k = 0; k < GROUP; k += 8)
    for (int i = 0; i < 8; i++) {
      const uint32_t magnitude = bits_of(number(x, is_bf16, k + i)) & 0x7fffffff;
      most[i] = magnitude > most[i] ? magnitude : most[i];
    }
  for (int n = 4; n; n /= 2)
    for (int i = 0; i < n; i++) most[i] = most[i] > most[i + n] ? most[i] : most[i + n];
  return most[0];
}

/* The nearest levels of x / largest: 128.5 + 127 * share, cut off, minus 128; and the sums of the
 * first 16 and of the others. */
VECTOR_INLINE void levels_of(const int is_bf16, const void *x, float largest,
                             int8_t *restrict levels, int32_t *restrict totals) {
  int32_t found[GROUP];
  for (int i = 0; i < GROUP; i++)
    found[i] = (int8_t)(
        (int32_t)__builtin_fmaf(number(x, is_bf16, i) / largest, 127.0f, 128.5f) - 128);
  for (int part = 0; part < 2; part++) {
    int32_t sums[8];
    for (int i = 0; i < 8; i++) sums[i] = found[part * 16 + i] + found[part * 16 + 8 + i];
    for (int n = 4; n; n /= 2)
      for (int i = 0; i < n; i++) sums[i] += sums[i + n];
    totals[part] = sums[0];
  }
  for (int i = 0; i < GROUP; i++) levels[i] = (int8_t)found[i];
}

VECTOR_INLINE void quantise_as(const int is_bf16, const Job *job, int64_t row) {
  const Weight *w = job->weight;
  const int64_t size = is_bf16 ? 2 : 4, whole = w->given / GROUP;
  const char *x = job->x + row * w->given * size;
  int8_t *levels = job->levels + row * job->stride;
  int32_t *totals = job->totals + row * job->groups * 2;
  float *largest = job->largest + row * job->groups, *lowered = job->lowered + row * job->groups;
  char last[GROUP * 4] = {0}; /* what is behind the whole groups, and zeros */
  memcpy(last, x + whole * GROUP * size, w->given % GROUP * size);
  uint32_t most = 0;
  for (int64_t g = 0; g < job->groups && w->is_by_row; g++) {
    const uint32_t here = most_of(is_bf16, g < whole ? x + g * GROUP * size : last);
    most = here > most ? here : most;
  }
  for (int64_t g = 0; g < job->groups; g++) {
    if (g == whole + 1) memset(last, 0, sizeof last);
    const char *group = g < whole ? x + g * GROUP * size : last;
    largest[g] = of_bits(w->is_by_row ? most : most_of(is_bf16, group));
    levels_of(is_bf16, group, largest[g], levels + g * GROUP, totals + g * 2);
    lowered[g] = (float)(totals[g * 2] + totals[g * 2 + 1]) * largest[g];
  }
  for (int64_t i = 1; i < job->groups * 2 && w->is_by_row; i++) totals[0] += totals[i];
}

VECTOR_TARGET static void quantise(const Job *job, int64_t row) {
  if (job->x_is_bf16) quantise_as(1, job, row);
  else quantise_as(0, job, row);
}

/* BYTES_ZERO: see dot_panel.h. */
static void take(const Job *job, const Weight *w, int32_t *taken, int bytes_zero) {
  const int zero = w->bytes ? bytes_zero : (int)w->zero;
  for (int64_t i = 0; i < job->rows * job->groups; i++) {
    const int32_t *totals = job->totals + i * 2;
    if (w->parts == 1) taken[i] = -zero * (totals[0] + totals[1]);
    else
      for (int part = 0; part < 2; part++) taken[i * 2 + part] = -zero * totals[part];
  }
}

/* ---- in plain C: what the other kernels compute */

static inline float of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float magnitude = of_bits(rest << 13) * 0x1p112f; /* exact, also below the least exponent */
  return of_bits(sign | bits_of(magnitude));
}

static inline int number_of(const Weight *w, const Panel *p, int64_t output, int64_t input) {
  const int64_t half = output / 16, lane = output % 16 * 4 + input % 4;
  if (w->bytes) return p->bytes[(half * (w->inputs / 4) + input / 4) * 64 + lane] - (int)w->zero;
  const int64_t vector = (input / GROUP * 2 + half) * 4 + input % GROUP / 8, late = input / 4 % 2;
  const int64_t bits = vector * 16 + late * 8 + lane / 8, bit = lane % 8;
  int number = p->nibbles[vector * 64 + lane] >> late * 4 & 15;
  if (p->fifths) number |= (p->fifths[bits] >> bit & 1) << 4;
  if (p->sixths) number |= (p->sixths[bits] >> bit & 1) << 5;
  return number - (int)w->zero;
}

static float sum_plain(const Job *job, const Panel *p, int64_t output, int64_t row) {
  const Weight *w = job->weight;
  const int8_t *levels = job->levels + row * job->stride;
  const float *largest = job->largest + row * job->groups;
  const float *lowered = job->lowered + row * job->groups;
  float sum = 0;
  int32_t whole = 0;
  for (int64_t g = 0; g < w->inputs / GROUP; g++) {
    const int64_t b = g / w->block * 32 + output;
    float found = 0;
    for (int part = 0; part < w->parts; part++) {
      const int64_t size = GROUP / w->parts, first = g * GROUP + part * size;
      int32_t of_part = 0;
      for (int64_t i = first; i < first + size; i++)
        of_part += number_of(w, p, output, i) * levels[i];
      whole += of_part;
      /* Exact in float32: whole numbers below 2^24. */
      found += (float)of_part * (w->parts == 2 ? p->scales[(g * 2 + part) * 32 + output] : 1);
    }
    float step = p->steps ? of_half(p->steps[b]) : 1, base = p->bases ? of_half(p->bases[b]) : 1;
    if (p->scales && w->parts == 1) step *= p->scales[g * 32 + output];
    if (p->centres) base *= p->centres[g * 32 + output];
    if (w->is_by_row) continue;
    sum = __builtin_fmaf(found * step, largest[g], sum);
    if (p->centres || p->bases) sum = __builtin_fmaf(-lowered[g], base, sum);
  }
  return w->is_by_row ? (float)whole : sum;
}

static void panel_plain(const Job *job, int64_t panel) {
  const Weight *w = job->weight;
  const Panel p = panel_of(w, panel);
  for (int64_t m = 0; m < job->rows; m++)
    for (int64_t i = 0; i < least(32, w->outputs - panel * 32); i++) {
      const int64_t output = panel * 32 + i;
      float found = sum_plain(job, &p, i, m) * w->units[output];
      if (w->is_by_row) found *= job->largest[m * job->groups];
      if (w->bias) found += w->bias[output];
      store_outputs(w, &found, 1, output, row_of(job, m), job->y_is_bf16);
    }
}

/* The weights of outputs `ids`, as numbers, to y [count][given]. */
void sr_rows(const Weight *w, const int64_t *ids, int64_t count, float *y) {
  for (int64_t n = 0; n < count; n++, y += w->given) {
    const Panel p = panel_of(w, ids[n] / 32);
    const int64_t output = ids[n] % 32;
    const float unit = w->units[ids[n]] * 127;
    for (int64_t i = 0; i < w->given; i++) {
      const int64_t g = i / GROUP, b = g / w->block * 32 + output, part = i * w->parts / GROUP;
      float step = p.steps ? of_half(p.steps[b]) : 1, base = p.bases ? of_half(p.bases[b]) : 1;
      if (p.scales) step *= p.scales[part * 32 + output];
      if (p.centres) base *= p.centres[g * 32 + output];
      y[i] = number_of(w, &p, output, i) * step;
      if (p.centres || p.bases) y[i] -= base;
      y[i] *= unit;
    }
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

static int64_t panels_of(const Weight *w) { return (w->outputs + 31) / 32; }

static void share(void *of) {
  const Job *job = of;
  const int several = job->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  if (job->quantises) {
    const int64_t end = job->rows * (number + 1) / count;
    for (int64_t m = job->rows * number / count; m < end; m++) quantise(job, m);
    return;
  }
  Job own = *job; /* of one weight after the other */
  int64_t all = 0;
  for (const Weight *w = job->weight; w != job->end; w = w->next) all += panels_of(w);
  int64_t begin = all * number / count, end = all * (number + 1) / count;
  for (const Weight *w = job->weight; w != job->end; w = w->next) {
    const int64_t panels = panels_of(w);
    own.weight = w;
    for (int64_t p = begin; p < least(end, panels); p++)
      if (job->kernel == PLAIN) panel_plain(&own, p);
      else run_panel(&own, p);
    begin = begin > panels ? begin - panels : 0;
    end -= panels;
    own.first += w->outputs;
    own.taken += job->rows * job->groups * 2;
  }
}

static void run(Job *job, int threads) {
  job->threads = threads;
  if (threads > 1) in_parallel(share, job, threads, 0);
  else share(job);
}

static inline size_t padded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* y [rows, outputs] = x [rows, given] times the weight, plus its bias, and so for those that follow
 * it, of the same inputs. Returns 0; 1 without memory. The rows lie one behind the other. */
int sr_linear(const Weight *w, const void *x, int x_is_bf16, void *y, int y_is_bf16, int64_t rows,
              int threads, int kernel) {
  if (!in_parallel || threads < 1) threads = 1;
  /* Rows a power of two apart would share few sets of the first cache. */
  const int64_t stride = w->inputs + 64, groups = w->inputs / GROUP;
  const size_t of_levels = padded(rows * stride), of_numbers = rows * groups * 4;
  int64_t weights = 0, width = 0;
  for (const Weight *one = w; one; one = one->next) weights++, width += one->outputs;
  char *memory = aligned_alloc(64, padded(of_levels + (4 + 2 * weights) * of_numbers));
  if (!memory) return 1;
  Job job = {.x = x, .y = y, .rows = rows, .width = width, .stride = stride,
             .groups = groups, .x_is_bf16 = x_is_bf16, .y_is_bf16 = y_is_bf16, .kernel = kernel,
             .levels = (int8_t *)memory, .totals = (int32_t *)(memory + of_levels)};
  job.largest = (float *)(job.totals + rows * groups * 2);
  job.lowered = job.largest + rows * groups;
  job.taken = (int32_t *)(job.lowered + rows * groups);
  while (w) { /* together all that follow one another and read the rows in one way */
    job.weight = w;
    job.quantises = 1;
    run(&job, rows * w->inputs < 1 << 15 ? 1 : threads);
    job.quantises = 0;
    int64_t outputs = 0;
    int32_t *taken = job.taken;
    for (; w && w->is_by_row == job.weight->is_by_row; w = w->next) {
      if (!w->is_by_row) take(&job, w, taken, kernel & (AVX512_VNNI | AVX_VNNI) ? 128 : 0);
      taken += rows * groups * 2;
      outputs += w->outputs;
    }
    job.end = w;
    run(&job, threads);
    job.first += outputs;
  }
  free(memory);
  return 0;
}
