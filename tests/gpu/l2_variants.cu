// How much of L2's peak real kernels reach. Built and read by:
//
//   nvcc -O3 -arch=native -o l2_variants tests/gpu/l2_variants.cu
//   ncu --clock-control none --metrics lts__t_sectors.avg.pct_of_peak_sustained_elapsed,lts__t_bytes.sum.per_second \
//     ./l2_variants
//
// Each kernel touches a buffer that fits into L2 again and again, past L1.

#include <cstdio>

constexpr int THREADS = 1024, BLOCKS = 264, ROUNDS = 4096;

template <int UNROLL> __global__ void read(const uint4 *source, uint4 *target, unsigned mask) {
    unsigned at = (blockIdx.x * 2654435761u & ~31u) + threadIdx.x;
    unsigned total = 0;
    for (int round = 0; round < ROUNDS / UNROLL; ++round) {
        uint4 got[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) got[i] = __ldcg(source + ((at + i * THREADS) & mask));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) total += got[i].x ^ got[i].y ^ got[i].z ^ got[i].w;
        at += UNROLL * THREADS;
    }
    if (total == 0x12345678) target[threadIdx.x].x = total;
}

__global__ void write(uint4 *target, unsigned mask) {
    unsigned at = (blockIdx.x * 2654435761u & ~31u) + threadIdx.x;
    for (int round = 0; round < ROUNDS; ++round, at += THREADS) __stcg(target + (at & mask), make_uint4(at, at, at, at));
}

__global__ void copy(const uint4 *source, uint4 *target, unsigned mask) {
    unsigned at = (blockIdx.x * 2654435761u & ~31u) + threadIdx.x;
    for (int round = 0; round < ROUNDS / 4; ++round, at += 4 * THREADS) {
        uint4 got[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) got[i] = __ldcg(source + ((at + i * THREADS) & mask));
#pragma unroll
        for (int i = 0; i < 4; ++i) __stcg(target + ((at + i * THREADS) & mask), got[i]);
    }
}

__global__ void add(unsigned *target, unsigned mask) {
    unsigned at = (blockIdx.x * 2654435761u & ~31u) + threadIdx.x;
    for (int round = 0; round < ROUNDS; ++round, at += THREADS) atomicAdd(target + (at & mask), 1u);
}

int main() {
    uint4 *source, *target;
    cudaMalloc(&source, 64 << 20);
    cudaMalloc(&target, 64 << 20);
    cudaMemset(source, 1, 64 << 20);
    for (unsigned mib : {1u, 4u, 16u}) {
        unsigned mask = (mib << 20) / sizeof(uint4) - 1;
        read<1><<<BLOCKS, THREADS>>>(source, target, mask);
        read<4><<<BLOCKS, THREADS>>>(source, target, mask);
        read<8><<<BLOCKS, THREADS>>>(source, target, mask);
        write<<<BLOCKS, THREADS>>>(target, mask);
        copy<<<BLOCKS, THREADS>>>(source, target, mask);
        add<<<BLOCKS, THREADS>>>(reinterpret_cast<unsigned *>(target), mask);
    }
    return cudaDeviceSynchronize() != cudaSuccess;
}
