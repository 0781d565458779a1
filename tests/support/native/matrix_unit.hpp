// What the matrix unit does, in software, for processors without one: include it first, in place of -DFRISKET_AMX.
// Products as Intel's manual has them for TDPBF16PS: even and odd numbers are summed up apart, each product and sum is
// rounded once, and both sums are added to C at the end.
#include <cstring>

#define FRISKET_AMX 2

struct MatrixUnit {  // registers hold nothing before and after
    MatrixUnit();
    ~MatrixUnit();
};
static thread_local float registers[8][16][16];
static thread_local bool ready;
inline MatrixUnit::MatrixUnit() { ready = true; }
inline MatrixUnit::~MatrixUnit() { ready = false, std::memset(registers, 0xFF, sizeof registers); }

template <int T> static void square_of_zeros() { std::memset(registers[T], ready ? 0 : 0xFF, sizeof registers[T]); }
template <int T> static void load_square(const void *from, long row) {
    for (int i = 0; i < 16; i++) std::memcpy(registers[T][i], (const float *)from + i * row, 64);
}
template <int T> static void store_square(void *to, long row) {
    for (int i = 0; i < 16; i++) std::memcpy((float *)to + i * row, registers[T][i], 64);
}
static float half_of(float pair, int which) {
    unsigned bits;
    std::memcpy(&bits, &pair, 4);
    bits = which ? bits & 0xFFFF0000 : bits << 16;
    std::memcpy(&pair, &bits, 4);
    return __builtin_fabsf(pair) < 1.17549435e-38f ? 0 : pair;  // subnormal numbers are zeros
}
template <int C, int A, int B> static void add_product() {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float sum[2] = {};
            for (int k = 0; k < 16; k++)
                for (int which = 0; which < 2; which++)
                    sum[which] = __builtin_fmaf(half_of(registers[A][i][k], which), half_of(registers[B][k][j], which), sum[which]);
            registers[C][i][j] += sum[0] + sum[1];
        }
}
template <int C, int A, int B> static void add_product_of_bytes() {  // TDPBSSD
    signed char a[16][64], b[16][64];
    std::memcpy(a, registers[A], sizeof a), std::memcpy(b, registers[B], sizeof b);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int sum;
            std::memcpy(&sum, &registers[C][i][j], 4);
            for (int k = 0; k < 64; k++) sum += a[i][k] * b[k / 4][4 * j + k % 4];
            std::memcpy(&registers[C][i][j], &sum, 4);
        }
}
