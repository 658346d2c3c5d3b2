/* The token with the largest score: logit / temperature + Gumbel noise, -log(-log(u)), of (seed,
 * stream, position, id).
 *
 * u is numpy's: Philox 4x64-10 keyed by (seed, stream), counter (block, position). The logarithm is
 * written here, of plain products and sums in float64, so that noise has the same bits on every CPU:
 * compile with -ffp-contract=off.
 *
 * A token can only win over a score b if -log(-log(u)) > b - l, where l is its logit / temperature;
 * and since exp(-x) >= 1 - x, only if 1 - u < exp(l - b). Few tokens pass this, and they alone are
 * computed in float64. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). */

#include <math.h>
#include <stdint.h>

#include "linear.h"
#include "threads.h"

#define COLDEST 1e-3 /* below, every token is computed */
enum { BLOCK = 4, TOGETHER = 64, ALONE = 1 << 13 }; /* words of a block; ids whose bounds are computed
  at once; numbers that one thread looks at */

typedef struct {
  const float *logits;
  int64_t size;
  const uint64_t *key; /* seed, stream, position */
  double temperature;  /* 0: no noise */
} Place;

typedef struct {
  double score; /* NaN where a logit is NaN */
  int64_t id;
} Best;

/* Words 4 * block to 4 * block + 3. Of what a place takes this is the most: 20 products of 64 bits
 * for four tokens, of which CPUs do one in two cycles; blocks side by side are no faster. */
static inline void philox(const uint64_t key[3], uint64_t block, uint64_t words[BLOCK]) {
  uint64_t c0 = block + 1, c1 = key[2], c2 = 0, c3 = 0, k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 a = (unsigned __int128)c0 * 0xD2E7470EE14C6C93u;
    const unsigned __int128 b = (unsigned __int128)c2 * 0xCA5A826395121157u;
    c0 = (uint64_t)(b >> 64) ^ c1 ^ k0, c1 = (uint64_t)b;
    c2 = (uint64_t)(a >> 64) ^ c3 ^ k1, c3 = (uint64_t)a;
    k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

VECTOR_INLINE double of_bits_64(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Of a whole number below 2^53, by what AVX2 has. */
VECTOR_INLINE double whole(uint64_t number) {
  const double low = of_bits_64(0x4330000000000000u | (number & 0xffffffffu)) - 0x1p52;
  return of_bits_64(0x4530000000000000u | number >> 32) - 0x1p84 + low;
}

/* The natural logarithm of a positive normal number, within a unit of the last place. */
VECTOR_INLINE double logarithm(double x) {
  const uint64_t root = 0x3fe6a09e667f3bcdu; /* sqrt(1/2), from which on mantissas are */
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits += 0x3ff0000000000000u - root;
  const double k = of_bits_64(0x4330000000000000u | bits >> 52) - (0x1p52 + 1023);
  const double f = of_bits_64((bits & 0xfffffffffffffu) + root) - 1.0;
  const double half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
  const double even = w * (0.3999999999940942 + w * (0.22222198432149784 + w * 0.15313837699209373));
  const double odd = z * (0.6666666666666735 + w * (0.2857142874366239 +
                     w * (0.1818357216161805 + w * 0.14798198605116586)));
  const double low = k * 1.9082149292705877e-10, high = k * 0.6931471803691238;
  return high - ((half - (s * (half + (even + odd)) + low)) - f);
}

VECTOR_TARGET static void gumbels(const uint64_t *words, int count, double *y) {
  for (int i = 0; i < count; i++) {
    const double u = whole(words[i] >> 11) * 0x1p-53;
    y[i] = -logarithm(-logarithm(u < 0x1p-54 ? 0x1p-54 : u)); /* whose logarithm is finite */
  }
}

/* The noise of ids from 0 on. */
void sr_gumbel(const uint64_t *key, int64_t size, double *y) {
  uint64_t words[TOGETHER];
  for (int64_t i = 0; i < size; i += TOGETHER) {
    const int count = size - i < TOGETHER ? size - i : TOGETHER;
    for (int k = 0; k < count; k += BLOCK) philox(key, (i + k) / BLOCK, words + k);
    gumbels(words, count, y + i);
  }
}

/* The noise of some ids. */
void sr_gumbel_at(const uint64_t *key, const int64_t *ids, int64_t count, double *y) {
  for (int64_t i = 0; i < count; i++) {
    uint64_t words[BLOCK];
    philox(key, (uint64_t)ids[i] / BLOCK, words);
    gumbels(words + ids[i] % BLOCK, 1, y + i);
  }
}

/* e^x, or a little more, for x of at most 88; of what is below -87 less than 2^-125. */
VECTOR_INLINE float bound(float x) {
  const float shift = 12582912.0f; /* behind which a sum is a whole number */
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + shift, r = x - (shifted - shift) * 0.69314718f;
  const float y = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * 0.041666668f)));
  return y * 1.001f * of_bits((bits_of(shifted) << 23) + (127u << 23));
}

/* The largest logit from `first` on and its id; the first NaN if there is one. */
VECTOR_TARGET static Best largest(const Place *p, int64_t first, int64_t end) {
  float most[32];
  uint32_t strange = 0;
  for (int k = 0; k < 32; k++) most[k] = -INFINITY;
  int64_t i = first;
  for (; i + 32 <= end; i += 32)
    for (int k = 0; k < 32; k++) {
      const float x = p->logits[i + k];
      most[k] = x > most[k] ? x : most[k];
      strange |= x != x;
    }
  for (; i < end; i++) {
    const float x = p->logits[i];
    most[0] = x > most[0] ? x : most[0];
    strange |= x != x;
  }
  for (int k = 1; k < 32; k++) most[0] = most[k] > most[0] ? most[k] : most[0];
  for (i = first; strange ? p->logits[i] == p->logits[i] : p->logits[i] != most[0];) i++;
  return (Best){p->logits[i], i};
}

static inline Best better(Best one, Best other) { /* NaN before all, then the lower id */
  if (one.score != one.score || other.score != other.score) return one.score != one.score ? one : other;
  if (one.score == other.score) return one.id < other.id ? one : other;
  return one.score > other.score ? one : other;
}

static Best scored(const Place *p, int64_t id, uint64_t word) {
  double noise;
  gumbels(&word, 1, &noise);
  return (Best){(double)p->logits[id] / p->temperature + noise, id};
}

/* Which of some ids may have a larger score than `best`: 1 - u below these. */
VECTOR_TARGET static void bounds(const Place *p, int64_t first, int64_t count, double best, float *y) {
  const float by = (float)(1.0 / p->temperature), least = (float)best;
  const float rounded = 1e-3f + 1e-6f * __builtin_fabsf(least); /* and more than that is rounded here */
  for (int64_t k = 0; k < count; k++) y[k] = bound(p->logits[first + k] * by - least + rounded);
  if (p->temperature < COLDEST)
    for (int64_t k = 0; k < count; k++) y[k] = 1;
}

/* Of ids first..end, where `first` is a multiple of BLOCK. */
static Best best_of(const Place *p, int64_t first, int64_t end) {
  Best best = largest(p, first, end);
  if (p->temperature == 0 || best.score != best.score) return best;
  uint64_t words[BLOCK];
  philox(p->key, best.id / BLOCK, words);
  best = scored(p, best.id, words[best.id % BLOCK]);
  float passes[TOGETHER];
  for (int64_t i = first; i < end; i += TOGETHER) {
    const int64_t count = end - i < TOGETHER ? end - i : TOGETHER;
    bounds(p, i, count, best.score, passes);
    for (int64_t from = 0; from < count; from += BLOCK) {
      const int64_t some = count - from < BLOCK ? count - from : BLOCK;
      const float *pass = passes + from;
      float most = 0;
      for (int64_t k = 0; k < some; k++) most = pass[k] > most ? pass[k] : most;
      if (most < 0x1p-53f) continue; /* 1 - u is never less */
      philox(p->key, (i + from) / BLOCK, words);
      for (int64_t k = 0; k < some; k++) {
        const float left = (float)(int64_t)((1ull << 53) - (words[k] >> 11)) * 0x1p-53f;
        if (left <= pass[k]) best = better(best, scored(p, i + from + k, words[k]));
      }
    }
  }
  return best;
}

typedef struct {
  const Place *places;
  Best *found; /* [places][parts] */
  int64_t count, parts;
  int threads;
} Job;

static void share(void *of) {
  const Job *job = of;
  const int64_t number = job->threads > 1 ? thread_number() : 0;
  const int64_t count = job->threads > 1 ? thread_count() : 1;
  for (int64_t unit = number; unit < job->count * job->parts; unit += count) {
    const Place *p = job->places + unit / job->parts;
    const int64_t part = unit % job->parts, blocks = (p->size + BLOCK - 1) / BLOCK;
    const int64_t first = blocks * part / job->parts * BLOCK;
    const int64_t end = blocks * (part + 1) / job->parts * BLOCK;
    job->found[unit] = best_of(p, first, end < p->size ? end : p->size);
  }
}

enum { PLACES = 64, PARTS = 8 }; /* at once, and of one of them */

/* What is chosen at `count` places, of logits [count][size], `stride` apart. `keys` [count][3]: seed,
 * stream, position. Neither the places beside one nor the threads change anything. */
void sr_choose(const float *logits, int64_t count, int64_t size, int64_t stride, const uint64_t *keys,
               const double *temperatures, int64_t *ids, double *scores, int threads) {
  const int several = in_parallel && threads > 1 && count * size >= ALONE;
  for (int64_t n = 0; n < count; n += PLACES) {
    Place places[PLACES];
    Best found[PLACES * PARTS];
    const int64_t some = count - n < PLACES ? count - n : PLACES;
    for (int64_t i = 0; i < some; i++)
      places[i] = (Place){logits + (n + i) * stride, size, keys + (n + i) * 3, temperatures[n + i]};
    int64_t parts = several && size >= ALONE / PLACES ? (threads + some - 1) / some : 1;
    if (parts > PARTS) parts = PARTS;
    Job job = {places, found, some, parts, several ? threads : 1};
    if (several) in_parallel(share, &job, threads, 0);
    else share(&job);
    for (int64_t i = 0; i < some; i++) {
      Best best = found[i * parts];
      for (int64_t k = 1; k < parts; k++) best = better(best, found[i * parts + k]);
      ids[n + i] = best.id, scores[n + i] = best.score;
    }
  }
}
