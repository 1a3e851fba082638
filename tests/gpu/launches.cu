// Nanoseconds per launch of an empty kernel: reads a count per line, launches so often, prints the mean.
//
//     nvcc -O2 -o launches tests/gpu/launches.cu; echo 1000000 | taskset -c 2 ./launches
#include <chrono>
#include <cstdio>

__global__ void empty() {}

int main()
{
    long count;
    while (scanf("%ld", &count) == 1) {
        cudaDeviceSynchronize();
        auto begin = std::chrono::steady_clock::now();
        for (long i = 0; i < count; i++)
            empty<<<1, 32>>>();
        auto end = std::chrono::steady_clock::now();
        if (cudaDeviceSynchronize() != cudaSuccess) {
            fprintf(stderr, "a launch failed\n");
            return 1;
        }
        printf("%.3f\n", std::chrono::duration<double, std::nano>(end - begin).count() / count);
        fflush(stdout);
    }
}
