#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

static pthread_key_t scratch_key;
static int has_scratch_key = 0;

static void make_scratch_key(void) { has_scratch_key = pthread_key_create(&scratch_key, free) == 0; }

/* Memory of this thread that stays until it ends; 64 bytes aligned, NULL if there is none. */
static float *scratch(int64_t floats) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static _Thread_local float *memory = NULL;
  static _Thread_local int64_t size = 0;
  if (floats > size) {
    pthread_once(&once, make_scratch_key);
    free(memory);
    size = floats;
    memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    if (memory == NULL) size = 0;
    if (has_scratch_key) pthread_setspecific(scratch_key, memory);
  }
  return memory;
}
