/* The kernel of attend.c in plain C: what the others are compared with. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1") /* to compile it takes a third of the time */
#endif
#include "lanes_plain.h"
#define ATTEND attend_plain
#include "attend_pass.h"
