/* What stands between the products of a decoder's layer of Llama's shape, and these: norms, rotation,
 * gate, and sums of residuals, in float32 and row by row.
 *
 * A row's bits depend on nothing but the row: sums have an order of their own, by lanes, no
 * product is fused with a sum, and the exponential is written here. NaN and infinity go where they
 * go in torch. Compile with -ffp-contract=off.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "threads.h"

enum { LANES = 32, SHARED = 1 << 16, TOGETHER = 128 }; /* SHARED: numbers from which on threads
  share the rows; TOGETHER: rows whose MLP is in memory at once */

typedef struct {
  const Weight *qkv, *out, *gate_up, *down;
  const float *before, *between; /* [hidden] weights of norms */
  const float *of_heads;         /* [rotated][head_dim] those of heads, or NULL */
  int64_t hidden, inner;         /* inner: outputs of gate, and of up */
  int64_t heads, rotated, head_dim; /* heads: of queries, keys and values; rotated: of the first two */
  float before_eps, between_eps, heads_eps;
} Layer;

typedef struct Pass {
  const Layer *layer;
  void (*step)(const struct Pass *, int64_t row);
  int64_t rows;
  float *x;      /* [rows][hidden] */
  float *normed; /* the same */
  float *added;  /* the same, of attention or of the MLP */
  float *wide;   /* [rows] of queries, keys and values; or of gate and up */
  float *gated;  /* [rows][inner] */
  const float *cos, *sin; /* [head_dim] each, `stride` to the next row; sines are signed */
  int64_t stride;
  float *y;      /* [rows][heads][head_dim] */
  int threads;
} Pass;

/* To y what is x / sqrt(mean(x^2) + eps) * weight. */
VECTOR_INLINE void norm(const float *x, const float *weight, float eps, int64_t size, float *y) {
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (int k = 0; k < LANES; k++) lanes[k] += x[i + k] * x[i + k];
  for (; i < size; i++) lanes[i % LANES] += x[i] * x[i];
  for (int half = LANES / 2; half; half /= 2)
    for (int k = 0; k < half; k++) lanes[k] += lanes[k + half];
  const float by = 1.0f / __builtin_sqrtf(lanes[0] / (float)size + eps);
  for (int64_t k = 0; k < size; k++) y[k] = x[k] * by * weight[k];
}

/* e^x, within two units of the last place from -87 to 88, below as at -87, above 88.4 infinity.
 * `most` and `least` are 89 and -87: where GCC knows that, it does not compute lanes together. */
VECTOR_INLINE float exponential(float x, float most, float least) {
  const float shift = 12582912.0f; /* behind which a sum is a whole number */
  x = most < x ? most : x;         /* a NaN stays one */
  x = least > x ? least : x;
  const float shifted = x * 1.44269504f + shift, whole = shifted - shift;
  const float r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  /* The whole number, in the last bits of `shifted`, becomes an exponent. */
  return y * of_bits((bits_of(shifted) << 23) + (127u << 23));
}

VECTOR_TARGET static void norm_before(const Pass *p, int64_t row) {
  const Layer *l = p->layer;
  norm(p->x + row * l->hidden, l->before, l->before_eps, l->hidden, p->normed + row * l->hidden);
}

VECTOR_TARGET static void add(const Pass *p, int64_t row) {
  float *restrict x = p->x + row * p->layer->hidden;
  const float *restrict added = p->added + row * p->layer->hidden;
  for (int64_t i = 0; i < p->layer->hidden; i++) x[i] += added[i];
}

VECTOR_TARGET static void add_and_norm(const Pass *p, int64_t row) {
  const Layer *l = p->layer;
  add(p, row);
  norm(p->x + row * l->hidden, l->between, l->between_eps, l->hidden, p->normed + row * l->hidden);
}

/* silu(gate) * up. */
VECTOR_TARGET static void gate(const Pass *p, int64_t row) {
  const int64_t inner = p->layer->inner;
  const float *restrict of_gate = p->wide + row * 2 * inner, *restrict up = of_gate + inner;
  float *restrict y = p->gated + row * inner, most = 89.0f, least = -87.0f;
  __asm__("" : "+m"(most), "+m"(least));
  for (int64_t i = 0; i < inner; i++)
    y[i] = of_gate[i] / (1.0f + exponential(-of_gate[i], most, least)) * up[i];
}

/* Norms and turns queries and keys, in place, and gives all heads. */
VECTOR_TARGET static void turn(const Pass *p, int64_t row) {
  const Layer *l = p->layer;
  const int64_t dim = l->head_dim, half = dim / 2, size = l->heads * dim;
  const float *cos = p->cos + row * p->stride, *sin = p->sin + row * p->stride;
  float *x = p->wide + row * size;
  for (int64_t head = 0; head < l->rotated; head++) {
    float *low = x + head * dim, *high = low + half;
    if (l->of_heads) norm(low, l->of_heads + head * dim, l->heads_eps, dim, low);
    for (int64_t i = 0; i < half; i++) {
      const float a = low[i], b = high[i];
      low[i] = a * cos[i] + b * sin[i];
      high[i] = b * cos[half + i] + a * sin[half + i];
    }
  }
  memcpy(p->y + row * size, x, size * sizeof *x);
}

static void share(void *of) {
  const Pass *p = of;
  const int several = p->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  for (int64_t row = p->rows * number / count; row < p->rows * (number + 1) / count; row++)
    p->step(p, row);
}

static void each_row(Pass *p, void (*step)(const Pass *, int64_t), int threads) {
  p->step = step;
  p->threads = in_parallel && p->rows * p->layer->hidden >= SHARED ? threads : 1;
  if (p->threads > 1) in_parallel(share, p, p->threads, 0);
  else share(p);
}

/* Queries, keys and values of x. Returns 0; 1 without memory. */
int sr_before(const Layer *l, float *x, int64_t rows, const float *cos, const float *sin,
              int64_t stride, float *y, int threads, int kernel) {
  const int64_t all = l->hidden + l->heads * l->head_dim;
  if (!rows) return 0;
  float *memory = malloc(rows * all * sizeof(float));
  if (!memory) return 1;
  Pass p = {.layer = l, .rows = rows, .x = x, .normed = memory, .wide = memory + rows * l->hidden,
            .cos = cos, .sin = sin, .stride = stride, .y = y};
  each_row(&p, norm_before, threads);
  const int failed = sr_linear(l->qkv, p.normed, 0, p.wide, 0, rows, threads, kernel);
  if (!failed) each_row(&p, turn, threads);
  free(memory);
  return failed;
}

/* Adds to x what becomes of `seen`, and then what the MLP makes of x. As above. */
int sr_behind(const Layer *l, float *x, int64_t rows, const float *seen, int threads, int kernel) {
  const int64_t most = rows < TOGETHER ? rows : TOGETHER;
  const int64_t read = (2 * l->rotated - l->heads) * l->head_dim; /* of all query heads */
  if (!rows) return 0;
  float *memory = malloc(most * (2 * l->hidden + 3 * l->inner) * sizeof(float));
  if (!memory) return 1;
  float *wide = memory + 2 * most * l->hidden;
  int failed = 0;
  for (int64_t done = 0, some; done < rows && !failed; done += some) {
    some = rows - done < most ? rows - done : most;
    Pass p = {.layer = l, .rows = some, .x = x + done * l->hidden, .normed = memory,
              .added = memory + most * l->hidden, .wide = wide, .gated = wide + 2 * most * l->inner};
    failed = sr_linear(l->out, seen + done * read, 0, p.added, 0, some, threads, kernel);
    if (!failed) each_row(&p, add_and_norm, threads);
    failed = failed || sr_linear(l->gate_up, p.normed, 0, wide, 0, some, threads, kernel);
    if (!failed) each_row(&p, gate, threads);
    failed = failed || sr_linear(l->down, p.gated, 0, p.added, 0, some, threads, kernel);
    if (!failed) each_row(&p, add, threads);
  }
  free(memory);
  return failed;
}
