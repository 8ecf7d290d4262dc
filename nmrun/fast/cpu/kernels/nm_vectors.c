/* Vectors of LANES numbers. Follows nm_scratch.c in one translation unit. */
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));

#if LANES == 16
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

/* The transpose of LANES rows: rows i and i + LANES / 2 are interleaved, log2(LANES) times. */
static inline __attribute__((always_inline)) void turn(vec a[LANES]) {
#pragma GCC unroll 4
  for (int round = 1; round < LANES; round *= 2) {
    vec b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) b[2 * i] = LOW(a[i], a[i + LANES / 2]), b[2 * i + 1] = HIGH(a[i], a[i + LANES / 2]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) a[i] = b[i];
  }
}

static inline vec widened(half h) { return (vec)(__builtin_convertvector(h, bits) << 16); }

/* To bfloat16, ties to even; a NaN stays one. */
static inline half narrowed(vec v) {
  bits b = (bits)v, nan = (bits)(v != v);
  b += 0x7fff + (b >> 16 & 1);
  return __builtin_convertvector((b & ~nan | nan & 0x7fc00000) >> 16, half);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__) && (defined(__AVX512BF16__) || defined(EMULATED))
#include <immintrin.h>

/* vdpbf16ps, or EMULATED: written out, for tests on other processors. */
static inline __attribute__((always_inline)) __m512 dot(__m512 sum, __m512i a, __m512i b) {
#if defined(EMULATED) /* two fused operations, that of the higher numbers first */
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  sum = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high), (__m512)_mm512_and_si512(b, high), sum);
  return _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
#else
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
}
#endif
