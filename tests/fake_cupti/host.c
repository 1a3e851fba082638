/* libcupti: versions, the profiler's start, and the host side: metrics, config images, evaluation. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cupti.h"

struct Host {
    bool live;
    bool spoilt; /* by a refused metric: the real object then answers UNKNOWN for ever */
    char *chip;
    Names metrics;
};

bool params_ok(const Params *params, size_t size)
{
    return params && params->size >= size && !params->reserved;
}

/* ---- Versions and the profiler ---- */

int cuptiGetVersion(uint32_t *version)
{
    Call c;
    int rc = call_open(&c, FN_cuptiGetVersion);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && !version)
        rc = INVALID_PARAMETER;
    if (rc == OK)
        *version = c.scenario->version;
    return call_close(&c, rc);
}

int cuptiGetResultString(int code, const char **text)
{
    static const struct { int code; const char *name; } names[] = {
        {0, "CUPTI_SUCCESS"},
        {1, "CUPTI_ERROR_INVALID_PARAMETER"},
        {2, "CUPTI_ERROR_INVALID_DEVICE"},
        {3, "CUPTI_ERROR_INVALID_CONTEXT"},
        {7, "CUPTI_ERROR_INVALID_OPERATION"},
        {8, "CUPTI_ERROR_OUT_OF_MEMORY"},
        {9, "CUPTI_ERROR_HARDWARE"},
        {10, "CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT"},
        {11, "CUPTI_ERROR_API_NOT_IMPLEMENTED"},
        {12, "CUPTI_ERROR_MAX_LIMIT_REACHED"},
        {13, "CUPTI_ERROR_NOT_READY"},
        {14, "CUPTI_ERROR_NOT_COMPATIBLE"},
        {15, "CUPTI_ERROR_NOT_INITIALIZED"},
        {17, "CUPTI_ERROR_INVALID_METRIC_NAME"},
        {19, "CUPTI_ERROR_INVALID_HANDLE"},
        {23, "CUPTI_ERROR_DISABLED"},
        {26, "CUPTI_ERROR_HARDWARE_BUSY"},
        {27, "CUPTI_ERROR_NOT_SUPPORTED"},
        {33, "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED"},
        {35, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"},
        {36, "CUPTI_ERROR_OLD_PROFILER_API_INITIALIZED"},
        {38, "CUPTI_ERROR_LEGACY_PROFILER_NOT_SUPPORTED"},
        {39, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"},
        {40, "CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES"},
        {41, "CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED"},
        {42, "CUPTI_ERROR_CMP_DEVICE_NOT_SUPPORTED"},
        {43, "CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED"},
        {44, "CUPTI_ERROR_SLI_DEVICE_NOT_SUPPORTED"},
        {45, "CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED"},
        {999, "CUPTI_ERROR_UNKNOWN"},
    };
    Call c;
    call_open(&c, FN_cuptiGetResultString);
    int rc = INVALID_PARAMETER;
    if (text)
        *text = "<unknown>";
    for (size_t i = 0; text && i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *text = names[i].name;
            rc = OK;
        }
    return call_close(&c, rc);
}

static int change_profiler(Function fn, const Params *p, int change)
{
    Call c;
    int rc = call_open(&c, fn);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && !params_ok(p, sizeof *p))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        profiler_users(change);
    return call_close(&c, rc);
}

int cuptiProfilerInitialize(Params *p) { return change_profiler(FN_cuptiProfilerInitialize, p, 1); }
int cuptiProfilerDeInitialize(Params *p) { return change_profiler(FN_cuptiProfilerDeInitialize, p, -1); }

int cuptiDeviceGetChipName(ChipNameParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiDeviceGetChipName);
    bool valid = params_ok(&p->head, UP_TO(ChipNameParams, chip));
    const Device *device = rc == OK && valid ? cuda_device(c.scenario, p->device) : NULL;
    if (rc == OK)
        rc = call_enter(&c, device ? device->id : NO_DEVICE);
    if (rc == OK && !device)
        rc = INVALID_PARAMETER;
    if (rc == OK)
        p->chip = device->chip;
    return call_close(&c, rc);
}

/* ---- Host objects: never freed, so that a use after their end is seen ---- */

static Host **hosts;
static size_t host_count;
static pthread_mutex_t hosts_lock = PTHREAD_MUTEX_INITIALIZER;

static bool chip_known(const Scenario *s, const char *chip)
{
    for (int i = 0; chip && i < s->chip_count; i++)
        if (strcmp(s->chips[i], chip) == 0)
            return true;
    return false;
}

static Host *host_new(const char *chip)
{
    Host *host = must(calloc(1, sizeof *host));
    *host = (Host){.live = true, .chip = must(strdup(chip))};
    pthread_mutex_lock(&hosts_lock);
    *APPEND(hosts, host_count) = host;
    pthread_mutex_unlock(&hosts_lock);
    stat_add(STAT_live_hosts, NO_DEVICE, 1);
    return host;
}

static bool host_known(const Host *host)
{
    bool known = false;
    pthread_mutex_lock(&hosts_lock);
    for (size_t i = 0; i < host_count && !known; i++)
        known = hosts[i] == host;
    pthread_mutex_unlock(&hosts_lock);
    return known;
}

/* Opens a call with a host object; ends the process if the object is at its end already. */
static int open_host(Call *c, Function fn, const HostParams *p, size_t size)
{
    int rc = call_open(c, fn);
    if (rc == OK && (!params_ok(&p->head, size) || !host_known(p->host)))
        rc = INVALID_PARAMETER;
    if (rc == OK && !p->host->live) {
        stat_add(STAT_dead_object_uses, NO_DEVICE, 1);
        misuse(fn, "the host object was deinitialised before");
    }
    return rc;
}

static int enter_host(Call *c, Function fn, const HostParams *p, size_t size)
{
    int rc = open_host(c, fn, p, size);
    return rc == OK ? call_enter(c, NO_DEVICE) : rc;
}

int cuptiProfilerHostInitialize(HostInitParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiProfilerHostInitialize);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && (!params_ok(&p->head, UP_TO(HostInitParams, host)) || p->type < 0 || p->type > 1 ||
                     !chip_known(c.scenario, p->chip) ||
                     (p->availability && !availability_image_ok(p->availability))))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        p->host = host_new(p->chip);
    return call_close(&c, rc);
}

int cuptiProfilerHostDeinitialize(HostParams *p)
{
    Call c;
    int rc = enter_host(&c, FN_cuptiProfilerHostDeinitialize, p, sizeof *p);
    if (rc == OK) {
        p->host->live = false;
        names_clear(&p->host->metrics);
        stat_add(STAT_live_hosts, NO_DEVICE, -1);
    }
    return call_close(&c, rc);
}

int cuptiProfilerHostGetSupportedChips(ChipsParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiProfilerHostGetSupportedChips);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && !params_ok(&p->head, UP_TO(ChipsParams, names)))
        rc = INVALID_PARAMETER;
    if (rc == OK) {
        p->count = (size_t)c.scenario->chip_count;
        p->names = c.scenario->chips;
    }
    return call_close(&c, rc);
}

static int unknown_metric(const Call *c, const char *chip, const char *metric)
{
    const Names one = {(char **)(uintptr_t)&metric, 1};
    const Quirk *quirk = quirk_find(c->scenario, Q_unknown_metric, NO_DEVICE, chip, &one, c->t);
    return quirk ? (int)quirk->number : OK;
}

int cuptiProfilerHostConfigAddMetrics(AddMetricsParams *p)
{
    Call c;
    int rc = enter_host(&c, FN_cuptiProfilerHostConfigAddMetrics, (HostParams *)p,
                        UP_TO(AddMetricsParams, count));
    if (rc == OK && (p->count == 0 || !names_given(p->metrics, p->count)))
        rc = INVALID_PARAMETER;
    if (rc == OK && p->host->spoilt)
        rc = UNKNOWN;
    for (size_t i = 0; rc == OK && i < p->count; i++) {
        rc = unknown_metric(&c, p->host->chip, p->metrics[i]);
        p->host->spoilt = rc != OK;
    }
    if (rc == OK)
        names_append(&p->host->metrics, p->metrics, p->count);
    return call_close(&c, rc);
}

int cuptiProfilerHostGetConfigImageSize(ConfigSizeParams *p)
{
    Call c;
    int rc = enter_host(&c, FN_cuptiProfilerHostGetConfigImageSize, (HostParams *)p,
                        UP_TO(ConfigSizeParams, image_size));
    if (rc == OK && (p->host->spoilt || p->host->metrics.count == 0))
        rc = UNKNOWN;
    if (rc == OK)
        p->image_size = config_image_size(&p->host->metrics);
    return call_close(&c, rc);
}

int cuptiProfilerHostGetConfigImage(ConfigImageParams *p)
{
    Call c;
    int rc = enter_host(&c, FN_cuptiProfilerHostGetConfigImage, (HostParams *)p,
                        UP_TO(ConfigImageParams, image));
    if (rc == OK && (!p->image || p->image_size < config_image_size(&p->host->metrics)))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        config_image_write(p->image, &p->host->metrics);
    return call_close(&c, rc);
}

int cuptiProfilerHostGetNumOfPasses(PassesParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiProfilerHostGetNumOfPasses);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && (!params_ok(&p->head, UP_TO(PassesParams, passes)) ||
                     !config_image_print(p->image, p->image_size)))
        rc = INVALID_PARAMETER;
    if (rc == OK) {
        Names metrics = {NULL, 0};
        config_image_metrics(p->image, &metrics);
        p->passes = passes_needed(c.scenario, &metrics, c.t);
        names_clear(&metrics);
    }
    return call_close(&c, rc);
}

int cuptiProfilerHostGetMaxNumHardwareMetricsPerPass(MaxMetricsParams *p)
{
    Call c;
    int rc = call_open(&c, FN_cuptiProfilerHostGetMaxNumHardwareMetricsPerPass);
    if (rc == OK)
        rc = call_enter(&c, NO_DEVICE);
    if (rc == OK && (!params_ok(&p->head, UP_TO(MaxMetricsParams, max)) ||
                     !chip_known(c.scenario, p->chip)))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        p->max = c.scenario->max_metrics;
    return call_close(&c, rc);
}

/* ---- Evaluation ---- */

/* The value of a metric in one window; NULL: it is not among those of the image. */
static const double *find_value(const CounterData *data, size_t index, const char *metric)
{
    const char *name = counter_data_names(data);
    for (uint64_t i = 0; i < data->metric_count; i++, name += strlen(name) + 1)
        if (strcmp(name, metric) == 0)
            return &counter_data_values(data, index)[i];
    return NULL;
}

static int evaluate(const EvaluateParams *p, const CounterData *data)
{
    for (size_t i = 0; i < p->count; i++) {
        const double *value = find_value(data, p->index, p->metrics[i]);
        if (!value)
            return INVALID_METRIC_NAME;
        p->values[i] = *value;
    }
    return OK;
}

int cuptiProfilerHostEvaluateToGpuValues(EvaluateParams *p)
{
    Call c;
    const CounterData *data = NULL;
    int rc = open_host(&c, FN_cuptiProfilerHostEvaluateToGpuValues, (HostParams *)p,
                       UP_TO(EvaluateParams, values));
    if (rc == OK && (data = counter_data(c.fn, p->image, p->image_size)) == NULL)
        rc = INVALID_PARAMETER;
    if (rc == OK)
        rc = call_enter(&c, (int)data->device);
    if (rc == OK && (p->index >= data->samples || !names_given(p->metrics, p->count) || !p->values))
        rc = INVALID_PARAMETER;
    if (rc == OK)
        rc = evaluate(p, data);
    return call_close(&c, rc);
}
