// Adds segments to a shard in one pass: every element of the shard that is in a segment is read and written once, and
// its terms are added in the order of the segments, ((shard + segment 0) + segment 1) + ...
#include "segments.cuh"

constexpr int BLOCKS_PER_MULTIPROCESSOR = 3;

// Elements of a tile in one thread: quads at a stride of the block size.
template <typename T>
struct Fragment {
    Quad<T> quads[QUADS_PER_THREAD];
};

__device__ inline long long quad_start(long long begin, int quad)
{
    return begin + 4ll * (threadIdx.x + quad * blockDim.x);
}

// Loads elements `from` to `to` of an array whose element `begin` is at `source`; the others are not changed.
template <typename T>
__device__ inline void load(const T *__restrict__ source, long long begin, long long from, long long to,
                            Fragment<T> &fragment)
{
    const bool aligned = is_aligned(source);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
        if (aligned && from <= start && start + 4 <= to) {
            fragment.quads[q] = *reinterpret_cast<const Quad<T> *>(source + (start - begin));
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (from <= start + k && start + k < to)
                    fragment.quads[q].v[k] = source[start + k - begin];
        }
    }
}

__device__ inline void store(float *target, long long begin, long long end, const Fragment<float> &fragment)
{
    const bool aligned = is_aligned(target);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
        if (aligned && start + 4 <= end) {
            *reinterpret_cast<Quad<float> *>(target + (start - begin)) = fragment.quads[q];
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (start + k < end)
                    target[start + k - begin] = fragment.quads[q].v[k];
        }
    }
}

template <typename From>
__device__ inline void add(const From *source, long long begin, long long from, long long to, Fragment<float> &sums)
{
    Fragment<From> terms;
    load(source, begin, from, to, terms);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (from <= start + k && start + k < to)
                sums.quads[q].v[k] = plus(sums.quads[q].v[k], widen(terms.quads[q].v[k]));
    }
}

// Adds segments, which may overlap and are in any order, to shard[first] up to shard[stop - 1].
extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
add_segments(const __grid_constant__ Segments segments, int num_segments, long long first, long long stop, float *shard)
{
    const long long tile = NUMEL_PER_THREAD * blockDim.x;
    for (long long begin = first + blockIdx.x * tile; begin < stop; begin += gridDim.x * tile) {
        const long long end = min(begin + tile, stop);
        Fragment<float> sums;
        bool touched = false;
        for (int i = 0; i < num_segments; i++) {
            const long long from = max(begin, segments.start[i]), to = min(end, segments.stop[i]);
            if (from >= to)
                continue;
            if (!touched)
                load(shard + begin, begin, begin, end, sums);
            touched = true;
            // The address for element `begin` may be before the segment. Only elements of the segment are loaded.
            with_source(segments, i, begin, [&](auto source) { add(source, begin, from, to, sums); });
        }
        if (touched)
            store(shard + begin, begin, end, sums);
    }
}
