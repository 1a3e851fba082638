/* GPM: samples of counters that refresh every gpm_refresh seconds, and means between two. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_nvml.h"

typedef enum { FRESH, FILLED, FREED } State;
struct Sample {
    _Atomic int state;
    _Atomic int uses; /* calls inside */
    int device, gi;
    double refreshed;  /* when the counters were last refreshed */
    long double sums[KEYS];
    Sample *next;
};
typedef struct { uint32_t id; Key key; double scale; const char *unit; } Metric;

static const double PERCENT = 100, MIB = 1 / 1048576.0;
static Sample *samples; /* never released: a use after free must be seen, not crash */
static pthread_mutex_t samples_lock = PTHREAD_MUTEX_INITIALIZER;

static bool metric_of(uint32_t id, Metric *m)
{
    static const struct { uint32_t id; Key key; } table[] = {
        {1, K_graphics}, {2, K_sm}, {3, K_occupancy}, {4, K_integer}, {5, K_tensor},
        {6, K_tensor_dfma}, {7, K_tensor_hmma}, {8, K_tensor_dmma}, {9, K_tensor_imma},
        {10, K_dram}, {11, K_fp64}, {12, K_fp32}, {13, K_fp16}, {20, K_pcie_tx}, {21, K_pcie_rx},
        {50, K_nvofa}, {60, K_nvlink_rx}, {61, K_nvlink_tx}, {100, K_c2c_total_tx},
        {101, K_c2c_total_rx}, {102, K_c2c_data_tx}, {103, K_c2c_data_rx}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].id == id) {
            bool traffic = table[i].key >= K_pcie_tx && table[i].key <= K_c2c_data_rx;
            *m = (Metric){id, table[i].key, traffic ? MIB : PERCENT, traffic ? "MiB/s" : "%"};
            return true;
        }
    if ((id >= 30 && id <= 36) || (id >= 40 && id <= 46))
        *m = (Metric){id, id < 40 ? K_nvdec : K_nvjpg, PERCENT, "%"};
    else if (id >= 62 && id <= 97)
        *m = (Metric){id, id % 2 ? K_nvlink_tx : K_nvlink_rx, MIB, "MiB/s"};
    else
        return false;
    return true;
}

static bool known(const Sample *sample)
{
    bool found = false;
    pthread_mutex_lock(&samples_lock);
    for (const Sample *s = samples; s && !found; s = s->next)
        found = s == sample;
    pthread_mutex_unlock(&samples_lock);
    return found;
}

/* Enters a sample; a freed one is refused and counted. */
static bool hold(Sample *sample)
{
    if (!sample || !known(sample))
        return false;
    atomic_fetch_add(&sample->uses, 1);
    if (atomic_load(&sample->state) != FREED)
        return true;
    atomic_fetch_sub(&sample->uses, 1);
    stat_add(STAT_freed_sample_uses, -1, 1);
    fputs("fake_nvml: a freed GPM sample was used\n", stderr);
    return false;
}

static void drop(Sample *sample) { atomic_fetch_sub(&sample->uses, 1); }

int nvmlGpmSampleAlloc(Sample **out)
{
    Call c;
    int rc = call_open(&c, FN_nvmlGpmSampleAlloc);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc != OK)
        return call_close(&c, rc);
    Sample *s = calloc(1, sizeof *s);
    if (!s)
        abort();
    pthread_mutex_lock(&samples_lock);
    s->next = samples;
    samples = s;
    pthread_mutex_unlock(&samples_lock);
    stat_add(STAT_live_samples, -1, 1);
    *out = s;
    return call_close(&c, OK);
}

int nvmlGpmSampleFree(Sample *sample)
{
    Call c;
    int rc = call_open(&c, FN_nvmlGpmSampleFree);
    if (rc == OK)
        rc = call_enter(&c, NULL);
    if (rc != OK)
        return call_close(&c, rc);
    if (!hold(sample))
        return call_close(&c, INVALID_ARGUMENT);
    if (atomic_load(&sample->uses) > 1) { /* freed under another thread's feet */
        stat_add(STAT_freed_sample_uses, -1, 1);
        fputs("fake_nvml: a GPM sample was freed while in use\n", stderr);
    }
    if (atomic_exchange(&sample->state, FREED) != FREED)
        stat_add(STAT_live_samples, -1, -1);
    drop(sample);
    return call_close(&c, OK);
}

static bool supported(const Call *c)
{
    Value set = value_at(c->entity, K_gpm_support, c->t);
    if (set.ret != RET_AUTO)
        return set.ret == OK && set.v != 0;
    return value_at(c->entity, K_architecture, c->t).v >= 9;
}

static void fill(Sample *s, const Call *c, const Entity *e)
{
    double t = seconds_now(), refresh = c->scenario->gpm_refresh;
    s->device = e->device;
    s->gi = e->gi;
    s->refreshed = refresh > 0 ? floor(t / refresh) * refresh : t;
    const Scenario *then = scenario_at(scenario_now(), s->refreshed);
    const Entity *past = e->gi < 0 ? then->devices[e->device] : mig_find(then, e->device, e->gi, e->ci);
    for (int k = 0; k <= (int)K_c2c_data_rx; k++)
        s->sums[k] = integral_at(past ? past : e, (Key)k, s->refreshed);
    atomic_store(&s->state, FILLED);
}

static int sample_get(Call *c, int rc, int gi, Sample *sample)
{
    if (rc == OK && !supported(c))
        rc = NOT_SUPPORTED;
    const Entity *e = c->entity;
    if (rc == OK && gi >= 0 && !mig_on(e, c->scenario, c->t))
        rc = NOT_SUPPORTED;
    if (rc == OK && gi >= 0 && !(e = mig_find(c->scenario, e->device, gi, -1)))
        rc = INVALID_ARGUMENT;
    if (!hold(sample)) /* checked last on purpose: a freed sample counts even on a failing call */
        return call_close(c, rc == OK ? INVALID_ARGUMENT : rc);
    if (rc == OK)
        fill(sample, c, e);
    drop(sample);
    return call_close(c, rc);
}

int nvmlGpmSampleGet(const Handle *h, Sample *sample)
{
    Call c;
    int rc = call_device(&c, FN_nvmlGpmSampleGet, h);
    return sample_get(&c, rc, -1, sample);
}

/* Faults on `mig D gi G` hit this call; those on `device D` do not, those on `board D` do. */
int nvmlGpmMigSampleGet(const Handle *h, unsigned gi, Sample *sample)
{
    Call c;
    int rc = call_open(&c, FN_nvmlGpmMigSampleGet);
    const Entity *device = rc == OK ? entity_of_handle(&c, h, &rc) : NULL;
    if (device && device->gi >= 0)
        rc = INVALID_ARGUMENT;
    if (rc == OK) {
        const Entity *instance = mig_find(c.scenario, device->device, (int)gi, -1);
        rc = call_enter(&c, instance ? instance : device);
        c.entity = device;
    }
    return sample_get(&c, rc, (int)gi, sample);
}

int nvmlGpmQueryDeviceSupport(const Handle *h, GpmSupport *out)
{
    Call c;
    int rc = call_device(&c, FN_nvmlGpmQueryDeviceSupport, h);
    if (rc == OK && !out)
        rc = INVALID_ARGUMENT;
    if (rc == OK && out->version != 1)
        rc = VERSION_MISMATCH;
    if (rc == OK)
        out->supported = supported(&c);
    return call_close(&c, rc);
}

/* Without a refresh between the samples an H200 says 0 for activity and NaN for DRAM. */
static double mean(const Metric *m, const Sample *a, const Sample *b)
{
    double length = b->refreshed - a->refreshed;
    if (length <= 0)
        return m->key == K_dram ? NAN : 0;
    return (double)((b->sums[m->key] - a->sums[m->key]) / length) * m->scale;
}

static void read_metric(GpmMetric *out, const Call *c, const Sample *a, const Sample *b)
{
    Metric m = {0, K_sm, 0, ""};
    bool exists = metric_of(out->id, &m);
    const Override *raw = override_find(c->scenario->gpms, c->scenario->gpm_count, out->id, 0,
                                        c->entity, c->t);
    Value v = raw ? raw->value : exists ? value_at(c->entity, m.key, c->t) : (Value){0, NOT_SUPPORTED};
    out->ret = v.ret == RET_AUTO ? OK : v.ret;
    out->value = 0;
    out->short_name = out->long_name = "fake";
    out->unit = m.unit;
    if (out->ret != OK)
        return;
    out->value = raw ? (double)v.v : mean(&m, a, b);
    if (!raw && out->id >= 62 && out->id <= 97) { /* one link's share */
        double links = (double)value_at(c->entity, K_nvlink_links, c->t).v;
        out->value = (out->id - 62) / 2 < links ? out->value / links : 0;
    }
}

static int metrics(Call *c, GpmMetricsGet *get)
{
    const Sample *a = get->sample1, *b = get->sample2;
    if (atomic_load(&a->state) != FILLED || atomic_load(&b->state) != FILLED ||
        a->device != b->device || a->gi != b->gi || b->refreshed < a->refreshed)
        return INVALID_ARGUMENT;
    const Entity *e = c->scenario->devices[a->device];
    if (e && a->gi >= 0)
        e = mig_find(c->scenario, a->device, a->gi, -1);
    if (!e)
        return GPU_IS_LOST;
    int rc = call_enter(c, e);
    for (uint32_t i = 0; rc == OK && i < get->count; i++)
        read_metric(&get->metrics[i], c, a, b);
    return rc;
}

int nvmlGpmMetricsGet(GpmMetricsGet *get)
{
    Call c;
    int rc = call_open(&c, FN_nvmlGpmMetricsGet);
    if (rc == OK && (!get || get->count > GPM_METRIC_MAX))
        rc = INVALID_ARGUMENT;
    if (rc == OK && get->version != 1)
        rc = VERSION_MISMATCH;
    if (rc != OK)
        return call_close(&c, rc);
    bool first = hold(get->sample1), second = hold(get->sample2);
    rc = first && second ? metrics(&c, get) : INVALID_ARGUMENT;
    if (first)
        drop(get->sample1);
    if (second)
        drop(get->sample2);
    return call_close(&c, rc);
}
