/* libcuda.so.1: only what finds a GPU's CUDA ordinal. */
#include <stdio.h>
#include <string.h>

#include "fake_cupti.h"

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* Opens a call and enters the device behind an ordinal. */
static int open_device(Call *c, Function fn, int ordinal, const Device **device)
{
    int rc = call_open(c, fn);
    if (rc != OK)
        return rc;
    *device = ordinal >= 0 ? cuda_device(c->scenario, (size_t)ordinal) : NULL;
    rc = call_enter(c, *device ? (*device)->id : NO_DEVICE);
    return rc == OK && !*device ? CUDA_INVALID_DEVICE : rc;
}

int cuInit(unsigned flags)
{
    Call c;
    int rc = call_open(&c, FN_cuInit);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && flags != 0)
        rc = CUDA_INVALID_VALUE;
    if (rc == OK && cuda_start(c.scenario) == 0)
        rc = CUDA_NO_DEVICE;
    return call_close(&c, rc);
}

int cuDriverGetVersion(int *version)
{
    Call c;
    int rc = call_open(&c, FN_cuDriverGetVersion);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK)
        *version = c.scenario->driver_cuda;
    return call_close(&c, rc);
}

int cuDeviceGetCount(int *count)
{
    Call c;
    int rc = call_open(&c, FN_cuDeviceGetCount);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK)
        *count = cuda_device_count();
    return call_close(&c, rc);
}

int cuDeviceGet(int *handle, int ordinal)
{
    Call c;
    const Device *device;
    int rc = open_device(&c, FN_cuDeviceGet, ordinal, &device);
    if (rc == OK)
        *handle = ordinal; /* as the real CUdevice, in practice */
    return call_close(&c, rc);
}

static int get_uuid(Function fn, uint8_t *uuid, int handle)
{
    Call c;
    const Device *device;
    int rc = open_device(&c, fn, handle, &device);
    if (rc == OK)
        memcpy(uuid, device->uuid_bytes, sizeof device->uuid_bytes);
    return call_close(&c, rc);
}

int cuDeviceGetUuid(uint8_t *uuid, int handle) { return get_uuid(FN_cuDeviceGetUuid, uuid, handle); }
int cuDeviceGetUuid_v2(uint8_t *uuid, int handle) { return get_uuid(FN_cuDeviceGetUuid_v2, uuid, handle); }

int cuDeviceGetName(char *name, int size, int handle)
{
    Call c;
    const Device *device;
    int rc = open_device(&c, FN_cuDeviceGetName, handle, &device);
    if (rc == OK && size <= 0)
        rc = CUDA_INVALID_VALUE;
    if (rc == OK)
        snprintf(name, (size_t)size, "%s", device->name);
    return call_close(&c, rc);
}

static int get_text(Function fn, int code, const char **text)
{
    Call c;
    call_open(&c, fn);
    *text = NULL;
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            *text = fn == FN_cuGetErrorName ? ERRORS[i].name : ERRORS[i].text;
    return call_close(&c, *text ? OK : CUDA_INVALID_VALUE);
}

int cuGetErrorName(int code, const char **text) { return get_text(FN_cuGetErrorName, code, text); }
int cuGetErrorString(int code, const char **text) { return get_text(FN_cuGetErrorString, code, text); }
