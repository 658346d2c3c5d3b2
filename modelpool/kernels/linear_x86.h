/* Kernels of linear layers for x86-64: AVX-512 VNNI, AVX-VNNI, and AVX2 alone. Part of linear.c. */

#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- VNNI, with vectors of 512 bits and of 256 */

#define MOST_FEW 8
#define MOST_ROWS 12
#define MOST_OF_BLOCKS 4
#define V __m512i
#define VF __m512
#define LANES 16
#define VECTORS 2
#define NAME(x) x##_512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define ZERO _mm512_setzero_si512
#define LOAD(p) _mm512_load_si512((const void *)(p))
#define LOADU(p) _mm512_loadu_si512((const void *)(p))
#define STORE(p, v) _mm512_storeu_si512((void *)(p), v)
#define WIDEN(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define OR _mm512_or_si512
#define AND _mm512_and_si512
#define SHIFT_LEFT _mm512_slli_epi32
#define SHIFT_RIGHT16 _mm512_srli_epi16
#define MUL16 _mm512_mullo_epi16
#define SUB8 _mm512_sub_epi8
#define SUB32 _mm512_sub_epi32
#define SET8 _mm512_set1_epi8
#define SET32 _mm512_set1_epi32
#define DOT _mm512_dpbusd_epi32
#define TO_FLOAT _mm512_cvtepi32_ps
#define MULF _mm512_mul_ps
#define ADDF _mm512_add_ps
#define SUBF _mm512_sub_ps
#define HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define SETF _mm512_set1_ps
#define LOADF _mm512_loadu_ps
#define STOREF _mm512_storeu_ps
#include "dot_panel.h"

/* ---- AMX: an unpacked panel is a tile of 16 outputs and 64 inputs beside the other */

#define TILES 32            /* rows of two tiles */
#define MOST_BEFORE_TILES 8 /* rows for which nibbles are not unpacked */
#define AMX_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,amx-tile,amx-int8")))

/* As `block_512`, also reading and adding to rows up to a multiple of 16. */
AMX_TARGET static void block_amx(int count, const int8_t *bytes, int64_t half, int64_t steps,
                                 const uint8_t *levels, int64_t stride, int32_t *kept) {
  const int are_two = count > TILE_ROWS;
  int32_t *second = kept + TILE_ROWS * 32;
  const uint8_t *others = levels + TILE_ROWS * stride;
  _tile_loadd(0, kept, 128);
  _tile_loadd(1, kept + 16, 128);
  if (are_two) {
    _tile_loadd(2, second, 128);
    _tile_loadd(3, second + 16, 128);
  }
  for (int64_t k = 0; k < steps * 4; k += 64, bytes += 1024) {
    _tile_loadd(4, levels + k, stride);
    _tile_loadd(6, bytes, 64);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, bytes + half, 64);
    _tile_dpbusd(1, 4, 7);
    if (are_two) {
      _tile_loadd(5, others + k, stride);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  }
  _tile_stored(0, kept, 128);
  _tile_stored(1, kept + 16, 128);
  if (are_two) {
    _tile_stored(2, second, 128);
    _tile_stored(3, second + 16, 128);
  }
}

AMX_TARGET static void many_amx(const Job *job, int64_t panel, char *scratch) {
  /* Static: gcc 12 takes eight bytes of it for all that is read, and drops stores to a local one. */
  static const struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; }
      tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&tiles);
  many_by_512(job, panel, scratch, TILES, TILE_ROWS, block_amx);
  _tile_release();
}
#undef MOST_FEW
#undef MOST_ROWS
#undef MOST_OF_BLOCKS
#undef V
#undef VF
#undef LANES
#undef VECTORS
#undef NAME
#undef TARGET
#undef ZERO
#undef LOAD
#undef LOADU
#undef STORE
#undef WIDEN
#undef OR
#undef AND
#undef SHIFT_LEFT
#undef SHIFT_RIGHT16
#undef MUL16
#undef SUB8
#undef SUB32
#undef SET8
#undef SET32
#undef DOT
#undef TO_FLOAT
#undef MULF
#undef ADDF
#undef SUBF
#undef HALVES
#undef SETF
#undef LOADF
#undef STOREF

/* Sixteen registers leave room for fewer rows. */
#define MOST_FEW 4
#define MOST_ROWS 4
#define MOST_OF_BLOCKS 2
#define V __m256i
#define VF __m256
#define LANES 8
#define VECTORS 4
#define ZERO _mm256_setzero_si256
#define LOAD(p) _mm256_load_si256((const __m256i *)(p))
#define LOADU(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define WIDEN(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define OR _mm256_or_si256
#define AND _mm256_and_si256
#define SHIFT_LEFT _mm256_slli_epi32
#define SHIFT_RIGHT16 _mm256_srli_epi16
#define MUL16 _mm256_mullo_epi16
#define SUB8 _mm256_sub_epi8
#define SUB32 _mm256_sub_epi32
#define SET8 _mm256_set1_epi8
#define SET32 _mm256_set1_epi32
#define TO_FLOAT _mm256_cvtepi32_ps
#define MULF _mm256_mul_ps
#define ADDF _mm256_add_ps
#define SUBF _mm256_sub_ps
#define HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define SETF _mm256_set1_ps
#define LOADF _mm256_loadu_ps
#define STOREF _mm256_storeu_ps

#define NAME(x) x##_avx
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define DOT _mm256_dpbusd_avx_epi32
#include "dot_panel.h"
#undef NAME
#undef TARGET
#undef DOT

/* The same under the instructions of AVX-512, for tests on CPUs without those of AVX-VNNI. */
#define NAME(x) x##_256
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")))
#define DOT _mm256_dpbusd_epi32
#include "dot_panel.h"

/* ---- AVX2 alone: nibbles times bytes leave room for eight sums in 16 bits */

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE AVX2_TARGET __attribute__((always_inline)) static inline

/* Compilers would compute all products before the first sum, and have no registers for them. */
#ifndef IN_ORDER
#define IN_ORDER(vector) __asm__("" : "+x"(vector))
#endif

AVX2_INLINE void avx2_finish(const Weight *w, __m256 sum, int64_t output, float largest, void *y,
                             int is_bf16) {
  __m256 found = _mm256_mul_ps(sum, _mm256_loadu_ps(w->units + output));
  found = _mm256_mul_ps(found, _mm256_set1_ps(largest));
  if (w->bias) found = _mm256_add_ps(found, _mm256_loadu_ps(w->bias + output));
  float outputs[8];
  _mm256_storeu_ps(outputs, found);
  store_outputs(w, outputs, 8, output, y, is_bf16);
}

AVX2_INLINE int64_t eight_bytes(const int16_t *levels) {
  int64_t found;
  memcpy(&found, levels, sizeof found);
  return found;
}

AVX2_INLINE __m256i avx2_twice(const uint8_t *of_outputs) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)of_outputs));
  return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
}

/* Of a group: products of `count` rows with sixteen outputs, of pairs of inputs, in 16 bits. */
AVX2_INLINE void avx2_pairs(const int count, const Job *job, const uint8_t *nibbles, int64_t g,
                            int64_t m0, __m256i short_sums[][2]) {
  const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int m = 0; m < count; m++) short_sums[m][0] = short_sums[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __builtin_prefetch(nibbles + j * 64 + AHEAD);
    const __m256i a = _mm256_load_si256((const __m256i *)(nibbles + j * 64));
    const __m256i b = _mm256_load_si256((const __m256i *)(nibbles + j * 64 + 32));
#pragma GCC unroll 2
    for (int late = 0; late < 2; late++) { /* the later four of eight inputs */
      const __m256i of_a = _mm256_and_si256(late ? _mm256_srli_epi16(a, 4) : a, low);
      const __m256i of_b = _mm256_and_si256(late ? _mm256_srli_epi16(b, 4) : b, low);
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const uint8_t *from = job->levels + (m0 + m) * job->stride + g * GROUP + j * 8 + late * 4;
        const __m256i x = _mm256_set1_epi32(four_bytes(from));
        short_sums[m][0] = _mm256_add_epi16(short_sums[m][0], _mm256_maddubs_epi16(of_a, x));
        short_sums[m][1] = _mm256_add_epi16(short_sums[m][1], _mm256_maddubs_epi16(of_b, x));
        IN_ORDER(short_sums[m][0]);
        IN_ORDER(short_sums[m][1]);
      }
    }
  }
}

/* `count` rows with the sixteen outputs of half a panel. */
AVX2_INLINE void avx2_nibbles(const int count, const Job *job, int64_t panel, int half, int64_t m0,
                              __m256i sums[][2]) {
  const Weight *w = job->weight;
  const int64_t groups = w->inputs / GROUP;
  const uint8_t *nibbles = w->nibbles + panel * groups * 512 + half * 256;
  const uint8_t *scales = w->scales + panel * groups * 32 + half * 16;
  const uint8_t *centres = w->centres + panel * groups * 32 + half * 16;
  for (int64_t g = 0; g < groups; g++, nibbles += 512, scales += 32, centres += 32) {
    __m256i short_sums[4][2];
    avx2_pairs(count, job, nibbles, g, m0, short_sums);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m256i scale = avx2_twice(scales + i * 8), centre = avx2_twice(centres + i * 8);
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const __m256i minus = _mm256_set1_epi32(job->sums[(m0 + m) * groups + g]);
        const __m256i scaled = _mm256_madd_epi16(short_sums[m][i], scale);
        const __m256i taken = _mm256_madd_epi16(minus, centre);
        sums[m][i] = _mm256_add_epi32(sums[m][i], _mm256_add_epi32(scaled, taken));
      }
    }
  }
}

/* The same with levels, which need 16 bits each: bytes times bytes have no room for a sum. */
AVX2_INLINE void avx2_levels(const int count, const Job *job, int64_t panel, int half, int64_t m0,
                             __m256i sums[][2]) {
  const Weight *w = job->weight;
  for (int i = 0; i < 2; i++) {
    const int8_t *levels = w->levels + (panel * 2 + half) * w->inputs * 16 + i * 32;
    __m256i parts[4][2];
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) parts[m][0] = parts[m][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < w->inputs; k += 4, levels += 64) {
      __builtin_prefetch(levels + AHEAD);
      const __m256i a = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)levels));
      const __m256i b = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(levels + 16)));
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const __m256i x = _mm256_set1_epi64x(eight_bytes(job->wide + (m0 + m) * job->stride + k));
        parts[m][0] = _mm256_add_epi32(parts[m][0], _mm256_madd_epi16(a, x));
        parts[m][1] = _mm256_add_epi32(parts[m][1], _mm256_madd_epi16(b, x));
        IN_ORDER(parts[m][1]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) {
      const __m256i pairs = _mm256_hadd_epi32(parts[m][0], parts[m][1]);
      sums[m][i] = _mm256_permute4x64_epi64(pairs, 0xd8);
    }
  }
}

/* Blocks, see `rows_of_blocks` of dot_panel.h. */
AVX2_INLINE void avx2_blocks(const int count, const Job *job, int64_t panel, int half, int64_t m0,
                             __m256 sums[][2]) {
  const Weight *w = job->weight;
  const int64_t groups = w->inputs / GROUP, at = panel * groups * 32 + half * 16;
  const uint8_t *nibbles = w->nibbles + panel * groups * 512 + half * 256;
  const uint16_t *halves = w->halves + panel * blocks_of(w) * 64 + half * 16;
  const __m256i ones = _mm256_set1_epi16(1);
  int64_t left = w->block; /* groups of the block */
  for (int64_t g = 0; g < groups; g++, nibbles += 512) {
    __m256i short_sums[4][2];
    avx2_pairs(count, job, nibbles, g, m0, short_sums);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      __m256 scale = HALVES(halves + i * 8), centre = HALVES(halves + 32 + i * 8);
      if (w->scales) {
        scale = _mm256_mul_ps(scale, TO_FLOAT(WIDEN(w->scales + at + g * 32 + i * 8)));
        centre = _mm256_mul_ps(centre, TO_FLOAT(WIDEN(w->centres + at + g * 32 + i * 8)));
      }
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const __m256 total = _mm256_set1_ps(job->totals[(m0 + m) * groups + g]);
        const __m256 found = TO_FLOAT(_mm256_madd_epi16(short_sums[m][i], ones));
        sums[m][i] = _mm256_add_ps(
            sums[m][i],
            _mm256_sub_ps(_mm256_mul_ps(found, scale), _mm256_mul_ps(total, centre)));
      }
    }
    if (--left == 0) left = w->block, halves += 64;
  }
}

#define AVX2_ROWS(count)                                                                         \
  case count:                                                                                    \
    if (w->halves) avx2_blocks(count, job, panel, half, m0, found);                              \
    else if (w->nibbles) avx2_nibbles(count, job, panel, half, m0, sums);                        \
    else avx2_levels(count, job, panel, half, m0, sums);                                         \
    break

AVX2_TARGET static void panel_avx2(const Job *job, int64_t panel) {
  const Weight *w = job->weight;
  for (int64_t m0 = 0; m0 < job->rows; m0 += 4) {
    const int count = least(job->rows - m0, 4);
    for (int half = 0; half < 2; half++) {
      __m256i sums[4][2];
      __m256 found[4][2]; /* of blocks */
      for (int m = 0; m < 4; m++) {
        sums[m][0] = sums[m][1] = _mm256_setzero_si256();
        found[m][0] = found[m][1] = _mm256_setzero_ps();
      }
      switch (count) { AVX2_ROWS(1); AVX2_ROWS(2); AVX2_ROWS(3); AVX2_ROWS(4); }
      for (int m = 0; m < count; m++)
        for (int i = 0; i < 2; i++)
          avx2_finish(w, w->halves ? found[m][i] : _mm256_cvtepi32_ps(sums[m][i]),
                      panel * 32 + half * 16 + i * 8, job->largest[m0 + m], row_of(job, m0 + m),
                      job->y_is_bf16);
    }
  }
}

static int kernels_of_cpu(void) {
  __builtin_cpu_init();
  int found = 0;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  unsigned a = 1, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(c >> 29 & 1)) return 0; /* half floats, of which older compilers do not ask */
  found |= AVX2;
  a = 7, c = 1;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (a >> 4 & 1) found |= AVX_VNNI;
  a = 7, c = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    found |= AVX512_VNNI | AVX512_VNNI_256;
#ifdef __linux__ /* which a process asks for tiles */
  if (found & AVX512_VNNI && (d >> 24 & 3) == 3 && !syscall(SYS_arch_prctl, 0x1023, 18))
    found |= AMX;
#endif
  return found;
}

static void run_panel(const Job *job, int64_t panel, char *scratch) {
  switch (job->kernel) {
    case AMX:
      if (is_direct(job, MOST_BEFORE_TILES)) few_512(job, panel);
      else many_amx(job, panel, scratch);
      break;
    case AVX512_VNNI:
      if (is_direct(job, 24)) few_512(job, panel);
      else many_512(job, panel, scratch);
      break;
    case AVX_VNNI:
      if (is_direct(job, 4)) few_avx(job, panel);
      else many_avx(job, panel, scratch);
      break;
    case AVX512_VNNI_256:
      if (is_direct(job, 4)) few_256(job, panel);
      else many_256(job, panel, scratch);
      break;
    default:
      panel_avx2(job, panel);
  }
}
