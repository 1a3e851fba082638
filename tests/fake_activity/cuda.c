/* libcuda.so.1: cuInit loads the injected library, as the driver does. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_activity.h"

static _Thread_local bool in_host; /* the host program may initialise CUDA, the agent must not */
void host_calls(bool yes) { in_host = yes; }

int cuInit(unsigned flags)
{
    (void)flags;
    if (!in_host) {
        fprintf(stderr, "fake_activity: cuInit was called by the agent\n");
        abort();
    }
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    void *function = library ? dlsym(library, "InitializeInjection") : NULL;
    int (*initialize)(void);
    memcpy(&initialize, &function, sizeof function);
    cuda_init_goes_on(true);
    bool is_done = function && initialize() == 1;
    cuda_init_goes_on(false);
    if (path && !is_done)
        fprintf(stderr, "fake_activity: the injection failed: %s\n", library ? "no function" : dlerror());
    cuda_init_done();
    return OK;
}

int cuDriverGetVersion(int *version)
{
    int code = call(__func__);
    *version = settings.driver;
    return code;
}

int cuDeviceGetCount(int *count)
{
    int code = call(__func__);
    *count = settings.devices;
    return code ? code : cuda_is_init() ? OK : 3;
}

int cuDeviceGet(int *device, int ordinal)
{
    int code = call(__func__);
    *device = 100 + ordinal; /* a handle is no ordinal */
    return code;
}

int cuDeviceGetUuid_v2(uint8_t uuid[16], int device)
{
    int code = call(__func__);
    for (int i = 0; i < 16; i++)
        uuid[i] = (uint8_t)(device - 100 + 16 * i + 1);
    return code;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    int code = call(__func__);
    *flags = 0;
    *active = cuda_contexts(device - 100) > 0;
    return code;
}
