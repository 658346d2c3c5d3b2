/* What the kernels for x86-64 use of the compiler's own header, in plain C: for tests of those whose
 * instructions a CPU does not have. Compile with -D'target(x)=' and -DEMULATED. */

#include <stdint.h>
#include <string.h>

typedef struct { uint8_t b[16]; } __m128i;
typedef struct { uint8_t b[32]; } __m256i;
typedef struct { uint8_t b[64]; } __m512i;
typedef struct { float f[8]; } __m256;
typedef struct { float f[16]; } __m512;

/* `made`, of type R and in elements of T from those of the arguments, x and y. */
#define MAP(R, name, A, a, B, b_, T, made)                                                       \
  static inline R name(A a, B b_) {                                                              \
    R r;                                                                                         \
    T x[sizeof(A) / sizeof(T)], y[sizeof(A) / sizeof(T)], z[sizeof(R) / sizeof(T)];              \
    memcpy(x, &a, sizeof a);                                                                     \
    memcpy(y, &b_, sizeof(B) < sizeof y ? sizeof(B) : sizeof y);                                 \
    for (int i = 0; i < (int)(sizeof z / sizeof *z); i++) z[i] = made;                           \
    memcpy(&r, z, sizeof r);                                                                     \
    return r;                                                                                    \
  }
#define BOTH(V, name, T, made) MAP(V, name, V, a, V, b, T, made)
#define BY(V, name, T, made) MAP(V, name, V, a, int, b, T, made)
#define SET(V, name, T)                                                                          \
  static inline V name(T value) {                                                                \
    V r;                                                                                         \
    for (size_t i = 0; i < sizeof r / sizeof value; i++)                                         \
      memcpy((char *)&r + i * sizeof value, &value, sizeof value);                               \
    return r;                                                                                    \
  }
#define LOAD_AS(V, name)                                                                         \
  static inline V name(const void *p) { V r; memcpy(&r, p, sizeof r); return r; }
#define STORE_AS(V, name)                                                                        \
  static inline void name(void *p, V v) { memcpy(p, &v, sizeof v); }
#define FROM(R, name, V, T, made) /* from elements of T, widened */                              \
  static inline R name(V v) {                                                                    \
    R r;                                                                                         \
    T x[sizeof v / sizeof(T)];                                                                   \
    memcpy(x, &v, sizeof v);                                                                     \
    for (size_t i = 0; i < sizeof r / sizeof(made); i++) {                                       \
      __typeof__(made) one = made;                                                               \
      memcpy((char *)&r + i * sizeof one, &one, sizeof one);                                     \
    }                                                                                            \
    return r;                                                                                    \
  }

#define OF_WIDTH(p, si, V, F, HALVES)                                                            \
  BOTH(V, p##_and_##si, uint8_t, x[i] & y[i])                                                    \
  BOTH(V, p##_sub_epi32, uint32_t, x[i] - y[i])                                                  \
  BOTH(F, p##_add_ps, float, x[i] + y[i])                                                        \
  static inline F p##_fmadd_ps(F a, F b, F c) {                                                  \
    for (size_t i = 0; i < sizeof a / 4; i++) a.f[i] = __builtin_fmaf(a.f[i], b.f[i], c.f[i]);   \
    return a;                                                                                    \
  }                                                                                              \
  BOTH(F, p##_mul_ps, float, x[i] * y[i])                                                        \
  BY(V, p##_srli_epi16, uint16_t, x[i] >> b)                                                     \
  SET(V, p##_set1_epi8, int8_t)                                                                  \
  SET(V, p##_set1_epi32, int32_t)                                                                \
  SET(F, p##_set1_ps, float)                                                                     \
  static inline V p##_setzero_##si(void) { return p##_set1_epi8(0); }                            \
  static inline F p##_setzero_ps(void) { return p##_set1_ps(0); }                                \
  LOAD_AS(V, p##_load_##si)                                                                      \
  LOAD_AS(V, p##_loadu_##si)                                                                     \
  LOAD_AS(F, p##_loadu_ps)                                                                       \
  STORE_AS(V, p##_storeu_##si)                                                                   \
  STORE_AS(F, p##_storeu_ps)                                                                     \
  FROM(V, p##_cvtepu8_epi32, __m128i, uint8_t, (int32_t)x[i])                                    \
  FROM(V, p##_cvtepi8_epi32, __m128i, int8_t, (int32_t)x[i])                                     \
  FROM(F, p##_cvtepi32_ps, V, int32_t, (float)x[i])                                              \
  FROM(F, p##_cvtph_ps, HALVES, _Float16, (float)x[i])                                           \
  static inline V p##_dpbusd_epi32(V sums, V a, V b) {                                           \
    int32_t z[sizeof(V) / 4];                                                                    \
    memcpy(z, &sums, sizeof z);                                                                  \
    for (size_t i = 0; i < sizeof(V); i++) z[i / 4] += (int)a.b[i] * (int8_t)b.b[i];             \
    memcpy(&sums, z, sizeof z);                                                                  \
    return sums;                                                                                 \
  }

OF_WIDTH(_mm256, si256, __m256i, __m256, __m128i)
OF_WIDTH(_mm512, si512, __m512i, __m512, __m256i)
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32

/* AVX2 alone. */
static inline int16_t saturated(int32_t sum) {
  return sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum;
}
BOTH(__m256i, _mm256_add_epi16, uint16_t, x[i] + y[i])
BOTH(__m256i, _mm256_xor_si256, uint8_t, x[i] ^ y[i])
BOTH(__m256i, _mm256_or_si256, uint8_t, x[i] | y[i])
BOTH(__m256i, _mm256_cmpeq_epi8, uint8_t, x[i] == y[i] ? 255 : 0)
SET(__m256i, _mm256_set1_epi64x, int64_t)
static inline __m256i _mm256_setr_epi64x(int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t z[4] = {a, b, c, d};
  __m256i r;
  memcpy(&r, z, 32);
  return r;
}
static inline __m256i _mm256_shuffle_epi8(__m256i a, __m256i order) {
  __m256i r;
  for (int i = 0; i < 32; i++) r.b[i] = order.b[i] & 128 ? 0 : a.b[(i & 16) + (order.b[i] & 15)];
  return r;
}
static inline __m512i _mm512_mask_add_epi8(__m512i otherwise, uint64_t mask, __m512i a, __m512i b) {
  for (int i = 0; i < 64; i++)
    if (mask >> i & 1) otherwise.b[i] = a.b[i] + b.b[i];
  return otherwise;
}
BOTH(__m256i, _mm256_sign_epi8, int8_t, y[i] < 0 ? -x[i] : y[i] ? x[i] : 0)
FROM(__m256i, _mm256_abs_epi8, __m256i, int8_t, (int8_t)(x[i] < 0 ? -x[i] : x[i]))
BOTH(__m256i, _mm256_add_epi32, uint32_t, x[i] + y[i])
SET(__m256i, _mm256_set1_epi16, int16_t)
LOAD_AS(__m128i, _mm_loadu_si128)
static inline __m128i _mm_loadl_epi64(const void *p) {
  __m128i r = {{0}};
  memcpy(&r, p, 8);
  return r;
}
static inline __m256i _mm256_maddubs_epi16(__m256i a, __m256i b) {
  int16_t z[16];
  for (int i = 0; i < 16; i++)
    z[i] = saturated(a.b[2 * i] * (int8_t)b.b[2 * i] + a.b[2 * i + 1] * (int8_t)b.b[2 * i + 1]);
  return _mm256_loadu_si256(z);
}
static inline __m256i _mm256_madd_epi16(__m256i a, __m256i b) {
  int16_t x[16], y[16];
  int32_t z[8];
  memcpy(x, &a, 32);
  memcpy(y, &b, 32);
  for (int i = 0; i < 8; i++) z[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  return _mm256_loadu_si256(z);
}
