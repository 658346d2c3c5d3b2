/* What the kernels for x86-64 use of the compiler's own header, in plain C: for tests of those whose
 * instructions a CPU does not have. Compile with -D'target(x)=' and -D'IN_ORDER(x)='. */

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
  BOTH(V, p##_or_##si, uint8_t, x[i] | y[i])                                                     \
  BOTH(V, p##_and_##si, uint8_t, x[i] & y[i])                                                    \
  BOTH(V, p##_sub_epi8, uint8_t, x[i] - y[i])                                                    \
  BOTH(V, p##_sub_epi32, uint32_t, x[i] - y[i])                                                  \
  BOTH(V, p##_mullo_epi16, uint16_t, (uint32_t)x[i] * y[i])                                      \
  BOTH(F, p##_add_ps, float, x[i] + y[i])                                                        \
  BOTH(F, p##_sub_ps, float, x[i] - y[i])                                                        \
  BOTH(F, p##_mul_ps, float, x[i] * y[i])                                                        \
  BY(V, p##_slli_epi32, uint32_t, x[i] << b)                                                     \
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
BOTH(__m256i, _mm256_add_epi32, uint32_t, x[i] + y[i])
SET(__m256i, _mm256_set1_epi16, int16_t)
SET(__m256i, _mm256_set1_epi64x, int64_t)
FROM(__m256i, _mm256_cvtepi8_epi16, __m128i, int8_t, (int16_t)x[i])
LOAD_AS(__m128i, _mm_load_si128)
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
static inline __m256i _mm256_hadd_epi32(__m256i a, __m256i b) {
  int32_t x[8], y[8], z[8];
  memcpy(x, &a, 32);
  memcpy(y, &b, 32);
  for (int i = 0; i < 8; i++) {
    const int32_t *from = i & 2 ? y : x;
    const int at = i / 4 * 4 + i % 2 * 2;
    z[i] = from[at] + from[at + 1];
  }
  return _mm256_loadu_si256(z);
}
static inline __m256i _mm256_permute4x64_epi64(__m256i a, int order) {
  int64_t x[4], z[4];
  memcpy(x, &a, 32);
  for (int i = 0; i < 4; i++) z[i] = x[order >> 2 * i & 3];
  return _mm256_loadu_si256(z);
}

/* AMX, each thread's tiles of 16 rows and 64 bytes. */
static __thread uint8_t tiles_of_thread[8][16][64];
#define _tile_loadconfig(p) ((void)(p))
#define _tile_release() ((void)0)
static inline void _tile_loadd(int tile, const void *p, int64_t stride) {
  for (int i = 0; i < 16; i++)
    memcpy(tiles_of_thread[tile][i], (const char *)p + i * stride, 64);
}
static inline void _tile_stored(int tile, void *p, int64_t stride) {
  for (int i = 0; i < 16; i++) memcpy((char *)p + i * stride, tiles_of_thread[tile][i], 64);
}
static inline void _tile_dpbusd(int sums, int a, int b) {
  for (int row = 0; row < 16; row++) {
    int32_t z[16];
    memcpy(z, tiles_of_thread[sums][row], 64);
    for (int k = 0; k < 64; k++)
      for (int i = 0; i < 16; i++)
        z[i] += tiles_of_thread[a][row][k] * (int8_t)tiles_of_thread[b][k / 4][i * 4 + k % 4];
    memcpy(tiles_of_thread[sums][row], z, 64);
  }
}
