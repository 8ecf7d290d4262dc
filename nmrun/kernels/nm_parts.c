/* A kernel's work in parts, on the threads of the OpenMP runtime that torch has. Those stay awake for some milliseconds after torch's own
   work: they begin at once, and threads beside them would have to share the processors with them meanwhile. */
#include <stdint.h>

#define MOST 16 /* operands */

/* Every kernel takes pointers and whole numbers, and returns 0, or 1 where it failed. One that takes fewer than MOST leaves the rest
   where it is: the calling conventions of x86-64 and ARM on Linux allow for that. */
typedef int64_t word;
typedef int (*kernel)(word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word);
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of libgomp and libomp */

typedef struct {
  kernel run;
  const word (*operands)[MOST];
  int64_t count, next;
  int failed;
} Parts;

static void work(void *all) {
  Parts *p = all;
  for (int64_t i; (i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->count;) {
    const word *o = p->operands[i];
    if (p->run(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15]))
      __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
  }
}

int nm_parts(parallel region, int64_t threads, kernel run, const word (*operands)[MOST], int64_t count) {
  Parts all = {run, operands, count, 0, 0};
  region(work, &all, (unsigned)threads, 0);
  return all.failed;
}
