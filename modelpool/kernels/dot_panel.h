/* Products of one panel of 32 outputs, for CPUs that sum four products of bytes at once (VNNI on
 * x86-64, dot products on Arm).
 *
 * Included once for each width of vectors, with these macros: NAME(x), TARGET, V (vector of
 * integers), VF (of floats), LANES (outputs of a vector), VECTORS (of a panel), and what VNNI and
 * the instructions around it are called. Arm brings its own SCALES, CENTRES, LOW_NIBBLES,
 * HIGH_NIBBLES, LOW_LEVELS, HIGH_LEVELS and CENTRED.
 */

#define INLINE TARGET __attribute__((always_inline)) static inline

#ifdef MUL16 /* x86-64 cannot multiply bytes one by one */
/* Of the groups' scales and centres: each output's scale in both 16-bit halves of its lane, and its
 * centre in all four bytes. */
INLINE V NAME(each_twice)(const uint8_t *of_outputs) {
  V wide = WIDEN(of_outputs);
  return OR(wide, SHIFT_LEFT(wide, 16));
}

INLINE V NAME(each_four_times)(const uint8_t *of_outputs) {
  V twice = NAME(each_twice)(of_outputs);
  return OR(twice, SHIFT_LEFT(twice, 8));
}

/* Four inputs of a vector as bytes: nibble * scale - centre. A scale is at most 17, so the products
 * of both bytes of a 16-bit lane fit it at once: 15 * 17 = 255. */
#define SCALES NAME(each_twice)
#define CENTRES NAME(each_four_times)
#define LOW_LEVELS(bytes, scale, centre) SUB8(MUL16(LOW_NIBBLES(bytes), scale), centre)
#define HIGH_LEVELS(bytes, scale, centre) SUB8(MUL16(HIGH_NIBBLES(bytes), scale), centre)
#define LOW_NIBBLES(bytes) AND(bytes, SET8(15))
#define HIGH_NIBBLES(bytes) AND(SHIFT_RIGHT16(bytes, 4), SET8(15))
/* Activations lie around 128 here, but beside blocks. */
#define CENTRED(sum, offsets) SUB32(sum, LOADU(offsets))
#endif

/* Where vector `i` of a panel begins in a group's 512 bytes of nibbles, or in a step's bytes. */
#define PLACE(i) (((i) * LANES / 16) * 256 + ((i) * LANES % 16) * 4)

/* Adds the products of `count` rows with vectors `first` and `first` + 1, straight from nibbles. */
INLINE void NAME(rows_of_nibbles)(const int count, const Weight *w, int64_t panel, int first,
                                  const uint8_t *levels, int64_t stride, V sums[][2]) {
  const int64_t groups = w->inputs / GROUP;
  const uint8_t *nibbles = w->nibbles + panel * groups * 512;
  const uint8_t *scales = w->scales + panel * groups * 32 + first * LANES;
  const uint8_t *centres = w->centres + panel * groups * 32 + first * LANES;
  for (int64_t g = 0; g < groups; g++, nibbles += 512, scales += 32, centres += 32) {
    V scale[2], centre[2];
    for (int i = 0; i < 2; i++) {
      scale[i] = SCALES(scales + i * LANES);
      centre[i] = CENTRES(centres + i * LANES);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const uint8_t *a = nibbles + PLACE(first) + j * 64, *b = nibbles + PLACE(first + 1) + j * 64;
      __builtin_prefetch(a + AHEAD);
      __builtin_prefetch(b + AHEAD);
      V of_a = LOAD(a), of_b = LOAD(b);
      V a0 = LOW_LEVELS(of_a, scale[0], centre[0]), a1 = HIGH_LEVELS(of_a, scale[0], centre[0]);
      V b0 = LOW_LEVELS(of_b, scale[1], centre[1]), b1 = HIGH_LEVELS(of_b, scale[1], centre[1]);
#pragma GCC unroll 8
      for (int m = 0; m < count; m++) {
        const uint8_t *x = levels + m * stride + g * GROUP + j * 8;
        V x0 = SET32(four_bytes(x)), x1 = SET32(four_bytes(x + 4));
        sums[m][0] = DOT(sums[m][0], x0, a0);
        sums[m][1] = DOT(sums[m][1], x0, b0);
        sums[m][0] = DOT(sums[m][0], x1, a1);
        sums[m][1] = DOT(sums[m][1], x1, b1);
      }
    }
  }
}

/* The same with `steps` times four inputs in bytes, [2][steps][64], `half` bytes apart. */
INLINE void NAME(rows_of_bytes)(const int count, const int8_t *bytes, int64_t half, int64_t steps,
                                int first, const uint8_t *levels, int64_t stride, V sums[][2]) {
  const int8_t *a = bytes + (first * LANES / 16) * half + first * LANES % 16 * 4;
  const int8_t *b = bytes + ((first + 1) * LANES / 16) * half + (first + 1) * LANES % 16 * 4;
  for (int64_t k = 0; k < steps; k++, a += 64, b += 64) {
    __builtin_prefetch(a + AHEAD);
    __builtin_prefetch(b + AHEAD);
    V of_a = LOAD(a), of_b = LOAD(b);
#pragma GCC unroll 12
    for (int m = 0; m < count; m++) {
      V x = SET32(four_bytes(levels + m * stride + k * 4));
      sums[m][0] = DOT(sums[m][0], x, of_a);
      sums[m][1] = DOT(sums[m][1], x, of_b);
    }
  }
}

/* Groups `g0` to `g1` of a panel as bytes, [2][8 (g1 - g0)][64]. */
TARGET static void NAME(unpack)(const Weight *w, int64_t panel, int64_t g0, int64_t g1,
                                int8_t *bytes) {
  const int64_t groups = w->inputs / GROUP, half = (g1 - g0) * 512;
  for (int64_t g = g0; g < g1; g++) {
    const uint8_t *nibbles = w->nibbles + (panel * groups + g) * 512;
    for (int i = 0; i < VECTORS; i++) {
      V scale = SCALES(w->scales + (panel * groups + g) * 32 + i * LANES);
      V centre = CENTRES(w->centres + (panel * groups + g) * 32 + i * LANES);
      int8_t *to = bytes + (i * LANES / 16) * half + (g - g0) * 512 + i * LANES % 16 * 4;
      for (int j = 0; j < 4; j++) {
        __builtin_prefetch(nibbles + PLACE(i) + j * 64 + AHEAD);
        V packed = LOAD(nibbles + PLACE(i) + j * 64);
        STORE(to + j * 128, LOW_LEVELS(packed, scale, centre));
        STORE(to + j * 128 + 64, HIGH_LEVELS(packed, scale, centre));
      }
    }
  }
}

/* Sums of whole numbers, for `finish`. */
INLINE VF NAME(counted)(const Weight *w, V sum, int64_t output) {
  return TO_FLOAT(CENTRED(sum, w->offsets + output));
}

/* LANES outputs of a row from their sums. */
INLINE void NAME(finish)(const Weight *w, VF sum, int64_t output, float largest, void *y,
                         int is_bf16) {
  VF found = MULF(MULF(sum, LOADF(w->units + output)), SETF(largest));
  if (w->bias) found = ADDF(found, LOADF(w->bias + output));
  float outputs[LANES];
  STOREF(outputs, found);
  store_outputs(w, outputs, LANES, output, y, is_bf16);
}

/* Blocks: the sums of `count` rows from `m0` on with vectors `first` and `first` + 1. */
INLINE void NAME(rows_of_blocks)(const int count, const Job *job, int64_t panel, int first,
                                 int64_t m0, VF sums[][2]) {
  const Weight *w = job->weight;
  const int64_t groups = w->inputs / GROUP, at = panel * groups * 32 + first * LANES;
  const uint8_t *nibbles = w->nibbles + panel * groups * 512;
  const uint16_t *halves = w->halves + panel * blocks_of(w) * 64 + first * LANES;
  int64_t left = w->block; /* groups of the block */
  for (int64_t g = 0; g < groups; g++, nibbles += 512) {
    V found[4][2];
    for (int m = 0; m < count; m++) found[m][0] = found[m][1] = ZERO();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const uint8_t *a = nibbles + PLACE(first) + j * 64, *b = nibbles + PLACE(first + 1) + j * 64;
      __builtin_prefetch(a + AHEAD);
      __builtin_prefetch(b + AHEAD);
      V of_a = LOAD(a), of_b = LOAD(b);
      V a0 = LOW_NIBBLES(of_a), a1 = HIGH_NIBBLES(of_a);
      V b0 = LOW_NIBBLES(of_b), b1 = HIGH_NIBBLES(of_b);
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const uint8_t *x = job->levels + (m0 + m) * job->stride + g * GROUP + j * 8;
        V x0 = SET32(four_bytes(x)), x1 = SET32(four_bytes(x + 4));
        found[m][0] = DOT(found[m][0], a0, x0);
        found[m][1] = DOT(found[m][1], b0, x0);
        found[m][0] = DOT(found[m][0], a1, x1);
        found[m][1] = DOT(found[m][1], b1, x1);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      VF scale = HALVES(halves + i * LANES), centre = HALVES(halves + 32 + i * LANES);
      if (w->scales) {
        scale = MULF(scale, TO_FLOAT(WIDEN(w->scales + at + g * 32 + i * LANES)));
        centre = MULF(centre, TO_FLOAT(WIDEN(w->centres + at + g * 32 + i * LANES)));
      }
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        VF total = SETF(job->totals[(m0 + m) * groups + g]);
        VF of_group = SUBF(MULF(TO_FLOAT(found[m][i]), scale), MULF(total, centre));
        sums[m][i] = ADDF(sums[m][i], of_group);
      }
    }
    if (--left == 0) left = w->block, halves += 64;
  }
}

#define NIBBLES_OF_ROWS(count)                                                                   \
  case count:                                                                                    \
    NAME(rows_of_nibbles)(count, w, panel, first, job->levels + m0 * job->stride, job->stride,   \
                          sums);                                                                 \
    break

#define BLOCKS_OF_ROWS(count)                                                                    \
  case count:                                                                                    \
    NAME(rows_of_blocks)(count, job, panel, first, m0, found);                                   \
    break

/* Straight from nibbles, up to `MOST_FEW` rows at a time, as many each time; blocks of a file up to
 * `MOST_OF_BLOCKS`. */
TARGET static void NAME(few)(const Job *job, int64_t panel) {
  const Weight *w = job->weight;
  const int64_t most = w->halves ? MOST_OF_BLOCKS : MOST_FEW;
  const int64_t blocks = (job->rows + most - 1) / most;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t m0 = job->rows * b / blocks;
    const int count = job->rows * (b + 1) / blocks - m0;
    for (int first = 0; first < VECTORS; first += 2) {
      VF found[8][2];
      if (w->halves) {
        for (int m = 0; m < count; m++) found[m][0] = found[m][1] = SETF(0);
        switch (count) {
          BLOCKS_OF_ROWS(1); BLOCKS_OF_ROWS(2);
#if MOST_OF_BLOCKS > 2
          BLOCKS_OF_ROWS(3); BLOCKS_OF_ROWS(4);
#endif
        }
      } else {
        V sums[8][2];
        for (int m = 0; m < 8; m++) sums[m][0] = sums[m][1] = ZERO();
        switch (count) {
          NIBBLES_OF_ROWS(1); NIBBLES_OF_ROWS(2); NIBBLES_OF_ROWS(3); NIBBLES_OF_ROWS(4);
#if MOST_FEW > 4
          NIBBLES_OF_ROWS(5); NIBBLES_OF_ROWS(6); NIBBLES_OF_ROWS(7); NIBBLES_OF_ROWS(8);
#endif
        }
        for (int m = 0; m < count; m++)
          for (int i = 0; i < 2; i++)
            found[m][i] = NAME(counted)(w, sums[m][i], panel * 32 + (first + i) * LANES);
      }
      for (int m = 0; m < count; m++)
        for (int i = 0; i < 2; i++)
          NAME(finish)(w, found[m][i], panel * 32 + (first + i) * LANES, job->largest[m0 + m],
                       row_of(job, m0 + m), job->y_is_bf16);
    }
  }
}

#define BLOCK_OF_ROWS(count)                                                                     \
  case count:                                                                                    \
    NAME(rows_of_bytes)(count, bytes, half, steps, first, levels, stride, sums);                 \
    break

/* Adds a block of rows' products to their sums in memory, [rows][32]. */
TARGET static void NAME(block)(int count, const int8_t *bytes, int64_t half, int64_t steps,
                               const uint8_t *levels, int64_t stride, int32_t *kept) {
  for (int first = 0; first < VECTORS; first += 2) {
    V sums[12][2];
#pragma GCC unroll 12
    for (int m = 0; m < 12; m++)
      for (int i = 0; i < 2; i++)
        sums[m][i] = m < count ? LOADU(kept + m * 32 + (first + i) * LANES) : ZERO();
    switch (count) {
      BLOCK_OF_ROWS(1); BLOCK_OF_ROWS(2); BLOCK_OF_ROWS(3); BLOCK_OF_ROWS(4);
#if MOST_ROWS > 4
      BLOCK_OF_ROWS(5); BLOCK_OF_ROWS(6); BLOCK_OF_ROWS(7); BLOCK_OF_ROWS(8);
      BLOCK_OF_ROWS(9); BLOCK_OF_ROWS(10); BLOCK_OF_ROWS(11); BLOCK_OF_ROWS(12);
#endif
    }
#pragma GCC unroll 12
    for (int m = 0; m < 12; m++)
      for (int i = 0; i < 2; i++)
        if (m < count) STORE(kept + m * 32 + (first + i) * LANES, sums[m][i]);
  }
}

/* Any number of rows: CHUNK inputs of the panel stay in the first cache for all of them. `block` is
 * called for at most `most` at once, which but for the last are a multiple of `unit`. */
INLINE void NAME(many_by)(const Job *job, int64_t panel, char *scratch, int64_t most, int64_t unit,
                          void (*block)(int, const int8_t *, int64_t, int64_t, const uint8_t *,
                                        int64_t, int32_t *)) {
  const Weight *w = job->weight;
  int8_t *unpacked = (int8_t *)scratch;
  int32_t *kept = (int32_t *)(scratch + CHUNK * 32);
  memset(kept, 0, job->rows * 32 * sizeof *kept);
  const int64_t blocks = (job->rows + most - 1) / most;
  for (int64_t k0 = 0; k0 < w->inputs; k0 += CHUNK) {
    const int64_t k1 = least(k0 + CHUNK, w->inputs), steps = (k1 - k0) / 4;
    const int8_t *bytes = w->levels + panel * w->inputs * 32 + k0 * 16;
    int64_t half = w->inputs * 16;
    if (w->nibbles) {
      NAME(unpack)(w, panel, k0 / GROUP, k1 / GROUP, unpacked);
      bytes = unpacked;
      half = (k1 - k0) * 16;
    }
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t m = multiple(job->rows * b / blocks, unit);
      const int64_t end = least(multiple(job->rows * (b + 1) / blocks, unit), job->rows);
      block(end - m, bytes, half, steps, job->levels + m * job->stride + k0, job->stride,
            kept + m * 32);
    }
  }
  for (int64_t m = 0; m < job->rows; m++)
    for (int i = 0; i < VECTORS; i++) {
      const int64_t output = panel * 32 + i * LANES;
      NAME(finish)(w, NAME(counted)(w, LOADU(kept + m * 32 + i * LANES), output), output,
                   job->largest[m], row_of(job, m), job->y_is_bf16);
    }
}

TARGET static void NAME(many)(const Job *job, int64_t panel, char *scratch) {
  NAME(many_by)(job, panel, scratch, MOST_ROWS, 1, NAME(block));
}

#undef INLINE
#undef PLACE
#undef SCALES
#undef CENTRES
#undef LOW_NIBBLES
#undef HIGH_NIBBLES
#undef LOW_LEVELS
#undef HIGH_LEVELS
#undef CENTRED
#undef NIBBLES_OF_ROWS
#undef BLOCKS_OF_ROWS
#undef BLOCK_OF_ROWS
