/* Products of one panel of 32 outputs with vectors.
 *
 * Included once for each set of instructions, with these macros: NAME(x), TARGET, V (vector of
 * integers), VF (of floats), LANES (outputs of a vector), VECTORS (of a panel), and what the
 * instructions are called. START begins sums of products, ENDED adds them to what there was. DOT adds
 * those of four numbers of each output, at most 15, with four activations; SMALL and WIDE add two
 * such steps, of numbers up to 63 and of bytes. BYTES_ZERO is what WIDE leaves to be taken
 * from a byte: 128, or 0 where it takes that itself. WITH_BITS adds a number where a bit is set.
 */

#define INLINE TARGET __attribute__((always_inline)) static inline

/* Where vector `i` of a panel begins in a group's 512 bytes of nibbles. */
#define PLACE(i) (((i) * LANES / 16) * 256 + ((i) * LANES % 16) * 4)

/* Where it begins in a panel's bytes. */
#define BYTES_AT(at) (((at) / 16) * w->inputs * 16 + (at) % 16 * 4)

#define LEVELS(m, k) SET32(four_bytes(levels + (m) * stride + (k)))

/* Of eight inputs of a group, of a vector of outputs: the earlier four, and the later ones. */
INLINE void NAME(unpack)(const int form, const Panel *p, int64_t g, int vector, int j, V four[2]) {
  const int64_t place = g * 512 + PLACE(vector) + j * 64;
  const int64_t bits = place / 64 * 16 + place % 64 / 8;
  __builtin_prefetch(p->nibbles + place + AHEAD);
  const V bytes = LOAD(p->nibbles + place);
  four[0] = LOW_NIBBLES(bytes);
  four[1] = HIGH_NIBBLES(bytes);
#pragma GCC unroll 2
  for (int late = 0; late < 2; late++) {
    if (form != NIBBLES) four[late] = WITH_BITS(four[late], p->fifths + bits + late * 8, 16);
    if (form == SIX_BITS) four[late] = WITH_BITS(four[late], p->sixths + bits + late * 8, 32);
  }
}

/* Where what `unpack` found is in a group's numbers. */
#define UNPACKED(vector, j) ((((vector) / 2 * 4 + (j)) * 2 + (vector) % 2) * 2 * sizeof(V))

/* Adds the products of a part of a group, `steps` times eight inputs from byte `j0` on, of `count`
 * rows with the outputs of vectors `first` and `first` + 1; `unpacked`: the group's numbers. */
INLINE void NAME(nibbles)(const int count, const int form, const int j0, const int steps,
                          const Panel *p, int64_t g, const int is_unpacked,
                          const uint8_t *unpacked, int first, const int8_t *levels, int64_t stride,
                          V found[][2]) {
  V sums[ROWS_AT_ONCE][2];
  for (int m = 0; m < count; m++)
    for (int i = 0; i < 2; i++) sums[m][i] = form == NIBBLES ? START(found[m][i]) : found[m][i];
#pragma GCC unroll 4
  for (int j = j0; j < j0 + steps; j++) {
    V numbers[2][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      if (!is_unpacked) {
        NAME(unpack)(form, p, g, first + i, j, numbers[i]);
        continue;
      }
      const uint8_t *at = unpacked + UNPACKED(first + i, j);
      numbers[i][0] = LOAD(at);
      numbers[i][1] = LOAD(at + sizeof(V));
    }
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) {
      const V x0 = LEVELS(m, (j - j0) * 8), x1 = LEVELS(m, (j - j0) * 8 + 4);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        sums[m][i] = form == NIBBLES ? DOT(DOT(sums[m][i], numbers[i][0], x0), numbers[i][1], x1)
                                     : SMALL(sums[m][i], numbers[i][0], x0, numbers[i][1], x1);
        IN_ORDER(sums[m][i]);
      }
    }
  }
  for (int m = 0; m < count; m++)
    for (int i = 0; i < 2; i++)
      found[m][i] = form == NIBBLES ? ENDED(found[m][i], sums[m][i]) : sums[m][i];
}

/* Adds the products of 32 inputs in bytes, of which `a` and `b` are the vectors'. */
INLINE void NAME(bytes)(const int count, const uint8_t *a, const uint8_t *b, const int8_t *levels,
                        int64_t stride, V found[][2]) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++, a += 128, b += 128) {
    __builtin_prefetch(a + AHEAD);
    __builtin_prefetch(b + AHEAD);
    const V a0 = LOAD(a), a1 = LOAD(a + 64), b0 = LOAD(b), b1 = LOAD(b + 64);
#pragma GCC unroll 4
    for (int m = 0; m < count; m++) {
      const V x0 = LEVELS(m, k * 8), x1 = LEVELS(m, k * 8 + 4);
      found[m][0] = WIDE(found[m][0], a0, x0, a1, x1);
      found[m][1] = WIDE(found[m][1], b0, x0, b1, x1);
      IN_ORDER(found[m][0]);
      IN_ORDER(found[m][1]);
    }
  }
}

/* LANES outputs of a row from their sums. Once in the code: it would be in dozens of places. */
TARGET __attribute__((noinline)) static void NAME(finish)(const Job *job, VF sum, int64_t output,
                                                          int64_t row) {
  const Weight *w = job->weight;
  VF found = MULF(sum, LOADF(w->units + output));
  if (w->is_by_row) found = MULF(found, SETF(job->largest[row * job->groups]));
  if (w->bias) found = ADDF(found, LOADF(w->bias + output));
  float outputs[LANES];
  STOREF(outputs, found);
  store_outputs(w, outputs, LANES, output, row_of(job, row), job->y_is_bf16);
}

/* What a group's sums of a vector of outputs are multiplied with, and its base. */
INLINE void NAME(scales)(const int form, const Weight *w, const Panel *p, int64_t g, int at,
                         VF *step, VF *base) {
  const int64_t block = g / w->block * 32 + at;
  *step = p->steps ? HALVES(p->steps + block) : SETF(1);
  *base = p->bases ? HALVES(p->bases + block) : SETF(1);
  if (p->scales && form != SIX_BITS) *step = MULF(*step, SCALES(p->scales + g * 32 + at));
  if (p->centres) *base = MULF(*base, CENTRES(p->centres + g * 32 + at));
}

/* Of a group: the sums of `count` rows; those of parts times their scales. */
INLINE void NAME(group)(const int count, const int form, const Job *job, const Panel *p, int64_t g,
                        const int is_known, const Group *known, int first, int64_t m0,
                        VF of_group[][2]) {
  const Weight *w = job->weight;
  const int64_t at = first * LANES, stride = job->stride;
  const int parts = form == SIX_BITS ? 2 : 1;
  const int8_t *levels = job->levels + m0 * stride + g * GROUP;
  const uint8_t *a = p->bytes + BYTES_AT(at) + g * 512;
  const uint8_t *b = p->bytes + BYTES_AT(at + LANES) + g * 512;
#pragma GCC unroll 2
  for (int part = 0; part < parts; part++, levels += 16) {
    V found[ROWS_AT_ONCE][2];
    for (int m = 0; m < count; m++)
      found[m][0] = found[m][1] =
          SET32(job->taken[((m0 + m) * job->groups + g) * parts + part]);
    if (form == BYTES) NAME(bytes)(count, a, b, levels, stride, found);
    else
      NAME(nibbles)(count, form, part * 2, 4 / parts, p, g, is_known,
                    is_known ? known->numbers : NULL, first, levels, stride, found);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const int8_t *scales = p->scales + (g * 2 + part) * 32 + at + i * LANES;
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        VF one = TO_FLOAT(found[m][i]);
        if (parts == 2) one = MULF(one, SCALES(scales)); /* exact: whole numbers below 2^24 */
        of_group[m][i] = part ? ADDF(of_group[m][i], one) : one;
      }
    }
  }
}

/* Adds groups from `begin` to `end` to the sums of `count` rows from `m0` on, for the outputs of
 * vectors `first` and `first` + 1. `known`: these groups unpacked,
 * if `is_known`. */
INLINE void NAME(groups)(const int count, const int form, const Job *job, const Panel *p,
                         const int is_known, const Group *known, int64_t begin, int64_t end,
                         int first, int64_t m0, VF sums[][2]) {
  const Weight *w = job->weight;
  const int takes = w->centres || w->bases, at = first * LANES;
  for (int64_t g = begin; g < end; g++) {
    const Group *one = is_known ? known + (g - begin) : NULL;
    VF of_group[ROWS_AT_ONCE][2];
    NAME(group)(count, form, job, p, g, is_known, one, first, m0, of_group);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      VF step, base;
      if (!is_known) NAME(scales)(form, w, p, g, at + i * LANES, &step, &base);
      else {
        step = LOADF(one->steps + at + i * LANES);
        base = LOADF(one->bases + at + i * LANES);
      }
#pragma GCC unroll 4
      for (int m = 0; m < count; m++) {
        const int64_t place = (m0 + m) * job->groups + g;
        sums[m][i] = FMA(MULF(of_group[m][i], step), SETF(job->largest[place]), sums[m][i]);
        if (takes) sums[m][i] = FMA(SETF(-job->lowered[place]), base, sums[m][i]);
      }
    }
  }
}

/* All of `count` rows, at most ROWS_AT_ONCE. */
INLINE void NAME(few)(const int count, const int form, const Job *job, int64_t panel, int64_t m0) {
  const Panel p = panel_of(job->weight, panel);
  for (int first = 0; first < VECTORS; first += 2) {
    VF sums[ROWS_AT_ONCE][2];
    for (int m = 0; m < count; m++) sums[m][0] = sums[m][1] = SETF(0);
    NAME(groups)(count, form, job, &p, 0, NULL, 0, job->groups, first, m0, sums);
    for (int m = 0; m < count; m++)
      for (int i = 0; i < 2; i++)
        NAME(finish)(job, sums[m][i], panel * 32 + (first + i) * LANES, m0 + m);
  }
}

/* Adds groups that are unpacked to `sums`. */
INLINE void NAME(some)(const int count, const int form, const Job *job, const Panel *p,
                       const Group *known, int64_t begin, int64_t end, int64_t m0,
                       float sums[][32]) {
  for (int first = 0; first < VECTORS; first += 2) {
    VF of_rows[ROWS_AT_ONCE][2];
    for (int m = 0; m < count; m++)
      for (int i = 0; i < 2; i++) of_rows[m][i] = LOADF(sums[m] + (first + i) * LANES);
    NAME(groups)(count, form, job, p, 1, known, begin, end, first, m0, of_rows);
    for (int m = 0; m < count; m++)
      for (int i = 0; i < 2; i++) STOREF(sums[m] + (first + i) * LANES, of_rows[m][i]);
  }
}

/* Many rows: of a few groups at a time, whose weights are unpacked once for all. These, the rows'
 * levels and their sums stay in the first two caches. */
INLINE void NAME(many)(const int form, const Job *job, int64_t panel, int64_t m0, int64_t rows) {
  const Weight *w = job->weight;
  const Panel p = panel_of(w, panel);
  __attribute__((aligned(64))) Group known[GROUPS_AT_ONCE];
  __attribute__((aligned(64))) float sums[ROWS_OF_TILE][32];
  memset(sums, 0, rows * sizeof *sums);
  for (int64_t begin = 0, end; begin < job->groups; begin = end) {
    end = least(begin + GROUPS_AT_ONCE, job->groups);
    for (int64_t g = begin; g < end; g++)
      for (int vector = 0; vector < VECTORS; vector++) {
        Group *one = known + (g - begin);
        VF step, base;
        NAME(scales)(form, w, &p, g, vector * LANES, &step, &base);
        STOREF(one->steps + vector * LANES, step);
        STOREF(one->bases + vector * LANES, base);
        for (int j = 0; j < 4; j++) {
          V four[2];
          NAME(unpack)(form, &p, g, vector, j, four);
          memcpy(one->numbers + UNPACKED(vector, j), four, sizeof four);
        }
      }
    int64_t m = 0;
    for (; m + ROWS_AT_ONCE <= rows; m += ROWS_AT_ONCE)
      NAME(some)(ROWS_AT_ONCE, form, job, &p, known, begin, end, m0 + m, sums + m);
    for (; m < rows; m++) NAME(some)(1, form, job, &p, known, begin, end, m0 + m, sums + m);
  }
  for (int64_t m = 0; m < rows; m++)
    for (int vector = 0; vector < VECTORS; vector++)
      NAME(finish)(job, LOADF(sums[m] + vector * LANES), panel * 32 + vector * LANES, m0 + m);
}

/* With one scale a row. */
INLINE void NAME(whole_rows)(const int count, const Job *job, int64_t panel, int64_t m0) {
  const Weight *w = job->weight;
  const uint8_t *bytes = panel_of(w, panel).bytes;
  for (int first = 0; first < VECTORS; first += 2) {
    const int64_t at = first * LANES;
    const uint8_t *a = bytes + BYTES_AT(at), *b = bytes + BYTES_AT(at + LANES);
    const int8_t *levels = job->levels + m0 * job->stride;
    V found[ROWS_AT_ONCE][2];
    for (int m = 0; m < count; m++) found[m][0] = found[m][1] = ZERO();
    for (int64_t k = 0; k < w->inputs; k += GROUP, a += 512, b += 512, levels += GROUP)
      NAME(bytes)(count, a, b, levels, job->stride, found);
    for (int m = 0; m < count; m++) {
      const V taken = SET32(BYTES_ZERO * job->totals[(m0 + m) * job->groups * 2]);
      for (int i = 0; i < 2; i++)
        NAME(finish)(job, TO_FLOAT(SUB32(found[m][i], taken)), panel * 32 + at + i * LANES,
                     m0 + m);
    }
  }
}

#define COUNT(count)                                                                             \
  case count:                                                                                    \
    if (w->is_by_row) NAME(whole_rows)(count, job, panel, m0);                                   \
    else if (w->bytes) NAME(few)(count, BYTES, job, panel, m0);                                  \
    else if (w->sixths) NAME(few)(count, SIX_BITS, job, panel, m0);                              \
    else if (w->fifths) NAME(few)(count, FIVE_BITS, job, panel, m0);                             \
    else NAME(few)(count, NIBBLES, job, panel, m0);                                              \
    break

/* Bytes need no unpacking. Rows that are few are taken in equal parts. */
TARGET static void NAME(panel)(const Job *job, int64_t panel) {
  const Weight *w = job->weight;
  const int is_many = !w->bytes && job->rows > 2 * ROWS_AT_ONCE;
  const int64_t most = is_many ? ROWS_OF_TILE : ROWS_AT_ONCE, times = (job->rows + most - 1) / most;
  for (int64_t t = 0; t < times; t++) {
    const int64_t m0 = job->rows * t / times, rows = job->rows * (t + 1) / times - m0;
    if (!is_many)
      switch (rows) { COUNT(1); COUNT(2); COUNT(3); COUNT(4); }
    else if (w->sixths) NAME(many)(SIX_BITS, job, panel, m0, rows);
    else if (w->fifths) NAME(many)(FIVE_BITS, job, panel, m0, rows);
    else NAME(many)(NIBBLES, job, panel, m0, rows);
  }
}

#undef INLINE
#undef PLACE
#undef BYTES_AT
#undef LEVELS
#undef COUNT
#undef UNPACKED
