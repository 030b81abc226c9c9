// Casts and copies gradients of several parameters into a flat array, and computes the largest magnitude, in one pass:
// every element of the array is written once, every element of a gradient is read once.
#include "segments.cuh"

constexpr int BLOCKS_PER_MULTIPROCESSOR = 4;

// Magnitude as bits without the sign. Their order as integers is the order of the numbers, followed by infinity and
// NaN: so the maximum is NaN if any element is NaN.
__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Returns the bits of a double, for the bits of a float that is not negative.
__device__ inline unsigned long long as_double(unsigned bits)
{
    if (bits > 0x7f800000u)
        return 0x7ff8000000000000ull;  // the conversion may give a NaN any sign
#ifdef __CUDACC__
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(__uint_as_float(bits)));  // flushes no subnormals, see `plus`
#else
    const double wide = __uint_as_float(bits);
#endif
    return __double_as_longlong(wide);
}

// Casts source[i] to target[i] with all threads of a block.
template <typename From>
__device__ void copy_cast(float *__restrict__ target, const From *__restrict__ source, int numel, unsigned &largest)
{
    const int num_quads = is_aligned(target) && is_aligned(source) ? numel / 4 : 0;
    const int threads = blockDim.x;
    for (int first = threadIdx.x; first < num_quads; first += QUADS_PER_THREAD * threads) {
        Quad<From> loaded[QUADS_PER_THREAD];
#pragma unroll
        for (int q = 0; q < QUADS_PER_THREAD; q++) {
            const int i = first + q * threads;
            if (i < num_quads)
                loaded[q] = reinterpret_cast<const Quad<From> *>(source)[i];
        }
#pragma unroll
        for (int q = 0; q < QUADS_PER_THREAD; q++) {
            const int i = first + q * threads;
            if (i < num_quads) {
                Quad<float> value;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    value.v[k] = widen(loaded[q].v[k]);
                    largest = max(largest, magnitude(value.v[k]));
                }
                reinterpret_cast<Quad<float> *>(target)[i] = value;
            }
        }
    }
    for (int i = 4 * num_quads + threadIdx.x; i < numel; i += threads) {
        const float value = widen(source[i]);
        largest = max(largest, magnitude(value));
        target[i] = value;
    }
}

__device__ inline void clear(float *target, int numel)
{
    for (int i = threadIdx.x; i < numel; i += blockDim.x)
        target[i] = 0;
}

// Returns the first segment that ends after `at`. Segments are sorted.
__device__ inline int find_segment(const Segments &segments, int num_segments, long long at)
{
    int low = 0, high = num_segments;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (segments.stop[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Raises *largest, a double, to the maximum over the threads of this block.
__device__ inline void atomic_max_magnitude(unsigned long long *largest, unsigned local_max)
{
    __shared__ unsigned block_max;
    if (threadIdx.x == 0)
        block_max = 0;
    __syncthreads();
    atomicMax(&block_max, local_max);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicMax(largest, as_double(block_max));
}

// Writes flat[first] to flat[stop - 1]: the segments, which are sorted and do not overlap, and zeros between them.
// Raises *largest, a double that is at least zero, to the largest magnitude, or to NaN if an element is NaN.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
flatten(const __grid_constant__ Segments segments, int num_segments, long long first, long long stop, float *flat,
        unsigned long long *largest)
{
    const long long tile = NUMEL_PER_THREAD * blockDim.x;
    unsigned local_max = 0;
    for (long long begin = first + blockIdx.x * tile; begin < stop; begin += gridDim.x * tile) {
        const long long end = min(begin + tile, stop);
        long long at = begin;
        for (int i = find_segment(segments, num_segments, begin); at < end; i++) {
            const long long start = i < num_segments ? min(segments.start[i], end) : end;
            if (at < start) {
                clear(flat + at, static_cast<int>(start - at));
                at = start;
            }
            if (at < end) {
                const int numel = static_cast<int>(min(segments.stop[i], end) - at);
                with_source(segments, i, at, [&](auto source) { copy_cast(flat + at, source, numel, local_max); });
                at += numel;
            }
        }
    }
    atomic_max_magnitude(largest, local_max);
}
