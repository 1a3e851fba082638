/* Enumeration, identity, MIG, memory and board readings. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "getters.h"

/* ---- System ---- */

static int copy_text(const char *text, char *out, unsigned size)
{
    if (!out)
        return INVALID_ARGUMENT;
    if (text[0] == '!') /* a return code instead of the text */
        return atoi(text + 1);
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static int open_plain(Call *c, Function fn)
{
    int rc = call_open(c, fn);
    return rc == OK ? call_enter(c, NULL) : rc;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    Call c;
    int rc = open_plain(&c, FN_nvmlSystemGetDriverVersion);
    return call_close(&c, rc == OK ? copy_text(c.scenario->driver_version, out, size) : rc);
}

int nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    Call c;
    int rc = open_plain(&c, FN_nvmlSystemGetNVMLVersion);
    return call_close(&c, rc == OK ? copy_text(c.scenario->nvml_version, out, size) : rc);
}

static int cuda_version(Function fn, int *out)
{
    Call c;
    int rc = open_plain(&c, fn);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *out = c.scenario->cuda_version;
    return call_close(&c, rc);
}

int nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(FN_nvmlSystemGetCudaDriverVersion, out); }
int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    return cuda_version(FN_nvmlSystemGetCudaDriverVersion_v2, out);
}

/* ---- Enumeration ---- */

static int count(Function fn, unsigned *out)
{
    Call c;
    int rc = open_plain(&c, fn);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK && c.scenario->count.ret > 0)
        rc = c.scenario->count.ret;
    if (rc == OK)
        *out = c.scenario->count.ret == OK ? (unsigned)c.scenario->count.v
                                           : (unsigned)c.scenario->order_count;
    return call_close(&c, rc);
}

int nvmlDeviceGetCount(unsigned *out) { return count(FN_nvmlDeviceGetCount, out); }
int nvmlDeviceGetCount_v2(unsigned *out) { return count(FN_nvmlDeviceGetCount_v2, out); }

/* Hands out the handle of an entity, unless a fault forbids it. */
static int hand_out(Call *c, const Entity *e, int otherwise, const Handle **out)
{
    int rc = !out ? INVALID_ARGUMENT : e ? call_enter(c, e) : otherwise;
    if (rc == OK)
        *out = handle_of(e);
    return call_close(c, rc);
}

static int by_index(Function fn, unsigned index, const Handle **out)
{
    Call c;
    int rc = call_open(&c, fn);
    return rc == OK ? hand_out(&c, entity_of_index(c.scenario, index), INVALID_ARGUMENT, out) : rc;
}

int nvmlDeviceGetHandleByIndex(unsigned index, const Handle **out)
{
    return by_index(FN_nvmlDeviceGetHandleByIndex, index, out);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, const Handle **out)
{
    return by_index(FN_nvmlDeviceGetHandleByIndex_v2, index, out);
}

static const Entity *of_uuid(const Scenario *s, const char *uuid)
{
    for (int i = 0; i < s->order_count; i++) {
        int d = s->order[i];
        if (strcmp(s->devices[d]->text[T_uuid], uuid) == 0)
            return s->devices[d];
        for (int m = 0; m < s->mig_count[d]; m++)
            if (strcmp(s->migs[d][m]->text[T_uuid], uuid) == 0)
                return s->migs[d][m];
    }
    return NULL;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, const Handle **out)
{
    Call c;
    int rc = call_open(&c, FN_nvmlDeviceGetHandleByUUID);
    if (rc == OK && !uuid)
        rc = INVALID_ARGUMENT;
    return rc == OK ? hand_out(&c, of_uuid(c.scenario, uuid), NOT_FOUND, out) : rc;
}

static bool pci_parse(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    return sscanf(text, "%x:%x:%x", domain, bus, device) == 3;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, const Handle **out)
{
    Call c;
    int rc = call_open(&c, FN_nvmlDeviceGetHandleByPciBusId_v2);
    unsigned want[3], have[3];
    if (rc == OK && (!id || !pci_parse(id, &want[0], &want[1], &want[2])))
        rc = INVALID_ARGUMENT;
    if (rc != OK)
        return rc;
    const Entity *found = NULL;
    for (int i = 0; i < c.scenario->order_count && !found; i++) {
        const Entity *e = c.scenario->devices[c.scenario->order[i]];
        if (pci_parse(e->text[T_pci_bus_id], &have[0], &have[1], &have[2]) &&
            memcmp(want, have, sizeof want) == 0)
            found = e;
    }
    return hand_out(&c, found, NOT_FOUND, out);
}

static unsigned mig_index(const Scenario *s, const Entity *e)
{
    unsigned m = 0;
    while (s->migs[e->device][m] != e)
        m++;
    return m;
}

int nvmlDeviceGetIndex(const Handle *h, unsigned *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetIndex, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *out = c.entity->gi >= 0 ? mig_index(c.scenario, c.entity)
                                 : (unsigned)index_of_device(c.scenario, c.entity->device);
    return call_close(&c, rc);
}

/* ---- Identity ---- */

#define TEXT_GETTER(name, key) \
    int name(const Handle *h, char *out, unsigned size) \
    { \
        Call c; \
        int rc = call_device(&c, FN_##name, h); \
        return call_close(&c, rc == OK ? copy_text(c.entity->text[T_##key], out, size) : rc); \
    }

TEXT_GETTER(nvmlDeviceGetUUID, uuid)
TEXT_GETTER(nvmlDeviceGetName, name)
TEXT_GETTER(nvmlDeviceGetSerial, serial)
TEXT_GETTER(nvmlDeviceGetVbiosVersion, vbios)
GETTER(nvmlDeviceGetMinorNumber, minor, 32)
GETTER(nvmlDeviceGetArchitecture, architecture, 32)
GETTER(nvmlDeviceGetVirtualizationMode, virtualization, 32)

int nvmlDeviceGetCudaComputeCapability(const Handle *h, int *major, int *minor)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetCudaComputeCapability, h);
    char text[16];
    if (rc == OK)
        rc = copy_text(c.entity->text[T_compute_capability], text, sizeof text);
    if (rc == OK && (!major || !minor || sscanf(text, "%d.%d", major, minor) != 2))
        rc = INVALID_ARGUMENT;
    return call_close(&c, rc);
}

int nvmlDeviceGetPciInfo_v3(const Handle *h, PciInfo *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetPciInfo_v3, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc != OK)
        return call_close(&c, rc);
    memset(out, 0, sizeof *out);
    rc = copy_text(c.entity->text[T_pci_bus_id], out->bus_id, sizeof out->bus_id);
    if (rc == OK && !pci_parse(out->bus_id, &out->domain, &out->bus, &out->device))
        rc = UNKNOWN;
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0",
             out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    out->device_id = 0x233510DE;
    out->subsystem_id = 0x18BE10DE;
    return call_close(&c, rc);
}

/* ---- MIG ---- */

int nvmlDeviceGetMigMode(const Handle *h, unsigned *now, unsigned *pending)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetMigMode, h);
    if (rc == OK && (!now || !pending))
        rc = INVALID_ARGUMENT;
    Value mode = {0, OK}, next = {0, OK};
    if (rc == OK) {
        mode = value_at(c.entity, K_mig_mode, c.t);
        next = value_at(c.entity, K_mig_pending, c.t);
        rc = mode.ret > 0 ? mode.ret : OK;
    }
    if (rc == OK) {
        *now = mode.ret == OK ? (unsigned)mode.v : mig_on(c.entity, c.scenario, c.t);
        *pending = next.ret == OK ? (unsigned)next.v : *now;
    }
    return call_close(&c, rc);
}

int nvmlDeviceIsMigDeviceHandle(const Handle *h, unsigned *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceIsMigDeviceHandle, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *out = c.entity->gi >= 0;
    return call_close(&c, rc);
}

int nvmlDeviceGetMaxMigDeviceCount(const Handle *h, unsigned *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetMaxMigDeviceCount, h);
    if (rc == OK)
        rc = get_u32(&c, K_max_mig_devices, out);
    if (rc == OK && !mig_on(c.entity, c.scenario, c.t))
        *out = 0;
    return call_close(&c, rc);
}

int nvmlDeviceGetMigDeviceHandleByIndex(const Handle *h, unsigned index, const Handle **out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetMigDeviceHandleByIndex, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK && !mig_on(c.entity, c.scenario, c.t))
        rc = NOT_SUPPORTED;
    if (rc == OK && index >= (unsigned)c.scenario->mig_count[c.entity->device])
        rc = NOT_FOUND;
    if (rc == OK)
        *out = handle_of(c.scenario->migs[c.entity->device][index]);
    return call_close(&c, rc);
}

static int instance_id(Function fn, const Handle *h, unsigned *out)
{
    Call c;
    int rc = call_device(&c, fn, h);
    if (rc == OK && (!out || c.entity->gi < 0))
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *out = (unsigned)(fn == FN_nvmlDeviceGetGpuInstanceId ? c.entity->gi : c.entity->ci);
    return call_close(&c, rc);
}

int nvmlDeviceGetGpuInstanceId(const Handle *h, unsigned *out)
{
    return instance_id(FN_nvmlDeviceGetGpuInstanceId, h, out);
}

int nvmlDeviceGetComputeInstanceId(const Handle *h, unsigned *out)
{
    return instance_id(FN_nvmlDeviceGetComputeInstanceId, h, out);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Handle *h, const Handle **out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetDeviceHandleFromMigDeviceHandle, h);
    if (rc == OK && (!out || c.entity->gi < 0))
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *out = handle_of(c.scenario->devices[c.entity->device]);
    return call_close(&c, rc);
}

int nvmlDeviceGetAttributes_v2(const Handle *h, Attributes *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetAttributes_v2, h);
    if (rc == OK)
        rc = !out ? INVALID_ARGUMENT : c.entity->gi < 0 ? NOT_SUPPORTED : OK;
    if (rc != OK)
        return call_close(&c, rc);
    const Key keys[] = {K_sm_count, K_copy_engines, K_decoders, K_encoders, K_jpeg_engines,
                        K_ofa_engines, K_profile_slices, K_ci_slices};
    uint32_t *const fields[] = {&out->sm_count, &out->copy, &out->decoder, &out->encoder,
                                &out->jpeg, &out->ofa, &out->gi_slices, &out->ci_slices};
    for (int i = 0; i < 8 && rc == OK; i++)
        rc = get_u32(&c, keys[i], fields[i]);
    if (rc == OK)
        rc = get_u64(&c, K_memory_total, &out->memory_mb);
    out->memory_mb /= 1048576;
    return call_close(&c, rc);
}

/* ---- Memory ---- */

static int memory(const Call *c, MemoryV2 *out)
{
    int rc = get_u64(c, K_memory_total, &out->total);
    if (rc == OK)
        rc = get_u64(c, K_memory_reserved, &out->reserved);
    if (rc == OK)
        rc = get_u64(c, K_memory_used, &out->used);
    if (rc == OK && value_at(c->entity, K_memory_free, c->t).ret == RET_AUTO)
        out->free = out->total > out->reserved + out->used ? out->total - out->reserved - out->used : 0;
    else if (rc == OK)
        rc = get_u64(c, K_memory_free, &out->free);
    return rc;
}

/* Version 1 counts the reserved part as used. */
int nvmlDeviceGetMemoryInfo(const Handle *h, Memory *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetMemoryInfo, h);
    MemoryV2 all = {0};
    if (rc == OK)
        rc = out ? memory(&c, &all) : INVALID_ARGUMENT;
    if (rc == OK)
        *out = (Memory){all.total, all.free, all.used + all.reserved};
    return call_close(&c, rc);
}

int nvmlDeviceGetMemoryInfo_v2(const Handle *h, MemoryV2 *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetMemoryInfo_v2, h);
    if (rc == OK)
        rc = !out ? INVALID_ARGUMENT : out->version != 0x02000028 ? VERSION_MISMATCH : memory(&c, out);
    return call_close(&c, rc);
}

int nvmlDeviceGetBAR1MemoryInfo(const Handle *h, Memory *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetBAR1MemoryInfo, h);
    if (rc == OK)
        rc = out ? get_u64(&c, K_bar1_total, &out->total) : INVALID_ARGUMENT;
    if (rc == OK)
        rc = get_u64(&c, K_bar1_used, &out->used);
    if (rc == OK)
        out->free = out->total - out->used;
    return call_close(&c, rc);
}

/* ---- Utilization: not supported on a device in MIG mode ---- */

int nvmlDeviceGetUtilizationRates(const Handle *h, Utilization *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetUtilizationRates, h);
    if (rc == OK)
        rc = !out ? INVALID_ARGUMENT : mig_on(c.entity, c.scenario, c.t) ? NOT_SUPPORTED : OK;
    if (rc == OK)
        rc = get_u32(&c, K_utilization_gpu, &out->gpu);
    if (rc == OK)
        rc = get_u32(&c, K_utilization_memory, &out->memory);
    return call_close(&c, rc);
}

static int codec(Function fn, Key key, const Handle *h, unsigned *out, unsigned *period)
{
    Call c;
    int rc = call_device(&c, fn, h);
    if (rc == OK)
        rc = !period ? INVALID_ARGUMENT : mig_on(c.entity, c.scenario, c.t) ? NOT_SUPPORTED : OK;
    if (rc == OK)
        rc = get_u32(&c, key, out);
    if (rc == OK)
        *period = 167000;
    return call_close(&c, rc);
}

int nvmlDeviceGetEncoderUtilization(const Handle *h, unsigned *out, unsigned *period)
{
    return codec(FN_nvmlDeviceGetEncoderUtilization, K_utilization_encoder, h, out, period);
}

int nvmlDeviceGetDecoderUtilization(const Handle *h, unsigned *out, unsigned *period)
{
    return codec(FN_nvmlDeviceGetDecoderUtilization, K_utilization_decoder, h, out, period);
}

/* ---- Power, temperature, clocks ---- */

GETTER(nvmlDeviceGetPowerUsage, power_mw, 32)
GETTER(nvmlDeviceGetPowerManagementLimit, power_limit_mw, 32)
GETTER(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw, 32)
GETTER(nvmlDeviceGetFanSpeed, fan_speed, 32)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, clock_reasons, 64)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, clock_reasons, 64)
GETTER(nvmlDeviceGetPerformanceState, performance_state, 32)
GETTER(nvmlDeviceGetPowerState, performance_state, 32)
GETTER(nvmlDeviceGetPersistenceMode, persistence, 32)
GETTER(nvmlDeviceGetMemoryBusWidth, memory_bus_width, 32)

/* Millijoules: the scenario's start value and the integral of the power. */
int nvmlDeviceGetTotalEnergyConsumption(const Handle *h, uint64_t *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetTotalEnergyConsumption, h);
    if (rc == OK)
        rc = get_u64(&c, K_energy_start_mj, out);
    if (rc == OK)
        *out += (uint64_t)integral_at(c.entity, K_power_mw, c.t);
    return call_close(&c, rc);
}

int nvmlDeviceGetTemperature(const Handle *h, unsigned sensor, unsigned *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetTemperature, h);
    if (rc == OK)
        rc = sensor ? INVALID_ARGUMENT : get_u32(&c, K_temperature, out);
    return call_close(&c, rc);
}

int nvmlDeviceGetTemperatureV(const Handle *h, TemperatureV1 *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetTemperatureV, h);
    uint32_t value = 0;
    if (rc == OK)
        rc = !out || out->sensor ? INVALID_ARGUMENT : out->version != 0x0100000C ? VERSION_MISMATCH : OK;
    if (rc == OK)
        rc = get_u32(&c, K_temperature, &value);
    if (rc == OK)
        out->temperature = (int32_t)value;
    return call_close(&c, rc);
}

/* A getter with a selector: the keys from `first` on, `count` of them. */
static int selected(Function fn, Key first, unsigned count_, const Handle *h, unsigned which,
                    unsigned *out)
{
    Call c;
    int rc = call_device(&c, fn, h);
    if (rc == OK)
        rc = which < count_ ? get_u32(&c, (Key)((unsigned)first + which), out) : INVALID_ARGUMENT;
    return call_close(&c, rc);
}

int nvmlDeviceGetTemperatureThreshold(const Handle *h, unsigned which, unsigned *out)
{
    return selected(FN_nvmlDeviceGetTemperatureThreshold, K_temperature_shutdown, 4, h, which, out);
}

int nvmlDeviceGetClockInfo(const Handle *h, unsigned which, unsigned *out)
{
    return selected(FN_nvmlDeviceGetClockInfo, K_clock_graphics, 4, h, which, out);
}

int nvmlDeviceGetMaxClockInfo(const Handle *h, unsigned which, unsigned *out)
{
    return selected(FN_nvmlDeviceGetMaxClockInfo, K_clock_max_graphics, 4, h, which, out);
}
