/* What the files of libcupti share. Struct layouts follow the public CUPTI ABI (12.9 and 13.1 agree). */
#ifndef CUPTI_H
#define CUPTI_H

#include "fake_cupti.h"

/* ---- CUPTI ABI ---- */

typedef struct Host Host;       /* CUpti_Profiler_Host_Object */
typedef struct Sampler Sampler; /* CUpti_PmSampling_Object */
enum { TRIGGER_SYSCLK = 0, TRIGGER_TIME = 1 };
enum { KEEP_OLDEST = 0, KEEP_LATEST = 1 };
enum { STOP_OTHER = 0, STOP_IMAGE_FULL = 1, STOP_END_OF_RECORDS = 2 };

typedef struct { size_t size; void *reserved; } Params; /* how every parameter struct begins */
typedef struct { Params head; size_t device; const char *chip; } ChipNameParams;
typedef struct {
    Params head; int32_t type; const char *chip; const uint8_t *availability; Host *host;
} HostInitParams;
typedef struct { Params head; Host *host; } HostParams;
typedef struct { Params head; size_t count; const char *const *names; } ChipsParams;
typedef struct { Params head; Host *host; const char **metrics; size_t count; } AddMetricsParams;
typedef struct { Params head; Host *host; size_t image_size; } ConfigSizeParams;
typedef struct { Params head; Host *host; size_t image_size; uint8_t *image; } ConfigImageParams;
typedef struct { Params head; size_t image_size; uint8_t *image; size_t passes; } PassesParams;
typedef struct {
    Params head; int32_t type; const char *chip; uint8_t *availability; size_t max;
} MaxMetricsParams;
typedef struct {
    Params head; Host *host; const uint8_t *image; size_t image_size, index; const char **metrics;
    size_t count; double *values;
} EvaluateParams;
typedef struct { Params head; size_t device; Sampler *sampler; } EnableParams;
typedef struct { Params head; Sampler *sampler; } SamplerParams;
typedef struct {
    Params head; Sampler *sampler; size_t config_size; const uint8_t *config; size_t buffer_size;
    uint64_t interval; int32_t trigger, append;
} SetConfigParams;
typedef struct {
    Params head; Sampler *sampler; uint8_t *image; size_t image_size; int32_t stop_reason;
    uint8_t overflow;
} DecodeParams;
typedef struct { Params head; size_t device, image_size; uint8_t *image; } AvailabilityParams;
typedef struct {
    Params head; Sampler *sampler; const char **metrics; size_t count; uint32_t max_samples;
    size_t image_size;
} ImageSizeParams;
typedef struct { Params head; Sampler *sampler; size_t image_size; uint8_t *image; } ImageInitParams;
typedef struct {
    Params head; const uint8_t *image; size_t image_size, total, populated, completed;
} ImageInfoParams;
typedef struct {
    Params head; Sampler *sampler; const uint8_t *image; size_t image_size, index;
    uint64_t start, end;
} SampleInfoParams;
_Static_assert(sizeof(SetConfigParams) == 64 && sizeof(DecodeParams) == 48 &&
               sizeof(ImageSizeParams) == 56 && sizeof(SampleInfoParams) == 64 &&
               sizeof(EvaluateParams) == 72 && sizeof(HostInitParams) == 48,
               "the CUPTI ABI");

/* Whether a parameter struct is there, as long as up to its last field, and clean. */
bool params_ok(const Params *params, size_t size);
#define UP_TO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* ---- Names ---- */

bool names_given(const char *const *metrics, size_t count);
void names_append(Names *names, const char *const *metrics, size_t count);
void names_clear(Names *names);

/* ---- Images: the caller's memory, in the fake's own format ---- */

size_t config_image_size(const Names *metrics);
void config_image_write(uint8_t *image, const Names *metrics);
/* A number that any change of the image changes; 0: no config image. */
uint64_t config_image_print(const uint8_t *image, size_t size);
void config_image_metrics(const uint8_t *image, Names *metrics);
/* How many passes the hardware needs for these metrics. */
uint64_t passes_needed(const Scenario *s, const Names *metrics, double t);

size_t availability_image_size(void);
void availability_image_write(uint8_t *image);
bool availability_image_ok(const uint8_t *image);

/* A counter data image: max_samples windows, each with the values of all metrics. */
typedef struct {
    uint64_t magic, size, sampler;
    int64_t device;
    uint64_t max_samples, samples, metric_count, names_size;
} CounterData;
typedef struct { uint64_t start, end; } Window; /* on the GPU's clock, ns */

size_t counter_data_size(const Names *metrics, uint32_t max_samples);
void counter_data_init(uint8_t *image, uint64_t sampler, int device, const Names *metrics,
                       uint32_t max_samples);
/* The header of an image; ends the process if it was never initialised; NULL: its size is wrong. */
CounterData *counter_data(Function fn, const uint8_t *image, size_t size);
Window *counter_data_window(const CounterData *data, size_t index);
double *counter_data_values(const CounterData *data, size_t index);
/* The names of the metrics, each ended by \0. */
const char *counter_data_names(const CounterData *data);

#endif
