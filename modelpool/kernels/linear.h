/* Linear layers, as other parts of the library call them; see linear.c. */
#include <stdint.h>
#include <string.h>

/* Loops of x86-64 may use the vectors that every kernel needs; those of Arm have theirs anyway. */
#ifdef __x86_64__
#define VECTOR_TARGET __attribute__((target("avx2,fma")))
#else
#define VECTOR_TARGET
#endif
#define VECTOR_INLINE VECTOR_TARGET __attribute__((always_inline)) static inline

typedef struct Weight Weight;

int sr_linear(const Weight *w, const void *x, int x_is_bf16, void *y, int y_is_bf16, int64_t rows,
              int threads, int kernel);

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* To the nearest bfloat16, ties to even; NaN stays one. */
static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
