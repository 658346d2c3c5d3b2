/* The kernel of linear layers for Arm's 64-bit CPUs with dot products of bytes. Part of linear.c. */

#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif

/* ---- NEON: activations around 0, and one instruction from a nibble to its level */

#ifdef __ARM_FEATURE_DOTPROD
#define TARGET
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define MOST_FEW 8
#define MOST_ROWS 12
#define MOST_OF_BLOCKS 4
#define V uint8x16_t
#define VF float32x4_t
#define LANES 4
#define VECTORS 8
#define NAME(x) x##_neon
#define ZERO() vdupq_n_u8(0)
#define LOAD(p) vld1q_u8((const uint8_t *)(p))
#define LOADU LOAD
#define STORE(p, v) vst1q_u8((uint8_t *)(p), v)
#define SET32(x) vreinterpretq_u8_s32(vdupq_n_s32(x))
#define DOT(sum, x, levels)                                                                      \
  vreinterpretq_u8_s32(vdotq_s32(vreinterpretq_s32_u8(sum), vreinterpretq_s8_u8(levels),         \
                                 vreinterpretq_s8_u8(x)))
#define CENTRED(sum, offsets) (sum)
#define TO_FLOAT(sum) vcvtq_f32_s32(vreinterpretq_s32_u8(sum))
#define MULF vmulq_f32
#define ADDF vaddq_f32
#define SUBF vsubq_f32
#define HALVES(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define SETF vdupq_n_f32
#define LOADF vld1q_f32
#define STOREF vst1q_f32

/* A byte of each of four outputs, four times. */
TARGET __attribute__((always_inline)) static inline V each_four_times(const uint8_t *of_outputs) {
  const uint8x16_t lanes = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return vqtbl1q_u8(vreinterpretq_u8_s32(vdupq_n_s32(four_bytes(of_outputs))), lanes);
}

TARGET __attribute__((always_inline)) static inline V each_wide(const uint8_t *of_outputs) {
  const uint8x16_t lanes = {0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3, 16, 16, 16};
  return vqtbl1q_u8(vreinterpretq_u8_s32(vdupq_n_s32(four_bytes(of_outputs))), lanes);
}

#define WIDEN each_wide
#define SCALES each_four_times
#define CENTRES(of_outputs) vnegq_u8(each_four_times(of_outputs))
#define vnegq_u8(v) vsubq_u8(ZERO(), v)
#define LOW_NIBBLES(bytes) vandq_u8(bytes, vdupq_n_u8(15))
#define HIGH_NIBBLES(bytes) vshrq_n_u8(bytes, 4)
#define LOW_LEVELS(bytes, scale, centre) vmlaq_u8(centre, LOW_NIBBLES(bytes), scale)
#define HIGH_LEVELS(bytes, scale, centre) vmlaq_u8(centre, HIGH_NIBBLES(bytes), scale)
#include "dot_panel.h"

static int kernels_of_cpu(void) {
#if defined(__linux__)
  const unsigned long dot_products = 1 << 20; /* HWCAP_ASIMDDP */
  return getauxval(AT_HWCAP) & dot_products ? NEON : 0;
#elif defined(__ARM_FEATURE_DOTPROD)
  return NEON; /* as the compiler was told, which on macOS holds for every CPU */
#else
  return 0;
#endif
}

static void run_panel(const Job *job, int64_t panel, char *scratch) {
  if (is_direct(job, 2 * MOST_FEW)) few_neon(job, panel);
  else many_neon(job, panel, scratch);
}
