// Shared by the kernels: a table of segments of a flat array, casts to fp32, and loads of four elements at once.
//
// No header of CUDA or of the C++ library is included, since not every installation has them where NVRTC looks; so
// bf16 and fp16 are read as bits. Warps and lanes are not used: the tests also compile these files for the host, and
// run them there with any number of threads.
#pragma once

constexpr int MAX_SEGMENTS = 128;

// The same numbers as in odc_mpi/comm/kernels/native.py.
enum Type : unsigned char { FLOAT32, BFLOAT16, FLOAT16 };

// Passed by value with the launch, so it needs neither a copy to the device nor memory that must outlive the kernel.
// The arguments of a launch are limited to 4096 bytes.
struct Segments {
    const void *source[MAX_SEGMENTS];
    long long start[MAX_SEGMENTS];  // offset of the first element in the flat array
    long long stop[MAX_SEGMENTS];   // one past the last element
    unsigned char type[MAX_SEGMENTS];
};

// Each block processes tiles of the flat array of NUMEL_PER_THREAD elements per thread, independent of the segments
// there: so the load is balanced if segments have very different sizes. A thread loads all its quads of a tile before
// it stores the first.
constexpr int QUADS_PER_THREAD = 2;
constexpr int NUMEL_PER_THREAD = 4 * QUADS_PER_THREAD;

// Maximum number of threads per block. With the blocks that share a multiprocessor, all values fit in registers.
constexpr int MAX_THREADS = 256;

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
    T v[4];
};

struct BFloat16 {
    unsigned short bits;
};

struct Float16 {
    unsigned short bits;
};

// The sum is PTX: CuPy compiles with -ftz=true, with which the compiler would flush subnormals to zero.
__device__ inline float plus(float a, float b)
{
#ifdef __CUDACC__
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
#else
    return a + b;
#endif
}

// Casts to fp32, which is exact.
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ inline float widen(Float16 x)
{
    const unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    unsigned bits = rest << 13;  // exponent and mantissa at their position in fp32
    if (rest >= 0x7c00u)
        bits |= 0x7f800000u;
    else if (rest >= 0x400u)
        bits += 112u << 23;
    else if (rest > 0)  // subnormal: multiples of 2^-24
        bits = __float_as_uint(static_cast<float>(rest)) - (24u << 23);
    return __uint_as_float(sign | bits);
}

// True if quads may be loaded from or stored to this address.
template <typename T>
__device__ inline bool is_aligned(const T *p)
{
    return reinterpret_cast<unsigned long long>(p) % alignof(Quad<T>) == 0;
}

// Calls work(p) with the address p of the element of a segment for position `at` of the flat array. Uniform in a block.
template <typename Work>
__device__ inline void with_source(const Segments &segments, int segment, long long at, Work work)
{
    const void *source = segments.source[segment];
    const long long skipped = at - segments.start[segment];
    switch (segments.type[segment]) {
    case FLOAT32: work(static_cast<const float *>(source) + skipped); break;
    case BFLOAT16: work(static_cast<const BFloat16 *>(source) + skipped); break;
    case FLOAT16: work(static_cast<const Float16 *>(source) + skipped); break;
    }
}
