// A network 2 -> W -> W -> 2 with tanh, solved by Tsit5 with fixed steps in float32: by hand. A layer
// is a product of rows of weights and vectors of trajectories, whose sums stay in registers, with the
// bias before and tanh after it; a chunk of trajectories stays in the nearest caches.

#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// Vectors of the machine's width, and as many sums as leave registers for the terms.
#ifdef __AVX512F__
constexpr int LANES = 16, SUMS = 24;
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12;
#else
constexpr int LANES = 4, SUMS = 12;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
constexpr int STAGES = 6, MOST_NEURONS = 1024;

static inline Vector spread(float x) { return x - Vector{}; }

static inline Vector bounded(Vector x, float most) {
  Vector top = spread(most);
  x = x < top ? x : top;
  return x > -top ? x : -top;
}

static inline Vector inverse(Vector x) {
#ifdef __AVX512F__
  Vector y = (Vector)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// The quotient of polynomials of Eigen, to some units in the last place.
static inline Vector tanh_of(Vector x) {
  x = bounded(x, 7.90531110763549805f);
  const float above[] = {4.89352455891786e-03f, 6.37261928875436e-04f,  1.48572235717979e-05f, 5.12229709037114e-08f,
                         -8.60467152213735e-11f, 2.00018790482477e-13f, -2.76076847742355e-16f};
  const float below[] = {4.89352518554385e-03f, 2.26843463243900e-03f, 1.18534705686654e-04f, 1.19825839466702e-06f};
  Vector z = x * x, p = spread(above[6]), q = spread(below[3]);
  for (int i = 5; i >= 0; i--) p = p * z + above[i];
  for (int i = 2; i >= 0; i--) q = q * z + below[i];
  return x * p * inverse(q);
}

template <int ROWS, int VECTORS, bool ACTIVE>
static inline void rows(const float *w, long inner, const float *bias, const Vector *x, Vector *out) {
  Vector sums[ROWS][VECTORS];
#pragma GCC unroll 32
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[r][v] = spread(bias[r]);
#pragma GCC unroll 2
  for (long k = 0; k < inner; k++) {
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; r++) {
      Vector weight = spread(w[r * inner + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[r][v] += weight * x[k * VECTORS + v];
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) out[r * VECTORS + v] = ACTIVE ? tanh_of(sums[r][v]) : sums[r][v];
}

template <int VECTORS, bool ACTIVE>
static void layer(const float *w, long n, long inner, const float *bias, const Vector *x, Vector *out) {
  constexpr int MOST = SUMS / VECTORS > 0 ? SUMS / VECTORS : 1;
  long i = 0;
  for (; i + MOST <= n; i += MOST) rows<MOST, VECTORS, ACTIVE>(w + i * inner, inner, bias + i, x, out + i * VECTORS);
  for (; i < n; i++) rows<1, VECTORS, ACTIVE>(w + i * inner, inner, bias + i, x, out + i * VECTORS);
}

static constexpr float WEIGHTS[STAGES][STAGES] = {
    {0.161},
    {-0.008480655492356989, 0.335480655492357},
    {2.8971530571054935, -6.359448489975075, 4.3622954328695815},
    {5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525},
    {5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383},
    {0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774}};

struct Network {
  long width;
  const float *w1, *b1, *w2, *b2, *w3, *b3;
};

template <int VECTORS>
static void solve_in_chunks(const Network &p, long n, const float *u0, long steps, float h, float *out) {
  static Vector first[MOST_NEURONS * VECTORS], second[MOST_NEURONS * VECTORS];
  constexpr int CHUNK = VECTORS * LANES;
  Vector y[2 * VECTORS], at[2 * VECTORS], k[STAGES][2 * VECTORS];
  auto f = [&](const Vector *u, Vector *du) {
    layer<VECTORS, true>(p.w1, p.width, 2, p.b1, u, first);
    layer<VECTORS, true>(p.w2, p.width, p.width, p.b2, first, second);
    layer<VECTORS, false>(p.w3, 2, p.width, p.b3, second, du);
  };
  for (long start = 0; start < n; start += CHUNK) {
    float *state = (float *)y;
    for (int c = 0; c < 2; c++)
      for (int i = 0; i < CHUNK; i++) state[c * CHUNK + i] = u0[(start + i) * 2 + c];
    for (long step = 0; step < steps; step++) {
      f(y, k[0]);
      for (int i = 0; i < STAGES; i++) {
        for (int e = 0; e < 2 * VECTORS; e++) {
          Vector total = y[e];
          for (int j = 0; j <= i; j++) total += h * WEIGHTS[i][j] * k[j][e];
          at[e] = total;
        }
        if (i + 1 < STAGES) f(at, k[i + 1]);
      }
      std::memcpy(y, at, sizeof(y));
    }
    for (int c = 0; c < 2; c++)
      for (int i = 0; i < CHUNK; i++) out[(start + i) * 2 + c] = state[c * CHUNK + i];
  }
}

// The ends of `n` trajectories, a multiple of `vectors` times the lanes of a vector; of the former there are 2 or 4.
extern "C" void solve(int vectors, long width, const float *const *p, long n, const float *u0, long steps, float h,
                      float *out) {
  Network network{width, p[0], p[1], p[2], p[3], p[4], p[5]};
  if (vectors == 2)
    solve_in_chunks<2>(network, n, u0, steps, h, out);
  else
    solve_in_chunks<4>(network, n, u0, steps, h, out);
}
