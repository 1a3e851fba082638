/* One-value getters, and their building blocks. */
#ifndef FAKE_NVML_GETTERS_H
#define FAKE_NVML_GETTERS_H

#include "fake_nvml.h"

/* The value as an integer, as a driver writes it (negative ones wrap); its code otherwise. */
static inline int whole_value(Value v, uint64_t *out)
{
    if (v.ret != OK)
        return v.ret == RET_AUTO ? NOT_SUPPORTED : v.ret;
    *out = v.v < 0 ? (uint64_t)(int64_t)v.v : (uint64_t)v.v;
    return OK;
}

static inline int get_u64(const Call *c, Key key, uint64_t *out)
{
    return out ? whole_value(value_at(c->entity, key, c->t), out) : INVALID_ARGUMENT;
}

static inline int get_u32(const Call *c, Key key, uint32_t *out)
{
    uint64_t v = 0;
    int rc = out ? get_u64(c, key, &v) : INVALID_ARGUMENT;
    if (rc == OK)
        *out = (uint32_t)v;
    return rc;
}

#define GETTER(name, key, bits) \
    int name(const Handle *h, uint##bits##_t *out) \
    { \
        Call c; \
        int rc = call_device(&c, FN_##name, h); \
        return call_close(&c, rc == OK ? get_u##bits(&c, K_##key, out) : rc); \
    }

#endif
