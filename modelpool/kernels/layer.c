/* A pass over a decoder of Llama's or Gemma's shape: layers, norm and head, in float32 and row by row.
 *
 * A row's bits depend on nothing but the row: sums have an order of their own, by lanes, no
 * product is fused with a sum, and the exponential is written here. NaN and infinity go where they
 * go in torch. Compile with -ffp-contract=off.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"
#include "linear.h"
#include "threads.h"

enum { SUMS = 32, SHARED = 1 << 16, TOGETHER = 128 }; /* SUMS: of a norm, side by side; SHARED: numbers
  from which on threads share the rows; TOGETHER: rows whose MLP is in memory at once */

typedef struct {
  const Weight *qkv, *out, *gate_up, *down;
  const AttendLayer *attend;     /* its keys and values are written, then read */
  const float *before, *between; /* [hidden] weights of norms */
  const float *of_heads;         /* [rotated][head_dim] those of heads, or NULL */
  const float *after_attention, *after_mlp; /* [hidden] of what is added, or NULL */
  int64_t hidden, inner;         /* inner: outputs of gate, and of up */
  int64_t heads, rotated, head_dim; /* heads: of queries, keys and values; rotated: of the first two */
  int64_t angles;                /* which of a pass it rotates by */
  int64_t is_gelu;               /* the gate's: GELU by its tanh; else SiLU */
  float before_eps, between_eps, heads_eps, attention_eps, mlp_eps;
  float multiplier;              /* of what is added */
} Layer;

typedef struct {
  const float *cos, *sin; /* [tokens][head_dim], `stride` to the next token; sines are signed */
  int64_t stride;
} Angles;

typedef struct {
  const Layer *layers;        /* [count] */
  const Places *places;       /* of the tokens and their keys */
  const int64_t *slots;       /* [tokens] of the arena, where their keys and values go */
  const Angles *angles;
  float *x;                   /* [tokens][hidden] what the first layer reads; it becomes what the last gives */
  const int64_t *kept;        /* tokens that are wanted behind the last layer */
  const float *norm;          /* [hidden] before the head; NULL: without a head */
  const Weight *head;
  float *y;                   /* [kept][outputs of the head], or [kept][hidden] without one */
  int64_t count, hidden;
  int64_t kept_count;         /* negative: more layers follow */
  float norm_eps;
  int threads, kernel, attend_kernel;
} Pass;

/* What a layer works on. */
typedef struct Work {
  const Layer *layer;
  const Pass *pass;
  void (*step)(const struct Work *, int64_t row);
  int64_t rows;
  float *x;      /* [rows][hidden] */
  float *normed; /* the same */
  float *added;  /* the same, of attention or of the MLP */
  float *wide;   /* [rows] of queries, keys and values; or of gate and up */
  float *gated;  /* [rows][inner] */
  int threads;
} Work;

/* To y what is x / sqrt(mean(x^2) + eps) * weight. */
VECTOR_INLINE void norm(const float *x, const float *weight, float eps, int64_t size, float *y) {
  float lanes[SUMS] = {0};
  int64_t i = 0;
  for (; i + SUMS <= size; i += SUMS)
    for (int k = 0; k < SUMS; k++) lanes[k] += x[i + k] * x[i + k];
  for (; i < size; i++) lanes[i % SUMS] += x[i] * x[i];
  for (int half = SUMS / 2; half; half /= 2)
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

VECTOR_TARGET static void norm_before(const Work *p, int64_t row) {
  const Layer *l = p->layer;
  norm(p->x + row * l->hidden, l->before, l->before_eps, l->hidden, p->normed + row * l->hidden);
}

VECTOR_TARGET static void norm_last(const Work *p, int64_t row) {
  const int64_t size = p->pass->hidden;
  norm(p->x + row * size, p->pass->norm, p->pass->norm_eps, size, p->normed + row * size);
}

VECTOR_INLINE void add(const Work *p, int64_t row, const float *weight, float eps) {
  const int64_t hidden = p->layer->hidden;
  float *restrict x = p->x + row * hidden, *restrict added = p->added + row * hidden;
  const float by = p->layer->multiplier;
  if (weight) norm(added, weight, eps, hidden, added);
  for (int64_t i = 0; i < hidden; i++) x[i] += added[i] * by;
}

VECTOR_TARGET static void add_last(const Work *p, int64_t row) {
  add(p, row, p->layer->after_mlp, p->layer->mlp_eps);
}

VECTOR_TARGET static void add_and_norm(const Work *p, int64_t row) {
  const Layer *l = p->layer;
  add(p, row, l->after_attention, l->attention_eps);
  norm(p->x + row * l->hidden, l->between, l->between_eps, l->hidden, p->normed + row * l->hidden);
}

/* silu(gate) * up; or gelu(gate) * up, whose tanh is a sigmoid too: x / (1 + exp(-2y)), where y is
 * sqrt(2 / pi) * (x + 0.044715 * x^3). */
VECTOR_TARGET static void gate(const Work *p, int64_t row) {
  const int64_t inner = p->layer->inner;
  const float *restrict of_gate = p->wide + row * 2 * inner, *restrict up = of_gate + inner;
  float *restrict y = p->gated + row * inner, most = 89.0f, least = -87.0f;
  __asm__("" : "+m"(most), "+m"(least));
  if (p->layer->is_gelu)
    for (int64_t i = 0; i < inner; i++) {
      const float x = of_gate[i], z = 1.5957691f * (x + 0.044715f * x * x * x);
      y[i] = x / (1.0f + exponential(-z, most, least)) * up[i];
    }
  else
    for (int64_t i = 0; i < inner; i++)
      y[i] = of_gate[i] / (1.0f + exponential(-of_gate[i], most, least)) * up[i];
}

/* To the nearest float16, ties to even. */
VECTOR_INLINE uint16_t to_half(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;
  if (rest < 0x38800000) return sign | (bits_of(of_bits(rest) + 0.5f) - 0x3f000000);
  return sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
}

/* Numbers of one head to where they are kept, as `kind`. */
VECTOR_INLINE void keep(const float *x, int64_t count, int64_t kind, int64_t at, const char *kept) {
  if (kind == KIND_F32) memcpy((float *)kept + at, x, count * sizeof *x);
  else
    for (int64_t i = 0; i < count; i++)
      ((uint16_t *)kept)[at + i] = kind == KIND_BF16 ? to_bf16(x[i]) : to_half(x[i]);
}

/* Norms and turns queries and keys, in place, and keeps keys and values. */
VECTOR_TARGET static void turn(const Work *p, int64_t row) {
  const Layer *l = p->layer;
  const AttendLayer *to = l->attend;
  const Angles *angles = p->pass->angles + l->angles;
  const int64_t dim = l->head_dim, half = dim / 2, slot = p->pass->slots[row];
  const float *cos = angles->cos + row * angles->stride, *sin = angles->sin + row * angles->stride;
  float *x = p->wide + row * l->heads * dim;
  for (int64_t head = 0; head < l->rotated; head++) {
    float *low = x + head * dim, *high = low + half;
    if (l->of_heads) norm(low, l->of_heads + head * dim, l->heads_eps, dim, low);
    for (int64_t i = 0; i < half; i++) {
      const float a = low[i], b = high[i];
      low[i] = a * cos[i] + b * sin[i];
      high[i] = b * cos[half + i] + a * sin[half + i];
    }
  }
  const float *keys = x + to->heads * dim, *values = x + l->rotated * dim;
  for (int64_t head = 0; head < to->kv_heads; head++) {
    const int64_t key = slot * to->key_slot + head * to->key_head;
    const int64_t value = slot * to->value_slot + head * to->value_head;
    keep(keys + head * dim, dim, to->kind, key, to->keys);
    keep(values + head * dim, dim, to->kind, value, to->values);
  }
}

static void share(void *of) {
  const Work *p = of;
  const int several = p->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  for (int64_t row = p->rows * number / count; row < p->rows * (number + 1) / count; row++)
    p->step(p, row);
}

static void each_row(Work *p, void (*step)(const Work *, int64_t)) {
  p->step = step;
  p->threads = in_parallel && p->rows * p->pass->hidden >= SHARED ? p->pass->threads : 1;
  if (p->threads > 1) in_parallel(share, p, p->threads, 0);
  else share(p);
}

static int linear(const Work *p, const Weight *weight, const float *x, float *y) {
  return p->rows && sr_linear(weight, x, 0, y, 0, p->rows, p->pass->threads, p->pass->kernel);
}

/* To `seen` what the queries of all rows attend to. */
static int attention(Work *p, float *seen) {
  const AttendLayer *l = p->layer->attend;
  each_row(p, norm_before);
  if (linear(p, p->layer->qkv, p->normed, p->wide)) return 1;
  each_row(p, turn);
  return sr_attend(l, p->pass->places, p->wide, p->layer->heads * l->dim, l->dim, KIND_F32, seen,
                   p->pass->threads, p->pass->attend_kernel);
}

/* Adds to x what becomes of `seen`, and then what the MLP makes of x. `work` has memory for TOGETHER
 * rows. */
static int behind(const Work *work, const float *seen) {
  const Layer *l = work->layer;
  const int64_t width = l->attend->heads * l->attend->value_dim;
  for (int64_t done = 0; done < work->rows; done += TOGETHER) {
    Work p = *work;
    p.rows = work->rows - done < TOGETHER ? work->rows - done : TOGETHER;
    p.x += done * l->hidden;
    if (linear(&p, l->out, seen + done * width, p.added)) return 1;
    each_row(&p, add_and_norm);
    if (linear(&p, l->gate_up, p.normed, p.wide)) return 1;
    each_row(&p, gate);
    if (linear(&p, l->down, p.gated, p.added)) return 1;
    each_row(&p, add_last);
  }
  return 0;
}

static void pick(const float *from, int64_t size, const Pass *pass, float *to) {
  for (int64_t i = 0; i < pass->kept_count; i++)
    memcpy(to + i * size, from + pass->kept[i] * size, size * sizeof *from);
}

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns 0; 1 without memory. Of the last layer only what is kept is computed to the end. */
int sr_pass(const Pass *pass) {
  const int64_t rows = pass->places->tokens, kept = larger(pass->kept_count, 0);
  const int is_last = pass->kept_count >= 0;
  const int64_t all = larger(rows, kept), most = all < TOGETHER ? all : TOGETHER;
  const int64_t hidden = pass->hidden;
  int64_t width = 0, wide = 0, inner = 0;
  if (!rows) return 0;
  for (int64_t i = 0; i < pass->count; i++) {
    const Layer *l = pass->layers + i;
    width = larger(width, l->attend->heads * l->attend->value_dim);
    wide = larger(wide, larger(rows * l->heads * l->head_dim, most * 2 * l->inner));
    inner = larger(inner, l->inner);
  }
  float *memory = malloc(
      sizeof *memory * (all * (hidden + 2 * width) + wide + most * (hidden + inner) + kept * hidden));
  if (!memory) return 1;
  float *seen = memory + all * hidden, *of_kept = seen + all * width, *last = of_kept + all * width;
  Work p = {.pass = pass, .rows = rows, .x = pass->x, .normed = memory, .wide = last + kept * hidden};
  p.added = p.wide + wide;
  p.gated = p.added + most * hidden;
  int failed = 0;
  for (int64_t i = 0; i < pass->count && !failed; i++) {
    p.layer = pass->layers + i;
    failed = attention(&p, seen);
    if (is_last && i == pass->count - 1) {
      pick(seen, p.layer->attend->heads * p.layer->attend->value_dim, pass, of_kept);
      pick(p.x, hidden, pass, last);
      seen = of_kept, p.x = last, p.rows = kept;
    }
    failed = failed || behind(&p, seen);
  }
  if (is_last && !failed) {
    if (!pass->count) pick(pass->x, hidden, pass, last), p.x = last, p.rows = kept;
    if (pass->norm) {
      each_row(&p, norm_last);
      failed = linear(&p, pass->head, p.normed, pass->y);
    } else
      memcpy(pass->y, last, kept * hidden * sizeof *last);
  }
  free(memory);
  return failed;
}
