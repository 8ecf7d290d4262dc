/* Sums over the kept and over the pruned entries of a tensor, by its mask, a byte an entry. */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define PIECE 4096 /* entries that are summed in float32 */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Add LANES entries: numbers are taken or left out by their bits, so that there is no branch to guess. */
static inline __attribute__((always_inline)) void add(const float *values, const uint8_t *mask, int squares, vec *kept_sum, vec *pruned_sum) {
  vec x;
  bytes m;
  memcpy(&x, values, sizeof x);
  memcpy(&m, mask, sizeof m);
  ints is_kept = -__builtin_convertvector(m, ints);
  if (squares) x *= x;
  *kept_sum += (vec)((ints)x & is_kept);
  *pruned_sum += (vec)((ints)x & ~is_kept);
}

/* Pieces `begin` to `end` of `count` entries: sums[2 * piece] is of the kept, sums[2 * piece + 1] of the pruned; of their squares with
   `squares`. They depend on nothing but the piece. */
int nm_split(const float *values, const uint8_t *mask, int64_t count, int64_t begin, int64_t end, int squares, double *sums) {
  for (int64_t piece = begin; piece < end; piece++) {
    int64_t i = piece * PIECE, last = i + PIECE < count ? i + PIECE : count;
    vec kept_sum[2] = {0}, pruned_sum[2] = {0};
    for (; i + 2 * LANES <= last; i += 2 * LANES)
      for (int part = 0; part < 2; part++) add(values + i + part * LANES, mask + i + part * LANES, squares, kept_sum + part, pruned_sum + part);
    for (; i < last; i += LANES) {
      float rest[LANES] = {0};
      uint8_t of_rest[LANES] = {0};
      int64_t left = last - i < LANES ? last - i : LANES;
      memcpy(rest, values + i, left * sizeof(float));
      memcpy(of_rest, mask + i, left);
      add(rest, of_rest, squares, kept_sum, pruned_sum);
    }
    double of_kept = 0, of_pruned = 0;
    for (int l = 0; l < LANES; l++) of_kept += (double)kept_sum[0][l] + kept_sum[1][l], of_pruned += (double)pruned_sum[0][l] + pruned_sum[1][l];
    sums[2 * piece] = of_kept, sums[2 * piece + 1] = of_pruned;
  }
  return 0;
}
