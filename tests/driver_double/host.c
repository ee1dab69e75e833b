/* Settings, faults, records and the log of a simulated host. Linked into both libraries. */
#include "double.h"

#include <dirent.h>

static struct {
    pthread_mutex_t mutex;
    char folder[512];
    struct timespec changed;
    ino_t inode;
    char *text; /* lines separated by zero bytes, ends with an empty one */
} host = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* In a forked child another thread of the parent may seem to hold the mutex for ever. libcuda's own handler needs it, too, and may
   be called before this one. */
void renew_host_mutex(void) { pthread_mutex_init(&host.mutex, NULL); }

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, renew_host_mutex); }

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void nap_until(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000ull), .tv_nsec = (long)(ns % 1000000000ull)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}

/* ---- settings ---- */

static char *read_whole(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    struct stat s;
    char *text = fstat(fd, &s) == 0 ? calloc(1, (size_t)s.st_size + 2) : NULL;
    if (text) {
        ssize_t got = read(fd, text, (size_t)s.st_size);
        if (got < 0) text[0] = 0;
        for (char *c = text; *c; c++)
            if (*c == '\n') *c = 0;
    }
    close(fd);
    return text;
}

bool open_host(void) {
    const char *folder = getenv("DRIVER_DOUBLE");
    char path[600];
    struct stat s;
    if (!folder || !*folder || strlen(folder) >= sizeof host.folder) return false;
    snprintf(path, sizeof path, "%s/settings", folder);
    if (stat(path, &s)) return false;
    pthread_mutex_lock(&host.mutex);
    bool same = host.text && !strcmp(host.folder, folder) && host.inode == s.st_ino &&
                !memcmp(&host.changed, &s.st_mtim, sizeof host.changed);
    if (!same) {
        char *text = read_whole(path);
        if (text) {
            free(host.text);
            host.text = text, host.inode = s.st_ino, host.changed = s.st_mtim;
            snprintf(host.folder, sizeof host.folder, "%s", folder);
        }
    }
    bool there = host.text != NULL;
    pthread_mutex_unlock(&host.mutex);
    return there;
}

bool text_setting(const char *name, char *value, size_t room) {
    size_t length = strlen(name);
    bool found = false;
    pthread_mutex_lock(&host.mutex);
    for (const char *line = host.text; line && *line && !found; line += strlen(line) + 1)
        if (!strncmp(line, name, length) && line[length] == '=') {
            snprintf(value, room, "%s", line + length + 1);
            found = true;
        }
    pthread_mutex_unlock(&host.mutex);
    return found;
}

double setting(const char *name, double fallback) {
    char value[64];
    return text_setting(name, value, sizeof value) ? strtod(value, NULL) : fallback;
}

bool setting_lists(const char *name, long number) {
    char value[4096], *rest = value, *end;
    if (!text_setting(name, value, sizeof value)) return false;
    while (*rest) {
        long one = strtol(rest, &end, 10);
        if (end == rest) return false;
        if (one == number) return true;
        rest = *end ? end + 1 : end;
    }
    return false;
}

static void parse_uuid(const char *id, unsigned char out[16]) {
    const char *c = strchr(id, '-') ? strchr(id, '-') + 1 : id;
    for (int i = 0; i < 16 && *c; i++) {
        unsigned byte = 0;
        if (*c == '-') c++;
        if (sscanf(c, "%2x", &byte) != 1) return;
        out[i] = (unsigned char)byte;
        c += 2;
    }
}

int devices(Device out[MAX_DEVICES]) {
    int count = 0;
    for (; count < MAX_DEVICES; count++) {
        Device *one = &out[count];
        char name[64];
        memset(one, 0, sizeof *one);
        snprintf(name, sizeof name, "device.%d.uuid", count);
        if (!text_setting(name, one->id, sizeof one->id)) break;
        parse_uuid(one->id, one->uuid);
        snprintf(name, sizeof name, "device.%d.name", count);
        text_setting(name, one->name, sizeof one->name);
        snprintf(name, sizeof name, "device.%d.chip", count);
        text_setting(name, one->chip, sizeof one->chip);
        snprintf(name, sizeof name, "device.%d.mib", count);
        one->mib = (uint64_t)setting(name, 0);
        snprintf(name, sizeof name, "device.%d.mig", count);
        one->mig = (int)setting(name, -1);
    }
    return count;
}

bool host_path(char *out, size_t room, const char *name) {
    pthread_mutex_lock(&host.mutex);
    int length = host.text ? snprintf(out, room, "%s/%s", host.folder, name) : -1;
    pthread_mutex_unlock(&host.mutex);
    return length > 0 && (size_t)length < room;
}

uint64_t context_bytes(void) { return (uint64_t)(setting("context_mib", 512) * (double)MIB); }

/* ---- processes ---- */

/* Whether there is such a process that has not ended (a zombie has), when it started, and its state. */
bool process_lives(int pid, uint64_t *start_time, char *state) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return false;
    text[got] = 0;
    char *after = strrchr(text, ')'), is;
    unsigned long long start;
    if (!after || sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &is, &start) != 2)
        return false;
    if (start_time) *start_time = start;
    if (state) *state = is;
    return is != 'Z' && is != 'X';
}

int open_record(int pid, uint64_t start_time) {
    char name[64], path[600];
    snprintf(name, sizeof name, "processes/%d.%llu", pid, (unsigned long long)start_time);
    return host_path(path, sizeof path, name) ? open(path, O_RDWR | O_CLOEXEC) : -1;
}

bool read_record(int pid, Record *out) {
    uint64_t start;
    if (pid <= 0 || !process_lives(pid, &start, NULL)) return false;
    int fd = open_record(pid, start);
    if (fd < 0) return false;
    bool whole = pread(fd, out, sizeof *out, 0) == sizeof *out && out->magic == RECORD_MAGIC;
    close(fd);
    return whole;
}

void visit_records(Visit visit, void *with) {
    char folder[600];
    if (!host_path(folder, sizeof folder, "processes")) return;
    DIR *all = opendir(folder);
    if (!all) return;
    struct dirent *entry;
    while ((entry = readdir(all))) {
        unsigned long long start;
        uint64_t now;
        int pid, length = 0;
        if (sscanf(entry->d_name, "%d.%llu%n", &pid, &start, &length) != 2 || entry->d_name[length]) continue;
        if (!process_lives(pid, &now, NULL) || now != start) {
            unlinkat(dirfd(all), entry->d_name, 0); /* its process has ended */
            continue;
        }
        Record record;
        if (read_record(pid, &record)) visit(&record, with);
    }
    closedir(all);
}

uint64_t used_by(const Record *record, int device) {
    return record->resident ? record->bytes[device] + record->contexts[device] * context_bytes() : 0;
}

static void add_process(const Record *record, void *sums) {
    for (int i = 0; i < MAX_DEVICES; i++) ((uint64_t *)sums)[i] += used_by(record, i);
}

void add_up_use(uint64_t used[MAX_DEVICES]) {
    memset(used, 0, MAX_DEVICES * sizeof *used);
    visit_records(add_process, used);
}

int lock_capacity(void) {
    char path[600];
    if (!host_path(path, sizeof path, "capacity")) return -1;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    while (fd >= 0 && flock(fd, LOCK_EX) && errno == EINTR) continue;
    return fd;
}

/* ---- limits of control groups (version 2) ---- */

/* The folder of the process's control group. */
static bool group_of(int pid, char *out, size_t room) {
    char path[64], mount[256] = "/sys/fs/cgroup";
    snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
    text_setting("cgroup2", mount, sizeof mount);
    char *text = NULL, *all, *rest = NULL;
    FILE *file = fopen(path, "re");
    size_t size = 0;
    bool found = false;
    if (!file) return false;
    if (getdelim(&text, &size, 0, file) > 0)
        for (all = strtok_r(text, "\n", &rest); all; all = strtok_r(NULL, "\n", &rest))
            if (!strncmp(all, "0::", 3)) {
                snprintf(out, room, "%s%s", mount, strcmp(all + 3, "/") ? all + 3 : "");
                found = true;
            }
    free(text);
    fclose(file);
    return found;
}

static bool in_group(const char *folder, const char *group) {
    size_t length = strlen(group);
    return !strncmp(folder, group, length) && (!folder[length] || folder[length] == '/');
}

struct group_use {
    const char *group;
    int device;
    uint64_t used;
};

static void add_if_in_group(const Record *record, void *with) {
    struct group_use *use = with;
    char folder[512];
    if (group_of((int)record->pid, folder, sizeof folder) && in_group(folder, use->group)) use->used += used_by(record, use->device);
}

uint64_t used_in_group(const char *group, int device) {
    struct group_use use = {.group = group, .device = device};
    visit_records(add_if_in_group, &use);
    return use.used;
}

bool limit_path(char *out, size_t room, const char *folder, int device) {
    struct stat s;
    char name[64];
    if (stat(folder, &s) || !S_ISDIR(s.st_mode)) return false;
    snprintf(name, sizeof name, "limits/%d.%llu", device, (unsigned long long)s.st_ino);
    return host_path(out, room, name);
}

bool read_limit(const char *path, uint64_t *hard, char *folder, size_t room) {
    char text[600], format[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) return false;
    text[got] = 0;
    unsigned long long bytes;
    snprintf(format, sizeof format, "%%llu %%%zus", room - 1);
    if (sscanf(text, format, &bytes, folder) != 2) return false;
    *hard = bytes;
    return true;
}

Limit limit_for(int pid, int device) {
    Limit least = {.hard = UINT64_MAX};
    char own[512], group[512], path[600], path_again[600];
    if (!host_path(path, sizeof path, "limits") || !group_of(pid, own, sizeof own)) return least;
    DIR *all = opendir(path);
    if (!all) return least;
    struct dirent *entry;
    while ((entry = readdir(all))) {
        int index, length = 0;
        unsigned long long inode;
        uint64_t hard;
        if (sscanf(entry->d_name, "%d.%llu%n", &index, &inode, &length) != 2 || entry->d_name[length] || index != device) continue;
        snprintf(path_again, sizeof path_again, "%s/%s", path, entry->d_name);
        if (!read_limit(path_again, &hard, group, sizeof group) || !in_group(own, group)) continue;
        struct stat s;
        if (stat(group, &s) || s.st_ino != inode) continue; /* the group was removed, and its limit with it */
        uint64_t used = used_in_group(group, device);
        if (least.hard == UINT64_MAX || (int64_t)(hard - used) < (int64_t)(least.hard - least.used))
            least = (Limit){.hard = hard, .used = used, .leaf = !strcmp(own, group)};
    }
    closedir(all);
    return least;
}

/* Whether the driver knows the process as one of CUDA: some drivers may not before it has a context, or when it is a forked child. */
bool is_cuda_process(const Record *record) {
    if (record->inherited) return setting("forked_known", 0) != 0;
    return record->devices || setting("init_only_known", 1) != 0;
}

/* ---- faults ---- */

/* A fault is a file faults/CALL/NUMBER-WHAT[-PID], the lowest is next. WHAT is a result (0: success, and nothing done), which the
   call takes by removing the file; or `hang` (before the deed) or `late` (after it): the call waits until the file is removed
   by the test. A file whose number begins with `a` stays. */
static bool take_fault(Call *call, int pid) {
    char name[128], folder[600], best[256] = "", path[900];
    snprintf(name, sizeof name, "faults/%s", call->name);
    if (!host_path(folder, sizeof folder, name)) return false;
    for (;;) {
        DIR *all = opendir(folder);
        if (!all) return false;
        best[0] = 0;
        struct dirent *entry;
        while ((entry = readdir(all))) {
            char *what = strchr(entry->d_name, '-'), *whose = what ? strchr(what + 1, '-') : NULL;
            if (!what || (whose && atoi(whose + 1) != pid)) continue;
            if (!best[0] || strcmp(entry->d_name, best) < 0) snprintf(best, sizeof best, "%s", entry->d_name);
        }
        closedir(all);
        if (!best[0]) return false;
        snprintf(path, sizeof path, "%s/%s", folder, best);
        const char *what = strchr(best, '-') + 1;
        if (!strncmp(what, "hang", 4) || !strncmp(what, "late", 4)) {
            snprintf(call->fault, sizeof call->fault, "%s/%s", name, best);
            call->hang_after = *what == 'l';
            return false;
        }
        call->result = atoi(what);
        if (best[0] == 'a' || unlink(path) == 0) return true; /* else another call was quicker */
    }
}

static void write_log(const char *line, int length) {
    char path[600];
    if (!host_path(path, sizeof path, "calls")) return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return;
    if (write(fd, line, (size_t)length) != length) perror("driver double: writing the log");
    close(fd);
}

static void hang(const Call *call) {
    char path[900], line[256];
    int length = snprintf(line, sizeof line, "%llu 0 %d %s hangs\n", (unsigned long long)now_ns() / 1000, (int)getpid(), call->name);
    write_log(line, length);
    while (host_path(path, sizeof path, call->fault) && access(path, F_OK) == 0) nap_until(now_ns() + 500000);
}

/* ---- calls ---- */

bool begin(Call *call, const char *name, int pid) {
    char latency[128];
    *call = (Call){.name = name, .began_ns = now_ns()};
    open_host();
    snprintf(latency, sizeof latency, "latency.%s", name);
    double us = setting(latency, !strncmp(name, "nvml", 4) ? setting("latency.nvml", 0) : 0);
    if (us > 0) nap_until(call->began_ns + (uint64_t)(us * 1000));
    if (take_fault(call, pid)) return false;
    if (call->fault[0] && !call->hang_after) hang(call);
    return true;
}

int end(Call *call, const char *format, ...) {
    char line[4096];
    int saved = errno;
    if (call->hang_after) hang(call);
    uint64_t now = now_ns();
    int length = snprintf(line, sizeof line, "%llu %llu %d %s %d ", (unsigned long long)call->began_ns / 1000,
                          (unsigned long long)(now - call->began_ns) / 1000, (int)getpid(), call->name, call->result);
    va_list rest;
    va_start(rest, format);
    length += vsnprintf(line + length, sizeof line - (size_t)length, format, rest);
    va_end(rest);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length] = '\n';
    write_log(line, length + 1);
    if (call->leave) call->leave();
    errno = saved;
    return call->result;
}

const char *hex(char *out, const void *bytes, size_t count) {
    if (!bytes) return "NULL";
    for (size_t i = 0; i < count; i++) sprintf(out + 2 * i, "%02x", ((const unsigned char *)bytes)[i]);
    out[2 * count] = 0;
    return out;
}
