/* The kernel of attend.c for this instruction set. */
#ifdef __x86_64__
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#include "lanes_avx512.h"
#define ATTEND attend_avx512
#include "attend_pass.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
