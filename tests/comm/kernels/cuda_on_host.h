// As much of CUDA as the kernels need, for the host: each thread of a block is a thread, blocks come one after another.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct Index {
    unsigned x;
};

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
inline pthread_barrier_t block_barrier;

inline void __syncthreads() { pthread_barrier_wait(&block_barrier); }

template <typename T>
void atomicMax(T *address, T value)
{
    T before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(address, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

template <typename To, typename From>
To same_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }

template <typename... Parameters, typename... Arguments>
void launch(int blocks, int threads, void (*kernel)(Parameters...), Arguments... arguments)
{
    pthread_barrier_init(&block_barrier, nullptr, threads);
    std::vector<std::thread> block;
    for (int thread = 0; thread < threads; thread++)
        block.emplace_back([=] {
            threadIdx.x = thread, blockDim.x = threads, gridDim.x = blocks;
            for (int i = 0; i < blocks; i++) {
                blockIdx.x = i;
                kernel(arguments...);
                __syncthreads();  // what threads share is the next block's
            }
        });
    for (std::thread &thread : block)
        thread.join();
    pthread_barrier_destroy(&block_barrier);
}
