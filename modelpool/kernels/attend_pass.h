/* The kernel of attend.c, over `lanes`: LANES numbers of type `number` side by side. Included once
 * for each instruction set, behind its lanes_*.h, with ATTEND naming what it defines.
 *
 * Each number goes through the same operations in the same order whatever the instruction set, the
 * queries beside it, and whatever else the caller may choose: sums of dot products by lanes, weights
 * and values by position, pieces in order. Only a query's own keys take part. */
#include <math.h>
#include <string.h>

#include "attend.h"

#define ALWAYS __attribute__((always_inline)) static inline
#define SELDOM __attribute__((noinline)) static

typedef struct {
  number *query;   /* [QUERIES][whole_lanes(dim)] times the scale */
  number *turned;  /* [QUERIES / LANES][whole_lanes(dim)][LANES] the same, queries side by side */
  number *keys;    /* [TILE_KEYS][whole_lanes(dim)] some keys */
  number *scores;  /* [QUERIES][PIECE], of a tile [PIECE][LANES]; weights later */
  number *parts;   /* [QUERIES][part_size] what is known of each */
  number *piece;   /* [TILE_VALUES][part_size] the same, of one piece */
  int64_t *slots;  /* [PIECE] of the arena, of text */
} Scratch;

static int64_t bytes_of(int kind) { return kind == KIND_F64 ? 8 : kind == KIND_F32 ? 4 : 2; }

static void divide_scratch(const AttendJob *j, void *memory, Scratch *s) {
  const AttendLayer *l = j->layer;
  number *at = memory;
  s->query = at, at += QUERIES * whole_lanes(l->dim);
  s->turned = at, at += QUERIES * whole_lanes(l->dim);
  s->keys = at, at += MOST_KEYS * whole_lanes(l->dim);
  s->scores = at, at += QUERIES * PIECE;
  s->parts = at, at += QUERIES * part_size(l->value_dim);
  s->piece = at, at += TILE_VALUES * part_size(l->value_dim);
  s->slots = (int64_t *)at;
}

/* e^x for x of at most 0; below -87 as at -87, but 0 of minus infinity. NaN stays NaN. */
static lanes exponential(lanes x) {
  const lanes bounded = max_lanes(all_lanes(-87), x);
#ifdef LANES_LIBM
  const lanes y = exp_lanes(bounded);
#else
  const lanes shift = all_lanes(12582912.0f); /* behind which a sum is a whole number */
  const lanes shifted = fma_lanes(bounded, all_lanes(1.44269504f), shift);
  const lanes whole = sub_lanes(shifted, shift);
  lanes r = fma_lanes(whole, all_lanes(-0.693359375f), bounded);
  r = fma_lanes(whole, all_lanes(2.12194440e-4f), r);
  lanes y = all_lanes(1.9875691500e-4f);
  y = fma_lanes(y, r, all_lanes(1.3981999507e-3f));
  y = fma_lanes(y, r, all_lanes(8.3334519073e-3f));
  y = fma_lanes(y, r, all_lanes(4.1665795894e-2f));
  y = fma_lanes(y, r, all_lanes(1.6666665459e-1f));
  y = fma_lanes(y, r, all_lanes(5.0000001201e-1f));
  y = fma_lanes(y, mul_lanes(r, r), r);
  y = mul_lanes(add_lanes(y, all_lanes(1)), power_of_two(shifted));
#endif
  return where_less(x, all_lanes(-3e38f), all_lanes(0), y);
}

static number exponential_of(number x) {
  number y[LANES];
  store_lanes(y, exponential(all_lanes(x)));
  return y[0];
}

/* cap * tanh(x / cap): by its series where exponentials would cancel out. */
static lanes capped(lanes x, lanes cap) {
  x = div_lanes(x, cap);
#ifdef LANES_LIBM
  return mul_lanes(cap, tanh_lanes(x));
#endif
  const lanes one = all_lanes(1), zero = all_lanes(0), y = mul_lanes(x, x);
  const lanes magnitude = max_lanes(x, sub_lanes(zero, x));
  const lanes e = exponential(mul_lanes(magnitude, all_lanes(-2)));
  const lanes far = div_lanes(sub_lanes(one, e), add_lanes(one, e));
  lanes near = all_lanes((number)(62.0 / 2835));
  near = fma_lanes(near, y, all_lanes((number)(-17.0 / 315)));
  near = fma_lanes(near, y, all_lanes((number)(2.0 / 15)));
  near = fma_lanes(near, y, all_lanes((number)(-1.0 / 3)));
  near = mul_lanes(fma_lanes(near, y, one), x);
  const lanes turned = where_less(x, zero, sub_lanes(zero, far), far);
  return mul_lanes(cap, where_less(y, all_lanes(0.0625f), near, turned));
}

/* Scores of `count` queries with one key. */
ALWAYS void dots(const number *query, int64_t stride, const char *key, int kind, int64_t dim,
                 number *scores, int count) {
  lanes sums[4];
  const int64_t whole = dim / LANES * LANES, bytes = bytes_of(kind);
  for (int i = 0; i < count; i++) sums[i] = all_lanes(0);
  for (int64_t d = 0; d < whole; d += LANES) {
    const lanes k = load_kind(key + d * bytes, kind);
    for (int i = 0; i < count; i++)
      sums[i] = fma_lanes(load_lanes(query + i * stride + d), k, sums[i]);
  }
  if (whole < dim) {
    const lanes k = load_part(key + whole * bytes, kind, dim - whole);
    for (int i = 0; i < count; i++)
      sums[i] = fma_lanes(load_lanes(query + i * stride + whole), k, sums[i]);
  }
  if (count == 4) sum_four(sums, scores);
  else
    for (int i = 0; i < count; i++) scores[i] = sum_lanes(sums[i]);
}

/* Scores of up to four queries with the keys at positions low..high of a piece, all of text. */
ALWAYS void score_text(const AttendLayer *l, const Scratch *s, const char *keys, int64_t at,
                       int64_t low, int64_t high, int kind, int count) {
  const int64_t stride = whole_lanes(l->dim), step = l->key_slot * bytes_of(kind);
  for (int64_t p = low; p < high; p++) {
    number found[4];
    dots(s->query + at * stride, stride, keys + s->slots[p] * step, kind, l->dim, found, count);
    for (int i = 0; i < count; i++) s->scores[(at + i) * PIECE + p] = found[i];
  }
}

/* Sums as `sum_lanes` adds them: of what halves[0..7] and those 8 behind them were, by lane. */
ALWAYS lanes sum_halves(const lanes *halves) {
  const lanes low = add_lanes(add_lanes(halves[0], halves[1]), add_lanes(halves[2], halves[3]));
  const lanes high = add_lanes(add_lanes(halves[4], halves[5]), add_lanes(halves[6], halves[7]));
  return add_lanes(low, high);
}

/* The same of a tile: of LANES queries that stand side by side, with some keys at a time. Each
 * query's sums go in the order in which it sums them alone. */
ALWAYS void score_tile(const AttendLayer *l, const Scratch *s, const char *keys, int64_t at,
                       int64_t p, int kind, const int count) {
  const int64_t dim = whole_lanes(l->dim), step = l->key_slot * bytes_of(kind);
  const number *turned = s->turned + at * dim;
  lanes halves[MOST_KEYS][LANES / 2];
  const number *own[MOST_KEYS];
  for (int k = 0; k < count; k++) {
    const char *key = keys + s->slots[p + k] * step;
    own[k] = kind == KIND_OWN && dim == l->dim ? (const number *)key : s->keys + k * dim;
    if (own[k] != (const number *)key)
      for (int64_t d = 0; d < dim; d += LANES) {
        const int64_t rest = l->dim - d < LANES ? l->dim - d : LANES;
        store_lanes(s->keys + k * dim + d, load_part(key + d * bytes_of(kind), kind, rest));
      }
  }
  for (int first = 0; first < LANES / 2; first += TILE_PAIRS) { /* lanes, and those 8 behind them */
    lanes sums[MOST_KEYS][2 * TILE_PAIRS];
    for (int k = 0; k < count; k++)
      for (int i = 0; i < 2 * TILE_PAIRS; i++) sums[k][i] = all_lanes(0);
    for (int64_t d = first; d < dim; d += LANES)
      for (int i = 0; i < 2 * TILE_PAIRS; i++) {
        const int64_t at_d = d + i % TILE_PAIRS + i / TILE_PAIRS * (LANES / 2);
        const lanes q = kept_lanes(load_lanes(turned + at_d * LANES));
        for (int k = 0; k < count; k++)
          sums[k][i] = fma_lanes(q, all_lanes(own[k][at_d]), sums[k][i]);
      }
    for (int k = 0; k < count; k++)
      for (int i = 0; i < TILE_PAIRS; i++)
        halves[k][first + i] = add_lanes(sums[k][i], sums[k][TILE_PAIRS + i]);
  }
  for (int k = 0; k < count; k++)
    store_lanes(s->scores + at * PIECE + (p + k) * LANES, sum_halves(halves[k]));
}

ALWAYS void score_many(const AttendLayer *l, const Scratch *s, const char *keys, int64_t at,
                       int64_t low, int64_t high, int kind) {
  int64_t p = low;
  for (; p + MOST_KEYS <= high; p += MOST_KEYS) score_tile(l, s, keys, at, p, kind, MOST_KEYS);
  for (; p < high; p++) score_tile(l, s, keys, at, p, kind, 1);
}

/* What a group of tokens and heads attends to: [QUERIES] of each query, positions of a piece. The
 * first `tiled` are in tiles; behind `count` the last one stands for those that a tile lacks. */
typedef struct {
  int64_t count, tiled, base, tail, piece_tail; /* piece_tail: where its row's tree begins */
  int64_t token[QUERIES], head[QUERIES], begin[QUERIES], end[QUERIES], low[QUERIES], high[QUERIES];
  const int32_t *table;
} Queries;

/* Where the score of query i with position p is: at[p * step]. */
typedef struct {
  number *at;
  int64_t step;
} Scores;

ALWAYS Scores scores_of(const Scratch *s, const Queries *q, int64_t i) {
  if (i >= q->tiled) return (Scores){s->scores + i * PIECE, 1};
  return (Scores){s->scores + i / LANES * LANES * PIECE + i % LANES, LANES};
}

static int64_t slot_at(const Places *pl, const Queries *q, int64_t token, int64_t position) {
  int64_t slot = position;
  if (position >= q->tail) slot = q->tail + pl->path[token * pl->path_width + position - q->tail];
  return q->table[slot / pl->block_slots] * pl->block_slots + slot % pl->block_slots;
}

/* Scores of one query with its keys in the tree. */
SELDOM void score_path(const AttendLayer *l, const Places *pl, const Scratch *s, const Queries *q,
                       const char *keys, int64_t i, int kind) {
  const int64_t stride = whole_lanes(l->dim), step = l->key_slot * bytes_of(kind);
  const Scores scores = scores_of(s, q, i);
  for (int64_t p = q->low[i] > q->piece_tail ? q->low[i] : q->piece_tail; p < q->high[i]; p++) {
    const int64_t slot = slot_at(pl, q, q->token[i], q->base + p);
    dots(s->query + i * stride, stride, keys + slot * step, kind, l->dim,
         scores.at + p * scores.step, 1);
  }
}

ALWAYS void score_all(const AttendLayer *l, const Places *pl, const Scratch *s, const Queries *q,
                  const char *keys, int kind) {
  for (int64_t at = 0, together; at < q->count; at += together) {
    const int64_t left = q->count - at, four = left < 4 ? left : 4;
    const int is_tile = at < q->tiled;
    int64_t low = PIECE, high = 0;
    together = is_tile ? LANES : four;
    for (int64_t i = at; i < at + together; i++) {
      if (q->low[i] < q->high[i] && q->low[i] < low) low = q->low[i];
      if (q->high[i] > high) high = q->high[i];
    }
    if (high > q->piece_tail) high = q->piece_tail;
    /* What is no key of a query gives it a score that is not looked at. */
    if (is_tile) score_many(l, s, keys, at, low, high, kind);
    else if (four == 4) score_text(l, s, keys, at, low, high, kind, 4);
    else if (four == 3) score_text(l, s, keys, at, low, high, kind, 3);
    else if (four == 2) score_text(l, s, keys, at, low, high, kind, 2);
    else score_text(l, s, keys, at, low, high, kind, 1);
  }
  for (int64_t i = 0; i < q->count; i++)
    if (q->high[i] > q->piece_tail) score_path(l, pl, s, q, keys, i, kind);
}

/* Of one query: makes weights of scores. Returns the largest score, and the sum in `total`. */
static number softmax(const AttendLayer *l, number *x, int64_t low, int64_t high, number *total) {
  const int64_t first = low / LANES * LANES, stop = whole_lanes(high);
  for (int64_t k = first; k < low; k++) x[k] = -INFINITY;
  for (int64_t k = high; k < stop; k++) x[k] = -INFINITY;
  if (l->softcap != 0) {
    const lanes cap = all_lanes((number)l->softcap);
    for (int64_t k = first; k < stop; k += LANES) {
      const lanes own = load_lanes(x + k);
      store_lanes(x + k, where_less(own, all_lanes(-3e38f), own, capped(own, cap)));
    }
  }
  lanes most = all_lanes(-INFINITY), sum = all_lanes(0);
  for (int64_t k = first; k < stop; k += LANES) most = max_lanes(most, load_lanes(x + k));
  number each[LANES], top;
  store_lanes(each, most);
  top = each[0];
  for (int k = 1; k < LANES; k++) top = each[k] > top ? each[k] : top;
  for (int64_t k = first; k < stop; k += LANES) {
    const lanes weight = exponential(sub_lanes(load_lanes(x + k), all_lanes(top)));
    store_lanes(x + k, weight);
    sum = add_lanes(sum, weight);
  }
  *total = sum_lanes(sum);
  return top;
}

/* The same of a tile; sums go by lanes of positions, as those of one query do. */
ALWAYS void softmax_tile(const AttendLayer *l, const Queries *q, number *x, int64_t at,
                         number *most, number *total) {
  int64_t low = PIECE, high = 0, all_low = 0, all_high = PIECE; /* of some query; of all */
  number own_low[LANES], own_high[LANES];
  for (int i = 0; i < LANES; i++) {
    const int64_t begin = q->low[at + i], end = q->high[at + i];
    own_low[i] = begin, own_high[i] = end;
    if (begin < end && begin < low) low = begin;
    if (end > high) high = end;
    if (begin > all_low) all_low = begin;
    if (end < all_high) all_high = end;
  }
  const lanes none = all_lanes(-INFINITY), cap = all_lanes((number)l->softcap);
  low = low / LANES * LANES, high = whole_lanes(high);
  lanes top = none, sums[LANES], halves[LANES / 2];
  for (int64_t p = low; p < high; p++) {
    lanes score = load_lanes(x + p * LANES);
    if (l->softcap != 0) score = where_less(score, all_lanes(-3e38f), score, capped(score, cap));
    if (p < all_low || p >= all_high) {
      const lanes place = all_lanes((number)p);
      score = where_less(place, load_lanes(own_high), score, none);
      score = where_less(place, load_lanes(own_low), none, score);
    }
    store_lanes(x + p * LANES, score);
    top = max_lanes(top, score);
  }
  for (int i = 0; i < LANES; i++) sums[i] = all_lanes(0);
  for (int64_t p = low; p < high; p += LANES)
    for (int i = 0; i < LANES; i++) {
      const lanes weight = exponential(sub_lanes(load_lanes(x + (p + i) * LANES), top));
      store_lanes(x + (p + i) * LANES, weight);
      sums[i] = add_lanes(sums[i], weight);
    }
  for (int i = 0; i < LANES / 2; i++) halves[i] = add_lanes(sums[i], sums[LANES / 2 + i]);
  store_lanes(total + at, sum_halves(halves));
  store_lanes(most + at, top);
}

/* Adds to `known` [value_dim] what one query reads at positions low..high of a piece. */
SELDOM void add_alone(const AttendLayer *l, const Places *pl, const Scratch *s, const Queries *q,
                      const char *values, int64_t i, int64_t low, int64_t high, number *known,
                      int kind) {
  const int64_t bytes = bytes_of(kind), step = l->value_slot * bytes;
  const Scores weights = scores_of(s, q, i);
  for (int64_t p = low; p < high; p++) {
    const int64_t at = q->base + p;
    const int64_t slot = p < q->piece_tail ? s->slots[p] : slot_at(pl, q, q->token[i], at);
    const char *value = values + slot * step;
    const lanes weight = all_lanes(weights.at[p * weights.step]);
    for (int64_t d = 0; d < l->value_dim; d += LANES) {
      const int64_t rest = l->value_dim - d;
      const lanes v = load_part(value + d * bytes, kind, rest < LANES ? rest : LANES);
      store_lanes(known + d, fma_lanes(weight, v, load_lanes(known + d)));
    }
  }
}

/* Adds weights times values to `sums` [count][wide], of positions low..high of a piece, all of
 * text. `next`: from a query's weight to the next one's, `step`: from a position's. */
ALWAYS void add_text(const AttendLayer *l, const Scratch *s, const char *values,
                     const number *weights, int64_t next, int64_t step, int64_t low, int64_t high,
                     lanes *sums, int wide, int kind, int count) {
  const int64_t bytes = bytes_of(kind), slot = l->value_slot * bytes;
  for (int64_t p = low; p < high; p++) {
    const char *value = values + s->slots[p] * slot;
    lanes v[VALUES_WIDE];
    for (int w = 0; w < wide; w++) v[w] = load_kind(value + w * LANES * bytes, kind);
    for (int i = 0; i < count; i++) {
      const lanes weight = all_lanes(weights[i * next + p * step]);
      for (int w = 0; w < wide; w++)
        sums[i * wide + w] = fma_lanes(weight, v[w], sums[i * wide + w]);
    }
  }
}

/* Adds to `out` [count][value_dim] what some queries read where all of them read text. */
ALWAYS void add_together(const AttendLayer *l, const Scratch *s, const char *values,
                         const number *weights, int64_t next, int64_t step, int64_t low,
                         int64_t high, number *const *out, int kind, int count) {
  const int64_t bytes = bytes_of(kind), whole = l->value_dim / LANES * LANES;
  for (int64_t d = 0; d < whole;) {
    lanes sums[TILE_VALUES * VALUES_WIDE];
    const int wide = whole - d >= VALUES_WIDE * LANES ? VALUES_WIDE : 1;
    const char *from = values + d * bytes;
    for (int i = 0; i < count; i++)
      for (int w = 0; w < wide; w++) sums[i * wide + w] = load_lanes(out[i] + d + w * LANES);
    if (wide == 1) add_text(l, s, from, weights, next, step, low, high, sums, 1, kind, count);
    else add_text(l, s, from, weights, next, step, low, high, sums, VALUES_WIDE, kind, count);
    for (int i = 0; i < count; i++)
      for (int w = 0; w < wide; w++) store_lanes(out[i] + d + w * LANES, sums[i * wide + w]);
    d += wide * LANES;
  }
  if (whole == l->value_dim) return;
  for (int64_t p = low; p < high; p++) {
    const char *value = values + (s->slots[p] * l->value_slot + whole) * bytes;
    const lanes v = load_part(value, kind, l->value_dim - whole);
    for (int i = 0; i < count; i++) {
      const lanes weight = all_lanes(weights[i * next + p * step]);
      store_lanes(out[i] + whole, fma_lanes(weight, v, load_lanes(out[i] + whole)));
    }
  }
}

/* Weighted values of `count` queries from `at` on, to `out` [count][value_dim], by position. */
ALWAYS void read_values(const AttendLayer *l, const Places *pl, const Scratch *s, const Queries *q,
                        const char *values, int64_t at, number *const *out, int kind, int count,
                        int is_tile) {
  const number *weights = scores_of(s, q, at).at;
  int64_t low = 0, high = q->piece_tail; /* where all of them read */
  for (int i = 0; i < count; i++) {
    if (q->low[at + i] > low) low = q->low[at + i];
    if (q->high[at + i] < high) high = q->high[at + i];
  }
  if (high < low) high = low;
  for (int i = 0; i < count; i++) {
    const int64_t own = q->low[at + i], stop = q->high[at + i];
    memset(out[i], 0, sizeof(number) * whole_lanes(l->value_dim));
    if (own < low) add_alone(l, pl, s, q, values, at + i, own, stop < low ? stop : low, out[i], kind);
  }
  if (is_tile) add_together(l, s, values, weights, 1, LANES, low, high, out, kind, count);
  else add_together(l, s, values, weights, PIECE, 1, low, high, out, kind, count);
  for (int i = 0; i < count; i++) {
    const int64_t own = q->low[at + i] > high ? q->low[at + i] : high;
    if (own < q->high[at + i])
      add_alone(l, pl, s, q, values, at + i, own, q->high[at + i], out[i], kind);
  }
}

/* Joins what is known of a query with one more piece: largest score, sum, values. */
static void merge(number *known, const number *piece, int64_t value_dim) {
  const int64_t size = whole_lanes(value_dim);
  if (piece[0] <= known[0]) {
    const number by = exponential_of(piece[0] - known[0]);
    known[1] = known[1] + piece[1] * by;
    for (int64_t d = LANES; d < LANES + size; d += LANES)
      store_lanes(known + d, fma_lanes(load_lanes(piece + d), all_lanes(by), load_lanes(known + d)));
  } else {
    const number by = exponential_of(known[0] - piece[0]);
    known[1] = known[1] * by + piece[1];
    known[0] = piece[0];
    for (int64_t d = LANES; d < LANES + size; d += LANES)
      store_lanes(known + d, fma_lanes(load_lanes(known + d), all_lanes(by), load_lanes(piece + d)));
  }
}

static void begin(number *known, int64_t value_dim) {
  memset(known, 0, sizeof(number) * part_size(value_dim));
  known[0] = -INFINITY;
}

/* The output of a query: what is known, divided by the sum of weights. */
static void finish(const AttendJob *j, int64_t token, int64_t head, const number *known) {
  const AttendLayer *l = j->layer;
  number sum = known[1], by = 1;
  if (l->sinks) { /* one more score, which adds no value */
    const number sink = l->sinks[head], most = sink > known[0] ? sink : known[0];
    by = exponential_of(known[0] - most);
    sum = sum * by + exponential_of(sink - most);
  }
  const int64_t bytes = bytes_of(j->query_kind);
  char *out = j->out + (token * l->heads + head) * l->value_dim * bytes;
  for (int64_t d = 0; d < l->value_dim; d += LANES) {
    const lanes read = mul_lanes(load_lanes(known + LANES + d), all_lanes(by));
    const int64_t count = l->value_dim - d < LANES ? l->value_dim - d : LANES;
    store_kind(out + d * bytes, j->query_kind, div_lanes(read, all_lanes(sum)), count);
  }
}

/* One piece of all queries: joined with what is known of each, or kept as one of the parts. */
ALWAYS void attend_piece(const AttendJob *j, const Scratch *s, const Queries *q, int64_t kv_head,
                         int64_t piece, int kind) {
  const AttendLayer *l = j->layer;
  const int64_t bytes = bytes_of(kind), size = part_size(l->value_dim);
  const char *keys = l->keys + kv_head * l->key_head * bytes;
  const char *values = l->values + kv_head * l->value_head * bytes;
  score_all(l, j->places, s, q, keys, kind);
  number most[QUERIES], sums[QUERIES];
  for (int64_t at = 0; at < q->tiled; at += LANES)
    softmax_tile(l, q, s->scores + at * PIECE, at, most, sums);
  for (int64_t i = q->tiled; i < q->count; i++)
    if (q->low[i] < q->high[i])
      most[i] = softmax(l, s->scores + i * PIECE, q->low[i], q->high[i], sums + i);
  for (int64_t at = 0, together; at < q->count; at += together) {
    const int64_t left = q->count - at;
    const int is_tile = at < q->tiled;
    number *out[TILE_VALUES];
    together = is_tile ? TILE_VALUES : left < 4 ? left : 4;
    for (int i = 0; i < TILE_VALUES; i++) out[i] = s->piece + LANES + i * size;
    if (is_tile) read_values(l, j->places, s, q, values, at, out, kind, TILE_VALUES, 1);
    else if (together == 4) read_values(l, j->places, s, q, values, at, out, kind, 4, 0);
    else if (together == 3) read_values(l, j->places, s, q, values, at, out, kind, 3, 0);
    else if (together == 2) read_values(l, j->places, s, q, values, at, out, kind, 2, 0);
    else read_values(l, j->places, s, q, values, at, out, kind, 1, 0);
    for (int64_t i = 0; i < (left < together ? left : together); i++) {
      number *own = s->piece + i * size;
      own[0] = -INFINITY, own[1] = 0;
      if (q->low[at + i] < q->high[at + i]) own[0] = most[at + i], own[1] = sums[at + i];
      if (j->is_split) {
        const int64_t place = q->token[at + i] * l->heads + q->head[at + i];
        memcpy((number *)j->parts + (place * j->pieces + piece) * size, own, sizeof(number) * size);
      } else if (own[0] != -INFINITY) merge(s->parts + (at + i) * size, own, l->value_dim);
    }
  }
}

static void unit(const AttendJob *j, int64_t unit, void *memory) {
  const AttendLayer *l = j->layer;
  const Places *pl = j->places;
  const int64_t one = j->is_split ? unit % j->pieces : -1, whole = j->is_split ? unit / j->pieces : unit;
  const int64_t part = whole % j->head_groups, kv_head = whole / j->head_groups % l->kv_heads;
  const TokenGroup group = j->groups[whole / j->head_groups / l->kv_heads];
  const int64_t each = l->heads / l->kv_heads, stride = whole_lanes(l->dim);
  const int64_t first = part * j->head_group;
  const int64_t heads = each - first < j->head_group ? each - first : j->head_group;
  const int64_t size = part_size(l->value_dim), bytes = bytes_of(j->query_kind);
  Scratch s;
  Queries q = {.count = (group.stop - group.first) * heads, .tail = pl->tails[group.first],
               .table = pl->tables + pl->rows[group.first] * pl->table_width};
  divide_scratch(j, memory, &s);
  int64_t least = INT64_MAX, top = 0;
  for (int64_t i = 0; i < q.count; i++) {
    const int64_t token = group.first + i / heads, head = kv_head * each + first + i % heads;
    q.token[i] = token, q.head[i] = head;
    q.end[i] = pl->positions[token] + 1;
    q.begin[i] = l->window && q.end[i] > l->window ? q.end[i] - l->window : 0;
    if (q.begin[i] < least) least = q.begin[i];
    if (q.end[i] > top) top = q.end[i];
    const char *from = j->query + (token * j->query_token + head * j->query_head) * bytes;
    for (int64_t d = 0; d < l->dim; d += LANES) {
      const int64_t count = l->dim - d < LANES ? l->dim - d : LANES;
      const lanes own = load_part(from + d * bytes, j->query_kind, count);
      store_lanes(s.query + i * stride + d, mul_lanes(own, all_lanes((number)l->scale)));
    }
    begin(s.parts + i * size, l->value_dim);
  }
  q.tiled = (q.count + LANES / 2 - 1) / LANES * LANES;
  for (int64_t i = q.count; i < q.tiled; i++)
    q.token[i] = q.token[q.count - 1], q.begin[i] = q.begin[q.count - 1], q.end[i] = q.end[q.count - 1];
  for (int64_t at = 0; at < q.tiled; at += LANES)
    for (int64_t d = 0; d < stride; d++)
      for (int64_t i = 0; i < LANES; i++)
        s.turned[at * stride + d * LANES + i] = at + i < q.count ? s.query[(at + i) * stride + d] : 0;
  const int64_t last = (top + PIECE - 1) / PIECE;
  for (int64_t p = one < 0 ? least / PIECE : one; p < (one < 0 ? last : one + 1); p++) {
    q.base = p * PIECE;
    q.piece_tail = q.tail - q.base < 0 ? 0 : q.tail - q.base < PIECE ? q.tail - q.base : PIECE;
    int64_t high = 0;
    for (int64_t i = 0; i < q.count || i < q.tiled; i++) {
      q.low[i] = q.begin[i] > q.base ? q.begin[i] - q.base : 0;
      q.high[i] = q.end[i] - q.base < PIECE ? q.end[i] - q.base : PIECE;
      if (q.high[i] <= q.low[i]) q.low[i] = q.high[i] = 0;
      if (q.high[i] > high) high = q.high[i];
    }
    for (int64_t k = 0, text = high < q.piece_tail ? high : q.piece_tail; k < text;) {
      const int64_t block = (q.base + k) / pl->block_slots, at = (q.base + k) % pl->block_slots;
      const int64_t first = q.table[block] * pl->block_slots + at - k;
      const int64_t stop = k + pl->block_slots - at;
      for (; k < stop && k < text; k++) s.slots[k] = first + k;
    }
#ifdef LANES_DOUBLE
    attend_piece(j, &s, &q, kv_head, p, KIND_F64);
#else
    if (l->kind == KIND_F32) attend_piece(j, &s, &q, kv_head, p, KIND_F32);
    else if (l->kind == KIND_F16) attend_piece(j, &s, &q, kv_head, p, KIND_F16);
    else attend_piece(j, &s, &q, kv_head, p, KIND_BF16);
#endif
  }
  if (!j->is_split)
    for (int64_t i = 0; i < q.count; i++) finish(j, q.token[i], q.head[i], s.parts + i * size);
}

static void join(const AttendJob *j, int64_t token, int64_t head) {
  const int64_t size = part_size(j->layer->value_dim);
  number *pieces = (number *)j->parts + (token * j->layer->heads + head) * j->pieces * size;
  number known[size];
  begin(known, j->layer->value_dim);
  for (int64_t p = 0; p < j->pieces; p++)
    if (pieces[p * size] != -INFINITY) merge(known, pieces + p * size, j->layer->value_dim);
  finish(j, token, head, known);
}

const AttendKernel ATTEND = {unit, join, sizeof(number)};
