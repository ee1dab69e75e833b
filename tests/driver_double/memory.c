/* libcuda.so.1: memory.

   A device's memory is a file without a name (memfd) of the process that allocates it; it dies with the process. An allocation is
   a part of it, mapped at an address where nothing can be read: a device pointer means nothing to host code. Copies read and
   write the file. Work is done when it is submitted (see streams.c). */
#include "process.h"

#include <linux/falloc.h>

#define PAGE 4096ull
#define GRANULARITY (2 * MIB)

enum kind { RESERVED, DEVICE, MANAGED, HOST, REGISTERED, FOREIGN };

typedef struct Range {
    struct Range *next;
    enum kind kind;
    uint64_t at, size;
    Block *block; /* of DEVICE */
    uint64_t block_offset;
    bool accessible;
    int fd; /* of FOREIGN: the other process's memory, and where in it */
    uint64_t offset;
} Range;

static Range *ranges;

void forget_memory(void) { /* after a fork: the parent's memory is the parent's */
    if (process.memory_fd >= 0) close(process.memory_fd);
    process.memory_fd = -1, process.memory_end = 0, process.blocks = NULL, ranges = NULL;
}

static uint64_t round_up(uint64_t size, uint64_t to) { return (size + to - 1) / to * to; }

static Range *add_range(enum kind kind, uint64_t at, uint64_t size) {
    Range *range = calloc(1, sizeof *range);
    *range = (Range){.next = ranges, .kind = kind, .at = at, .size = size, .accessible = true, .fd = -1};
    return ranges = range;
}

static void remove_range(Range *range) {
    for (Range **link = &ranges; *link; link = &(*link)->next)
        if (*link == range) {
            *link = range->next;
            if (range->fd >= 0) close(range->fd);
            free(range);
            return;
        }
}

/* The range that an address lies in; a reservation only where nothing is mapped. */
static Range *range_at(uint64_t at) {
    Range *reserved = NULL;
    for (Range *one = ranges; one; one = one->next)
        if (at >= one->at && at < one->at + one->size) {
            if (one->kind != RESERVED) return one;
            reserved = one;
        }
    return reserved;
}

static Range *range_from(uint64_t at, enum kind kind) {
    for (Range *one = ranges; one; one = one->next)
        if (one->at == at && one->kind == kind) return one;
    return NULL;
}

/* ---- blocks: device memory ---- */

static CUresult make_block(int ordinal, uint64_t size, Block **out) {
    if (process.memory_fd < 0) process.memory_fd = memfd_create("device memory", MFD_CLOEXEC);
    if (process.memory_fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = take(ordinal, size, 0);
    if (result) return result;
    Block *block = calloc(1, sizeof *block);
    *block = (Block){.next = process.blocks, .offset = process.memory_end, .size = size, .ordinal = ordinal, .references = 1};
    if (ftruncate(process.memory_fd, (off_t)(process.memory_end + size))) {
        give_back(ordinal, size, 0);
        free(block);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    process.memory_end += size; /* addresses in the file are not used again: it has holes where memory was freed */
    *out = process.blocks = block;
    return CUDA_SUCCESS;
}

static void remove_block(Block *block) {
    for (Block **link = &process.blocks; *link; link = &(*link)->next)
        if (*link == block) {
            *link = block->next;
            break;
        }
    fallocate(process.memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)block->offset, (off_t)block->size);
    give_back(block->ordinal, block->size, 0);
    free(block);
}

static void release_block(Block *block) {
    if (!--block->references) remove_block(block);
}

void drop_block(Block *block) {
    for (Range *one = ranges, *next; one; one = next) {
        next = one->next;
        if (one->block == block) {
            munmap((void *)one->at, one->size);
            remove_range(one);
        }
    }
    remove_block(block);
}

/* ---- copying ---- */

typedef enum { READ, WRITE } Way;

static CUresult move_bytes(int fd, uint64_t offset, void *host, size_t size, Way way) {
    for (size_t done = 0; done < size;) {
        char *at = (char *)host + done;
        ssize_t n = way == READ ? pread(fd, at, size - done, (off_t)(offset + done)) : pwrite(fd, at, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return CUDA_ERROR_OUT_OF_MEMORY;
        done += (size_t)n;
    }
    return CUDA_SUCCESS;
}

/* Copies between host memory and what may be several mappings in a row. */
static CUresult copy(uint64_t at, void *host, size_t size, Way way) {
    while (size) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_at(at);
        bool usable = range && range->kind != RESERVED && range->accessible;
        Range is = usable ? *range : (Range){0};
        uint64_t offset = usable && is.block ? is.block->offset + is.block_offset : is.offset;
        pthread_mutex_unlock(&process.mutex);
        if (!usable) return CUDA_ERROR_INVALID_VALUE;
        size_t part = size < is.at + is.size - at ? size : is.at + is.size - at;
        CUresult result = CUDA_SUCCESS;
        if (is.kind == DEVICE || is.kind == FOREIGN)
            result = move_bytes(is.kind == FOREIGN ? is.fd : process.memory_fd, offset + at - is.at, host, part, way);
        else if (way == READ) memcpy(host, (void *)at, part);
        else memcpy((void *)at, host, part);
        if (result) return result;
        at += part, host = (char *)host + part, size -= part;
    }
    return CUDA_SUCCESS;
}

#define CHUNK MIB

static CUresult copy_between(uint64_t to, uint64_t from, size_t size) {
    char *through = malloc(CHUNK);
    CUresult result = CUDA_SUCCESS;
    for (size_t done = 0; done < size && !result; done += CHUNK) {
        size_t part = size - done < CHUNK ? size - done : CHUNK;
        result = copy(from + done, through, part, READ);
        if (!result) result = copy(to + done, through, part, WRITE);
    }
    free(through);
    return result;
}

static CUresult fill(uint64_t at, const void *pattern, size_t width, size_t count) {
    size_t size = width * count, ready = size < CHUNK ? size : CHUNK;
    unsigned char *through = malloc(ready ? ready : 1);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < ready; i++) through[i] = ((const unsigned char *)pattern)[i % width];
    for (size_t done = 0; done < size && !result; done += ready)
        result = copy(at + done, through, size - done < ready ? size - done : ready, WRITE);
    free(through);
    return result;
}

/* A pointer of host memory that CUDA does not know is copied from and to as it is. */
static CUresult copy_any(uint64_t to, uint64_t from, size_t size) {
    pthread_mutex_lock(&process.mutex);
    bool to_known = range_at(to), from_known = range_at(from);
    pthread_mutex_unlock(&process.mutex);
    if (to_known && from_known) return copy_between(to, from, size);
    if (to_known) return copy(to, (void *)from, size, WRITE);
    if (from_known) return copy(from, (void *)to, size, READ);
    memmove((void *)to, (void *)from, size);
    return CUDA_SUCCESS;
}

/* ---- the calls: plain memory ---- */

static CUresult allocate(CUdeviceptr *out, size_t size) {
    int ordinal;
    Block *block;
    CUresult result = size ? current_ordinal(&ordinal) : CUDA_ERROR_INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&process.mutex);
    result = make_block(ordinal, round_up(size, PAGE), &block);
    if (!result) {
        void *at = mmap(NULL, block->size, PROT_NONE, MAP_SHARED, process.memory_fd, (off_t)block->offset);
        if (at == MAP_FAILED) {
            remove_block(block);
            result = CUDA_ERROR_OPERATING_SYSTEM;
        } else {
            madvise(at, block->size, MADV_DONTFORK);
            add_range(DEVICE, (uint64_t)at, block->size)->block = block;
            *out = (CUdeviceptr)at;
        }
    }
    pthread_mutex_unlock(&process.mutex);
    return result;
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize) {
    Call call;
    if (enter_work(&call, "cuMemAlloc")) call.result = allocate(dptr, bytesize);
    return end(&call, "size=%zu pointer=%llx", bytesize, call.result ? 0 : *dptr);
}

static CUresult release(CUdeviceptr at) {
    CUresult result = CUDA_SUCCESS;
    if (!at) return result;
    pthread_mutex_lock(&process.mutex);
    Range *device = range_from(at, DEVICE), *managed = range_from(at, MANAGED);
    if (device) {
        munmap((void *)at, device->size);
        release_block(device->block);
        remove_range(device);
    } else if (managed) {
        munmap((void *)at, managed->size);
        process.record->managed_bytes -= managed->size;
        remove_range(managed);
    } else result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&process.mutex);
    return result;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr dptr) {
    Call call;
    if (enter_work(&call, "cuMemFree")) call.result = release(dptr);
    return end(&call, "pointer=%llx", dptr);
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    Call call;
    if (enter_work(&call, "cuMemGetAddressRange")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_at(dptr);
        if (!range) call.result = CUDA_ERROR_NOT_FOUND;
        if (range && pbase) *pbase = range->at;
        if (range && psize) *psize = range->size;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx", dptr);
}

CUresult CUDAAPI cuMemGetInfo(size_t *bytes_free, size_t *total) {
    Call call;
    int ordinal;
    if (enter_work(&call, "cuMemGetInfo") && !(call.result = current_ordinal(&ordinal))) {
        Device all[MAX_DEVICES];
        uint64_t used[MAX_DEVICES];
        int device = process.visible[ordinal], count = devices(all), lock = lock_capacity();
        add_up_use(used);
        Limit limit = limit_for(getpid(), device);
        close(lock);
        bool tells = limit.leaf && setting("limits_told", 1);
        *total = device >= count ? 0 : tells ? limit.hard : all[device].mib * MIB;
        uint64_t taken = tells ? limit.used : used[device];
        *bytes_free = *total > taken ? *total - taken : 0;
    }
    return end(&call, "%s", "");
}

/* Calls that differ in little: each is a line, with its asynchronous form. */
#define COPY(name, parameters, action, format, ...)                                      \
    CUresult CUDAAPI name parameters {                                                   \
        Call call;                                                                       \
        if (enter_work(&call, #name)) call.result = action;                              \
        return end(&call, format, __VA_ARGS__);                                          \
    }

COPY(cuMemcpyHtoD, (CUdeviceptr to, const void *from, size_t size),
       copy(to, (void *)from, size, WRITE),
       "to=%llx size=%zu", to, size)
COPY(cuMemcpyDtoH, (void *to, CUdeviceptr from, size_t size),
       copy(from, to, size, READ),
       "from=%llx size=%zu", from, size)
COPY(cuMemcpyDtoD, (CUdeviceptr to, CUdeviceptr from, size_t size),
       copy_between(to, from, size),
       "to=%llx from=%llx size=%zu", to, from, size)
COPY(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t size),
       copy_any(to, from, size),
       "to=%llx from=%llx size=%zu", to, from, size)
COPY(cuMemcpyHtoDAsync, (CUdeviceptr to, const void *from, size_t size, CUstream stream),
       copy(to, (void *)from, size, WRITE),
       "to=%llx size=%zu stream=%p", to, size, (void *)stream)
COPY(cuMemcpyDtoHAsync, (void *to, CUdeviceptr from, size_t size, CUstream stream),
       copy(from, to, size, READ),
       "from=%llx size=%zu stream=%p", from, size, (void *)stream)
COPY(cuMemcpyDtoDAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
       copy_between(to, from, size),
       "to=%llx from=%llx size=%zu stream=%p", to, from, size, (void *)stream)
COPY(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
       copy_any(to, from, size),
       "to=%llx from=%llx size=%zu stream=%p", to, from, size, (void *)stream)
COPY(cuMemsetD8, (CUdeviceptr at, unsigned char value, size_t count),
       fill(at, &value, 1, count),
       "to=%llx value=%x count=%zu", at, value, count)
COPY(cuMemsetD16, (CUdeviceptr at, unsigned short value, size_t count),
       fill(at, &value, 2, count),
       "to=%llx value=%x count=%zu", at, value, count)
COPY(cuMemsetD32, (CUdeviceptr at, unsigned int value, size_t count),
       fill(at, &value, 4, count),
       "to=%llx value=%x count=%zu", at, value, count)
COPY(cuMemsetD8Async, (CUdeviceptr at, unsigned char value, size_t count, CUstream stream),
       fill(at, &value, 1, count),
       "to=%llx value=%x count=%zu stream=%p", at, value, count, (void *)stream)
COPY(cuMemsetD32Async, (CUdeviceptr at, unsigned int value, size_t count, CUstream stream),
       fill(at, &value, 4, count),
       "to=%llx value=%x count=%zu stream=%p", at, value, count, (void *)stream)

/* ---- managed and pinned memory ---- */

static CUresult map_host(enum kind kind, size_t size, void **out) {
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    size = round_up(size, PAGE);
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&process.mutex);
    add_range(kind, (uint64_t)at, size);
    if (kind == MANAGED) process.record->managed_bytes += size;
    pthread_mutex_unlock(&process.mutex);
    *out = at;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    Call call;
    int ordinal;
    void *at = NULL;
    if (enter_work(&call, "cuMemAllocManaged") && !(call.result = current_ordinal(&ordinal)) &&
        !(call.result = map_host(MANAGED, bytesize, &at))) *dptr = (CUdeviceptr)at;
    return end(&call, "size=%zu flags=%u pointer=%p", bytesize, flags, at);
}

CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    Call call;
    if (enter_work(&call, "cuMemHostAlloc")) call.result = map_host(HOST, bytesize, pp);
    return end(&call, "size=%zu flags=%u", bytesize, Flags);
}

CUresult CUDAAPI cuMemAllocHost(void **pp, size_t bytesize) {
    Call call;
    if (enter_work(&call, "cuMemAllocHost")) call.result = map_host(HOST, bytesize, pp);
    return end(&call, "size=%zu", bytesize);
}

CUresult CUDAAPI cuMemFreeHost(void *p) {
    Call call;
    if (enter_work(&call, "cuMemFreeHost")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_from((uint64_t)p, HOST);
        if (range) {
            munmap(p, range->size);
            remove_range(range);
        } else call.result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%p", p);
}

static CUresult register_host(uint64_t at, size_t size) {
    if (!at || !size) return CUDA_ERROR_INVALID_VALUE;
    for (Range *one = ranges; one; one = one->next)
        if (at < one->at + one->size && one->at < at + size) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_range(REGISTERED, at, size);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags) {
    Call call;
    if (enter_work(&call, "cuMemHostRegister")) {
        pthread_mutex_lock(&process.mutex);
        call.result = register_host((uint64_t)p, bytesize);
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%p size=%zu flags=%u", p, bytesize, Flags);
}

CUresult CUDAAPI cuMemHostUnregister(void *p) {
    Call call;
    if (enter_work(&call, "cuMemHostUnregister")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_from((uint64_t)p, REGISTERED);
        if (range) remove_range(range);
        else call.result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%p", p);
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
    Call call;
    if (enter_work(&call, "cuMemHostGetDevicePointer")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_at((uint64_t)p);
        if (range && (range->kind == HOST || range->kind == REGISTERED)) *pdptr = (CUdeviceptr)p;
        else call.result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%p flags=%u", p, Flags);
}

/* ---- memory of other processes ---- */

struct handle { /* what lies in the 64 bytes of a CUipcMemHandle */
    uint32_t magic;
    int32_t pid, fd;
    uint64_t start_time, offset, size;
};

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    Call call;
    if (enter_work(&call, "cuIpcGetMemHandle")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_from(dptr, DEVICE);
        if (range) {
            struct handle of = {RECORD_MAGIC, getpid(), process.memory_fd, process.record->start_time, range->block->offset, range->size};
            memset(pHandle, 0, sizeof *pHandle);
            memcpy(pHandle, &of, sizeof of);
            process.record->shared++;
        } else call.result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx", dptr);
}

static CUresult open_handle(const struct handle *of, CUdeviceptr *out) {
    char path[64];
    uint64_t start;
    int ordinal;
    CUresult result = current_ordinal(&ordinal);
    if (result) return result;
    if (of->magic != RECORD_MAGIC) return CUDA_ERROR_INVALID_VALUE;
    if (of->pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT; /* CUDA opens no handle in the process that made it */
    if (!process_lives(of->pid, &start, NULL) || start != of->start_time) return CUDA_ERROR_MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", of->pid, of->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, of->size, PROT_NONE, MAP_SHARED, fd, (off_t)of->offset);
    if (at == MAP_FAILED) {
        if (fd >= 0) close(fd);
        return CUDA_ERROR_MAP_FAILED;
    }
    pthread_mutex_lock(&process.mutex);
    Range *range = add_range(FOREIGN, (uint64_t)at, of->size);
    range->fd = fd, range->offset = of->offset;
    process.record->shared++;
    pthread_mutex_unlock(&process.mutex);
    *out = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    Call call;
    struct handle of;
    memcpy(&of, &handle, sizeof of);
    if (enter_work(&call, "cuIpcOpenMemHandle")) call.result = open_handle(&of, pdptr);
    return end(&call, "process=%d flags=%u", of.pid, Flags);
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr) {
    Call call;
    if (enter_work(&call, "cuIpcCloseMemHandle")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_from(dptr, FOREIGN);
        if (range) {
            munmap((void *)dptr, range->size);
            remove_range(range);
            process.record->shared--;
        } else call.result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx", dptr);
}

/* ---- virtual memory ---- */

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    Call call;
    if (enter(&call, "cuMemGetAllocationGranularity")) *granularity = GRANULARITY;
    return end(&call, "type=%d option=%d", (int)prop->type, (int)option);
}

static CUresult reserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted) {
    if (!size || size % GRANULARITY || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
    uint64_t to = alignment > GRANULARITY ? alignment : GRANULARITY;
    void *at = MAP_FAILED;
    if (wanted && !(wanted % to)) /* a wish: where it is taken, the driver chooses */
        at = mmap((void *)wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == MAP_FAILED) {
        char *more = mmap(NULL, size + to, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (more == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
        char *aligned = (char *)round_up((uint64_t)more, to);
        if (aligned > more) munmap(more, (size_t)(aligned - more));
        if (more + to > aligned) munmap(aligned + size, (size_t)(more + to - aligned));
        at = aligned;
    }
    pthread_mutex_lock(&process.mutex);
    add_range(RESERVED, (uint64_t)at, size);
    pthread_mutex_unlock(&process.mutex);
    *out = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
    Call call;
    if (enter(&call, "cuMemAddressReserve")) call.result = reserve(ptr, size, alignment, addr);
    return end(&call, "size=%zu alignment=%zu wanted=%llx flags=%llu pointer=%llx", size, alignment, addr, flags, call.result ? 0 : *ptr);
}

/* Whether the addresses are partly mapped. */
static bool overlaps_mapping(uint64_t at, uint64_t size) {
    for (Range *one = ranges; one; one = one->next)
        if (one->kind != RESERVED && at < one->at + one->size && one->at < at + size) return true;
    return false;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    Call call;
    if (enter(&call, "cuMemAddressFree")) {
        pthread_mutex_lock(&process.mutex);
        Range *range = range_from(ptr, RESERVED);
        if (!range || range->size != size || overlaps_mapping(ptr, size)) call.result = CUDA_ERROR_INVALID_VALUE;
        else {
            munmap((void *)ptr, size);
            remove_range(range);
        }
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx size=%zu", ptr, size);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    Call call;
    if (enter_work(&call, "cuMemCreate")) {
        Block *block = NULL;
        bool sound = size && size % GRANULARITY == 0 && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                     prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        if (!sound) call.result = CUDA_ERROR_INVALID_VALUE;
        else if (prop->location.id < 0 || prop->location.id >= process.visible_count) call.result = CUDA_ERROR_INVALID_DEVICE;
        else {
            pthread_mutex_lock(&process.mutex);
            call.result = make_block(prop->location.id, size, &block);
            pthread_mutex_unlock(&process.mutex);
        }
        if (!call.result) *handle = (CUmemGenericAllocationHandle)(uintptr_t)block;
    }
    return end(&call, "size=%zu device=%d flags=%llu handle=%llx", size, prop->location.id, flags, call.result ? 0 : *handle);
}

static Block *block_of(CUmemGenericAllocationHandle handle) {
    for (Block *one = process.blocks; one; one = one->next)
        if ((uintptr_t)one == handle) return one;
    return NULL;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    Call call;
    if (enter_work(&call, "cuMemRelease")) {
        pthread_mutex_lock(&process.mutex);
        Block *block = block_of(handle);
        if (block) release_block(block); /* its memory is freed with its last mapping */
        else call.result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "handle=%llx", handle);
}

static CUresult map_block(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle) {
    Block *block = block_of(handle);
    Range *reserved = range_at(at);
    bool sound = block && size && size % GRANULARITY == 0 && at % GRANULARITY == 0 && offset + size <= block->size && reserved &&
                 reserved->kind == RESERVED && at + size <= reserved->at + reserved->size && !overlaps_mapping(at, size);
    if (!sound) return CUDA_ERROR_INVALID_VALUE;
    void *mapped = mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, process.memory_fd, (off_t)(block->offset + offset));
    if (mapped == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
    madvise(mapped, size, MADV_DONTFORK);
    Range *range = add_range(DEVICE, at, size);
    range->block = block, range->block_offset = offset, range->accessible = false;
    block->references++;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    Call call;
    if (enter_work(&call, "cuMemMap")) {
        pthread_mutex_lock(&process.mutex);
        call.result = map_block(ptr, size, offset, handle);
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx size=%zu offset=%zu handle=%llx flags=%llu", ptr, size, offset, handle, flags);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    Call call;
    bool open = count && desc[0].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (enter_work(&call, "cuMemSetAccess")) {
        uint64_t covered = 0;
        pthread_mutex_lock(&process.mutex);
        for (Range *one = ranges; one; one = one->next)
            if (one->kind == DEVICE && one->at >= ptr && one->at + one->size <= ptr + size) one->accessible = open, covered += one->size;
        pthread_mutex_unlock(&process.mutex);
        if (covered != size) call.result = CUDA_ERROR_INVALID_VALUE;
    }
    return end(&call, "pointer=%llx size=%zu access=%d", ptr, size, count ? (int)desc[0].flags : -1);
}

/* Unmaps whole mappings; the addresses stay reserved. */
static CUresult unmap(CUdeviceptr at, size_t size) {
    uint64_t covered = 0;
    for (Range *one = ranges; one; one = one->next)
        if (one->kind == DEVICE && one->at >= at && one->at + one->size <= at + size) covered += one->size;
    if (covered != size) return CUDA_ERROR_INVALID_VALUE;
    for (Range *one = ranges, *next; one; one = next) {
        next = one->next;
        if (one->kind != DEVICE || one->at < at || one->at + one->size > at + size) continue;
        mmap((void *)one->at, one->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        release_block(one->block);
        remove_range(one);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
    Call call;
    if (enter_work(&call, "cuMemUnmap")) {
        pthread_mutex_lock(&process.mutex);
        call.result = unmap(ptr, size);
        pthread_mutex_unlock(&process.mutex);
    }
    return end(&call, "pointer=%llx size=%zu", ptr, size);
}
