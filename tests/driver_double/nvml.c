/* libnvidia-ml.so.1: what NVML tells of the simulated host. */
#include "double.h"
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include <limits.h>

static atomic_int started;

struct nvmlDevice_st { int index, instance; }; /* instance -1: the whole device */
static struct nvmlDevice_st handles[MAX_DEVICES][9];

static bool enter(Call *call, const char *name) {
    if (atomic_load(&started)) return begin(call, name, getpid());
    *call = (Call){.name = name, .began_ns = now_ns(), .result = NVML_ERROR_UNINITIALIZED};
    return false;
}

/* Whether a call of a device goes on; fills `device`. */
static bool enter_device(Call *call, const char *name, nvmlDevice_t handle, Device *device) {
    Device all[MAX_DEVICES];
    char lost[64];
    if (!enter(call, name)) return false;
    if (!handle || handle->index >= devices(all)) call->result = NVML_ERROR_INVALID_ARGUMENT;
    else {
        *device = all[handle->index];
        snprintf(lost, sizeof lost, "device.%d.fails", handle->index);
        call->result = (int)setting(lost, 0); /* e.g. 15, GPU_IS_LOST */
    }
    return call->result == NVML_SUCCESS;
}

static int index_of(nvmlDevice_t handle) { return handle ? handle->index : -1; }

/* ---- the library ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    Call call;
    if (!open_host()) return NVML_ERROR_DRIVER_NOT_LOADED;
    if (begin(&call, "nvmlInit", getpid())) atomic_fetch_add(&started, 1);
    return end(&call, "flags=%u", flags);
}

#undef nvmlInit
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    Call call;
    if (enter(&call, "nvmlShutdown")) atomic_fetch_sub(&started, 1);
    return end(&call, "%s", "");
}

const char *nvmlErrorString(nvmlReturn_t result) {
    static __thread char text[64];
    snprintf(text, sizeof text, "NVML error %d of the driver's double", (int)result);
    return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    Call call;
    if (enter(&call, "nvmlSystemGetDriverVersion") && !text_setting("driver", version, length)) call.result = NVML_ERROR_UNKNOWN;
    return end(&call, "length=%u", length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    Call call;
    if (enter(&call, "nvmlSystemGetCudaDriverVersion")) *version = (int)setting("cuda_version", 13000);
    return end(&call, "%s", "");
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    Call call;
    if (enter(&call, "nvmlSystemGetCudaDriverVersion_v2")) *version = (int)setting("cuda_version", 13000);
    return end(&call, "%s", "");
}

/* ---- devices ---- */

static nvmlDevice_t handle_of(int index, int instance) {
    struct nvmlDevice_st *handle = &handles[index][instance + 1];
    *handle = (struct nvmlDevice_st){.index = index, .instance = instance};
    return handle;
}

/* A MIG instance of a device: its UUID and MiB, from device.N.instances=uuid:mib,... */
static bool instance_of(int index, int instance, char *uuid, size_t room, uint64_t *mib) {
    char name[64], all[1024], *rest;
    snprintf(name, sizeof name, "device.%d.instances", index);
    if (!text_setting(name, all, sizeof all)) return false;
    int number = 0;
    for (char *one = strtok_r(all, ",", &rest); one; one = strtok_r(NULL, ",", &rest), number++)
        if (number == instance) {
            char *colon = strchr(one, ':');
            if (!colon) return false;
            *colon = 0, *mib = strtoull(colon + 1, NULL, 10);
            snprintf(uuid, room, "%s", one);
            return true;
        }
    return false;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount) { /* _v2 by nvml.h */
    Call call;
    Device all[MAX_DEVICES];
    if (enter(&call, "nvmlDeviceGetCount")) *deviceCount = (unsigned)devices(all);
    return end(&call, "%s", "");
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    Call call;
    Device all[MAX_DEVICES];
    if (enter(&call, "nvmlDeviceGetHandleByIndex")) {
        if ((int)index >= devices(all)) call.result = NVML_ERROR_INVALID_ARGUMENT;
        else *device = handle_of((int)index, -1);
    }
    return end(&call, "index=%u", index);
}

static nvmlReturn_t find_device(const char *uuid, nvmlDevice_t *device) {
    Device all[MAX_DEVICES];
    int count = devices(all);
    uint64_t mib;
    for (int i = 0; i < count; i++) {
        if (!strcmp(uuid, all[i].id)) {
            *device = handle_of(i, -1);
            return NVML_SUCCESS;
        }
        char id[80];
        for (int n = 0; n < 8 && instance_of(i, n, id, sizeof id, &mib); n++)
            if (!strcmp(uuid, id)) {
                *device = handle_of(i, n);
                return NVML_SUCCESS;
            }
    }
    return !strncmp(uuid, "GPU-", 4) || !strncmp(uuid, "MIG-", 4) ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    Call call;
    if (enter(&call, "nvmlDeviceGetHandleByUUID")) call.result = find_device(uuid, device);
    return end(&call, "uuid=%s", uuid);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned int length) {
    Call call;
    Device device;
    uint64_t mib;
    if (enter_device(&call, "nvmlDeviceGetUUID", handle, &device) &&
        (handle->instance < 0 || !instance_of(handle->index, handle->instance, uuid, length, &mib)))
        snprintf(uuid, length, "%s", device.id);
    return end(&call, "device=%d length=%u", index_of(handle), length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned int length) {
    Call call;
    Device device;
    if (enter_device(&call, "nvmlDeviceGetName", handle, &device)) snprintf(name, length, "%s", device.name);
    return end(&call, "device=%d length=%u", index_of(handle), length);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned int *currentMode, unsigned int *pendingMode) {
    Call call;
    Device device;
    if (enter_device(&call, "nvmlDeviceGetMigMode", handle, &device)) {
        if (device.mig < 0) call.result = NVML_ERROR_NOT_SUPPORTED;
        else *currentMode = *pendingMode = (unsigned)device.mig;
    }
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned int *count) {
    Call call;
    Device device;
    if (enter_device(&call, "nvmlDeviceGetMaxMigDeviceCount", handle, &device)) *count = device.mig < 0 ? 0 : 7;
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned int index, nvmlDevice_t *migDevice) {
    Call call;
    Device device;
    char uuid[80];
    uint64_t mib;
    if (enter_device(&call, "nvmlDeviceGetMigDeviceHandleByIndex", handle, &device)) {
        if (index > 7) call.result = NVML_ERROR_INVALID_ARGUMENT;
        else if (!instance_of(handle->index, (int)index, uuid, sizeof uuid, &mib)) call.result = NVML_ERROR_NOT_FOUND;
        else *migDevice = handle_of(handle->index, (int)index);
    }
    return end(&call, "device=%d index=%u", index_of(handle), index);
}

/* ---- memory and processes ---- */

struct listing {
    int device;
    unsigned count, room;
    nvmlProcessInfo_t *out; /* NULL: only counted */
    const char *only;       /* the setting that lists who is in the list; NULL: those who compute */
};

static void list_one(const Record *record, void *with) {
    struct listing *list = with;
    char init_only[16] = "unlisted";
    uint64_t used = used_by(record, list->device), told = used;
    int pid = (int)record->pid;
    if (list->only ? !setting_lists(list->only, pid) : setting_lists("graphics_only", pid)) return;
    if (!used) {
        /* Without a context: some drivers list those of which only cuInit was called, with no bytes. */
        text_setting("init_only_listed", init_only, sizeof init_only);
        if (record->devices || record->inherited || strcmp(init_only, "zero")) return;
        told = 0;
    }
    if (setting_lists("nvml_hides", pid)) return;
    if (setting_lists("nvml_tells_zero", pid)) told = 0;
    if (setting("nvml_tells_memory", 1) == 0) told = ULLONG_MAX; /* NVML_VALUE_NOT_AVAILABLE */
    if (list->out && list->count < list->room)
        list->out[list->count] = (nvmlProcessInfo_t){
            .pid = setting("nvml_thread_ids", 0) && record->thread_id ? record->thread_id : record->pid,
            .usedGpuMemory = told,
            .gpuInstanceId = UINT_MAX,
            .computeInstanceId = UINT_MAX};
    list->count++;
}

static nvmlReturn_t list_processes(const char *name, nvmlDevice_t handle, unsigned int *count, nvmlProcessInfo_t *out, const char *only) {
    Call call;
    Device device;
    unsigned room = count ? *count : 0;
    if (enter_device(&call, name, handle, &device)) {
        struct listing list = {.device = handle->index, .room = room, .out = room ? out : NULL, .only = only};
        int lock = lock_capacity();
        visit_records(list_one, &list);
        close(lock);
        if (list.count > room || (list.count && !out)) call.result = NVML_ERROR_INSUFFICIENT_SIZE;
        *count = list.count;
    }
    return end(&call, "device=%d room=%u count=%u", index_of(handle), room, count ? *count : 0);
}

#undef nvmlDeviceGetComputeRunningProcesses
#undef nvmlDeviceGetGraphicsRunningProcesses
#undef nvmlDeviceGetMPSComputeRunningProcesses
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_t *infos) {
    return list_processes("nvmlDeviceGetComputeRunningProcesses", device, infoCount, infos, NULL);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_t *infos) {
    return list_processes("nvmlDeviceGetGraphicsRunningProcesses", device, infoCount, infos, "graphics");
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_t *infos) {
    return list_processes("nvmlDeviceGetMPSComputeRunningProcesses", device, infoCount, infos, "mps");
}

/* Returns what processes use, and the device's size as far as they can have it. */
static uint64_t used_and_total(nvmlDevice_t handle, const Device *device, uint64_t *total) {
    char uuid[80], extra[64];
    uint64_t mib = device->mib;
    if (handle->instance >= 0) instance_of(handle->index, handle->instance, uuid, sizeof uuid, &mib);
    uint64_t used[MAX_DEVICES];
    int lock = lock_capacity();
    add_up_use(used);
    Limit limit = limit_for(getpid(), handle->index);
    close(lock);
    snprintf(extra, sizeof extra, "device.%d.extra_mib", handle->index); /* used by what is no process of this host */
    *total = mib * MIB;
    if (limit.leaf && setting("limits_told", 1)) {
        *total = limit.hard;
        return limit.used;
    }
    return used[handle->index] + (uint64_t)(setting(extra, 0) * (double)MIB);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    Call call;
    Device device;
    if (enter_device(&call, "nvmlDeviceGetMemoryInfo", handle, &device)) {
        uint64_t total, used = used_and_total(handle, &device, &total), reserved = (uint64_t)setting("reserved_mib", 500) * MIB;
        memory->total = total + reserved, memory->used = used + reserved; /* this form counts the driver's own part as used */
        memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    }
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    Call call;
    Device device;
    if (enter_device(&call, "nvmlDeviceGetMemoryInfo_v2", handle, &device)) {
        if (memory->version != nvmlMemory_v2) call.result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
        else {
            uint64_t total, used = used_and_total(handle, &device, &total), reserved = (uint64_t)setting("reserved_mib", 500) * MIB;
            memory->total = total + reserved, memory->reserved = reserved, memory->used = used;
            memory->free = total > used ? total - used : 0;
        }
    }
    return end(&call, "device=%d version=%x", index_of(handle), memory->version);
}

/* ---- limits of control groups ---- */

/* Whether a call about a limit goes on: the driver knows limits from 615 on, and not for MIG. */
static bool enter_limit(Call *call, const char *name, nvmlDevice_t handle, Device *device, const char *group, char *path, size_t room) {
    if (!enter_device(call, name, handle, device)) return false;
    if (!setting("limits_known", 0)) call->result = NVML_ERROR_FUNCTION_NOT_FOUND;
    else if (handle->instance >= 0 || device->mig == 1) call->result = NVML_ERROR_NOT_SUPPORTED;
    else if (!limit_path(path, room, group, handle->index)) call->result = NVML_ERROR_OPERATING_SYSTEM;
    return call->result == NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t handle, nvmlSetMemoryLimits_v1_t *limits) {
    Call call;
    Device device;
    char path[600], bytes[2 * sizeof *limits + 1];
    if (enter_limit(&call, "nvmlDeviceSetMemoryLimits_v1", handle, &device, limits->nameSpace, path, sizeof path)) {
        bool clears = limits->hardLimit == NVML_DEVICE_MEMORY_LIMIT_MAX;
        if (geteuid() != 0) call.result = NVML_ERROR_NO_PERMISSION;
        else if (limits->softLimit > limits->hardLimit || (!clears && limits->hardLimit > device.mib * MIB))
            call.result = NVML_ERROR_INVALID_ARGUMENT;
        else {
            int lock = lock_capacity();
            unlink(path);
            int fd = clears ? -1 : open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
            if (!clears && fd < 0) call.result = NVML_ERROR_UNKNOWN;
            if (fd >= 0) {
                dprintf(fd, "%llu %s\n", limits->hardLimit, limits->nameSpace);
                close(fd);
            }
            close(lock);
        }
    }
    return end(&call, "device=%d group=%s limits=%s", index_of(handle), limits->nameSpace,
               hex(bytes, &limits->softLimit, sizeof *limits - sizeof limits->nameSpace));
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t handle, nvmlGetMemoryLimits_v1_t *limits) {
    Call call;
    Device device;
    char path[600], group[512];
    uint64_t hard;
    if (enter_limit(&call, "nvmlDeviceGetMemoryLimits_v1", handle, &device, limits->nameSpace, path, sizeof path)) {
        int lock = lock_capacity();
        if (!read_limit(path, &hard, group, sizeof group)) call.result = NVML_ERROR_NOT_FOUND;
        else {
            limits->softLimit = 0, limits->hardLimit = hard;
            limits->currentUsed = used_in_group(group, handle->index);
        }
        close(lock);
    }
    return end(&call, "device=%d group=%s", index_of(handle), limits->nameSpace);
}

/* ---- activity ---- */

/* The samples that were set: device.N.samples=pid:stamp_us:sm:memory,... (a stamp of 0 is now) */
static unsigned read_samples(int index, uint64_t since, nvmlProcessUtilizationSample_t *out, unsigned room) {
    char name[64], all[4096], *rest;
    unsigned count = 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, sizeof name, "device.%d.samples", index);
    if (!text_setting(name, all, sizeof all)) return 0;
    for (char *one = strtok_r(all, ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        nvmlProcessUtilizationSample_t sample = {0};
        if (sscanf(one, "%u:%llu:%u:%u", &sample.pid, &sample.timeStamp, &sample.smUtil, &sample.memUtil) < 3) continue;
        if (!sample.timeStamp) sample.timeStamp = (unsigned long long)now.tv_sec * 1000000ull + (unsigned long long)now.tv_nsec / 1000;
        if (sample.timeStamp <= since) continue;
        if (count < room) out[count] = sample;
        count++;
    }
    return count;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle, nvmlProcessUtilizationSample_t *utilization, unsigned int *sampleCount,
                                             unsigned long long lastSeenTimeStamp) {
    Call call;
    Device device;
    unsigned room = utilization ? *sampleCount : 0;
    if (enter_device(&call, "nvmlDeviceGetProcessUtilization", handle, &device)) {
        unsigned count = read_samples(handle->index, lastSeenTimeStamp, utilization, room);
        if (!count) call.result = NVML_ERROR_NOT_FOUND;
        else if (count > room) call.result = NVML_ERROR_INSUFFICIENT_SIZE;
        *sampleCount = count;
    }
    return end(&call, "device=%d room=%u since=%llu", index_of(handle), room, lastSeenTimeStamp);
}

/* A number of a device: device.N.NAME, or the default; a negative one is "not supported". */
static bool enter_number(Call *call, const char *function, nvmlDevice_t handle, const char *name, double fallback, double *out) {
    Device device;
    char full[64];
    if (!enter_device(call, function, handle, &device)) return false;
    snprintf(full, sizeof full, "device.%d.%s", handle->index, name);
    *out = setting(full, fallback);
    if (*out < 0) call->result = NVML_ERROR_NOT_SUPPORTED;
    return *out >= 0;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *utilization) {
    Call call;
    double busy;
    if (enter_number(&call, "nvmlDeviceGetUtilizationRates", handle, "busy_percent", 0, &busy))
        utilization->gpu = (unsigned)busy, utilization->memory = 0;
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, nvmlTemperatureSensors_t sensorType, unsigned int *temp) {
    Call call;
    double value;
    if (enter_number(&call, "nvmlDeviceGetTemperature", handle, "temperature_c", 40, &value)) {
        if (sensorType != NVML_TEMPERATURE_GPU) call.result = NVML_ERROR_INVALID_ARGUMENT;
        else *temp = (unsigned)value;
    }
    return end(&call, "device=%d sensor=%d", index_of(handle), (int)sensorType);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned int *power) {
    Call call;
    double value;
    if (enter_number(&call, "nvmlDeviceGetPowerUsage", handle, "power_mw", 80000, &value)) *power = (unsigned)value;
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t handle, unsigned long long *energy) {
    Call call;
    double value;
    if (enter_number(&call, "nvmlDeviceGetTotalEnergyConsumption", handle, "energy_mj", 1000, &value)) *energy = (unsigned long long)value;
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, nvmlComputeMode_t *mode) {
    Call call;
    double value;
    if (enter_number(&call, "nvmlDeviceGetComputeMode", handle, "compute_mode", 0, &value)) *mode = (nvmlComputeMode_t)(int)value;
    return end(&call, "device=%d", index_of(handle));
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t handle, nvmlEnableState_t *mode) {
    Call call;
    double value;
    if (enter_number(&call, "nvmlDeviceGetPersistenceMode", handle, "persistence_mode", 1, &value)) *mode = (nvmlEnableState_t)(int)value;
    return end(&call, "device=%d", index_of(handle));
}
