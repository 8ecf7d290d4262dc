/* How the kernel of a convolution moves over an image. */
#include <stdint.h>

/* Sizes of the side that is read and of the side that is written. Forward, output pixel p reads p * stride - padding + tap * dilation;
   backward, the pixel at which this pixel was read. */
typedef struct {
  int64_t height, width, columns, out_height, out_width, rows;
  int64_t taps[2], stride[2], padding[2], dilation[2];
  int64_t backward;
} Geometry;

/* The coordinate that is read, or -1. */
static int64_t source(const Geometry *g, int axis, int64_t p, int64_t tap) {
  int64_t size = axis == 0 ? g->height : g->width;
  int64_t at = g->backward ? p + g->padding[axis] - tap * g->dilation[axis]
                           : p * g->stride[axis] - g->padding[axis] + tap * g->dilation[axis];
  if (g->backward) {
    if (at < 0 || at % g->stride[axis]) return -1;
    at /= g->stride[axis];
  }
  return at >= 0 && at < size ? at : -1;
}
