/* LANES floats side by side, with NEON: see attend_pass.h. */
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "attend.h"

typedef float number;
typedef struct {
  float32x4_t q[4];
} lanes;
enum { KIND_OWN = KIND_F32 };
enum { MOST_KEYS = 2, TILE_PAIRS = 1, TILE_VALUES = 4, VALUES_WIDE = 1 }; /* of a tile, as registers allow */
#define LANE static inline __attribute__((always_inline))
#define EACH(value) \
  ({ lanes y_; for (int i = 0; i < 4; i++) y_.q[i] = (value); y_; })

LANE lanes all_lanes(float x) { return EACH(vdupq_n_f32(x)); }
LANE lanes load_lanes(const float *x) { return EACH(vld1q_f32(x + 4 * i)); }
LANE lanes kept_lanes(lanes x) { return x; }
LANE void store_lanes(float *to, lanes x) {
  for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, x.q[i]);
}
LANE lanes add_lanes(lanes x, lanes y) { return EACH(vaddq_f32(x.q[i], y.q[i])); }
LANE lanes sub_lanes(lanes x, lanes y) { return EACH(vsubq_f32(x.q[i], y.q[i])); }
LANE lanes mul_lanes(lanes x, lanes y) { return EACH(vmulq_f32(x.q[i], y.q[i])); }
LANE lanes div_lanes(lanes x, lanes y) { return EACH(vdivq_f32(x.q[i], y.q[i])); }
/* As on x86: y where one is NaN, or both are equal. */
LANE lanes max_lanes(lanes x, lanes y) {
  return EACH(vbslq_f32(vcgtq_f32(x.q[i], y.q[i]), x.q[i], y.q[i]));
}
LANE lanes fma_lanes(lanes x, lanes y, lanes z) { return EACH(vfmaq_f32(z.q[i], x.q[i], y.q[i])); }
/* yes where x < y, else no. */
LANE lanes where_less(lanes x, lanes y, lanes yes, lanes no) {
  return EACH(vbslq_f32(vcltq_f32(x.q[i], y.q[i]), yes.q[i], no.q[i]));
}
/* 2 to the whole number in the last bits of `shifted`. */
LANE lanes power_of_two(lanes shifted) {
  return EACH(vreinterpretq_f32_s32(vshlq_n_s32(
      vaddq_s32(vreinterpretq_s32_f32(shifted.q[i]), vdupq_n_s32(127)), 23)));
}

LANE float sum_lanes(lanes x) {
  const float32x4_t low = vaddq_f32(x.q[0], x.q[2]), high = vaddq_f32(x.q[1], x.q[3]);
  const float32x4_t pairs = vpaddq_f32(low, high), sums = vpaddq_f32(pairs, pairs);
  return vgetq_lane_f32(sums, 0) + vgetq_lane_f32(sums, 1);
}
LANE void sum_four(const lanes *x, float *to) {
  for (int i = 0; i < 4; i++) to[i] = sum_lanes(x[i]);
}

LANE lanes load_kind(const char *x, int kind) {
  if (kind == KIND_F32) return load_lanes((const float *)x);
  const uint16_t *half = (const uint16_t *)x;
  if (kind == KIND_F16)
    return EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + 4 * i))));
  return EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(half + 4 * i), 16)));
}
/* The first `count` of them; zeros. */
LANE lanes load_part(const char *x, int kind, int64_t count) {
  if (count == LANES) return load_kind(x, kind);
  float whole[LANES] = {0};
  memcpy(whole, x, count * (kind == KIND_F32 ? 4 : 2));
  return load_kind((const char *)whole, kind);
}
LANE uint16x4_t bf16_of(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last);
  const uint32x4_t number_bits = vceqq_f32(x, x);
  return vmovn_u32(vbslq_u32(number_bits, vshrq_n_u32(sum, 16), vdupq_n_u32(0x7fc0)));
}
LANE void store_kind(char *to, int kind, lanes x, int64_t count) {
  uint16_t half[LANES];
  if (kind == KIND_F32) {
    memcpy(to, &x, count * 4);
    return;
  }
  for (int i = 0; i < 4; i++)
    vst1_u16(half + 4 * i, kind == KIND_F16 ? vreinterpret_u16_f16(vcvt_f16_f32(x.q[i]))
                                            : bf16_of(x.q[i]));
  memcpy(to, half, count * 2);
}
