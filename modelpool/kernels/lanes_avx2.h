/* LANES floats side by side, with AVX2, FMA and F16C: see attend_pass.h. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "attend.h"

typedef float number;
typedef struct {
  __m256 a, b;
} lanes;
enum { KIND_OWN = KIND_F32 };
enum { MOST_KEYS = 3, TILE_PAIRS = 1, TILE_VALUES = 4, VALUES_WIDE = 1 }; /* of a tile, as registers allow */
#define LANE static inline __attribute__((always_inline))
#define PAIR(operation, x, y) (lanes){operation(x.a, y.a), operation(x.b, y.b)}

LANE lanes all_lanes(float x) { return (lanes){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LANE lanes load_lanes(const float *x) {
  return (lanes){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
/* In registers: a compiler may else load it again for each use. */
LANE lanes kept_lanes(lanes x) {
  __asm__("" : "+x"(x.a), "+x"(x.b));
  return x;
}
LANE void store_lanes(float *to, lanes x) {
  _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b);
}
LANE lanes add_lanes(lanes x, lanes y) { return PAIR(_mm256_add_ps, x, y); }
LANE lanes sub_lanes(lanes x, lanes y) { return PAIR(_mm256_sub_ps, x, y); }
LANE lanes mul_lanes(lanes x, lanes y) { return PAIR(_mm256_mul_ps, x, y); }
LANE lanes div_lanes(lanes x, lanes y) { return PAIR(_mm256_div_ps, x, y); }
LANE lanes max_lanes(lanes x, lanes y) { return PAIR(_mm256_max_ps, x, y); } /* y where NaN */
LANE lanes fma_lanes(lanes x, lanes y, lanes z) {
  return (lanes){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
/* yes where x < y, else no. */
LANE lanes where_less(lanes x, lanes y, lanes yes, lanes no) {
  return (lanes){_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                 _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
/* 2 to the whole number in the last bits of `shifted`. */
LANE __m256 power8(__m256 shifted) {
  const __m256i whole = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(whole, 23));
}
LANE lanes power_of_two(lanes shifted) { return (lanes){power8(shifted.a), power8(shifted.b)}; }

LANE float sum_lanes(lanes x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  h = _mm256_hadd_ps(h, h), h = _mm256_hadd_ps(h, h);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
LANE void sum_four(const lanes *x, float *to) {
  __m256 h[4];
  for (int i = 0; i < 4; i++) h[i] = _mm256_add_ps(x[i].a, x[i].b);
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

LANE __m256 load8(const char *x, int kind) {
  if (kind == KIND_F32) return _mm256_loadu_ps((const float *)x);
  const __m128i half = _mm_loadu_si128((const __m128i *)x);
  if (kind == KIND_F16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
LANE lanes load_kind(const char *x, int kind) {
  return (lanes){load8(x, kind), load8(x + (kind == KIND_F32 ? 32 : 16), kind)};
}
/* The first `count` of them; zeros. */
LANE lanes load_part(const char *x, int kind, int64_t count) {
  if (count == LANES) return load_kind(x, kind);
  float whole[LANES] = {0};
  memcpy(whole, x, count * (kind == KIND_F32 ? 4 : 2));
  return load_kind((const char *)whole, kind);
}
LANE __m128i bf16_of(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_set1_epi32(0x7fff);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i high = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), last), 16);
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(is_nan));
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
LANE void store_kind(char *to, int kind, lanes x, int64_t count) {
  __m128i half[2];
  if (kind == KIND_F32) memcpy(to, &x, count * 4);
  else {
    if (kind == KIND_F16) half[0] = _mm256_cvtps_ph(x.a, 0), half[1] = _mm256_cvtps_ph(x.b, 0);
    else half[0] = bf16_of(x.a), half[1] = bf16_of(x.b);
    memcpy(to, half, count * 2);
  }
}
