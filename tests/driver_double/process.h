/* What the files of libcuda.so.1 share: the state of the process that loaded it. */
#ifndef DRIVER_DOUBLE_PROCESS_H
#define DRIVER_DOUBLE_PROCESS_H
#include "double.h"
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

struct CUctx_st {
    int ordinal;
    int references; /* of a primary one */
    bool primary;
};

/* Device memory: a part of the file that stands for the devices' memory. */
typedef struct Block {
    struct Block *next;
    uint64_t offset, size;
    int ordinal;
    int references; /* by its handle and by each mapping */
    unsigned char *saved; /* in host memory, while it is not on a device */
    uint64_t moved;       /* how much of it lies there */
} Block;

extern struct Process {
    pthread_mutex_t mutex; /* for what follows */
    Record *record;        /* NULL before cuInit */
    int record_fd;
    int memory_fd;
    uint64_t memory_end;
    Block *blocks;
    int visible_count;
    int visible[MAX_DEVICES]; /* ordinal -> device of the host */
} process;

/* cuda.c */
bool enter(Call *, const char *name);  /* begins a call that needs cuInit */
bool enter_work(Call *, const char *name); /* begins a call that works on the device: waits while the process is held */
CUresult current_ordinal(int *ordinal);
CUresult take(int ordinal, uint64_t bytes, int contexts); /* counts device memory, where there is room */
void give_back(int ordinal, uint64_t bytes, int contexts);
CUresult make_record(bool inherited);
void forget_after_fork(void);

/* memory.c */
void forget_memory(void);
void drop_block(Block *); /* with the mutex held */

/* checkpoint.c */
bool start_thread(void);
long futex(_Atomic uint32_t *word, int operation, uint32_t value, uint64_t timeout_ns);
void wake(_Atomic uint32_t *word);

#endif
