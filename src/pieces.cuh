// What the kernels share: a table of pieces of a flat array, casts, and loads of four elements at once.
//
// No header of CUDA or of the C++ library is included, since not every installation has them where NVRTC looks; so
// bf16 and fp16 are read as bits. Neither warps nor lanes are mentioned: the tests compile these files for the host,
// too, and run them there with any number of threads.
#pragma once

constexpr int MAX_PIECES = 128;

// As odc_mpi/comm/kernels/native.py numbers them.
enum Type : unsigned char { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

// Comes with the launch, by value: so it takes neither a copy to the device nor memory that has to outlive the kernel.
// A launch's arguments may take 4096 bytes.
struct Pieces {
    const void *source[MAX_PIECES];
    long long start[MAX_PIECES];  // of its first element in the flat array
    long long stop[MAX_PIECES];   // one past its last
    unsigned char type[MAX_PIECES];
};

// Each block works through stretches of the flat array of so many elements per thread, whatever pieces lie there: so no
// block waits where pieces are of very different sizes. They are read as quads, all before the first is written.
constexpr int QUADS_PER_THREAD = 2;
constexpr int NUMEL_PER_THREAD = 4 * QUADS_PER_THREAD;

// Threads of a block, at most; with the blocks that share a multiprocessor it leaves room for all values in registers.
constexpr int MAX_THREADS = 256;

template <typename T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Quad {
    T v[4];
};

struct BFloat16 {
    unsigned short bits;
};

struct Float16 {
    unsigned short bits;
};

// What rounds is written in PTX: CuPy compiles with -ftz=true, and the compiler would take subnormal numbers for zeros.
#ifdef __CUDACC__
__device__ inline float plus(float a, float b)
{
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ inline double to_double(float x)
{
    double same;
    asm("cvt.f64.f32 %0, %1;" : "=d"(same) : "f"(x));
    return same;
}

__device__ inline float to_float(double x)
{
    float nearest;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(nearest) : "d"(x));
    return nearest;
}
#else
inline float plus(float a, float b) { return a + b; }
inline double to_double(float x) { return x; }
inline float to_float(double x) { return static_cast<float>(x); }
#endif

__device__ inline double plus(double a, double b) { return a + b; }
__device__ inline double to_double(double x) { return x; }
__device__ inline float to_float(float x) { return x; }

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ inline float widen(Float16 x)
{
    const unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    unsigned bits = rest << 13;  // exponent and mantissa, where fp32 has them
    if (rest >= 0x7c00u)
        bits |= 0x7f800000u;
    else if (rest >= 0x400u)
        bits += 112u << 23;
    else if (rest > 0)  // subnormal: multiples of 2^-24
        bits = __float_as_uint(static_cast<float>(rest)) - (24u << 23);
    return __uint_as_float(sign | bits);
}

// Rounds to nearest, as torch does.
template <typename From>
__device__ inline void cast(From x, float &made)
{
    made = to_float(widen(x));
}

template <typename From>
__device__ inline void cast(From x, double &made)
{
    made = to_double(widen(x));
}

template <typename To, typename From>
__device__ inline To cast(From x)
{
    To made;
    cast(x, made);
    return made;
}

// Whether quads may be read or written from here on.
template <typename T>
__device__ inline bool is_aligned(const T *p)
{
    return reinterpret_cast<unsigned long long>(p) % alignof(Quad<T>) == 0;
}

// Calls work(p), p being where the piece has what belongs at `at` of the flat array. All threads of a block alike.
template <typename Work>
__device__ inline void with_source(const Pieces &pieces, int piece, long long at, Work work)
{
    const void *source = pieces.source[piece];
    const long long skipped = at - pieces.start[piece];
    switch (pieces.type[piece]) {
    case FLOAT32: work(static_cast<const float *>(source) + skipped); break;
    case FLOAT64: work(static_cast<const double *>(source) + skipped); break;
    case BFLOAT16: work(static_cast<const BFloat16 *>(source) + skipped); break;
    case FLOAT16: work(static_cast<const Float16 *>(source) + skipped); break;
    }
}
