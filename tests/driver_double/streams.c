/* libcuda.so.1: streams and events. There is one line of work for a process: what is submitted is done at once, unless
   driverDoubleBusy keeps the device at work. */
#include "process.h"

struct CUevent_st { uint64_t at_ns; };

static bool is_done(uint64_t at_ns) { return at_ns <= now_ns(); }

static void wait_for_work(void) {
    for (uint64_t until; !is_done(until = atomic_load(&process.record->busy_until_ns));) {
        uint64_t soon = now_ns() + 500000; /* it may be told to end before */
        nap_until(until < soon ? until : soon);
    }
}

static uint64_t work_ends(void) {
    uint64_t until = atomic_load(&process.record->busy_until_ns);
    return is_done(until) ? now_ns() : until;
}

/* Not CUDA's: keeps the process's device at work for so many milliseconds; 0 ends it, UINT_MAX: until then. */
__attribute__((visibility("default"))) CUresult driverDoubleBusy(unsigned int ms) {
    Call call;
    if (enter(&call, "driverDoubleBusy")) /* not held by a lock: it may be what the lock waits for */
        atomic_store(&process.record->busy_until_ns, ms == UINT32_MAX ? UINT64_MAX : ms ? now_ns() + ms * 1000000ull : 0);
    return end(&call, "ms=%u", ms);
}

#define SIMPLE(name, parameters, action, format, ...)          \
    CUresult CUDAAPI name parameters {                         \
        Call call;                                             \
        if (enter_work(&call, #name)) { action; }              \
        return end(&call, format, __VA_ARGS__);                \
    }

SIMPLE(cuCtxSynchronize, (void), wait_for_work(), "%s", "")
SIMPLE(cuStreamCreate, (CUstream *stream, unsigned int flags), *stream = malloc(8), "flags=%u", flags)
SIMPLE(cuStreamCreateWithPriority, (CUstream *stream, unsigned int flags, int priority),
       *stream = malloc(8),
       "flags=%u priority=%d", flags, priority)
SIMPLE(cuStreamDestroy, (CUstream stream), free(stream), "stream=%p", (void *)stream)
SIMPLE(cuStreamSynchronize, (CUstream stream), wait_for_work(), "stream=%p", (void *)stream)
SIMPLE(cuStreamQuery, (CUstream stream),
       call.result = is_done(atomic_load(&process.record->busy_until_ns)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY,
       "stream=%p", (void *)stream)
SIMPLE(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags),
       (void)0,
       "stream=%p event=%p flags=%u", (void *)stream, (void *)event, flags)
SIMPLE(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *with),
       wait_for_work(); function(with),
       "stream=%p", (void *)stream)
SIMPLE(cuEventCreate, (CUevent *event, unsigned int flags),
       *event = calloc(1, sizeof **event),
       "flags=%u", flags)
SIMPLE(cuEventDestroy, (CUevent event), free(event), "event=%p", (void *)event)
SIMPLE(cuEventRecord, (CUevent event, CUstream stream),
       event->at_ns = work_ends(),
       "event=%p stream=%p", (void *)event, (void *)stream)
SIMPLE(cuEventSynchronize, (CUevent event),
       if (!is_done(event->at_ns)) wait_for_work(),
       "event=%p", (void *)event)
SIMPLE(cuEventQuery, (CUevent event),
       call.result = is_done(event->at_ns) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY,
       "event=%p", (void *)event)
SIMPLE(cuEventElapsedTime, (float *ms, CUevent from, CUevent to),
       *ms = (float)((double)(to->at_ns - from->at_ns) / 1e6),
       "from=%p to=%p", (void *)from, (void *)to)
