/* CUPTI's activity kinds, switched on and off by left_behind.py; records go nowhere. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { DRIVER = 4, RUNTIME = 5, RUNTIME_IDS = 520, DRIVER_IDS = 800, BUFFER = 1 << 20 };

static int (*enable)(int kind), (*disable)(int kind), (*flush)(uint32_t flag);
static int (*switch_runtime)(uint32_t id, uint8_t on), (*switch_driver)(uint32_t id, uint8_t on);

static void requested(uint8_t **buffer, size_t *size, size_t *most)
{
    *buffer = malloc(BUFFER);
    *size = BUFFER;
    *most = 0;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size, (void)valid;
    free(buffer);
}

/* 0, or what failed. */
int attach(const char *path)
{
    void *library = dlopen(path, RTLD_NOW);
    if (!library)
        return -1;
    int (*attach_callbacks)(void *, void *) = (int (*)(void *, void *))dlsym(library, "cuptiActivityRegisterCallbacks");
    enable = (int (*)(int))dlsym(library, "cuptiActivityEnable");
    disable = (int (*)(int))dlsym(library, "cuptiActivityDisable");
    flush = (int (*)(uint32_t))dlsym(library, "cuptiActivityFlushAll");
    switch_runtime = (int (*)(uint32_t, uint8_t))dlsym(library, "cuptiActivityEnableRuntimeApi");
    switch_driver = (int (*)(uint32_t, uint8_t))dlsym(library, "cuptiActivityEnableDriverApi");
    return attach_callbacks((void *)requested, (void *)completed);
}

int on(int kind) { return enable(kind); }
int off(int kind) { return disable(kind); }
int flushed(void) { return flush(0); }

/* Whether a launch, a graph's launch or a copy has that function. */
static int is_launch(int kind, uint32_t id)
{
    static const uint32_t IDS[2][12] = {{211, 214, 269, 270, 430, 431, 311, 312, 31, 215, 41, 225},
                                        {307, 442, 477, 478, 652, 653, 514, 515, 276, 277, 278, 279}};
    for (int i = 0; i < 12; i++)
        if (IDS[kind == DRIVER][i] == id)
            return 1;
    return 0;
}

/* All functions of an API but those that launch. */
void others(int kind, int switched_on)
{
    for (uint32_t id = 1; id < (kind == RUNTIME ? RUNTIME_IDS : DRIVER_IDS); id++)
        if (!is_launch(kind, id))
            (kind == RUNTIME ? switch_runtime : switch_driver)(id, (uint8_t)switched_on);
}
