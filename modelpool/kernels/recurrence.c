/* Recurrences over matrix states: Gated DeltaNet and Mamba-2.
 *
 * Each head has a state S [key_dim, value_dim]. A token with the decay d fades it and adds k u^T:
 *
 *     u = b * (v - d * (k S)), or v where there is no rate b
 *     o = d * (q S) + (q k) * u
 *     S = d * S + k u^T
 *
 * A column of S is worked on by itself, and its sums run over the keys in their order, one product
 * after the other, none of them fused. So a token's bits are a function of the state before it and of
 * nothing else: neither of the tokens of the same call, of threads, nor of the width of vectors.
 * Compile with -ffp-contract=off.
 */

#include <stdint.h>
#include <string.h>

#include "linear.h"
#include "threads.h"

typedef struct {
  float *state;        /* [heads][key_dim][value_dim] */
  const float *key;    /* [key_dim] of a token and head; `key_stride` to the next head or token */
  const float *query;  /* the same */
  const float *value;  /* [tokens][heads][value_dim] */
  const float *decay;  /* [tokens][heads], like the two below */
  const float *rate;   /* NULL: values are added as they are */
  const float *overlap; /* q k */
  float *out;          /* [tokens][heads][value_dim], like `added` */
  float *added;
  int64_t tokens, heads, key_dim, value_dim, key_stride, query_stride;
  int is_kept;         /* the state stays as it is; for one token */
  int threads;
} Scan;

enum { LANES = 16, WIDE = 2 * LANES, MOST_KEYS = 256 };

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define COLUMNS(TYPE, COUNT, START, STEP)                                                         \
  do {                                                                                            \
    const int64_t step = scan->value_dim;                                                         \
    for (int64_t t = 0; t < scan->tokens; t++) {                                                  \
      const int64_t at = t * scan->heads + head;                                                  \
      const float *key = scan->key + at * scan->key_stride;                                       \
      const float *query = scan->query + at * scan->query_stride;                                 \
      const float decay = scan->decay[at], overlap = scan->overlap[at];                           \
      TYPE known[COUNT], asked[COUNT], added[COUNT];                                              \
      memset(known, 0, sizeof known);                                                             \
      memset(asked, 0, sizeof asked);                                                             \
      const TYPE *row = (const TYPE *)(START);                                                    \
      if (scan->rate)                                                                             \
        for (int64_t i = 0; i < scan->key_dim; i++, row = (const TYPE *)((float *)row + STEP))    \
          for (int j = 0; j < COUNT; j++) {                                                       \
            known[j] = known[j] + key[i] * row[j];                                                \
            asked[j] = asked[j] + query[i] * row[j];                                              \
          }                                                                                       \
      else                                                                                        \
        for (int64_t i = 0; i < scan->key_dim; i++, row = (const TYPE *)((float *)row + STEP))    \
          for (int j = 0; j < COUNT; j++) asked[j] = asked[j] + query[i] * row[j];                \
      const TYPE *value = (const TYPE *)(scan->value + at * step + first);                        \
      TYPE *out = (TYPE *)(scan->out + at * step + first);                                        \
      TYPE *kept = (TYPE *)(scan->added + at * step + first);                                     \
      for (int j = 0; j < COUNT; j++) {                                                           \
        added[j] = scan->rate ? (value[j] - decay * known[j]) * scan->rate[at] : value[j];        \
        out[j] = decay * asked[j] + overlap * added[j];                                           \
        kept[j] = added[j];                                                                       \
      }                                                                                           \
      TYPE *next = (TYPE *)(START);                                                               \
      if (!scan->is_kept)                                                                         \
        for (int64_t i = 0; i < scan->key_dim; i++, next = (TYPE *)((float *)next + STEP))        \
          for (int j = 0; j < COUNT; j++) next[j] = decay * next[j] + key[i] * added[j];          \
    }                                                                                             \
  } while (0)

/* Columns from `first` on of a head, `WIDE` of them or what there is. Over several tokens they lie
 * together: with a power of two between two rows most of a cache would be out of their reach. */
#define BLOCK(NAME, TARGET)                                                                       \
  TARGET static void NAME(const Scan *scan, int64_t head, int64_t first) {                        \
    const int64_t dim = scan->value_dim, keys = scan->key_dim;                                    \
    float *state = scan->state + head * keys * dim;                                               \
    if (dim - first < WIDE)                                                                       \
      for (; first < dim; first++) COLUMNS(float, 1, state + first, dim);                         \
    else if (scan->tokens == 1 || keys > MOST_KEYS)                                               \
      COLUMNS(Lanes, 2, state + first, dim);                                                      \
    else {                                                                                        \
      float together[MOST_KEYS * WIDE] __attribute__((aligned(64)));                              \
      for (int64_t i = 0; i < keys; i++)                                                          \
        memcpy(together + i * WIDE, state + i * dim + first, WIDE * sizeof(float));               \
      COLUMNS(Lanes, 2, together, WIDE);                                                          \
      for (int64_t i = 0; i < keys; i++)                                                          \
        memcpy(state + i * dim + first, together + i * WIDE, WIDE * sizeof(float));               \
    }                                                                                             \
  }

BLOCK(block, VECTOR_TARGET)
#ifdef __x86_64__
BLOCK(block_wide, __attribute__((target("avx512f"))))
#define HAS_WIDE __builtin_cpu_supports("avx512f")
#else
#define block_wide block
#define HAS_WIDE 0
#endif

static void share(void *of) {
  const Scan *scan = of;
  const int several = scan->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  const int64_t blocks = (scan->value_dim + WIDE - 1) / WIDE, all = scan->heads * blocks;
  const int is_wide = HAS_WIDE;
  for (int64_t i = all * number / count; i < all * (number + 1) / count; i++)
    (is_wide ? block_wide : block)(scan, i / blocks, i % blocks * WIDE);
}

/* Reads tokens that follow one another, and puts them behind the state. */
void sr_scan(Scan *scan) {
  const int64_t work = scan->tokens * scan->heads * scan->key_dim * scan->value_dim;
  if (!in_parallel || work < 1 << 20) scan->threads = 1;
  if (scan->threads > 1) in_parallel(share, scan, scan->threads, 0);
  else share(scan);
}

/* S = d * S + k u^T with u [heads][value_dim] that `sr_scan` found, and with its bits. */
VECTOR_TARGET void sr_advance(float *restrict state, const float *restrict key,
                              const float *restrict added, const float *restrict decay,
                              int64_t heads, int64_t key_dim, int64_t value_dim,
                              int64_t key_stride) {
  for (int64_t head = 0; head < heads; head++, added += value_dim, key += key_stride)
    for (int64_t i = 0; i < key_dim; i++, state += value_dim)
      for (int64_t j = 0; j < value_dim; j++)
        state[j] = decay[head] * state[j] + key[i] * added[j];
}
