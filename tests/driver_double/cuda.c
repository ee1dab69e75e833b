/* libcuda.so.1: starting, devices, contexts, and how the bindings find the calls. */
#include "process.h"

#include <linux/futex.h>

struct Process process = {.mutex = PTHREAD_MUTEX_INITIALIZER, .record_fd = -1, .memory_fd = -1};

static struct CUctx_st primary[MAX_DEVICES];
static __thread CUcontext stack[32];
static __thread int depth;
static bool forked; /* a child of a process that had called cuInit: nothing works there */

/* ---- entering and leaving calls ---- */

static void leave_work(void) { atomic_fetch_sub(&process.record->in_flight, 1); }

bool enter(Call *call, const char *name) {
    if (!process.record || forked) {
        *call = (Call){.name = name, .began_ns = now_ns(), .result = CUDA_ERROR_NOT_INITIALIZED};
        return false;
    }
    return begin(call, name, getpid());
}

/* Counts the call as in flight, or waits while the process is locked or checkpointed. A lock sets `closing` before it looks at
   `in_flight`, and this looks at `closing` after it has counted itself: one of the two sees the other. */
static bool pass_gate(Record *record) {
    for (;;) {
        atomic_fetch_add(&record->in_flight, 1);
        uint32_t state = atomic_load(&record->state);
        if (state == CU_PROCESS_STATE_RUNNING && !atomic_load(&record->closing)) return true;
        atomic_fetch_sub(&record->in_flight, 1);
        if (state == CU_PROCESS_STATE_FAILED) return false;
        if (state != CU_PROCESS_STATE_RUNNING) futex(&record->state, FUTEX_WAIT, state, 100000000);
        else futex(&record->closing, FUTEX_WAIT, 1, 100000000);
    }
}

bool enter_work(Call *call, const char *name) {
    uint64_t began = now_ns();
    if (process.record && !forked && !pass_gate(process.record)) {
        *call = (Call){.name = name, .began_ns = began, .result = CUDA_ERROR_OPERATING_SYSTEM};
        return false;
    }
    bool go = enter(call, name);
    if (process.record && !forked) call->leave = leave_work;
    return go;
}

/* ---- starting ---- */

void forget_after_fork(void) {
    /* The child has copies of handles that mean nothing there: it must begin anew, and CUDA says that it cannot. */
    renew_host_mutex();
    bool inherits = process.record && setting("forked_known", 0) != 0;
    if (process.record) forked = true;
    pthread_mutex_init(&process.mutex, NULL);
    if (process.record_fd >= 0) close(process.record_fd);
    forget_memory();
    process.record = NULL, process.record_fd = -1;
    depth = 0;
    memset(primary, 0, sizeof primary);
    if (inherits && make_record(true) == CUDA_SUCCESS) start_thread();
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, forget_after_fork); }

static bool names_device(const char *given, const Device *device, int index) {
    char *end;
    long number = strtol(given, &end, 10);
    if (end != given && !*end) return number == index;
    return !strncasecmp(given, "GPU-", 4) && !strncasecmp(given, device->id, strlen(given));
}

/* Fills process.visible as CUDA_VISIBLE_DEVICES says: what follows the first name that means nothing is not seen. */
static void see_devices(void) {
    Device all[MAX_DEVICES];
    int count = devices(all);
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    char copy[1024], *rest;
    process.visible_count = 0;
    if (!given) {
        for (int i = 0; i < count; i++) process.visible[process.visible_count++] = i;
        return;
    }
    snprintf(copy, sizeof copy, "%s", given);
    for (char *one = strtok_r(copy, ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        int found = -1;
        for (int i = 0; i < count && found < 0; i++)
            if (names_device(one, &all[i], i)) found = i;
        for (int i = 0; i < process.visible_count; i++)
            if (process.visible[i] == found) found = -1;
        if (found < 0) return;
        process.visible[process.visible_count++] = found;
    }
}

CUresult make_record(bool inherited) {
    char name[96], path[600], final[600];
    uint64_t start;
    int pid = getpid();
    if (!process_lives(pid, &start, NULL)) return CUDA_ERROR_OPERATING_SYSTEM;
    snprintf(name, sizeof name, "processes/new.%d", pid);
    if (!host_path(path, sizeof path, name)) return CUDA_ERROR_OPERATING_SYSTEM;
    snprintf(name, sizeof name, "processes/%d.%llu", pid, (unsigned long long)start);
    host_path(final, sizeof final, name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    fchmod(fd, 0666); /* the broker may be another user */
    Record *record = MAP_FAILED;
    if (!ftruncate(fd, sizeof *record)) record = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (record == MAP_FAILED) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    record->magic = RECORD_MAGIC, record->pid = (uint32_t)pid, record->start_time = start;
    record->inherited = inherited, record->resident = 1;
    for (int i = 0; i < MAX_DEVICES; i++) record->move_to[i] = i;
    process.record = record, process.record_fd = fd;
    return rename(path, final) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

static CUresult start(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (process.record) return CUDA_SUCCESS;
    if (!open_host()) return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&process.mutex);
    see_devices();
    CUresult result = process.visible_count ? make_record(false) : CUDA_ERROR_NO_DEVICE;
    if (result == CUDA_SUCCESS && !start_thread()) result = CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_unlock(&process.mutex);
    return result;
}

CUresult CUDAAPI cuInit(unsigned int Flags) {
    Call call;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (begin(&call, "cuInit", getpid())) call.result = start(Flags);
    return end(&call, "flags=%u CUDA_VISIBLE_DEVICES=%s", Flags, visible ? visible : "NULL");
}

CUresult CUDAAPI cuDriverGetVersion(int *driverVersion) {
    Call call;
    if (begin(&call, "cuDriverGetVersion", getpid())) *driverVersion = (int)setting("cuda_version", 13000);
    return end(&call, "version=%d", *driverVersion);
}

/* ---- devices ---- */

static CUresult device_of(CUdevice ordinal, Device *out) {
    Device all[MAX_DEVICES];
    if (ordinal < 0 || ordinal >= process.visible_count) return CUDA_ERROR_INVALID_DEVICE;
    if (process.visible[ordinal] >= devices(all)) return CUDA_ERROR_INVALID_DEVICE;
    *out = all[process.visible[ordinal]];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    Call call;
    if (enter(&call, "cuDeviceGetCount")) *count = process.visible_count;
    return end(&call, "count=%d", *count);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    Call call;
    if (enter(&call, "cuDeviceGet")) {
        call.result = ordinal < 0 || ordinal >= process.visible_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
        if (!call.result) *device = ordinal;
    }
    return end(&call, "ordinal=%d", ordinal);
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) { /* _v2 by cuda.h */
    Call call;
    Device device;
    if (enter(&call, "cuDeviceGetUuid") && !(call.result = device_of(dev, &device))) memcpy(uuid->bytes, device.uuid, 16);
    return end(&call, "device=%d", dev);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev) {
    Call call;
    Device device;
    if (enter(&call, "cuDeviceGetName") && !(call.result = device_of(dev, &device))) snprintf(name, (size_t)len, "%s", device.name);
    return end(&call, "device=%d", dev);
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice dev) {
    Call call;
    Device device;
    if (enter(&call, "cuDeviceTotalMem") && !(call.result = device_of(dev, &device))) *bytes = device.mib * MIB;
    return end(&call, "device=%d", dev);
}

CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    static const struct { CUdevice_attribute is; int value; } known[] = {
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    };
    Call call;
    Device device;
    if (enter(&call, "cuDeviceGetAttribute") && !(call.result = device_of(dev, &device))) {
        *pi = 0;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (known[i].is == attrib) *pi = known[i].value;
    }
    return end(&call, "attribute=%d device=%d", (int)attrib, dev);
}

/* ---- how full devices are ---- */

CUresult take(int ordinal, uint64_t bytes, int contexts) {
    Device all[MAX_DEVICES];
    Record *record = process.record;
    uint64_t used[MAX_DEVICES], needed = bytes + (uint64_t)contexts * context_bytes();
    int device = process.visible[ordinal], count = devices(all), lock = lock_capacity();
    add_up_use(used);
    Limit limit = limit_for((int)record->pid, device);
    bool fits = device < count && used[device] + needed <= all[device].mib * MIB && (limit.hard == UINT64_MAX || limit.used + needed <= limit.hard);
    if (fits) {
        record->bytes[device] += bytes, record->contexts[device] += (uint32_t)contexts;
        if (record->contexts[device]) record->devices |= 1u << device;
    }
    close(lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void give_back(int ordinal, uint64_t bytes, int contexts) {
    Record *record = process.record;
    int device = process.visible[ordinal], lock = lock_capacity();
    record->bytes[device] -= bytes, record->contexts[device] -= (uint32_t)contexts;
    if (!record->contexts[device]) record->devices &= ~(1u << device);
    close(lock);
}

/* ---- contexts ---- */

CUresult current_ordinal(int *ordinal) {
    if (!depth || !stack[depth - 1]) return CUDA_ERROR_INVALID_CONTEXT;
    *ordinal = stack[depth - 1]->ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    Call call;
    Device device;
    if (enter_work(&call, "cuDevicePrimaryCtxRetain") && !(call.result = device_of(dev, &device))) {
        pthread_mutex_lock(&process.mutex);
        if (!primary[dev].references) call.result = take(dev, 0, 1);
        if (!call.result) {
            primary[dev] = (struct CUctx_st){.ordinal = dev, .references = primary[dev].references + 1, .primary = true};
            *pctx = &primary[dev];
        }
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "device=%d", dev);
}

static CUresult release_primary(CUdevice dev, bool all) {
    Device device;
    CUresult result = device_of(dev, &device);
    if (result) return result;
    pthread_mutex_lock(&process.mutex);
    if (!primary[dev].references) result = all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    else if (all || !--primary[dev].references) {
        /* What was allocated there goes with the context. */
        for (Block *one = process.blocks, *next; one; one = next) {
            next = one->next;
            if (one->ordinal == dev) drop_block(one);
        }
        primary[dev].references = 0;
        give_back(dev, 0, 1);
    }
    pthread_mutex_unlock(&process.mutex);
    return result;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
    Call call;
    if (enter_work(&call, "cuDevicePrimaryCtxRelease")) call.result = release_primary(dev, false);
    return end(&call, "device=%d", dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev) {
    Call call;
    if (enter_work(&call, "cuDevicePrimaryCtxReset")) call.result = release_primary(dev, true);
    return end(&call, "device=%d", dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    Call call;
    Device device;
    if (enter(&call, "cuDevicePrimaryCtxGetState") && !(call.result = device_of(dev, &device)))
        *flags = 0, *active = primary[dev].references > 0;
    return end(&call, "device=%d", dev);
}

static CUresult create_context(CUcontext *pctx, CUdevice dev) {
    Device device;
    CUresult result = device_of(dev, &device);
    if (result || (result = take(dev, 0, 1))) return result;
    *pctx = calloc(1, sizeof **pctx);
    (*pctx)->ordinal = dev;
    if (depth < 32) stack[depth++] = *pctx;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    Call call;
    if (enter_work(&call, "cuCtxCreate")) call.result = create_context(pctx, dev);
    return end(&call, "flags=%u device=%d", flags, dev);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice dev) {
    Call call;
    if (enter_work(&call, "cuCtxCreate")) call.result = create_context(pctx, dev);
    return end(&call, "params=%s count=%d flags=%u device=%d", params ? "given" : "NULL", count, flags, dev);
}

CUresult CUDAAPI cuCtxCreate(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev) { /* _v4 */
    Call call;
    if (enter_work(&call, "cuCtxCreate")) call.result = create_context(pctx, dev);
    return end(&call, "params=%s flags=%u device=%d", ctxCreateParams ? "given" : "NULL", flags, dev);
}

CUresult CUDAAPI cuCtxDestroy(CUcontext ctx) {
    Call call;
    if (enter_work(&call, "cuCtxDestroy")) {
        if (!ctx || ctx->primary) call.result = CUDA_ERROR_INVALID_CONTEXT;
        else {
            if (depth && stack[depth - 1] == ctx) depth--;
            give_back(ctx->ordinal, 0, 1);
            free(ctx);
        }
    }
    return end(&call, "context=%p", (void *)ctx);
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    Call call;
    if (enter(&call, "cuCtxSetCurrent")) {
        if (depth) depth--;
        if (ctx) stack[depth++] = ctx;
    }
    return end(&call, "context=%p", (void *)ctx);
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx) {
    Call call;
    if (enter(&call, "cuCtxGetCurrent")) *pctx = depth ? stack[depth - 1] : NULL;
    return end(&call, "%s", "");
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    Call call;
    if (enter(&call, "cuCtxPushCurrent")) {
        if (!ctx || depth == 32) call.result = CUDA_ERROR_INVALID_CONTEXT;
        else stack[depth++] = ctx;
    }
    return end(&call, "context=%p", (void *)ctx);
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx) {
    Call call;
    if (enter(&call, "cuCtxPopCurrent")) {
        if (!depth) call.result = CUDA_ERROR_INVALID_CONTEXT;
        else {
            depth--;
            if (pctx) *pctx = stack[depth];
        }
    }
    return end(&call, "%s", "");
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
    Call call;
    if (enter(&call, "cuCtxGetDevice")) call.result = current_ordinal(device);
    return end(&call, "%s", "");
}

/* ---- errors ---- */

static const struct { CUresult is; const char *name; } errors[] = {
#define ERROR(name) {name, #name},
#include "errors.inc" /* all of CUresult, made from cuda.h */
};

static CUresult error_text(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].is == error) {
            *text = errors[i].name;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **pStr) { return error_text(error, pStr); }
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr) { return error_text(error, pStr); }
