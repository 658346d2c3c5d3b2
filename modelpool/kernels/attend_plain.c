/* The kernel of attend.c in plain C. */
#include "lanes_plain.h"
#define ATTEND attend_plain
#include "attend_pass.h"
