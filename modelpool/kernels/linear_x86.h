/* Kernels of linear layers for x86-64: AVX-512 VNNI, AVX-VNNI, and AVX2 alone. Part of linear.c. */

#include <immintrin.h>

/* ---- VNNI, with vectors of 512 bits and of 256 */

#define IN_ORDER(vector)
#define START(before) (before)
#define ENDED(before, sums) (sums)
#define SMALL(sum, w0, x0, w1, x1) DOT(DOT(sum, w0, x0), w1, x1)
#define WIDE SMALL
#define BYTES_ZERO 128

#define V __m512i
#define VF __m512
#define LANES 16
#define VECTORS 2
#define NAME(x) x##_512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define ZERO _mm512_setzero_si512
#define LOAD(p) _mm512_load_si512((const void *)(p))
#define LOW_NIBBLES(bytes) _mm512_and_si512(bytes, _mm512_set1_epi8(15))
#define HIGH_NIBBLES(bytes) LOW_NIBBLES(_mm512_srli_epi16(bytes, 4))
#define WITH_BITS(v, bits, more)                                                                 \
  _mm512_mask_add_epi8(v, *(const uint64_t *)(bits), v, _mm512_set1_epi8(more))
#define SUB32 _mm512_sub_epi32
#define SET32 _mm512_set1_epi32
#define DOT _mm512_dpbusd_epi32
#define TO_FLOAT _mm512_cvtepi32_ps
#define SCALES(p) TO_FLOAT(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define CENTRES(p) TO_FLOAT(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define MULF _mm512_mul_ps
#define ADDF _mm512_add_ps
#define FMA _mm512_fmadd_ps
#define SETF _mm512_set1_ps
#define LOADF _mm512_loadu_ps
#define STOREF _mm512_storeu_ps
#include "dot_panel.h"
#undef V
#undef VF
#undef LANES
#undef VECTORS
#undef NAME
#undef TARGET
#undef ZERO
#undef LOAD
#undef LOW_NIBBLES
#undef HIGH_NIBBLES
#undef WITH_BITS
#undef SUB32
#undef SET32
#undef DOT
#undef TO_FLOAT
#undef SCALES
#undef CENTRES
#undef HALVES
#undef MULF
#undef ADDF
#undef FMA
#undef SETF
#undef LOADF
#undef STOREF

#define V __m256i
#define VF __m256
#define LANES 8
#define VECTORS 4
#define ZERO _mm256_setzero_si256
#define LOAD(p) _mm256_load_si256((const __m256i *)(p))
#define LOW_NIBBLES(bytes) _mm256_and_si256(bytes, _mm256_set1_epi8(15))
#define HIGH_NIBBLES(bytes) LOW_NIBBLES(_mm256_srli_epi16(bytes, 4))
#define WITH_BITS(v, bits, more) with_bits(v, four_bytes(bits), more)
#define SUB32 _mm256_sub_epi32
#define SET32 _mm256_set1_epi32
#define TO_FLOAT _mm256_cvtepi32_ps
#define SCALES(p) TO_FLOAT(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define CENTRES(p) TO_FLOAT(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define MULF _mm256_mul_ps
#define ADDF _mm256_add_ps
#define FMA _mm256_fmadd_ps
#define SETF _mm256_set1_ps
#define LOADF _mm256_loadu_ps
#define STOREF _mm256_storeu_ps

#define AVX2_INLINE __attribute__((target("avx2"), always_inline)) static inline

/* Each of 32 bits goes to the byte of its place, where it counts `more`. */
AVX2_INLINE __m256i with_bits(__m256i v, int32_t bits, char more) {
  const int64_t ones = 0x0101010101010101;
  const __m256i eight = _mm256_set1_epi64x(0x8040201008040201);
  const __m256i places = _mm256_setr_epi64x(0, ones, 2 * ones, 3 * ones);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), places);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, eight), eight);
  return _mm256_or_si256(v, _mm256_and_si256(is_set, _mm256_set1_epi8(more)));
}

#define NAME(x) x##_avx
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define DOT _mm256_dpbusd_avx_epi32
#include "dot_panel.h"
#undef NAME
#undef TARGET
#undef DOT

/* ---- AVX2 alone: bytes are multiplied into sums of pairs in 16 bits, which have room for eight
 * products with nibbles, or for four with numbers up to 63. Any others are multiplied without their
 * sign, which goes to the activation: two products fit. */

#undef IN_ORDER
#undef START
#undef ENDED
#undef SMALL
#undef WIDE
#undef BYTES_ZERO
/* Compilers would compute all products before the first sum, and have no registers for them. */
#ifdef EMULATED
#define IN_ORDER(vector)
#else
#define IN_ORDER(vector) __asm__("" : "+x"(vector))
#endif
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define PAIRS _mm256_maddubs_epi16
#define WHOLE(pairs) _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
#define START(before) ZERO()
#define ENDED(before, sums) _mm256_add_epi32(before, WHOLE(sums))
#define DOT(sum, w, x) _mm256_add_epi16(sum, PAIRS(w, x))
#define SMALL(sum, w0, x0, w1, x1)                                                               \
  _mm256_add_epi32(sum, WHOLE(_mm256_add_epi16(PAIRS(w0, x0), PAIRS(w1, x1))))
#define SIGNED(w) _mm256_xor_si256(w, _mm256_set1_epi8(-128))
#define WIDE_ONE(sum, w, x)                                                                      \
  _mm256_add_epi32(sum,                                                                          \
                   WHOLE(PAIRS(_mm256_abs_epi8(SIGNED(w)), _mm256_sign_epi8(x, SIGNED(w)))))
#define WIDE(sum, w0, x0, w1, x1) WIDE_ONE(WIDE_ONE(sum, w0, x0), w1, x1)
#define BYTES_ZERO 0
#include "dot_panel.h"

static int kernels_of_cpu(void) {
  __builtin_cpu_init();
  int found = 0;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  unsigned a = 1, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(c >> 29 & 1)) return 0; /* half floats, of which older compilers do not ask */
  found |= AVX2 | PLAIN; /* other parts of the library need AVX2 as well */
  a = 7, c = 1;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (a >> 4 & 1) found |= AVX_VNNI;
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    found |= AVX512_VNNI;
  return found;
}

static void run_panel(const Job *job, int64_t panel) {
  switch (job->kernel) {
    case AVX512_VNNI: panel_512(job, panel); break;
    case AVX_VNNI: panel_avx(job, panel); break;
    default: panel_avx2(job, panel);
  }
}
