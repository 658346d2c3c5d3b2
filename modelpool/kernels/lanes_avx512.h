/* LANES floats side by side, with AVX-512: see attend_pass.h. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "attend.h"

typedef float number;
typedef __m512 lanes;
enum { KIND_OWN = KIND_F32 };
enum { MOST_KEYS = 3, TILE_PAIRS = 4, TILE_VALUES = 8, VALUES_WIDE = 2 }; /* of a tile, as registers allow */
#define LANE static inline __attribute__((always_inline))

LANE lanes all_lanes(float x) { return _mm512_set1_ps(x); }
LANE lanes load_lanes(const float *x) { return _mm512_loadu_ps(x); }
/* In a register: a compiler may else load it again for each use. */
LANE lanes kept_lanes(lanes x) {
  __asm__("" : "+v"(x));
  return x;
}
LANE void store_lanes(float *to, lanes x) { _mm512_storeu_ps(to, x); }
LANE lanes add_lanes(lanes x, lanes y) { return _mm512_add_ps(x, y); }
LANE lanes sub_lanes(lanes x, lanes y) { return _mm512_sub_ps(x, y); }
LANE lanes mul_lanes(lanes x, lanes y) { return _mm512_mul_ps(x, y); }
LANE lanes div_lanes(lanes x, lanes y) { return _mm512_div_ps(x, y); }
LANE lanes max_lanes(lanes x, lanes y) { return _mm512_max_ps(x, y); } /* y where NaN */
LANE lanes fma_lanes(lanes x, lanes y, lanes z) { return _mm512_fmadd_ps(x, y, z); }
/* yes where x < y, else no. */
LANE lanes where_less(lanes x, lanes y, lanes yes, lanes no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}
/* 2 to the whole number in the last bits of `shifted`. */
LANE lanes power_of_two(lanes shifted) {
  const __m512i whole = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(whole, 23));
}

LANE __m256 halves_added(lanes x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
LANE float sum_lanes(lanes x) {
  __m256 h = halves_added(x);
  h = _mm256_hadd_ps(h, h), h = _mm256_hadd_ps(h, h);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
LANE void sum_four(const lanes *x, float *to) {
  const __m256 low = _mm256_hadd_ps(halves_added(x[0]), halves_added(x[1]));
  const __m256 all = _mm256_hadd_ps(low, _mm256_hadd_ps(halves_added(x[2]), halves_added(x[3])));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

/* The first `count` of them; zeros. */
LANE lanes load_part(const char *x, int kind, int64_t count) {
  const __mmask16 known = (__mmask16)((1u << count) - 1);
  if (kind == KIND_F32) return _mm512_maskz_loadu_ps(known, x);
  const __m256i half = _mm256_maskz_loadu_epi16(known, x);
  if (kind == KIND_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
LANE lanes load_kind(const char *x, int kind) {
  if (kind == KIND_F32) return _mm512_loadu_ps(x);
  const __m256i half = _mm256_loadu_si256((const __m256i *)x);
  if (kind == KIND_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
LANE __m256i bf16_of(lanes x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_set1_epi32(0x7fff);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), last);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(sum, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, high, _mm512_set1_epi32(0x7fc0)));
}
LANE void store_kind(char *to, int kind, lanes x, int64_t count) {
  const __mmask16 known = (__mmask16)((1u << count) - 1);
  if (kind == KIND_F32) _mm512_mask_storeu_ps(to, known, x);
  else {
    const __m256i half = kind == KIND_F16 ? _mm512_cvtps_ph(x, 0) : bf16_of(x);
    _mm256_mask_storeu_epi16(to, known, half);
  }
}
