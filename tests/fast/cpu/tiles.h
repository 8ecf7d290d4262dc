/* The tile instructions of AMX by their definitions (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), so that a
   kernel's addresses and numbers are tested on any processor. What is not configured or does not fit ends the process. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig stand_in_loadconfig
#define _tile_release stand_in_release
#define _tile_loadd stand_in_loadd
#define _tile_stored stand_in_stored
#define _tile_zero stand_in_zero
#define _tile_dpbf16ps stand_in_dpbf16ps
#define _tile_dpbsud stand_in_dpbsud

static _Thread_local struct {
  int rows, bytes;
  uint8_t data[16][64];
} tile[8];

static void stand_in_release(void) { memset(tile, 0, sizeof tile); }

static void stand_in_loadconfig(const void *config) {
  const uint8_t *c = config;
  stand_in_release();
  if (c[0] != 1) abort();
  for (int i = 1; i < 64; i++)
    if (c[i] && (i < 16 || (i >= 32 && i < 48) || i >= 56)) abort(); /* the first row, what is reserved, and tiles that are not there */
  for (int i = 0; i < 8; i++) {
    uint16_t bytes;
    memcpy(&bytes, c + 16 + 2 * i, sizeof bytes);
    tile[i].bytes = bytes, tile[i].rows = c[48 + i];
    if (tile[i].bytes > 64 || tile[i].bytes % 4 || tile[i].rows > 16 || !tile[i].bytes != !tile[i].rows) abort();
  }
}

static void stand_in_zero(int t) {
  if (!tile[t].rows) abort();
  memset(tile[t].data, 0, sizeof tile[t].data);
}

static void stand_in_loadd(int t, const void *from, long stride) {
  stand_in_zero(t);
  for (int r = 0; r < tile[t].rows; r++) memcpy(tile[t].data[r], (const char *)from + r * stride, tile[t].bytes);
}

static void stand_in_stored(int t, void *to, long stride) {
  if (!tile[t].rows) abort();
  for (int r = 0; r < tile[t].rows; r++) memcpy((char *)to + r * stride, tile[t].data[r], tile[t].bytes);
}

static float stand_in_number(const uint8_t *from) {
  uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static void stand_in_fits(int c, int a, int b) {
  int fits = tile[c].rows == tile[a].rows && tile[c].bytes == tile[b].bytes && tile[a].bytes == 4 * tile[b].rows && tile[c].rows;
  if (!fits || a == b || c == a || c == b) abort();
}

/* Noinline: all of its numbers are rounded while the mode of stand_in_dpbf16ps holds. */
static __attribute__((noinline)) void stand_in_sums(int c, int a, int b) {
  for (int m = 0; m < tile[c].rows; m++) {
    float sum[2][16] = {{0}};
    for (int k = 0; k < tile[a].bytes / 4; k++)
      for (int n = 0; n < tile[b].bytes / 4; n++)
        for (int i = 0; i < 2; i++) {
          const uint8_t *x = tile[a].data[m] + 4 * k + 2 * i, *y = tile[b].data[k] + 4 * n + 2 * i;
          sum[i][n] = __builtin_fmaf(stand_in_number(x), stand_in_number(y), sum[i][n]);
        }
    for (int n = 0; n < tile[c].bytes / 4; n++) {
      float before;
      memcpy(&before, tile[c].data[m] + 4 * n, sizeof before);
      before += sum[0][n] + sum[1][n];
      memcpy(tile[c].data[m] + 4 * n, &before, sizeof before);
    }
  }
}

/* The numbers of even place and those of odd place are added up apart, by fused operations, and then to what was there. Subnormal numbers
   are zero, whatever the thread's mode. */
static void stand_in_dpbf16ps(int c, int a, int b) {
  stand_in_fits(c, a, b);
  unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  stand_in_sums(c, a, b);
  _mm_setcsr(mode);
}

/* Signed bytes of a, unsigned ones of b. */
static void stand_in_dpbsud(int c, int a, int b) {
  stand_in_fits(c, a, b);
  for (int m = 0; m < tile[c].rows; m++)
    for (int k = 0; k < tile[a].bytes / 4; k++)
      for (int n = 0; n < tile[b].bytes / 4; n++) {
        int32_t sum;
        memcpy(&sum, tile[c].data[m] + 4 * n, sizeof sum);
        for (int i = 0; i < 4; i++) sum += (int8_t)tile[a].data[m][4 * k + i] * tile[b].data[k][4 * n + i];
        memcpy(tile[c].data[m] + 4 * n, &sum, sizeof sum);
      }
}
