/* What the two libraries share. A simulated host is a folder, named by DRIVER_DOUBLE:

     settings            name=value lines, written by double.py, read again whenever they change
     faults/CALL/...     one file for each fault to come (see take_fault)
     processes/PID.START one Record for each CUDA process, mapped by that process, read by everybody
     capacity            locked while device memory is counted and taken
     limits/DEVICE.INODE the memory limit of one control group on one device: its bytes, and the group's folder
     calls               one line for each call of every process
*/
#ifndef DRIVER_DOUBLE_H
#define DRIVER_DOUBLE_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 16
#define MIB 1048576ull
#define RECORD_MAGIC 0x44445631u /* changes with the layout; double.py knows it, too */

/* One CUDA process. It owns the record; another process writes only `asked` and what belongs to it, under a flock of the file.
   double.py reads the part up to `answered`. */
typedef struct {
    uint32_t magic, pid;
    uint64_t start_time; /* of the process, in ticks: with the pid it names one process for ever */
    uint32_t thread_id;  /* of the thread that locks, saves and restores */
    uint32_t inherited;  /* a forked child that inherited what its parent had opened */
    _Atomic uint32_t state; /* CUprocessState */
    uint32_t resident;      /* whether it occupies devices: contexts and bytes count */
    uint64_t saved_bytes, managed_bytes;
    uint32_t shared;  /* memory that other processes opened, or that it opened of theirs */
    uint32_t devices; /* a bit for each device it has a context on */
    uint32_t contexts[MAX_DEVICES];
    uint64_t bytes[MAX_DEVICES]; /* device memory, contexts apart */

    _Atomic int32_t in_flight;  /* calls that work on the device just now */
    _Atomic uint32_t closing;   /* a lock waits: new calls wait behind it */
    _Atomic uint64_t busy_until_ns; /* work on the device; UINT64_MAX: until told otherwise */

    _Atomic uint32_t asked, answered; /* numbers of the last operation that was asked for, and done */
    uint32_t operation, timeout_ms;
    int32_t result;
    int32_t move_to[MAX_DEVICES]; /* of a restore: the new device of each device */
    uint64_t job; /* inode of the caller's CUDA_CHECKPOINT_JOB_FILE, 0 without one */
} Record;

typedef struct {
    char id[64]; /* GPU-... */
    unsigned char uuid[16];
    char name[96], chip[32];
    uint64_t mib; /* that processes can have */
    int mig;      /* -1: has no such mode, 0: off, 1: on */
} Device;

/* One call of a library, from begin() to end(). */
typedef struct {
    const char *name;
    int result;
    uint64_t began_ns;
    bool hang_after;
    char fault[256]; /* the path of a fault that makes it hang */
    void (*leave)(void);
} Call;

/* host.c */
void renew_host_mutex(void);
uint64_t now_ns(void);
void nap_until(uint64_t ns);
bool open_host(void); /* reads what has changed; false: there is no simulated host */
bool text_setting(const char *name, char *value, size_t room);
double setting(const char *name, double fallback);
bool setting_lists(const char *name, long number); /* whether `name` is a list (1,2,3) that has the number */
int devices(Device out[MAX_DEVICES]);
bool host_path(char *out, size_t room, const char *name);
bool process_lives(int pid, uint64_t *start_time, char *state);
bool read_record(int pid, Record *out);
int open_record(int pid, uint64_t start_time);
int lock_capacity(void); /* returns what close() unlocks */
typedef void (*Visit)(const Record *, void *);
void visit_records(Visit, void *); /* those of living processes; sums are true while the capacity is locked */
uint64_t used_by(const Record *, int device);       /* bytes, contexts included */
void add_up_use(uint64_t used[MAX_DEVICES]);         /* by all processes; the caller has locked the capacity */
uint64_t context_bytes(void);
/* What a process's control groups leave it on a device: the smallest limit, of its own group (`leaf`) or of one above it, and what
   the group with that limit uses; UINT64_MAX without a limit. The caller has locked the capacity. */
typedef struct {
    uint64_t hard, used;
    bool leaf;
} Limit;
Limit limit_for(int pid, int device);
uint64_t used_in_group(const char *folder, int device);
bool limit_path(char *out, size_t room, const char *folder, int device); /* false: there is no such control group */
bool read_limit(const char *path, uint64_t *hard, char *folder, size_t room);
bool is_cuda_process(const Record *);
bool begin(Call *, const char *name, int pid); /* false: the result is given, do nothing */
int end(Call *, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *hex(char *out, const void *bytes, size_t count); /* "NULL" for none; out has room for 2 * count + 1 */

#endif
