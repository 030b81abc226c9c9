// Gradients of several parameters are cast and laid into a flat array, and the largest magnitude is worked out, in one
// pass: every element of the array is written once, every element of a gradient read once.
#include "pieces.cuh"

constexpr int BLOCKS_PER_MULTIPROCESSOR = 4;

// A magnitude as bits without a sign. Their order as integers is that of the numbers, infinity and then NaN on top: so
// the largest of them tells of a single NaN among them.
__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline unsigned long long magnitude(double x)
{
    return static_cast<unsigned long long>(__double_as_longlong(x)) & 0x7fffffffffffffffull;
}

template <typename T>
using Magnitude = decltype(magnitude(T()));

__device__ inline unsigned long long as_double(unsigned bits)
{
    if (bits > 0x7f800000u)
        return 0x7ff8000000000000ull;  // not left to the conversion: it may give a NaN any sign
    return __double_as_longlong(to_double(__uint_as_float(bits)));
}

__device__ inline unsigned long long as_double(unsigned long long bits) { return bits; }

// Casts source[i] to target[i] by all threads of a block.
template <typename To, typename From>
__device__ void lay(To *__restrict__ target, const From *__restrict__ source, int numel, Magnitude<To> &largest)
{
    const int num_quads = is_aligned(target) && is_aligned(source) ? numel / 4 : 0;
    const int threads = blockDim.x;
    for (int first = threadIdx.x; first < num_quads; first += QUADS_PER_THREAD * threads) {
        Quad<From> read[QUADS_PER_THREAD];
#pragma unroll
        for (int q = 0; q < QUADS_PER_THREAD; q++) {
            const int i = first + q * threads;
            if (i < num_quads)
                read[q] = reinterpret_cast<const Quad<From> *>(source)[i];
        }
#pragma unroll
        for (int q = 0; q < QUADS_PER_THREAD; q++) {
            const int i = first + q * threads;
            if (i < num_quads) {
                Quad<To> made;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    made.v[k] = cast<To>(read[q].v[k]);
                    largest = max(largest, magnitude(made.v[k]));
                }
                reinterpret_cast<Quad<To> *>(target)[i] = made;
            }
        }
    }
    for (int i = 4 * num_quads + threadIdx.x; i < numel; i += threads) {
        const To made = cast<To>(source[i]);
        largest = max(largest, magnitude(made));
        target[i] = made;
    }
}

template <typename To>
__device__ void clear(To *target, int numel)
{
    for (int i = threadIdx.x; i < numel; i += blockDim.x)
        target[i] = 0;
}

// The first piece that goes on behind `at`; pieces are in order.
__device__ inline int find_piece(const Pieces &pieces, int num_pieces, long long at)
{
    int low = 0, high = num_pieces;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (pieces.stop[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Raises *largest, a double, to the largest magnitude that a thread of this block has seen.
template <typename Bits>
__device__ void raise(unsigned long long *largest, Bits seen)
{
    __shared__ Bits of_block;
    if (threadIdx.x == 0)
        of_block = 0;
    __syncthreads();
    atomicMax(&of_block, seen);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicMax(largest, as_double(of_block));
}

template <typename To>
__device__ void flatten(const Pieces &pieces, int num_pieces, long long first, long long stop, To *flat,
                        unsigned long long *largest)
{
    const long long stretch = NUMEL_PER_THREAD * blockDim.x;
    Magnitude<To> seen = 0;
    for (long long begin = first + blockIdx.x * stretch; begin < stop; begin += gridDim.x * stretch) {
        const long long end = min(begin + stretch, stop);
        long long at = begin;
        for (int i = find_piece(pieces, num_pieces, begin); at < end; i++) {
            const long long piece = i < num_pieces ? min(pieces.start[i], end) : end;
            if (at < piece) {
                clear(flat + at, static_cast<int>(piece - at));
                at = piece;
            }
            if (at < end) {
                const int numel = static_cast<int>(min(pieces.stop[i], end) - at);
                with_source(pieces, i, at, [&](auto source) { lay(flat + at, source, numel, seen); });
                at += numel;
            }
        }
    }
    raise(largest, seen);
}

// Writes flat[first] to flat[stop - 1]: the pieces, which are in order and do not overlap, and zeros between them.
// Raises *largest, a double that is at least zero, to the largest magnitude; to NaN if there is one.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
flatten_float32(const __grid_constant__ Pieces pieces, int num_pieces, long long first, long long stop, float *flat,
                unsigned long long *largest)
{
    flatten(pieces, num_pieces, first, stop, flat, largest);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
flatten_float64(const __grid_constant__ Pieces pieces, int num_pieces, long long first, long long stop, double *flat,
                unsigned long long *largest)
{
    flatten(pieces, num_pieces, first, stop, flat, largest);
}
