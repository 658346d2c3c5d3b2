/* The kernel of attend.c in double, for models in float64. */
#define LANES_DOUBLE
#include "lanes_plain.h"
#define ATTEND attend_double
#include "attend_pass.h"
