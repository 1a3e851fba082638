// Replays CUDA graphs in two contexts on command, one a line:
//
//     nvcc -O2 -o graphs tests/gpu/graphs.cu -lcuda
//
//     graph CONTEXT NODES CLOCKS   captures a chain of kernels that each spin so long, in context 0 or 1; answers its number
//     replay GRAPH COUNT           answers the seconds that they took
//     memory                       answers the bytes in use on the GPU
//     start, stop                  tell the kernel agent, which is loaded into the program; answer what it answers
//
// The agent is told to stop before there is a context: what is captured first was captured before any tracing.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <vector>

__global__ void node(long clocks)
{
    for (long long begin = clocks ? clock64() : 0; clocks && clock64() - begin < clocks;)
        ;
}

struct Graph {
    int context;
    cudaStream_t stream;
    cudaGraphExec_t executable;
};

static CUcontext contexts[2];

static void check(int code, const char *what)
{
    if (code) {
        fprintf(stderr, "%s: error %d\n", what, code);
        exit(1);
    }
}

static int tell_agent(const char *function)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    void *symbol = library ? dlsym(library, function) : nullptr;
    return symbol ? reinterpret_cast<int (*)()>(symbol)() : -1;
}

static Graph capture(int context, int nodes, long clocks)
{
    check(cuCtxSetCurrent(contexts[context]), "cuCtxSetCurrent");
    Graph made{context, nullptr, nullptr};
    cudaGraph_t graph;
    check(cudaStreamCreate(&made.stream), "cudaStreamCreate");
    check(cudaStreamBeginCapture(made.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < nodes; i++)
        node<<<1, 32, 0, made.stream>>>(clocks);
    check(cudaStreamEndCapture(made.stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&made.executable, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return made;
}

static double replay(const Graph &graph, long count)
{
    check(cuCtxSetCurrent(contexts[graph.context]), "cuCtxSetCurrent");
    auto begin = std::chrono::steady_clock::now();
    for (long i = 0; i < count; i++)
        check(cudaGraphLaunch(graph.executable, graph.stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(graph.stream), "cudaStreamSynchronize");
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

static size_t used_memory()
{
    size_t free_bytes, all;
    check(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    return all - free_bytes;
}

int main()
{
    char command[16];
    int first;
    long second, third;
    std::vector<Graph> graphs;
    CUdevice device;
    check(cuInit(0), "cuInit");
    tell_agent("gpu_hpc_agent_stop");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&contexts[0], device), "cuDevicePrimaryCtxRetain");
#if CUDA_VERSION >= 13000
    check(cuCtxCreate(&contexts[1], nullptr, 0, device), "cuCtxCreate");
#else
    check(cuCtxCreate(&contexts[1], 0, device), "cuCtxCreate");
#endif
    while (scanf("%15s", command) == 1) {
        if (!strcmp(command, "graph") && scanf("%d %ld %ld", &first, &second, &third) == 3) {
            graphs.push_back(capture(first, static_cast<int>(second), third));
            printf("%zu\n", graphs.size() - 1);
        } else if (!strcmp(command, "replay") && scanf("%d %ld", &first, &second) == 2) {
            printf("%.9f\n", replay(graphs.at(first), second));
        } else if (!strcmp(command, "memory")) {
            printf("%zu\n", used_memory());
        } else if (!strcmp(command, "start")) {
            printf("%d\n", tell_agent("gpu_hpc_agent_start"));
        } else {
            printf("%d\n", tell_agent("gpu_hpc_agent_stop"));
        }
        fflush(stdout);
    }
}
