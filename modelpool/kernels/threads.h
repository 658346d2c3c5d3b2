/* Threads of OpenMP, whose functions the caller found in the process; NULL: there are none. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
extern Parallel in_parallel;
extern int (*thread_number)(void), (*thread_count)(void);
