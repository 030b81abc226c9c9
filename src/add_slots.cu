// An owner adds what others have put into its slots, in one pass: every element of the shard that a slot reaches is
// read and written once, and its sum is made in the order of the slots, ((shard + slot 0) + slot 1) + ...
#include "pieces.cuh"

constexpr int BLOCKS_PER_MULTIPROCESSOR = 3;

// What a thread has of a stretch: quads at a distance of all threads of the block.
template <typename T>
struct Part {
    Quad<T> quads[QUADS_PER_THREAD];
};

__device__ inline long long quad_start(long long begin, int quad)
{
    return begin + 4ll * (threadIdx.x + quad * blockDim.x);
}

// Reads elements `from` to `to` of an array whose element `begin` is at `source`; others stay as they are.
template <typename T>
__device__ inline void read(const T *__restrict__ source, long long begin, long long from, long long to, Part<T> &part)
{
    const bool aligned = is_aligned(source);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
        if (aligned && from <= start && start + 4 <= to) {
            part.quads[q] = *reinterpret_cast<const Quad<T> *>(source + (start - begin));
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (from <= start + k && start + k < to)
                    part.quads[q].v[k] = source[start + k - begin];
        }
    }
}

template <typename T>
__device__ inline void write(T *target, long long begin, long long end, const Part<T> &part)
{
    const bool aligned = is_aligned(target);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
        if (aligned && start + 4 <= end) {
            *reinterpret_cast<Quad<T> *>(target + (start - begin)) = part.quads[q];
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (start + k < end)
                    target[start + k - begin] = part.quads[q].v[k];
        }
    }
}

template <typename To, typename From>
__device__ inline void add(const From *source, long long begin, long long from, long long to, Part<To> &sums)
{
    Part<From> terms;
    read(source, begin, from, to, terms);
#pragma unroll
    for (int q = 0; q < QUADS_PER_THREAD; q++) {
        const long long start = quad_start(begin, q);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (from <= start + k && start + k < to)
                sums.quads[q].v[k] = plus(sums.quads[q].v[k], cast<To>(terms.quads[q].v[k]));
    }
}

template <typename To>
__device__ void add_slots(const Pieces &slots, int num_slots, long long first, long long stop, To *shard)
{
    const long long stretch = NUMEL_PER_THREAD * blockDim.x;
    for (long long begin = first + blockIdx.x * stretch; begin < stop; begin += gridDim.x * stretch) {
        const long long end = min(begin + stretch, stop);
        Part<To> sums;
        bool touched = false;
        for (int i = 0; i < num_slots; i++) {
            const long long from = max(begin, slots.start[i]), to = min(end, slots.stop[i]);
            if (from >= to)
                continue;
            if (!touched)
                read(shard + begin, begin, begin, end, sums);
            touched = true;
            // What would be the slot's element `begin`; it may begin later, and then that is not looked at.
            with_source(slots, i, begin, [&](auto source) { add(source, begin, from, to, sums); });
        }
        if (touched)
            write(shard + begin, begin, end, sums);
    }
}

// Adds slots, which may overlap and lie in any order, to shard[first] up to shard[stop - 1].
extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
add_slots_float32(const __grid_constant__ Pieces slots, int num_slots, long long first, long long stop, float *shard)
{
    add_slots(slots, num_slots, first, stop, shard);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS_PER_MULTIPROCESSOR)
add_slots_float64(const __grid_constant__ Pieces slots, int num_slots, long long first, long long stop, double *shard)
{
    add_slots(slots, num_slots, first, stop, shard);
}
