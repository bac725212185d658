// Steps of Rodas5P of a fixed length by hand, for 8 lanes of N states: `stiff_sizes.py`.
#include <utility>

typedef double V __attribute__((vector_size(64)));
constexpr int S = 8, TILE = 4;
constexpr double g = 0.21193756319429014;
constexpr double A[5][5] = {{3.0}, {2.849394379747939, 0.45842242204463923},
  {-6.954028509809101, 2.489845061869568, -10.358996098473584},
  {2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641},
  {-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256, 0.030198172008377946}};
constexpr double C[7][7] = {{-14.155112264123755}, {-17.97296035885952, -2.859693295451294},
  {147.12150275711716, -1.41221402718213, 71.68940251302358},
  {165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306},
  {24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125, -0.6610691825249471},
  {30.91273214028599, -3.1208243349937974, 77.79954646070892, 34.28646028294783, -19.097331116725623, -28.087943162872662},
  {37.80277123390563, -3.2571969029072276, 112.26918849496327, 66.9347231244047, -40.06618937091002, -54.66780262877968, -9.48861652309627}};

static const double *rates, *weights;

#if DENSE
static V M[N][N], inverse[N];

static void f(const V* u, V* du) {
  V q[N];
  for (int i = 0; i < N; i++) q[i] = u[i] * u[i];
  int i = 0;
  for (; i + 8 <= N; i += 8) {
    V sum[8] = {};
    for (int j = 0; j < N; j++)
      for (int r = 0; r < 8; r++) sum[r] += weights[(i + r) * N + j] * q[j];
    for (int r = 0; r < 8; r++) du[i + r] = sum[r] - rates[i + r] * u[i + r];
  }
  for (; i < N; i++) {
    V sum = {};
    for (int j = 0; j < N; j++) sum += weights[i * N + j] * q[j];
    du[i] = sum - rates[i] * u[i];
  }
}

// What becomes of a tile of R rows and Q columns: of the diagonal, to the right of it, or below it.
enum Part { DIAGONAL, RIGHT, BELOW };

template <Part part, int R, int Q> static inline __attribute__((always_inline)) void tile(int b, int i, int j) {
  V x[R][Q];
  for (int r = 0; r < R; r++)
    for (int q = 0; q < Q; q++) x[r][q] = M[i + r][j + q];
  for (int k = 0; k < b; k++)
    for (int r = 0; r < R; r++)
      for (int q = 0; q < Q; q++) x[r][q] -= M[i + r][k] * M[k][j + q];
  if (part == RIGHT)
    for (int r = 0; r < R; r++)
      for (int k = 0; k < r; k++)
        for (int q = 0; q < Q; q++) x[r][q] -= M[b + r][b + k] * x[k][q];
  else
    for (int k = 0; k < Q; k++) {
      if (part == DIAGONAL) inverse[b + k] = 1.0 / x[k][k];
      for (int r = part == DIAGONAL ? k + 1 : 0; r < R; r++) {
        x[r][k] *= inverse[b + k];
        for (int q = k + 1; q < Q; q++) x[r][q] -= x[r][k] * (part == DIAGONAL ? x[k][q] : M[b + k][b + q]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int q = 0; q < Q; q++) M[i + r][j + q] = x[r][q];
}

static void factorise(const V* u, V hg) {
  for (int i = 0; i < N; i++)
    for (int j = 0; j < N; j++) M[i][j] = (double)(i == j) - hg * (2 * weights[i * N + j] * u[j] - (i == j ? rates[i] : 0.0));
  constexpr int rest = N % TILE, whole = N - rest;
  for (int b = 0; b < whole; b += TILE) {
    tile<DIAGONAL, TILE, TILE>(b, b, b);
    for (int j = b + TILE; j < whole; j += TILE) tile<RIGHT, TILE, TILE>(b, b, j);
    for (int i = b + TILE; i < whole; i += TILE) tile<BELOW, TILE, TILE>(b, i, b);
    if (rest) tile<RIGHT, TILE, rest>(b, b, whole), tile<BELOW, rest, TILE>(b, whole, b);
  }
  if (rest) tile<DIAGONAL, rest, rest>(whole, whole, whole);
}

static void solve(V* x) {
  for (int b = 0; b < N; b += TILE) {
    int end = b + TILE < N ? b + TILE : N;
    V s[TILE];
    for (int i = b; i < end; i++) s[i - b] = x[i];
    if (end - b == TILE)
      for (int j = 0; j < b; j++)
        for (int r = 0; r < TILE; r++) s[r] -= M[b + r][j] * x[j];
    else
      for (int j = 0; j < b; j++)
        for (int r = 0; r < end - b; r++) s[r] -= M[b + r][j] * x[j];
    for (int i = b; i < end; i++) {
      for (int j = b; j < i; j++) s[i - b] -= M[i][j] * s[j - b];
      x[i] = s[i - b];
    }
  }
  for (int end = N; end > 0; end -= TILE) {
    int b = end > TILE ? end - TILE : 0;
    V s[TILE];
    for (int i = b; i < end; i++) s[i - b] = x[i];
    if (end - b == TILE)
      for (int j = end; j < N; j++)
        for (int r = 0; r < TILE; r++) s[r] -= M[b + r][j] * x[j];
    else
      for (int j = end; j < N; j++)
        for (int r = 0; r < end - b; r++) s[r] -= M[b + r][j] * x[j];
    for (int i = end - 1; i >= b; i--) {
      for (int j = i + 1; j < end; j++) s[i - b] -= M[i][j] * x[j];
      x[i] = s[i - b] * inverse[i];
    }
  }
}
#else
static V below[N], right[N], inverse[N];

static void f(const V* u, V* du) {
  for (int i = 0; i < N; i++)
    du[i] = rates[0] * (u[i + 1 < N ? i + 1 : i] - 2 * u[i] + u[i ? i - 1 : i]) + u[i] - u[i] * u[i] * u[i];
}

static void factorise(const V* u, V hg) {
  for (int i = 0; i < N; i++) {
    double own = rates[0] * ((i > 0) + (i + 1 < N));
    V pivot = 1 - hg * (1 - own - 3 * u[i] * u[i]), side = -hg * rates[0];
    if (i) below[i] = side * inverse[i - 1], pivot -= below[i] * side;
    inverse[i] = 1 / pivot, right[i] = side;
  }
}

static void solve(V* x) {
  for (int i = 1; i < N; i++) x[i] -= below[i] * x[i - 1];
  x[N - 1] *= inverse[N - 1];
  for (int i = N - 2; i >= 0; i--) x[i] = (x[i] - right[i] * x[i + 1]) * inverse[i];
}
#endif

static V step(V* u, V h) {
  V k[S][N], at[N], du[N], error = {};
  V hg = h * g;
  factorise(u, hg);
  for (int i = 0; i < N; i++) at[i] = u[i];
  for (int s = 0; s < S; s++) {
    if (s > 5)
      for (int i = 0; i < N; i++) at[i] += k[s - 1][i];
    else if (s)
      for (int i = 0; i < N; i++) {
        V x = u[i];
        for (int j = 0; j < s; j++) x += A[s - 1][j] * k[j][i];
        at[i] = x;
      }
    f(at, du);
    for (int i = 0; i < N; i++) {
      V x = hg * du[i];
      for (int j = 0; j < s; j++) x += (g * C[s - 1][j]) * k[j][i];
      k[s][i] = x;
    }
    solve(k[s]);
  }
  for (int i = 0; i < N; i++) {
    V y = at[i] + k[S - 1][i], a = y > u[i] ? y : u[i];
    V e = k[S - 1][i] / (1e-6 + 1e-6 * a);
    error += e * e, u[i] = y;
  }
  return error;
}

extern "C" double run(const double* u0, const double* p, const double* w, double h, int steps) {
  rates = p, weights = w;
  V u[N], sum = {}, length = V{} + h;
  for (int i = 0; i < N; i++)
    for (int l = 0; l < 8; l++) u[i][l] = u0[8 * i + l];
  for (int s = 0; s < steps; s++) sum += step(u, length);
  double total = 0;
  for (int i = 0; i < N; i++)
    for (int l = 0; l < 8; l++) total += u[i][l] + 1e-30 * sum[l];
  return total;
}
