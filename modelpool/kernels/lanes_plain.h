/* LANES numbers side by side in plain C, which says what the other lanes compute: see
 * attend_pass.h. LANES_DOUBLE: in double, with the exponential and tanh of libm. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attend.h"

#ifdef LANES_DOUBLE
#define LANES_LIBM
typedef double number;
#define fused __builtin_fma
#else
typedef float number;
#define fused __builtin_fmaf
#endif
typedef struct {
  number n[LANES];
} lanes;
enum { KIND_OWN = sizeof(number) == 8 ? KIND_F64 : KIND_F32 };
enum { MOST_KEYS = 1, TILE_PAIRS = 1, TILE_VALUES = 4, VALUES_WIDE = 1 }; /* of a tile, as registers allow */
#define LANE static inline __attribute__((always_inline))
#define EACH(value) \
  ({ lanes y_; for (int i = 0; i < LANES; i++) y_.n[i] = (value); y_; })

LANE lanes all_lanes(number x) { return EACH(x); }
LANE lanes load_lanes(const number *x) { return EACH(x[i]); }
LANE lanes kept_lanes(lanes x) { return x; }
LANE void store_lanes(number *to, lanes x) { memcpy(to, &x, sizeof x); }
LANE lanes add_lanes(lanes x, lanes y) { return EACH(x.n[i] + y.n[i]); }
LANE lanes sub_lanes(lanes x, lanes y) { return EACH(x.n[i] - y.n[i]); }
LANE lanes mul_lanes(lanes x, lanes y) { return EACH(x.n[i] * y.n[i]); }
LANE lanes div_lanes(lanes x, lanes y) { return EACH(x.n[i] / y.n[i]); }
LANE lanes max_lanes(lanes x, lanes y) { return EACH(x.n[i] > y.n[i] ? x.n[i] : y.n[i]); }
LANE lanes fma_lanes(lanes x, lanes y, lanes z) { return EACH(fused(x.n[i], y.n[i], z.n[i])); }
/* yes where x < y, else no. */
LANE lanes where_less(lanes x, lanes y, lanes yes, lanes no) {
  return EACH(x.n[i] < y.n[i] ? yes.n[i] : no.n[i]);
}
#ifdef LANES_LIBM
LANE lanes exp_lanes(lanes x) { return EACH(exp(x.n[i])); }
LANE lanes tanh_lanes(lanes x) { return EACH(tanh(x.n[i])); }
#else
static inline float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
/* 2 to the whole number in the last bits of `shifted`. */
LANE lanes power_of_two(lanes shifted) { return EACH(of_bits((bits_of(shifted.n[i]) + 127) << 23)); }
#endif

/* Halves, then neighbours. */
LANE number sum_lanes(lanes x) {
  number h[8], s[2];
  for (int i = 0; i < 8; i++) h[i] = x.n[i] + x.n[i + 8];
  for (int i = 0; i < 2; i++)
    s[i] = (h[4 * i] + h[4 * i + 1]) + (h[4 * i + 2] + h[4 * i + 3]);
  return s[0] + s[1];
}
LANE void sum_four(const lanes *x, number *to) {
  for (int i = 0; i < 4; i++) to[i] = sum_lanes(x[i]);
}

#ifdef LANES_DOUBLE
LANE lanes load_part(const char *x, int kind, int64_t count) {
  lanes y = {{0}};
  (void)kind; /* double */
  memcpy(&y, x, count * sizeof(number));
  return y;
}
LANE void store_kind(char *to, int kind, lanes x, int64_t count) {
  (void)kind;
  memcpy(to, &x, count * sizeof(number));
}
#else
static float of_f16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00) << 22);
  if (rest < 0x400) { /* of 2^-24 */
    const float x = (float)rest * 5.9604644775390625e-8f;
    return of_bits(sign | bits_of(x));
  }
  return of_bits(sign | ((rest << 13) + (112u << 23)));
}
/* To the nearest, ties to even. */
static uint16_t to_f16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00 | (rest >> 13 & 0x3ff);
  if (rest >= 0x477ff000) return sign | 0x7c00;
  if (rest < 0x38800000) return sign | (bits_of(of_bits(rest) + 0.5f) - bits_of(0.5f));
  return sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
}
static uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
LANE lanes load_part(const char *x, int kind, int64_t count) {
  lanes y = {{0}};
  for (int64_t i = 0; i < count; i++) {
    uint16_t half;
    if (kind == KIND_F32) memcpy(y.n + i, x + 4 * i, 4);
    else {
      memcpy(&half, x + 2 * i, 2);
      y.n[i] = kind == KIND_F16 ? of_f16(half) : of_bits((uint32_t)half << 16);
    }
  }
  return y;
}
LANE void store_kind(char *to, int kind, lanes x, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const uint16_t half = kind == KIND_F16 ? to_f16(x.n[i]) : to_bf16(x.n[i]);
    if (kind == KIND_F32) memcpy(to + 4 * i, x.n + i, 4);
    else memcpy(to + 2 * i, &half, 2);
  }
}
#endif
LANE lanes load_kind(const char *x, int kind) { return load_part(x, kind, LANES); }
