/* PCIe, NVLink, errors and field values. */
#include <time.h>

#include "getters.h"

GETTER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_gen_current, 32)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_gen_max, 32)
GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, pcie_gen_gpu_max, 32)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width_current, 32)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max, 32)
GETTER(nvmlDeviceGetPcieReplayCounter, pcie_replay, 32)

/* KB/s; 1000 bytes each unless the scenario gives the raw number. */
int nvmlDeviceGetPcieThroughput(const Handle *h, unsigned which, unsigned *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetPcieThroughput, h);
    if (rc == OK && (which > 1 || !out))
        rc = INVALID_ARGUMENT;
    if (rc != OK)
        return call_close(&c, rc);
    Key raw = which ? K_pcie_throughput_rx : K_pcie_throughput_tx;
    if (value_at(c.entity, raw, c.t).ret != RET_AUTO)
        return call_close(&c, get_u32(&c, raw, out));
    uint64_t bytes = 0;
    rc = get_u64(&c, which ? K_pcie_rx : K_pcie_tx, &bytes);
    *out = (unsigned)(bytes / 1000);
    return call_close(&c, rc);
}

/* ---- NVLink ---- */

static Value link_value(const Entity *e, unsigned link, LinkAttr attr, double t)
{
    Value links = value_at(e, K_nvlink_links, t);
    if (links.ret != OK)
        return links;
    if (link >= MAX_LINKS)
        return (Value){0, INVALID_ARGUMENT};
    if (link >= links.v)
        return (Value){0, NOT_SUPPORTED};
    Value v = e->link[link][attr];
    if (v.ret != RET_AUTO)
        return v;
    switch (attr) {
    case L_state: return (Value){1, OK};
    case L_speed: return value_at(e, K_nvlink_speed, t);
    case L_version: return value_at(e, K_nvlink_version, t);
    default: return (Value){0, OK};
    }
}

static int link_get(Function fn, const Handle *h, unsigned link, LinkAttr attr, uint64_t *out)
{
    Call c;
    int rc = call_device(&c, fn, h);
    if (rc == OK)
        rc = whole_value(link_value(c.entity, link, attr, c.t), out);
    return call_close(&c, rc);
}

int nvmlDeviceGetNvLinkState(const Handle *h, unsigned link, unsigned *out)
{
    uint64_t v = 0;
    int rc = link_get(FN_nvmlDeviceGetNvLinkState, h, link, L_state, &v);
    if (rc == OK)
        *out = (unsigned)v;
    return rc;
}

int nvmlDeviceGetNvLinkVersion(const Handle *h, unsigned link, unsigned *out)
{
    uint64_t v = 0;
    int rc = link_get(FN_nvmlDeviceGetNvLinkVersion, h, link, L_version, &v);
    if (rc == OK)
        *out = (unsigned)v;
    return rc;
}

int nvmlDeviceGetNvLinkErrorCounter(const Handle *h, unsigned link, unsigned counter, uint64_t *out)
{
    LinkAttr attr = counter < 5 ? (LinkAttr)(L_replay + (int)counter) : L_replay;
    return link_get(FN_nvmlDeviceGetNvLinkErrorCounter, h, counter < 5 ? link : MAX_LINKS, attr, out);
}

/* ---- ECC and row remapping ---- */

int nvmlDeviceGetEccMode(const Handle *h, unsigned *now, unsigned *pending)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetEccMode, h);
    if (rc == OK)
        rc = get_u32(&c, K_ecc_mode, now);
    if (rc == OK)
        rc = get_u32(&c, K_ecc_mode, pending);
    return call_close(&c, rc);
}

int nvmlDeviceGetTotalEccErrors(const Handle *h, unsigned type, unsigned counter, uint64_t *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetTotalEccErrors, h);
    if (rc == OK)
        rc = type > 1 || counter > 1
                 ? INVALID_ARGUMENT
                 : get_u64(&c, (Key)((unsigned)K_ecc_corrected_volatile + counter * 2 + type), out);
    return call_close(&c, rc);
}

int nvmlDeviceGetRemappedRows(const Handle *h, unsigned *cor, unsigned *unc, unsigned *pending,
                              unsigned *failure)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetRemappedRows, h);
    unsigned *const out[] = {cor, unc, pending, failure};
    for (unsigned i = 0; i < 4 && rc == OK; i++)
        rc = get_u32(&c, (Key)((unsigned)K_remapped_correctable + i), out[i]);
    return call_close(&c, rc);
}

int nvmlDeviceGetRowRemapperHistogram(const Handle *h, unsigned out[5])
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetRowRemapperHistogram, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    for (int i = 0; i < 5 && rc == OK; i++)
        out[i] = i ? 0 : 1536; /* all banks with full availability */
    return call_close(&c, rc);
}

/* ---- Field values ---- */

typedef enum { PLAIN, SUM, LINK, LINK_SUM, LINK_BYTES } How;
typedef struct { uint32_t id; int key; How how; ValueType type; long double scale; } Field;
static const Field FIELDS[] = {
    {1, K_ecc_mode, PLAIN, TYPE_U32, 1},
    {3, K_ecc_corrected_volatile, PLAIN, TYPE_U64, 1},
    {4, K_ecc_uncorrected_volatile, PLAIN, TYPE_U64, 1},
    {5, K_ecc_corrected_aggregate, PLAIN, TYPE_U64, 1},
    {6, K_ecc_uncorrected_aggregate, PLAIN, TYPE_U64, 1},
    {38, L_crc_flit, LINK_SUM, TYPE_U64, 1},
    {45, L_crc_data, LINK_SUM, TYPE_U64, 1},
    {52, L_replay, LINK_SUM, TYPE_U64, 1},
    {59, L_recovery, LINK_SUM, TYPE_U64, 1},
    {82, K_memory_temperature, PLAIN, TYPE_U32, 1},
    {83, K_power_mw, SUM, TYPE_U64, 1},
    {91, K_nvlink_links, PLAIN, TYPE_U32, 1},
    {94, K_pcie_replay, PLAIN, TYPE_U32, 1},
    {138, K_nvlink_tx, LINK_BYTES, TYPE_U64, 1 / 1024.0L},
    {139, K_nvlink_rx, LINK_BYTES, TYPE_U64, 1 / 1024.0L},
    {140, K_nvlink_tx, LINK_BYTES, TYPE_U64, 1.2L / 1024},
    {141, K_nvlink_rx, LINK_BYTES, TYPE_U64, 1.2L / 1024},
    {142, K_remapped_correctable, PLAIN, TYPE_U32, 1},
    {143, K_remapped_uncorrectable, PLAIN, TYPE_U32, 1},
    {144, K_remapped_pending, PLAIN, TYPE_U32, 1},
    {145, K_remapped_failure, PLAIN, TYPE_U32, 1},
    {160, L_ecc_data, LINK_SUM, TYPE_U64, 1},
    {161, L_replay, LINK, TYPE_U64, 1},
    {162, L_recovery, LINK, TYPE_U64, 1},
    {163, L_crc_flit, LINK, TYPE_U64, 1},
    {164, L_speed, LINK, TYPE_U32, 1},
    {165, L_state, LINK, TYPE_U32, 1},
    {166, L_version, LINK, TYPE_U32, 1},
    {170, K_c2c_links, PLAIN, TYPE_U32, 1},
    {171, K_c2c_status, PLAIN, TYPE_U32, 1},
    {172, K_c2c_max_bw, PLAIN, TYPE_U32, 1},
    {185, K_power_mw, PLAIN, TYPE_U32, 1},
    {186, K_power_mw, PLAIN, TYPE_U32, 1},
    {188, K_power_limit_mw, PLAIN, TYPE_U32, 1},
    {189, K_power_limit_mw, PLAIN, TYPE_U32, 1},
    {190, K_power_limit_mw, PLAIN, TYPE_U32, 1},
    {191, K_power_mw, SUM, TYPE_U64, 1},
    {192, K_power_limit_mw, PLAIN, TYPE_U32, 1},
    {197, K_pcie_tx, SUM, TYPE_U64, 1},
    {198, K_pcie_rx, SUM, TYPE_U64, 1},
    {202, K_nvlink_tx, LINK_BYTES, TYPE_U64, 1},
    {204, K_nvlink_rx, LINK_BYTES, TYPE_U64, 1},
    {230, K_recovery_action, PLAIN, TYPE_U32, 1},
};

static Value link_sum(const Entity *e, LinkAttr attr, double t)
{
    Value links = value_at(e, K_nvlink_links, t), sum = {0, links.ret};
    for (unsigned l = 0; sum.ret == OK && l < links.v; l++) {
        Value v = link_value(e, l, attr, t);
        sum.v += v.ret == OK ? v.v : 0;
    }
    return sum;
}

/* Bytes over one link, or over all for scope U32NA. */
static Value link_bytes(const Entity *e, Key key, unsigned link, double t)
{
    Value links = value_at(e, K_nvlink_links, t);
    if (links.ret != OK)
        return links;
    if (link != U32NA && link >= links.v)
        return (Value){0, NOT_SUPPORTED};
    return (Value){integral_at(e, key, t) / (link == U32NA ? 1 : links.v), OK};
}

static Value field_value(const Call *c, const Field *f, uint32_t scope)
{
    const Entity *e = c->entity;
    switch (f->how) {
    case LINK: return link_value(e, scope, (LinkAttr)f->key, c->t);
    case LINK_SUM: return link_sum(e, (LinkAttr)f->key, c->t);
    case LINK_BYTES: return link_bytes(e, (Key)f->key, scope, c->t);
    case SUM: {
        Value start = {0, OK};
        if (f->key == K_power_mw)
            start = value_at(e, K_energy_start_mj, c->t);
        start.v += integral_at(e, (Key)f->key, c->t);
        return start;
    }
    default: break;
    }
    if (f->key == K_c2c_status || f->key == K_c2c_max_bw) {
        Value links = value_at(e, K_c2c_links, c->t);
        if (links.ret != OK)
            return links;
    }
    return value_at(e, (Key)f->key, c->t);
}

static void read_field(const Call *c, FieldValue *out)
{
    const Override *raw = override_find(c->scenario->fields, c->scenario->field_count, out->id,
                                        out->scope, c->entity, c->t);
    Value v = {0, NOT_SUPPORTED};
    ValueType type = TYPE_U32;
    if (raw) {
        v = raw->value;
        type = raw->type;
    }
    for (size_t i = 0; !raw && i < sizeof FIELDS / sizeof *FIELDS; i++)
        if (FIELDS[i].id == out->id) {
            v = field_value(c, &FIELDS[i], out->scope);
            v.v *= FIELDS[i].scale;
            type = FIELDS[i].type;
        }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->timestamp = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000;
    out->latency = 1;
    out->type = (uint32_t)type;
    out->value.u64 = 0;
    uint64_t whole = 0;
    if (v.ret == OK && type == TYPE_DOUBLE)
        out->value.d = (double)v.v;
    else if ((v.ret = whole_value(v, &whole)) == OK && type == TYPE_U32)
        out->value.u32 = (uint32_t)whole;
    else if (v.ret == OK)
        out->value.u64 = whole; /* little endian: the smaller types read its low part */
    out->ret = v.ret;
}

int nvmlDeviceGetFieldValues(const Handle *h, int count, FieldValue *values)
{
    Call c;
    int rc = call_device(&c, FN_nvmlDeviceGetFieldValues, h);
    if (rc == OK && (!values || count < 1))
        rc = INVALID_ARGUMENT;
    for (int i = 0; i < count && rc == OK; i++)
        read_field(&c, &values[i]);
    return call_close(&c, rc);
}
