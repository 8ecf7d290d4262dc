#include <stdint.h>
#include <stdlib.h>

/* Memory of this thread that stays; 64 bytes aligned, NULL if there is none. */
static float *scratch(int64_t floats) {
  static _Thread_local float *memory = NULL;
  static _Thread_local int64_t size = 0;
  if (floats > size) {
    free(memory);
    size = floats;
    memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    if (memory == NULL) size = 0;
  }
  return memory;
}
