/* Names and slots: who is who, for the life of the process. */
#define _GNU_SOURCE
#include <string.h>

#include "agent.h"

enum {
    INDEX = 8192, /* places in each of the two hash tables, twice as many as there can be entries */
    PROBES = 64,  /* a table at most half full needs far fewer */
    RECENT = 4096,
};

struct name {
    uint64_t hash;
    uint32_t offset, size;
};

static char strings[AGENT_STRINGS];
static uint32_t strings_used;
static struct name names[AGENT_KERNELS];
static uint32_t name_count;
static uint16_t name_index[INDEX]; /* number of the name, plus 1 */

static struct agent_kernel slots[AGENT_KERNELS + AGENT_DEVICES];
static uint16_t slot_names[AGENT_KERNELS];
static uint32_t slot_count;
static uint16_t slot_index[INDEX]; /* number of the slot, plus 1 */
static bool full;

/* The last slot by the pointer of its name: CUPTI gives a kernel's records the same one. It may free a name and use
 * its place for another (a module is unloaded), so that the text is compared each time. */
static struct {
    const char *pointer;
    uint32_t slot;
} recent[RECENT];

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

static uint64_t hash_of(const char *text, size_t size)
{
    uint64_t hash = size, word;
    for (; size >= sizeof word; text += sizeof word, size -= sizeof word) {
        memcpy(&word, text, sizeof word);
        hash = mix(hash, word);
    }
    word = 0;
    memcpy(&word, text, size);
    return mix(hash, word);
}

static bool is_name(const struct name *name, const char *text, size_t size, uint64_t hash)
{
    return name->hash == hash && name->size == size && memcmp(strings + name->offset, text, size) == 0;
}

/* The name's number; -1: there is no room. */
static int intern(const char *text, size_t size)
{
    uint64_t hash = hash_of(text, size);
    for (uint32_t probe = 0; probe < PROBES; probe++) {
        uint16_t *place = &name_index[(hash + probe) % INDEX];
        if (*place && is_name(&names[*place - 1], text, size, hash))
            return *place - 1;
        if (*place)
            continue;
        if (name_count == AGENT_KERNELS || slot_count == AGENT_KERNELS || strings_used + size + 1 > AGENT_STRINGS)
            return -1;
        names[name_count] = (struct name){.hash = hash, .offset = strings_used, .size = (uint32_t)size};
        memcpy(strings + strings_used, text, size);
        strings_used += (uint32_t)size + 1; /* the arena is zero */
        *place = (uint16_t)++name_count;
        return *place - 1;
    }
    return -1;
}

static bool is_slot(uint32_t slot, uint32_t device, const struct shape *shape)
{
    const struct agent_kernel *k = &slots[slot];
    return k->device == device && memcmp(k->grid, shape->grid, sizeof k->grid) == 0 &&
           memcmp(k->block, shape->block, sizeof k->block) == 0;
}

static uint32_t new_slot(uint32_t device, uint16_t name, const struct shape *shape)
{
    struct agent_kernel *k = &slots[slot_count];
    k->device = device;
    k->name_offset = names[name].offset;
    k->name_size = names[name].size;
    memcpy(k->grid, shape->grid, sizeof k->grid);
    memcpy(k->block, shape->block, sizeof k->block);
    slot_names[slot_count] = name;
    return slot_count++;
}

static uint32_t find_slot(uint32_t device, const char *text, const struct shape *shape)
{
    int name = intern(text, strnlen(text, AGENT_NAME));
    uint64_t hash = mix(mix(0, (uint64_t)(name + 1)), device);
    for (int i = 0; i < 3; i++)
        hash = mix(hash, (uint64_t)shape->grid[i] << 32 | shape->block[i]);
    for (uint32_t probe = 0; name >= 0 && probe < PROBES; probe++) {
        uint16_t *place = &slot_index[(hash + probe) % INDEX];
        if (*place && slot_names[*place - 1] == name && is_slot(*place - 1u, device, shape))
            return *place - 1u;
        if (*place)
            continue;
        if (slot_count == AGENT_KERNELS)
            break;
        uint32_t slot = new_slot(device, (uint16_t)name, shape);
        *place = (uint16_t)(slot + 1);
        return slot;
    }
    full = true;
    return AGENT_KERNELS + device;
}

static bool has_text(uint32_t slot, const char *text)
{
    const struct agent_kernel *k = &slots[slot];
    const char *known = strings + k->name_offset;
    /* strncmp ends at the text's end: nothing behind it is read. */
    return strncmp(text, known, k->name_size) == 0 && (k->name_size == AGENT_NAME || text[k->name_size] == 0);
}

uint32_t kernels_slot(uint32_t device, const char *name, const struct shape *shape)
{
    uint32_t place = (uint32_t)(mix(shape->grid[0], (uintptr_t)name) >> 20) % RECENT;
    uint32_t known = recent[place].slot;
    if (recent[place].pointer == name && is_slot(known, device, shape) && has_text(known, name))
        return known;
    uint32_t slot = find_slot(device, name, shape);
    if (slot < AGENT_KERNELS) {
        recent[place].pointer = name;
        recent[place].slot = slot;
    }
    return slot;
}

struct agent_kernel *kernels_at(uint32_t slot) { return &slots[slot]; }

uint32_t kernels_count(void) { return slot_count; }

const char *kernels_strings(uint32_t *used)
{
    *used = strings_used;
    return strings;
}

bool kernels_full(void) { return full; }

/* Names that begin with this are communication, mangled or not: all kernels of NCCL, of every version. Others (the
 * all-reduce of an inference server) look like any kernel and count as compute. */
bool kernels_is_communication(const char *name)
{
    if (name[0] == '_' && name[1] == 'Z') {
        name += 2;
        while (*name >= '0' && *name <= '9')
            name++;
    }
    return strncmp(name, "nccl", 4) == 0;
}
