// What the matrix unit does, in software, for processors without one: include it first, in place of -DFRISKET_AMX.
// Products as Intel's manual has them for TDPBF16PS: even and odd numbers are summed up apart, each product and sum is
// rounded once, and both sums are added to C at the end. Nothing of it is inlined (`APART`): a kernel loads, stores and
// multiplies in dozens of places, which would take half as long again to compile.
#include <cstring>

#define FRISKET_AMX 2
#define APART __attribute__((noipa))

struct MatrixUnit {  // registers hold nothing before and after
    MatrixUnit();
    ~MatrixUnit();
};
static thread_local float registers[8][16][16];
static thread_local bool ready;
inline MatrixUnit::MatrixUnit() { ready = true; }
inline MatrixUnit::~MatrixUnit() { ready = false, std::memset(registers, 0xFF, sizeof registers); }

template <int T> APART static void square_of_zeros() { std::memset(registers[T], ready ? 0 : 0xFF, sizeof registers[T]); }
template <int T> APART static void load_square(const void *from, long row) {
    for (int i = 0; i < 16; i++) std::memcpy(registers[T][i], (const float *)from + i * row, 64);
}
template <int T> APART static void store_square(void *to, long row) {
    for (int i = 0; i < 16; i++) std::memcpy((float *)to + i * row, registers[T][i], 64);
}
static float half_of(float pair, int which) {
    unsigned bits;
    std::memcpy(&bits, &pair, 4);
    bits = which ? bits & 0xFFFF0000 : bits << 16;
    std::memcpy(&pair, &bits, 4);
    return __builtin_fabsf(pair) < 1.17549435e-38f ? 0 : pair;  // subnormal numbers are zeros
}
APART static void add_product_of(int c, int a, int b) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float sum[2] = {};
            for (int k = 0; k < 16; k++)
                for (int which = 0; which < 2; which++)
                    sum[which] = __builtin_fmaf(half_of(registers[a][i][k], which), half_of(registers[b][k][j], which), sum[which]);
            registers[c][i][j] += sum[0] + sum[1];
        }
}
template <int C, int A, int B> static void add_product() { add_product_of(C, A, B); }
APART static void add_product_of_bytes_of(int c, int at_a, int at_b) {  // TDPBSSD
    signed char a[16][64], b[16][64];
    std::memcpy(a, registers[at_a], sizeof a), std::memcpy(b, registers[at_b], sizeof b);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int sum;
            std::memcpy(&sum, &registers[c][i][j], 4);
            for (int k = 0; k < 64; k++) sum += a[i][k] * b[k / 4][4 * j + k % 4];
            std::memcpy(&registers[c][i][j], &sum, 4);
        }
}
template <int C, int A, int B> static void add_product_of_bytes() { add_product_of_bytes_of(C, A, B); }
