// y = x p for many rows, and maybe more than that while it is still near, for CPUs that torch's library was not made
// for. What is multiplied by lies in panels, made once; rows are read where they are. Called by native/matmul.py, and
// tested against torch. Memory is the caller's; nothing is allocated, nothing is kept.

#include "vector.h"

// Numbers that are taken at a time, so that they stay in the caches: of what is summed up; rows.
enum { DEEP = 384, HIGH = 120 };
enum { FAR = 8, LARGE = 1 << 22 };  // steps ahead that rows are fetched; bytes of panels that do not stay near

INLINE long least(long one, long other) { return one < other ? one : other; }
INLINE long cut(long many, long most, long step) {  // into equal pieces of whole steps
    const long pieces = (many + most - 1) / most;
    return pieces ? up((many + pieces - 1) / pieces, step) : step;
}

// p (deep, wide) -> for every PANEL vectors of its columns, and for every k: those of row k side by side.
template <typename Real>
static void pack(const Real *p, Real *to, long deep, long wide, long down, long beside, Share own) {
    const long lane = lanes<Real>(), panel = PANEL * lane, panels = (wide + panel - 1) / panel;
    const long first = own.begin(panels) * panel, last = own.end(panels) * panel;
    const long full = beside == 1 ? least(last, wide / panel * panel) : first;
    for (long k = 0; k < deep && first < full; k++)  // row by row, as they lie
        for (long o = first; o < full; o += panel)
            for (int j = 0; j < PANEL; j++)
                put(to + o * deep + k * panel + j * lane, load(p + k * down + o + j * lane));
    for (long o = full > first ? full : first; o < last; o += panel) {
        Real *one = to + o * deep;
        const Real *from = p + o * beside;
        const long some = least(wide - o, panel), whole = down == 1 && some == panel ? deep / 8 * 8 : 0;
        for (long k = 0; k < whole; k += 8)
            for (long j = 0; j < panel; j += 8) turned8(from + j * beside + k, beside, one + k * panel + j, panel);
        for (long k = whole; k < deep; k++)
            for (long j = 0; j < panel; j++) one[k * panel + j] = j < some ? from[k * down + j * beside] : 0;
    }
}

template <typename Real> struct MatmulArgs {
    const Real *x, *panels, *bias;  // (rows, deep), in any order; as `pack` has them; (wide)
    Real *y, *room;  // (rows, wide); (threads, HIGH * DEEP)
    const Real *hidden;  // (rows, wide), as y lies: y becomes y times the slope of the activation there
    Real *activated;  // the activation of hidden; without hidden, of y
    int64_t rows, wide, deep, x_row, x_deep, y_row, adds, how, threads;  // adds: to what y holds
};

// Some rows side by side for every k, in tiles; what is missing in the last one is 0.
template <typename Real> static void aligned(const Real *x, long row, long down, long deep, long rows, Real *to) {
    const long whole = row == 1 ? rows / ROWS * ROWS : 0;
    for (long k = 0; k < deep; k++) {
        const Real *from = x + k * down;
        for (long i = 0; i < whole; i += LINE / (long)sizeof(Real)) __builtin_prefetch(from + FAR * down + i);
        for (long i = 0; i < whole; i += ROWS) memcpy(to + i * deep + k * ROWS, from + i, ROWS * sizeof(Real));
        for (long i = whole; i < up(rows, ROWS); i++)
            to[i / ROWS * ROWS * deep + k * ROWS + i % ROWS] = i < rows ? from[i * row] : 0;
    }
}

template <typename Real, bool ACROSS>
static __attribute__((noinline)) void times(const Real *x, long step, const Real *panel, long deep, Real *y, long line,
                                            long rows, long some, bool adds, const Real *bias, const Real *next) {
    typedef typename Of<Real>::Vector Vector;
    const long lane = lanes<Real>();
    for (long r = 0; r < rows; r++) __builtin_prefetch(y + r * line, 1), __builtin_prefetch(y + r * line + some - 1, 1);
    Vector found[ROWS][PANEL];
    tile<Real, ACROSS>(x, step, panel, deep, found, next);
    if (rows == ROWS && some == PANEL * lane) {
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < PANEL; j++) {
                Real *to = y + r * line + j * lane;
                put(to, adds ? load(to) + found[r][j] : bias ? load(bias + j * lane) + found[r][j] : found[r][j]);
            }
        return;
    }
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < some; j++) {
            const Real one = ((const Real *)found[r])[j];
            y[r * line + j] = adds ? y[r * line + j] + one : bias ? bias[j] + one : one;
        }
}

// What else happens to some rows of y, which have just been made.
template <typename Real> static void finish(const MatmulArgs<Real> &a, long first, long rows, long column, long some) {
    for (long r = first; r < first + rows; r++) {
        const long at = r * a.y_row + column;
        if (a.hidden)
            activation_backward(a.hidden + at, a.activated + at, a.y + at, some, a.how);
        else
            bends(a.y + at, a.activated + at, some, a.how);
    }
}

template <typename Real> static void multiply(const MatmulArgs<Real> &a, Share own) {
    const long panel = PANEL * lanes<Real>(), tiles = (a.rows + ROWS - 1) / ROWS, panels = (a.wide + panel - 1) / panel;
    const bool by_rows = tiles >= panels, near = a.wide * a.deep * (long)sizeof(Real) < LARGE;
    const long top = by_rows ? own.begin(tiles) * ROWS : 0,
               end = least(by_rows ? own.end(tiles) * ROWS : a.rows, a.rows);
    const long left = by_rows ? 0 : own.begin(panels) * panel;
    const long right = least(by_rows ? a.wide : own.end(panels) * panel, a.wide);
    const long high = cut(end - top, HIGH, ROWS), down = cut(a.deep, DEEP, 8);
    const long across = (end - top + high - 1) / high, along = (a.deep + down - 1) / down;
    const bool direct = a.x_deep == 1;  // rows are read where they are
    Real *room = a.room + own.which * HIGH * DEEP;
    for (long piece = 0; piece < across * along; piece++) {  // what is near is taken next: of rows, or of k
        const long m = top + (direct ? piece / along : piece % across) * high;
        const long k = (direct ? piece % along : piece / across) * down;
        const long rows = least(end - m, high), deep = least(a.deep - k, down), whole = direct ? rows / ROWS * ROWS : 0;
        const long share = deep / (rows / ROWS + 1) + 1;
        const bool adds = a.adds || k;
        const Real *x = a.x + m * a.x_row + k * a.x_deep;
        aligned(x + whole * a.x_row, a.x_row, a.x_deep, deep, rows - whole, room);
        for (long o = left; o < right; o += panel) {
            const long some = least(right - o, panel);
            const Real *p = a.panels + o * a.deep + k * panel, *bias = a.bias ? a.bias + o : 0;
            const Real *coming = p + a.deep * panel;
            for (long i = 0; i < rows; i += ROWS) {
                Real *y = a.y + (m + i) * a.y_row + o;
                const Real *next = o == left && i + 2 * ROWS <= whole ? x + (i + ROWS) * a.x_row : 0;
                for (long ahead = 0; !near && ahead < share; ahead++)  // a share of the next panel by each tile
                    __builtin_prefetch(coming + (i / ROWS * share + ahead) * panel, 0, 2);
                if (i < whole)
                    times<Real, false>(x + i * a.x_row, a.x_row, p, deep, y, a.y_row, ROWS, some, adds, bias, next);
                else
                    times<Real, true>(room + (i - whole) * deep, ROWS, p, deep, y, a.y_row, least(rows - i, ROWS), some,
                                      adds, bias, 0);
            }
        }
        if (a.activated && k + deep == a.deep) finish(a, m, rows, left, right - left);
    }
}

#define KERNELS(Real, name)                                                                                            \
    extern "C" {                                                                                                       \
    void pack_##name(const Real *p, Real *to, long deep, long wide, long down, long beside, int threads) {             \
        spread(threads, [=](Share own) { pack(p, to, deep, wide, down, beside, own); });                               \
    }                                                                                                                  \
    void multiply_##name(const MatmulArgs<Real> *a) {                                                                  \
        spread(a->threads, [=](Share own) { multiply(*a, own); });                                                     \
    }                                                                                                                  \
    long piece_##name(void) { return HIGH * DEEP; }                                                                    \
    }
KERNELS(float, float32)
KERNELS(double, float64)

// Whether products are faster here than in torch's library, which was made for the CPUs of another maker.
extern "C" int prefers_own_matmul(void) {
#if defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}

// The bytes of each struct that structs.py mirrors, in its order.
extern "C" int struct_size_matmul(int which) { return which == 0 ? sizeof(MatmulArgs<double>) : 0; }
