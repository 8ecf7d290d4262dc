/* The tile instructions of AMX. HAS_TILES: they are there, or TILES_BY names a header with their definitions, for tests on any processor. */
#include <stdint.h>
#include <string.h>

#if defined(TILES_BY)
#include TILES_BY
#define HAS_TILES
static int tiles_allowed(void) { return 1; }
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
/* Linux gives a process the memory for tiles when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int tiles_allowed(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#endif

/* 2: products by tiles; 1: the system refuses them; 0: the processor has none. */
int nm_tiles(void) {
#if defined(HAS_TILES)
  return tiles_allowed() ? 2 : 1;
#else
  return 0;
#endif
}

#if defined(HAS_TILES)
/* GCC does not know that the instruction reads memory: what was written has to be there. */
#define LOAD_TILE(NUMBER, FROM, STRIDE)          \
  do {                                           \
    __asm__ volatile("" ::"r"(FROM) : "memory"); \
    _tile_loadd(NUMBER, FROM, STRIDE);           \
  } while (0)

/* Eight tiles of 16 rows of 64 bytes, of this thread, until _tile_release(). */
static void configure_tiles(void) {
  struct {
    uint8_t palette, first, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } c;
  memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
  __asm__ volatile("" ::"r"(&c) : "memory");
  _tile_loadconfig(&c);
}
#endif

/* Around products: tiles are configured, and released, where they multiply. */
static inline void begin_tiles(int64_t by_tiles) {
#if defined(HAS_TILES)
  if (by_tiles) configure_tiles();
#else
  (void)by_tiles;
#endif
}

static inline void end_tiles(int64_t by_tiles) {
#if defined(HAS_TILES)
  if (by_tiles) _tile_release();
#else
  (void)by_tiles;
#endif
}
