/* Attention on a CPU, by position over blocks of keys and values.
 *
 * Key j of a token has position j. It lies in slot j of the token's row, or, from `tails` on, in a slot
 * that the token's path through a tree names; a table says in which block of the arena a row's
 * slots are. Sums go by position, in pieces of PIECE positions that are joined in order, so the bits
 * of a token's output depend on its own keys and nothing else: not on tokens beside it, chunks,
 * trees, blocks or threads. What is no key of a token may be NaN. All instruction sets
 * and plain C give the same bits: compile with -ffp-contract=off.
 *
 * Sums are in float32 of keys and values in float32, float16 or bfloat16; in float64 of float64. */
#include "attend.h"

#include <stdlib.h>

#include "threads.h"

enum { TOKENS = 16, ALONE = 1 << 15 }; /* of a group at most; multiplications that one thread does */

static const AttendKernel *kernel_of(const AttendLayer *l, int number) {
  if (l->kind == KIND_F64) return &attend_double;
#ifdef __x86_64__
  if (number == 2) return &attend_avx512;
  if (number == 1) return &attend_avx2;
#endif
#ifdef __aarch64__
  if (number == 3) return &attend_neon;
#endif
  return &attend_plain;
}

/* Which kernels this CPU has, as bits: 1 AVX2, 2 AVX-512, 3 NEON; plain C (0) is everywhere. */
int sr_attend_kernels(void) {
  int found = 1;
#ifdef __x86_64__
  __builtin_cpu_init();
  /* Each CPU with AVX2 has F16C. */
  const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) found |= 1 << 1;
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found |= 1 << 2;
#endif
#ifdef __aarch64__
  found |= 1 << 3;
#endif
  return found;
}

typedef struct {
  AttendJob *job;
  const AttendKernel *kernel;
  int64_t units;
} Shared;

static void share(void *of) {
  Shared *shared = of;
  AttendJob *j = shared->job;
  const int several = j->threads > 1;
  const int64_t number = several ? thread_number() : 0, count = several ? thread_count() : 1;
  void *scratch = malloc(j->scratch);
  if (!scratch) {
    j->failed = 1;
    return;
  }
  /* In turn: later tokens have more keys. */
  for (int64_t u = number; u < shared->units; u += count) shared->kernel->unit(j, u, scratch);
  free(scratch);
}

/* Tokens of one row with one tree that stand beside each other, so many that their keys are read by
 * at most QUERIES queries at once. */
static int64_t grouped(const Places *p, int64_t most, TokenGroup *groups) {
  int64_t count = 0;
  for (int64_t t = 0; t < p->tokens;) {
    int64_t stop = t + 1;
    while (stop < p->tokens && stop - t < most && p->rows[stop] == p->rows[t] &&
           p->tails[stop] == p->tails[t])
      stop++;
    groups[count++] = (TokenGroup){t, stop};
    t = stop;
  }
  return count;
}

/* Attends `query` [tokens][heads][dim] to `out` [tokens][heads][value_dim], both of `query_kind`
 * (KIND_F64 if keys are). Returns 0; 1 without memory. */
int sr_attend(const AttendLayer *l, const Places *p, const void *query, int64_t query_token,
              int64_t query_head, int64_t query_kind, void *out, int threads, int number) {
  if (!p->tokens) return 0;
  const AttendKernel *kernel = kernel_of(l, number);
  const int64_t each = l->heads / l->kv_heads, parts = (each + QUERIES - 1) / QUERIES;
  const int64_t head_group = (each + parts - 1) / parts;
  int64_t most = QUERIES / head_group, longest = 0, keys = 0;
  if (most > TOKENS) most = TOKENS;
  for (int64_t t = 0; t < p->tokens; t++) {
    const int64_t end = p->positions[t] + 1;
    keys += l->window && end > l->window ? l->window : end;
    if (end > longest) longest = end;
  }
  TokenGroup *groups = malloc(p->tokens * sizeof *groups);
  if (!groups) return 1;
  AttendJob j = {
      .places = p, .layer = l, .query = query, .query_token = query_token,
      .query_head = query_head, .query_kind = query_kind, .out = out, .groups = groups,
      .group_count = grouped(p, most, groups), .pieces = (longest + PIECE - 1) / PIECE,
      .head_groups = parts, .head_group = head_group, .threads = 1};
  const int64_t size = part_size(l->value_dim), bytes = kernel->number_bytes;
  j.scratch = bytes * QUERIES * (2 * whole_lanes(l->dim) + PIECE + size) + 8 * PIECE;
  j.scratch += bytes * 8 * (whole_lanes(l->dim) + size); /* of at most eight keys, and parts */
  Shared shared = {&j, kernel, j.group_count * l->kv_heads * parts};
  if (in_parallel && threads > 1 && keys * l->heads * l->dim >= ALONE) {
    j.threads = threads;
    j.is_split = j.pieces > 1 && shared.units < 4 * threads;
  }
  if (j.is_split) {
    j.parts = malloc(bytes * size * p->tokens * l->heads * j.pieces);
    if (!j.parts) {
      free(groups);
      return 1;
    }
    shared.units *= j.pieces;
  }
  if (j.threads > 1) in_parallel(share, &shared, j.threads, 0);
  else share(&shared);
  if (j.is_split && !j.failed)
    for (int64_t t = 0; t < p->tokens; t++)
      for (int64_t head = 0; head < l->heads; head++) kernel->join(&j, t, head);
  free(j.parts);
  free(groups);
  return j.failed;
}
