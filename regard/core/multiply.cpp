// y = x p for many rows, and maybe more than that while it is still near, for processors that torch's library was not made
// for. What is multiplied by lies in panels, made once; rows are read where they are. Called by core/multiply.py, and tested
// against torch. Memory is the caller's; nothing is allocated, nothing is kept.

#include "native.h"
#include <limits.h>

// Numbers that are taken at a time, so that they stay in the caches: of what is summed up; rows.
enum { DEEP = 384, HIGH = 120 };
// The same for tiles: numbers of rows in all; of what is summed up, at the most and, where there are many rows, at the least.
enum { NEAR = 3 << 16, FAR_DOWN = 768, SHALLOW = 256 };
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

// Numbers of room that a core needs.
template <typename Real> constexpr long room_size() { return HIGH * DEEP; }
#if TILES
template <> constexpr long room_size<float>() { return NEAR / 2 * 3 + panel_size<float>(FAR_DOWN); }
#endif

template <typename Real> struct Times {
    const Real *x, *panels, *bias;  // (rows, deep), in any order; as `pack` has them; (wide)
    Real *y, *room;  // (rows, wide); (threads, HIGH * DEEP)
    const Real *hidden;  // (rows, wide), as y lies: y becomes y times the slope of the bend there
    Real *bent;  // the bend of hidden; without hidden, of y
    int64_t rows, wide, deep, x_row, x_deep, y_row, adds, how, threads;  // adds: to what y holds
    const Times *more;  // another product of the same x
    const Real *p;  // (deep, wide), in any order: where there are no panels, they are made one by one, in tiles
    int64_t p_deep, p_wide;
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
template <typename Real> static void finish(const Times<Real> &a, long first, long rows, long column, long some) {
    for (long r = first; r < first + rows; r++) {
        const long at = r * a.y_row + column;
        if (a.hidden)
            unbend(a.hidden + at, a.bent + at, a.y + at, some, a.how);
        else
            bends(a.y + at, a.bent + at, some, a.how);
    }
}

template <typename Real> static void multiply(const Times<Real> &a, Share own) {
    const long panel = PANEL * lanes<Real>(), tiles = (a.rows + ROWS - 1) / ROWS, panels = (a.wide + panel - 1) / panel;
    const bool by_rows = tiles >= panels, near = a.wide * a.deep * (long)sizeof(Real) < LARGE;
    const long top = by_rows ? own.begin(tiles) * ROWS : 0, end = least(by_rows ? own.end(tiles) * ROWS : a.rows, a.rows);
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
        if (a.bent && k + deep == a.deep) finish(a, m, rows, left, right - left);
    }
}

template <typename Real> static void multiply_all(const Times<Real> &a, Share own) {
    for (const Times<Real> *one = &a; one; one = one->more) multiply(*one, own);
}

#if TILES
// The same in tiles. Rows are split into parts some at a time, as many as stay near while all panels pass.
static void pack(const float *p, float *to, long deep, long wide, long down, long beside, Share own) {
    const long panel = PANEL * lanes<float>(), panels = (wide + panel - 1) / panel, size = panel_size<float>(deep);
    for (long i = own.begin(panels); i < own.end(panels); i++)
        tiles::right(p + i * panel * beside, down, beside, wide - i * panel, deep, (uint32_t *)(to + i * size));
}

static void multiply_all(const Times<float> &a, Share own) {
    const tiles::Ready ready;
    const long panel = PANEL * lanes<float>(), some = tile_rows<float>(), size = panel_size<float>(a.deep);
    const long groups = (a.rows + some - 1) / some;
    const bool by_rows = groups >= (a.wide + panel - 1) / panel;
    const long top = by_rows ? own.begin(groups) * some : 0, end = least(by_rows ? own.end(groups) * some : a.rows, a.rows);
    const long most = a.panels ? FAR_DOWN : least(FAR_DOWN, NEAR / up(end - top + 1, some));  // so that all rows stay near
    const long down = cut(a.deep, most > SHALLOW ? most / tiles::PAIR * tiles::PAIR : SHALLOW, tiles::PAIR);
    const long high = NEAR / down / some * some;
    uint32_t *room = (uint32_t *)(a.room + own.which * room_size<float>()), *made = room + NEAR / 2 * 3;
    for (long m = top; m < end; m += high)
        for (long k = 0; k < a.deep; k += down) {
            const long rows = least(end - m, high), deep = least(a.deep - k, down), blocks = tiles::blocks(deep);
            for (long i = 0; i < rows; i += some)
                tiles::left(a.x + (m + i) * a.x_row + k * a.x_deep, a.x_row, a.x_deep, least(rows - i, some), deep, 1,
                            room + i / some * blocks * tiles::BLOCK);
            for (const Times<float> *one = &a; one; one = one->more) {
                const long panels = (one->wide + panel - 1) / panel;
                const long left = by_rows ? 0 : own.begin(panels), right = by_rows ? panels : own.end(panels);
                const uint32_t *laid = (const uint32_t *)one->panels + k / tiles::PAIR * tiles::BLOCK;
                const auto place = [&](long i, long o) { return one->y + (m + i) * one->y_row + o * panel; };
                const auto tile = [&](long i, long o, const uint32_t *p, const float *coming) {
                    tiles::product(room + i / some * blocks * tiles::BLOCK, p, blocks, place(i, o), one->y_row,
                                   least(rows - i, some), one->wide - o * panel, one->adds || k,
                                   one->bias ? one->bias + o * panel : 0, coming);
                };
                for (long i = 0; one->panels && i < rows; i += some)
                    for (long o = left; o < right; o++)
                        tile(i, o, laid + o * size, o + 1 < right ? place(i, o + 1) : place(i + some, left));
                for (long o = left; !one->panels && o < right; o++) {
                    tiles::right(one->p + k * one->p_deep + o * panel * one->p_wide, one->p_deep, one->p_wide,
                                 one->wide - o * panel, deep, made);
                    for (long i = 0; i < rows; i += some)
                        tile(i, o, made, i + some < rows ? place(i + some, o) : place(0, o + 1));
                }
                const long first = left * panel;
                if (one->bent && k + deep == a.deep && right > left)
                    finish(*one, m, rows, first, least(one->wide, right * panel) - first);
            }
        }
}
#endif

#define KERNELS(Real, name)                                                                                            \
    extern "C" {                                                                                                       \
    void pack_##name(const Real *p, Real *to, long deep, long wide, long down, long beside, int threads) {             \
        spread(threads, [=](Share own) { pack(p, to, deep, wide, down, beside, own); });                               \
    }                                                                                                                  \
    void multiply_##name(const Times<Real> *a) {                                                                       \
        spread(a->threads, [=](Share own) { multiply_all(*a, own); });                                                 \
    }                                                                                                                  \
    long piece_##name(void) { return room_size<Real>(); }                                                               \
    }
KERNELS(float, float32)
KERNELS(double, float64)

// Channels from which on and up to which products of numbers of so many bytes are faster here than in torch's library, which
// was not made for tiles, nor for the processors of another maker. With few channels, tiles spend too long on splitting.
extern "C" long channels(int bytes, int most) {
#if TILES
    if (bytes == sizeof(float)) return most ? LONG_MAX : 256;
#elif defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return most ? 256 : 0;
#endif
    return 0;
}

// Rows of floats, up to which panels are best made one by one; 0: never.
extern "C" long one_by_one(void) { return TILES ? NEAR / SHALLOW : 0; }
