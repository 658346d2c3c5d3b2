/* The kernel of linear layers for Arm's 64-bit CPUs with dot products of bytes. Part of linear.c. */

#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif

#ifdef __ARM_FEATURE_DOTPROD
#define TARGET
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define IN_ORDER(vector)
#define V uint8x16_t
#define VF float32x4_t
#define LANES 4
#define VECTORS 8
#define NAME(x) x##_neon
#define ZERO() vdupq_n_u8(0)
#define START(before) (before)
#define ENDED(before, sums) (sums)
#define LOAD(p) vld1q_u8((const uint8_t *)(p))
#define LOW_NIBBLES(bytes) vandq_u8(bytes, vdupq_n_u8(15))
#define HIGH_NIBBLES(bytes) vshrq_n_u8(bytes, 4)
#define WITH_BITS with_bits
#define SUB32(a, b)                                                                              \
  vreinterpretq_u8_s32(vsubq_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b)))
#define SET32(x) vreinterpretq_u8_s32(vdupq_n_s32(x))
#define DOT(sum, w, x)                                                                           \
  vreinterpretq_u8_s32(vdotq_s32(vreinterpretq_s32_u8(sum), vreinterpretq_s8_u8(w),              \
                                 vreinterpretq_s8_u8(x)))
#define SMALL(sum, w0, x0, w1, x1) DOT(DOT(sum, w0, x0), w1, x1)
#define SIGNED(w) veorq_u8(w, vdupq_n_u8(128))
#define WIDE(sum, w0, x0, w1, x1) SMALL(sum, SIGNED(w0), x0, SIGNED(w1), x1)
#define BYTES_ZERO 0
#define TO_FLOAT(sum) vcvtq_f32_s32(vreinterpretq_s32_u8(sum))
#define FOUR_BYTES(p) vdup_n_s32(four_bytes(p))
#define SCALES(p)                                                                                \
  vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(FOUR_BYTES(p))))))
#define CENTRES(p)                                                                               \
  vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s32(FOUR_BYTES(p))))))
#define HALVES(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define MULF vmulq_f32
#define ADDF vaddq_f32
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define SETF vdupq_n_f32
#define LOADF vld1q_f32
#define STOREF vst1q_f32

static inline V with_bits(V v, const uint8_t *bits, uint8_t more) {
  const uint8x16_t each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t spread = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
  return vorrq_u8(v, vandq_u8(vtstq_u8(spread, each), vdupq_n_u8(more)));
}

#include "dot_panel.h"

static int kernels_of_cpu(void) {
#if defined(__linux__)
  const unsigned long dot_products = 1 << 20; /* HWCAP_ASIMDDP */
  return getauxval(AT_HWCAP) & dot_products ? NEON | PLAIN : PLAIN;
#elif defined(__ARM_FEATURE_DOTPROD)
  return NEON | PLAIN; /* as the compiler's target says, which on macOS holds for every CPU */
#else
  return PLAIN;
#endif
}

static void run_panel(const Job *job, int64_t panel) { panel_neon(job, panel); }
