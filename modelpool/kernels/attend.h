/* Attention by position over blocks of keys and values; see attend.c. */
#pragma once
#include <stdint.h>

enum { KIND_F32, KIND_F16, KIND_BF16, KIND_F64 };
enum {
  PIECE = 256,  /* positions whose weights are summed before they are joined with the others */
  QUERIES = 32, /* that share a reading of keys, at most */
  LANES = 16    /* numbers that a dot product is summed in side by side */
};

/* Where the keys of a pack's tokens lie: modelpool.attention.path.KeyPaths. */
typedef struct {
  const int32_t *rows, *positions, *tails; /* [tokens] */
  const int32_t *path;                     /* [tokens][path_width] */
  const int32_t *tables;                   /* [rows][table_width] blocks */
  int64_t tokens, path_width, table_width, block_slots;
} Places;

/* How a layer attends, and its keys and values. Strides count numbers. */
typedef struct {
  const char *keys, *values;
  int64_t key_slot, key_head, value_slot, value_head;
  const float *sinks; /* [heads] or NULL */
  int64_t heads, kv_heads, dim, value_dim;
  int64_t window;         /* positions, the own one included; 0: all */
  double scale, softcap;  /* softcap 0: none */
  int64_t kind;           /* of keys and values */
} AttendLayer;

/* Tokens first..stop of one row, whose keys are read together. */
typedef struct {
  int64_t first, stop;
} TokenGroup;

typedef struct {
  const Places *places;
  const AttendLayer *layer;
  const char *query; /* [tokens][heads][dim], of `query_kind` */
  int64_t query_token, query_head, query_kind;
  char *out; /* [tokens][heads][value_dim], of `query_kind` */
  const TokenGroup *groups;
  int64_t group_count, pieces, is_split;
  int64_t head_groups, head_group; /* of the query heads of a key head, and how many in each */
  char *parts;      /* split: [tokens][heads][pieces][PART] numbers */
  int64_t scratch;  /* bytes of a thread */
  int threads, failed;
} AttendJob;

/* A kernel: `unit` attends one group of tokens with one group of heads (split: over one piece),
 * `join` makes a split token and head of its pieces. */
typedef struct {
  void (*unit)(const AttendJob *, int64_t number, void *scratch);
  void (*join)(const AttendJob *, int64_t token, int64_t head);
  int64_t number_bytes;
} AttendKernel;

int sr_attend(const AttendLayer *l, const Places *p, const void *query, int64_t query_token,
              int64_t query_head, int64_t query_kind, void *out, int threads, int number);

extern const AttendKernel attend_plain, attend_double;
#ifdef __x86_64__
extern const AttendKernel attend_avx2, attend_avx512;
#endif
#ifdef __aarch64__
extern const AttendKernel attend_neon;
#endif

static inline int64_t whole_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
/* Numbers of what is known of a query: largest score, sum of weights, weighted values. */
static inline int64_t part_size(int64_t value_dim) { return LANES + whole_lanes(value_dim); }
