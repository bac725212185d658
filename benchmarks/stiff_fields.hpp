// The fields of stiff.cpp, over vectors or numbers, with their Jacobians by hand. What is zero in
// these is left out.

struct ROBER {
    static constexpr int n = 3, np = 3;
    static constexpr double u0[] = {1, 0, 0};
    static constexpr bool has(int i, int j) { return i < 2 || j == 1; }
    template <class T>
    static INLINE void f(const T *u, const T *p, T *d) {
        T a = p[0] * u[0], b = p[1] * u[1] * u[1], c = p[2] * u[1] * u[2];
        d[0] = c - a, d[1] = a - c - b, d[2] = b;
    }
    template <class T>
    static INLINE void jacobian(const T *u, const T *p, T (*J)[n]) {
        T b = 2.0 * p[1] * u[1], c1 = p[2] * u[2], c2 = p[2] * u[1];
        J[0][0] = -p[0], J[0][1] = c1, J[0][2] = c2;
        J[1][0] = p[0], J[1][1] = -c1 - b, J[1][2] = -c2;
        J[2][1] = b;
    }
};

struct OREGO {
    static constexpr int n = 3, np = 3;
    static constexpr double u0[] = {1, 2, 3};
    static constexpr bool has(int i, int j) { return !(i == 0 && j == 2) && !(i == 2 && j == 1); }
    template <class T>
    static INLINE void f(const T *u, const T *p, T *d) {
        d[0] = p[0] * (u[1] + u[0] * (1.0 - p[1] * u[0] - u[1]));
        d[1] = (u[2] - (1.0 + u[0]) * u[1]) * inverse(p[0]);
        d[2] = p[2] * (u[0] - u[2]);
    }
    template <class T>
    static INLINE void jacobian(const T *u, const T *p, T (*J)[n]) {
        T r = inverse(p[0]);
        J[0][0] = p[0] * (1.0 - 2.0 * p[1] * u[0] - u[1]), J[0][1] = p[0] * (1.0 - u[0]);
        J[1][0] = -u[1] * r, J[1][1] = -(1.0 + u[0]) * r, J[1][2] = r;
        J[2][0] = p[2], J[2][2] = -p[2];
    }
};

struct HIRES {
    static constexpr int n = 8, np = 12;
    static constexpr double u0[] = {1, 0, 0, 0, 0, 0, 0, .0057};
    static constexpr bool has(int i, int j) {
        constexpr const char *rows[] = {"xxx.....", "xx......", "..xxx...", ".xxx....",
                                        "....xxx.", "...xxxxx", ".....xxx", ".....xxx"};
        return rows[i][j] == 'x';
    }
    template <class T>
    static INLINE void f(const T *y, const T *k, T *d) {
        T bound = k[0] * y[5] * y[7], back = k[11] * y[6];
        d[0] = k[4] - k[1] * y[0] + k[2] * y[1] + k[3] * y[2];
        d[1] = k[1] * y[0] - k[5] * y[1];
        d[2] = k[2] * y[3] + k[7] * y[4] - k[6] * y[2];
        d[3] = k[3] * y[1] + k[1] * y[2] - k[8] * y[3];
        d[4] = k[2] * (y[5] + y[6]) - k[9] * y[4];
        d[5] = k[10] * (y[3] + y[6]) + k[1] * y[4] - k[2] * y[5] - bound;
        d[6] = bound - back, d[7] = back - bound;
    }
    template <class T>
    static INLINE void jacobian(const T *y, const T *k, T (*J)[n]) {
        T a = k[0] * y[7], b = k[0] * y[5];
        J[0][0] = -k[1], J[0][1] = k[2], J[0][2] = k[3];
        J[1][0] = k[1], J[1][1] = -k[5];
        J[2][2] = -k[6], J[2][3] = k[2], J[2][4] = k[7];
        J[3][1] = k[3], J[3][2] = k[1], J[3][3] = -k[8];
        J[4][4] = -k[9], J[4][5] = k[2], J[4][6] = k[2];
        J[5][3] = k[10], J[5][4] = k[1], J[5][5] = -k[2] - a, J[5][6] = k[10], J[5][7] = -b;
        J[6][5] = a, J[6][6] = -k[11], J[6][7] = b;
        J[7][5] = -a, J[7][6] = k[11], J[7][7] = -b;
    }
};

struct VDP {
    static constexpr int n = 2, np = 1;
    static constexpr double u0[] = {2, 0};
    static constexpr bool has(int i, int j) { return i || j; }
    template <class T>
    static INLINE void f(const T *u, const T *p, T *d) {
        d[0] = u[1], d[1] = p[0] * (1.0 - u[0] * u[0]) * u[1] - u[0];
    }
    template <class T>
    static INLINE void jacobian(const T *u, const T *p, T (*J)[n]) {
        J[0][1] = T(1.0), J[1][0] = -2.0 * p[0] * u[0] * u[1] - 1.0;
        J[1][1] = p[0] * (1.0 - u[0] * u[0]);
    }
};

// Of each reaction what goes in and what comes out, as numbers of species from 1 on; 0: nothing.
struct POLLU {
    static constexpr int n = 20, np = 25;
    static constexpr double u0[20] = {0, .2, 0, .04, 0, 0, .1, .3, .01, 0, 0, 0, 0, 0, 0, 0, .007};
    static constexpr int in[25][2] = {
        {1},     {2, 4},  {5, 2}, {7},    {7}, {7, 6}, {9}, {9, 6}, {11, 2}, {11, 1}, {13},   {10, 2}, {14},
        {1, 6}, {3},    {4}, {4},    {16},   {16}, {17, 6}, {19},    {19}, {1, 4}, {19, 1}, {20}};
    static constexpr int out[25][4] = {
        {2, 3},     {1},     {1, 6},   {5, 5, 8}, {8},    {5, 8}, {5, 8, 10}, {11}, {1, 10, 12},
        {13}, {1, 11},   {1, 14},    {5, 7},  {15}, {4},    {16},       {3},    {6, 6},
        {3},        {5, 18}, {2},      {1, 3},    {19},   {20},   {1, 19}};
    static constexpr int change(int species, int reaction) {
        int s = 0;
        for (int x : in[reaction]) s -= x == species + 1;
        for (int x : out[reaction]) s += x == species + 1;
        return s;
    }
    static constexpr bool has(int i, int j) {
        for (int r = 0; r < np; r++)
            if (change(i, r) && (in[r][0] == j + 1 || in[r][1] == j + 1)) return true;
        return false;
    }
    template <class T>
    static INLINE void f(const T *y, const T *k, T *d) {
        each<n>(EACH(i) { d[i] = T(0.0); });
        each<np>(EACH(r) {
            T v = k[r] * y[in[r][0] - 1];
            if constexpr (in[r][1] != 0) v = v * y[in[r][1] - 1];
            each<n>(EACH(i) {
                if constexpr (change(i, r) != 0) d[i] += double(change(i, r)) * v;
            });
        });
    }
    template <class T>
    static INLINE void jacobian(const T *y, const T *k, T (*J)[n]) {
        each<n>(EACH(i) {
            each<n>(EACH(j) {
                if constexpr (has(i, j)) J[i][j] = T(0.0);
            });
        });
        each<np>(EACH(r) {
            each<2>(EACH(c) {
                if constexpr (in[r][c] != 0) {
                    T v = k[r];
                    if constexpr (in[r][1] != 0) v = v * y[in[r][1 - c] - 1];
                    each<n>(EACH(i) {
                        if constexpr (change(i, r) != 0)
                            J[i][in[r][c] - 1] += double(change(i, r)) * v;
                    });
                }
            });
        });
    }
};
