/* The kernel of attend.c for this instruction set. */
#ifdef __aarch64__
#include "lanes_neon.h"
#define ATTEND attend_neon
#include "attend_pass.h"
#endif
