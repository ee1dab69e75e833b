/* libcuda.so.1: the six checkpoint calls, and the thread in each CUDA process that does what another process asks for.

   As with NVIDIA's driver, the work is done in the target, by a thread of its own: what is saved lands in the target's memory, and
   a target that is stopped answers nothing. The caller holds a flock on the target's record for as long as its call takes: it is
   free when the caller dies, which is how the target notices. */
#include "process.h"

#include <linux/futex.h>
#include <linux/falloc.h>
#include <signal.h>

#define CHUNK MIB
#define LOOK_NS 20000000ull /* how often a wait looks whether the other process lives */

enum operation { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK };

long futex(_Atomic uint32_t *word, int operation, uint32_t value, uint64_t timeout_ns) {
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000ull), .tv_nsec = (long)(timeout_ns % 1000000000ull)};
    return syscall(SYS_futex, word, operation, value, &t, NULL, 0);
}

void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static void become(Record *record, CUprocessState state) {
    atomic_store(&record->state, state);
    wake(&record->state);
}

/* ---- in the target ---- */

static int watch_fd = -1; /* the thread's own description of the record: its locks are apart from those of a caller in this process */

static bool caller_is_gone(void) {
    if (flock(watch_fd, LOCK_EX | LOCK_NB)) return false;
    flock(watch_fd, LOCK_UN);
    return true;
}

/* What becomes of an operation whose caller died: `back` (as before), `failed`, `done` (the target goes on alone). */
enum ending { GOES_ON, GOES_BACK, FAILS };

static enum ending after_caller(void) {
    char how[16];
    if (!caller_is_gone()) return GOES_ON;
    open_host();
    if (!text_setting("caller_death", how, sizeof how)) return GOES_BACK;
    return !strcmp(how, "failed") ? FAILS : !strcmp(how, "done") ? GOES_ON : GOES_BACK;
}

static int lock_self(Record *record) {
    if (atomic_load(&record->state) != CU_PROCESS_STATE_RUNNING) return CUDA_ERROR_ILLEGAL_STATE;
    uint64_t until = record->timeout_ms ? now_ns() + record->timeout_ms * 1000000ull : UINT64_MAX;
    int result = CUDA_SUCCESS;
    atomic_store(&record->closing, 1);
    for (;;) {
        open_host();
        bool busy = setting_lists("busy", getpid()) || atomic_load(&record->busy_until_ns) > now_ns();
        if (!busy && atomic_load(&record->in_flight) == 0) {
            become(record, CU_PROCESS_STATE_LOCKED);
            break;
        }
        if (now_ns() >= until || after_caller() != GOES_ON) {
            result = CUDA_ERROR_NOT_READY;
            break;
        }
        nap_until(now_ns() + 200000);
    }
    atomic_store(&record->closing, 0);
    wake(&record->closing);
    return result;
}

/* Waits as long as the bytes take at the speed that was set, in GB/s. */
static void pace(const char *speed, uint64_t began_ns, uint64_t bytes) {
    double gb_s = setting(speed, 0);
    if (gb_s > 0) nap_until(began_ns + (uint64_t)((double)bytes / gb_s));
}

static bool move_chunk(Block *block, bool out) {
    uint64_t left = out ? block->size - block->moved : block->moved, size = left < CHUNK ? left : CHUNK;
    uint64_t at = out ? block->moved : block->moved - size;
    for (uint64_t done = 0; done < size;) {
        off_t offset = (off_t)(block->offset + at + done);
        unsigned char *host = block->saved + at + done;
        ssize_t n = out ? pread(process.memory_fd, host, size - done, offset) : pwrite(process.memory_fd, host, size - done, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        done += (uint64_t)n;
    }
    if (out) fallocate(process.memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(block->offset + at), (off_t)size);
    else madvise(block->saved + at, size, MADV_DONTNEED);
    block->moved = out ? at + size : at;
    process.record->saved_bytes += out ? size : -size;
    return true;
}

static void free_saved(void) {
    for (Block *block = process.blocks; block; block = block->next)
        if (block->saved) {
            munmap(block->saved, block->size);
            block->saved = NULL;
        }
}

/* Moves all device memory to host memory (`out`), or back. */
static enum ending move_all(bool out, bool watched) {
    uint64_t began = now_ns(), bytes = 0;
    for (Block *block = process.blocks; block; block = block->next)
        while (out ? block->moved < block->size : block->moved > 0) {
            enum ending ending = watched ? after_caller() : GOES_ON;
            if (ending != GOES_ON) return ending;
            uint64_t before = block->moved;
            if (!move_chunk(block, out)) return FAILS;
            bytes += out ? block->moved - before : before - block->moved;
            pace(out ? "save_gb_s" : "load_gb_s", began, bytes);
        }
    return watched ? after_caller() : GOES_ON;
}

static bool make_room_for_saved(void) {
    for (Block *block = process.blocks; block; block = block->next) {
        void *at = mmap(NULL, block->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) {
            free_saved();
            return false;
        }
        madvise(at, block->size, MADV_DONTFORK);
        block->saved = at;
    }
    return true;
}

static int why_not_checkpoint(const Record *record) {
    Device all[MAX_DEVICES];
    int count = devices(all);
    for (int i = 0; i < count; i++)
        if ((record->devices & 1u << i) && all[i].mig == 1) return CUDA_ERROR_OUT_OF_MEMORY;
    if (record->inherited) return (int)setting("forked_checkpoint", 0);
    bool client = setting("mps_daemon", 0) && !getenv("CUDA_MPS_PIPE_DIRECTORY");
    if (client || setting_lists("mps", getpid())) return CUDA_ERROR_NOT_SUPPORTED;
    if (record->managed_bytes && !setting("managed_works", 0)) return CUDA_ERROR_NOT_SUPPORTED;
    return record->shared && !setting("ipc_works", 0) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static int checkpoint_self(Record *record) {
    if (atomic_load(&record->state) != CU_PROCESS_STATE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    int refusal = why_not_checkpoint(record);
    if (refusal) {
        if (setting("refusal_spoils", 0)) become(record, CU_PROCESS_STATE_FAILED);
        return refusal;
    }
    become(record, CU_PROCESS_STATE_CHECKPOINTING);
    if (!make_room_for_saved()) {
        become(record, CU_PROCESS_STATE_LOCKED);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    enum ending ending = move_all(true, true);
    if (ending == GOES_BACK) {
        move_all(false, false);
        free_saved();
        become(record, CU_PROCESS_STATE_LOCKED);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    record->resident = 0;
    become(record, ending == FAILS ? CU_PROCESS_STATE_FAILED : CU_PROCESS_STATE_CHECKPOINTED);
    return ending == FAILS ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* Lets the process occupy the devices that it goes to (`to[i]`: the new device of device i), where there is room. */
static bool occupy(Record *record, const int32_t *to) {
    Device all[MAX_DEVICES] = {0};
    uint64_t used[MAX_DEVICES], bytes[MAX_DEVICES] = {0};
    uint32_t contexts[MAX_DEVICES] = {0}, on = 0;
    int lock = lock_capacity();
    bool fits = true;
    devices(all);
    add_up_use(used);
    for (int i = 0; i < MAX_DEVICES; i++) bytes[to[i]] = record->bytes[i], contexts[to[i]] = record->contexts[i];
    for (int i = 0; i < MAX_DEVICES; i++) {
        uint64_t needed = bytes[i] + contexts[i] * context_bytes();
        if (needed && used[i] + needed > all[i].mib * MIB) fits = false;
        Limit limit = needed && setting("limits_hold_in_restore", 1) ? limit_for((int)record->pid, i) : (Limit){.hard = UINT64_MAX};
        if (limit.hard != UINT64_MAX && limit.used + needed > limit.hard) fits = false;
        if (contexts[i]) on |= 1u << i;
    }
    if (fits) {
        memcpy(record->bytes, bytes, sizeof bytes);
        memcpy(record->contexts, contexts, sizeof contexts);
        record->devices = on, record->resident = 1;
        for (int i = 0; i < process.visible_count; i++) process.visible[i] = to[process.visible[i]];
    }
    close(lock);
    return fits;
}

static void leave_devices(Record *record, const int32_t *to) {
    int32_t back[MAX_DEVICES];
    for (int i = 0; i < MAX_DEVICES; i++) back[to[i]] = i;
    record->resident = 0;
    uint64_t bytes[MAX_DEVICES];
    uint32_t contexts[MAX_DEVICES];
    memcpy(bytes, record->bytes, sizeof bytes);
    memcpy(contexts, record->contexts, sizeof contexts);
    record->devices = 0;
    for (int i = 0; i < MAX_DEVICES; i++) {
        record->bytes[back[i]] = bytes[i], record->contexts[back[i]] = contexts[i];
        if (contexts[i]) record->devices |= 1u << back[i];
    }
    for (int i = 0; i < process.visible_count; i++) process.visible[i] = back[process.visible[i]];
}

static uint64_t own_job(void) {
    const char *path = getenv("CUDA_CHECKPOINT_JOB_FILE");
    struct stat s;
    return path && !stat(path, &s) ? s.st_ino : 0;
}

static void count_heir(const Record *record, void *count) {
    char path[64], text[512];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%u/stat", record->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return;
    text[got] = 0;
    char *after = strrchr(text, ')');
    if (after && sscanf(after + 1, " %*c %d", &parent) == 1 && parent == getpid() && record->inherited) ++*(int *)count;
}

/* Whether forked children keep the process from being restored: all of one job, and the caller names that job, they do not. */
static bool held_by_children(const Record *record) {
    int heirs = 0;
    if (!setting("children_break_restore", 0)) return false;
    visit_records(count_heir, &heirs);
    return heirs && !(setting("jobs_known", 0) && record->job && record->job == own_job());
}

static int restore_self(Record *record) {
    uint32_t state = atomic_load(&record->state);
    if (state == CU_PROCESS_STATE_FAILED) return CUDA_ERROR_OPERATING_SYSTEM;
    if (state != CU_PROCESS_STATE_CHECKPOINTED) return CUDA_ERROR_ILLEGAL_STATE;
    int refusal = record->inherited ? (int)setting("forked_restore", 0) : 0;
    if (refusal) return refusal;
    if (held_by_children(record)) {
        become(record, CU_PROCESS_STATE_FAILED);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (!occupy(record, record->move_to)) {
        become(record, CU_PROCESS_STATE_FAILED); /* for good, even when there is room again */
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    become(record, CU_PROCESS_STATE_RESTORING);
    enum ending ending = move_all(false, true);
    if (ending == GOES_BACK) {
        move_all(true, false);
        leave_devices(record, record->move_to);
        become(record, CU_PROCESS_STATE_CHECKPOINTED);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (ending == GOES_ON) free_saved();
    become(record, ending == FAILS ? CU_PROCESS_STATE_FAILED : CU_PROCESS_STATE_LOCKED);
    return ending == FAILS ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

static int unlock_self(Record *record) {
    if (atomic_load(&record->state) != CU_PROCESS_STATE_LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    become(record, CU_PROCESS_STATE_RUNNING);
    return CUDA_SUCCESS;
}

static int do_operation(Record *record) {
    switch ((enum operation)record->operation) {
    case LOCK: return lock_self(record);
    case CHECKPOINT: return checkpoint_self(record);
    case RESTORE: return restore_self(record);
    case UNLOCK: return unlock_self(record);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static void *serve(void *with) {
    Record *record = with;
    record->thread_id = (uint32_t)gettid();
    wake((_Atomic uint32_t *)&record->thread_id);
    for (;;) {
        uint32_t answered = atomic_load(&record->answered);
        while (atomic_load(&record->asked) == answered) futex(&record->asked, FUTEX_WAIT, answered, 10000000000ull);
        open_host();
        record->result = do_operation(record);
        atomic_store(&record->answered, atomic_load(&record->asked));
        wake(&record->answered);
    }
    return NULL;
}

bool start_thread(void) {
    pthread_t thread;
    sigset_t all, before;
    if (watch_fd >= 0) close(watch_fd);
    watch_fd = open_record((int)process.record->pid, process.record->start_time);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = watch_fd >= 0 && !pthread_create(&thread, NULL, serve, process.record);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) return false;
    pthread_detach(thread);
    while (!process.record->thread_id) futex((_Atomic uint32_t *)&process.record->thread_id, FUTEX_WAIT, 0, 10000000);
    return true;
}

/* ---- in the caller ---- */

/* Whether the target may be asked for anything now; the answer where it may not. */
static int why_not_ask(int pid, const char *stopped_setting) {
    char state = 0, stopped[16] = "hang";
    if (setting("not_permitted", 0)) return CUDA_ERROR_NOT_PERMITTED;
    if (!process_lives(pid, NULL, &state) || (state != 'T' && state != 't')) return CUDA_SUCCESS;
    text_setting(stopped_setting, stopped, sizeof stopped);
    while (!strcmp(stopped, "hang") && process_lives(pid, NULL, &state) && (state == 'T' || state == 't')) {
        nap_until(now_ns() + 1000000);
        open_host();
        text_setting(stopped_setting, stopped, sizeof stopped);
    }
    return atoi(stopped); /* 0, too, where it answers or goes on */
}

static int wait_for_answer(int pid, Record *record, uint32_t number) {
    for (;;) {
        uint32_t answered = atomic_load(&record->answered);
        uint64_t start;
        if (answered == number) return record->result;
        if (!process_lives(pid, &start, NULL) || start != record->start_time) return CUDA_ERROR_OPERATING_SYSTEM;
        futex(&record->answered, FUTEX_WAIT, answered, LOOK_NS);
    }
}

/* Takes the lock of a target, which a living caller holds for as long as its operation takes: then the answer is no. An operation
   whose caller died is waited for; its target takes the lock for moments, to look whether that caller lives. */
static bool take_target(int pid, int fd, Record *record) {
    for (int refused = 0; refused < 5 && process_lives(pid, NULL, NULL); nap_until(now_ns() + 1000000)) {
        if (flock(fd, LOCK_EX | LOCK_NB)) refused++;
        else if (atomic_load(&record->asked) == atomic_load(&record->answered)) return true;
        else flock(fd, LOCK_UN), refused = 0;
    }
    return false;
}

static int ask(int pid, enum operation operation, uint32_t timeout_ms, const int32_t *to) {
    Record seen;
    if (!read_record(pid, &seen) || !is_cuda_process(&seen)) return CUDA_ERROR_NOT_INITIALIZED;
    int result = why_not_ask(pid, "stopped");
    if (result) return result;
    int fd = open_record(pid, seen.start_time);
    Record *record = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (record == MAP_FAILED) {
        if (fd >= 0) close(fd);
        return errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_NOT_INITIALIZED;
    }
    result = CUDA_ERROR_ILLEGAL_STATE; /* another caller is at work on it */
    if (take_target(pid, fd, record)) {
        record->operation = operation, record->timeout_ms = timeout_ms, record->job = own_job();
        for (int i = 0; i < MAX_DEVICES; i++) record->move_to[i] = to ? to[i] : i;
        uint32_t number = atomic_fetch_add(&record->asked, 1) + 1;
        wake(&record->asked);
        result = wait_for_answer(pid, record, number);
    }
    munmap(record, sizeof *record);
    close(fd);
    return result;
}

/* Whether what must be zero is. */
static bool all_zero(const void *bytes, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        if (((const char *)bytes)[i]) return false;
    return true;
}

/* Reads the pairs of a restore: every device once on either side, and only onto the same kind of chip. */
static bool read_pairs(const CUcheckpointRestoreArgs *args, int32_t to[MAX_DEVICES]) {
    Device all[MAX_DEVICES];
    int count = devices(all);
    bool taken[MAX_DEVICES] = {false};
    for (int i = 0; i < MAX_DEVICES; i++) to[i] = -1;
    if ((int)args->gpuPairsCount != count || !args->gpuPairs) return false;
    for (unsigned p = 0; p < args->gpuPairsCount; p++) {
        int from = -1, onto = -1;
        for (int i = 0; i < count; i++) {
            if (!memcmp(args->gpuPairs[p].oldUuid.bytes, all[i].uuid, 16)) from = i;
            if (!memcmp(args->gpuPairs[p].newUuid.bytes, all[i].uuid, 16)) onto = i;
        }
        if (from < 0 || onto < 0 || to[from] >= 0 || taken[onto] || strcmp(all[from].chip, all[onto].chip)) return false;
        to[from] = onto, taken[onto] = true;
    }
    for (int i = count; i < MAX_DEVICES; i++) to[i] = i;
    return true;
}

CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    Call call;
    if (begin(&call, "cuCheckpointProcessGetState", pid)) {
        Record record;
        if (!read_record(pid, &record) || !is_cuda_process(&record)) call.result = (CUresult)setting("no_cuda", 3);
        else if (!(call.result = why_not_ask(pid, "stopped_state")) && read_record(pid, &record)) {
            uint32_t is = atomic_load(&record.state);
            bool told = setting("tells_moving", 1) != 0; /* older drivers do not have these states */
            if (is == CU_PROCESS_STATE_CHECKPOINTING && !told) is = CU_PROCESS_STATE_LOCKED;
            if (is == CU_PROCESS_STATE_RESTORING && !told) is = CU_PROCESS_STATE_CHECKPOINTED;
            *state = (CUprocessState)is;
        }
    }
    return end(&call, "pid=%d state=%d", pid, call.result ? -1 : (int)*state);
}

CUresult CUDAAPI cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    Call call;
    if (begin(&call, "cuCheckpointProcessGetRestoreThreadId", pid)) {
        Record record;
        if (!read_record(pid, &record) || !is_cuda_process(&record)) call.result = CUDA_ERROR_NOT_INITIALIZED;
        else *tid = (int)record.thread_id;
    }
    return end(&call, "pid=%d", pid);
}

CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    Call call;
    char bytes[129];
    if (begin(&call, "cuCheckpointProcessLock", pid)) {
        Record record;
        bool init_only = read_record(pid, &record) && !record.devices && !record.inherited;
        if (args && !all_zero(args, 4, sizeof *args)) call.result = CUDA_ERROR_INVALID_VALUE;
        else if (init_only && setting("init_only_lock", 0)) call.result = (CUresult)setting("init_only_lock", 0);
        else call.result = ask(pid, LOCK, args ? args->timeoutMs : 0, NULL);
    }
    return end(&call, "pid=%d args=%s", pid, hex(bytes, args, sizeof *args));
}

CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    Call call;
    char bytes[129];
    if (begin(&call, "cuCheckpointProcessCheckpoint", pid)) {
        if (args && !all_zero(args, 0, sizeof *args)) call.result = CUDA_ERROR_INVALID_VALUE; /* custom storage is not played */
        else call.result = ask(pid, CHECKPOINT, 0, NULL);
    }
    return end(&call, "pid=%d args=%s", pid, hex(bytes, args, sizeof *args));
}

CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    Call call;
    char bytes[129], pairs[MAX_DEVICES * 64 + 1];
    size_t known = setting("cuda_version", 13000) >= 13000 ? 12 : 0; /* before, all of it was reserved */
    bool given = args && known && args->gpuPairsCount;
    if (begin(&call, "cuCheckpointProcessRestore", pid)) {
        int32_t to[MAX_DEVICES];
        if (!process.record && !setting("persistence", 0)) call.result = CUDA_ERROR_NOT_INITIALIZED;
        else if (args && !all_zero(args, known, sizeof *args)) call.result = CUDA_ERROR_INVALID_VALUE;
        else if (given && !read_pairs(args, to)) call.result = CUDA_ERROR_INVALID_VALUE;
        else call.result = ask(pid, RESTORE, 0, given ? to : NULL);
    }
    size_t count = given && args->gpuPairsCount <= MAX_DEVICES ? args->gpuPairsCount : 0;
    hex(bytes, args, sizeof *args);
    return end(&call, "pid=%d args=%s pairs=%s", pid, args ? bytes : "NULL", hex(pairs, count ? args->gpuPairs : NULL, count * 32));
}

CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    Call call;
    char bytes[129];
    if (begin(&call, "cuCheckpointProcessUnlock", pid)) {
        if (args && !all_zero(args, 0, sizeof *args)) call.result = CUDA_ERROR_INVALID_VALUE;
        else call.result = ask(pid, UNLOCK, 0, NULL);
    }
    return end(&call, "pid=%d args=%s", pid, hex(bytes, args, sizeof *args));
}
