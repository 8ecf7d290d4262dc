/* One step of Adam over a piece of a float32 weight, after a recipe has edited the gradient. nm_step of nm_project.c, or nm_step_blocks of
   nm_blocks.c, calls it and projects the piece while it is in the cache; so it is built once for all patterns.

   The arithmetic, where it fuses a multiplication with an addition and where not, is that of torch.optim.Adam(fused=True) and of the
   recipes in torch: the same bits. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=512")
#endif

typedef struct {
  float shrink, coupled, lerp, beta2, rest2, root, eps, step;
  float decay, spared; /* of the gradient of pruned weights: added per weight, multiplied by */
} Scalars;

enum { AS_IS, DECAYED, SCALED };

/* With `frozen`, `second` is a constant denominator. A weight is pruned where the mask says so; without one, where the projection has changed it. */
static inline __attribute__((always_inline)) void update(float *restrict weight, const float *restrict grad, float *restrict first,
                                                         float *restrict second, float *restrict out, const uint8_t *restrict mask,
                                                         int64_t count, const Scalars *s, int edit, int has_mask, int coupled, int frozen) {
  const float shrink = s->shrink, wd = s->coupled, lerp = s->lerp, beta2 = s->beta2, rest2 = s->rest2, root = s->root;
  const float eps = s->eps, step = s->step, decay = s->decay, spared = s->spared;
  for (int64_t i = 0; i < count; i++) {
    float w = weight[i], g = grad[i], m = first[i], v = second[i];
    if (edit == DECAYED) g = fmaf(w - out[i], decay, g);
    if (edit == SCALED) g *= (has_mask ? mask[i] != 0 : out[i] == w) ? 1.0f : spared;
    if (coupled) g = fmaf(w, wd, g);
    else w *= shrink;
    m = lerp < 0.5f ? fmaf(lerp, g - m, m) : fmaf(lerp - 1.0f, g - m, g);
    if (frozen) w += step * m / v;
    else {
      v = fmaf(rest2 * g, g, v * beta2);
      w += step * m / (sqrtf(v) / root + eps);
      second[i] = v;
    }
    weight[i] = w, first[i] = m;
    if (has_mask) out[i] = w * (float)mask[i];
  }
}

void nm_adam(float *weight, const float *grad, float *first, float *second, float *out, const uint8_t *mask, int64_t count,
             const Scalars *s, int edit, int frozen) {
  int coupled = s->coupled != 0.0f, has_mask = mask != NULL;
  switch (edit << 3 | has_mask << 2 | coupled << 1 | frozen) { /* one loop for each */
#define CASE(E, H, C, F) \
  case E << 3 | H << 2 | C << 1 | F: update(weight, grad, first, second, out, mask, count, s, E, H, C, F); break;
#define CASES(E, H) CASE(E, H, 0, 0) CASE(E, H, 0, 1) CASE(E, H, 1, 0) CASE(E, H, 1, 1)
    CASES(AS_IS, 0) CASES(AS_IS, 1) CASES(DECAYED, 0) CASES(DECAYED, 1) CASES(SCALED, 0) CASES(SCALED, 1)
  }
}
