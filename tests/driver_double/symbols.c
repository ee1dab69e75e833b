/* libcuda.so.1: how programs find its calls: by name and by the CUDA version that they were written for. */
#include "process.h"

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult *symbolStatus);

/* `since` is the CUDA version that brought this form of the call. A name's forms stand in order. */
static const struct { const char *name; int since; void *at; } symbols[] = {
#define HAS(name, since) {#name, since, (void *)name}
    HAS(cuInit, 2000), HAS(cuDriverGetVersion, 2020), HAS(cuGetProcAddress, 12000), HAS(cuGetErrorName, 6000), HAS(cuGetErrorString, 6000),
    HAS(cuDeviceGetCount, 2000), HAS(cuDeviceGet, 2000), HAS(cuDeviceGetUuid, 9020), HAS(cuDeviceGetName, 2000),
    HAS(cuDeviceTotalMem, 3020), HAS(cuDeviceGetAttribute, 2000),
    HAS(cuDevicePrimaryCtxRetain, 7000), HAS(cuDevicePrimaryCtxRelease, 7000), HAS(cuDevicePrimaryCtxReset, 7000),
    HAS(cuDevicePrimaryCtxGetState, 7000),
    {"cuCtxCreate", 3020, (void *)cuCtxCreate_v2}, {"cuCtxCreate", 11040, (void *)cuCtxCreate_v3}, HAS(cuCtxCreate, 12050),
    HAS(cuCtxDestroy, 4000), HAS(cuCtxSetCurrent, 4000), HAS(cuCtxGetCurrent, 4000), HAS(cuCtxPushCurrent, 4000),
    HAS(cuCtxPopCurrent, 4000), HAS(cuCtxGetDevice, 2000), HAS(cuCtxSynchronize, 2000),
    HAS(cuMemGetInfo, 3020), HAS(cuMemAlloc, 3020), HAS(cuMemFree, 3020), HAS(cuMemGetAddressRange, 3020),
    HAS(cuMemcpy, 4000), HAS(cuMemcpyAsync, 4000),
    HAS(cuMemcpyHtoD, 3020), HAS(cuMemcpyDtoH, 3020), HAS(cuMemcpyDtoD, 3020),
    HAS(cuMemcpyHtoDAsync, 3020), HAS(cuMemcpyDtoHAsync, 3020), HAS(cuMemcpyDtoDAsync, 3020),
    HAS(cuMemsetD8, 3020), HAS(cuMemsetD16, 3020), HAS(cuMemsetD32, 3020), HAS(cuMemsetD8Async, 3020), HAS(cuMemsetD32Async, 3020),
    HAS(cuMemAllocManaged, 6000), HAS(cuMemHostAlloc, 2020), HAS(cuMemAllocHost, 3020), HAS(cuMemFreeHost, 2000),
    HAS(cuMemHostRegister, 4000), HAS(cuMemHostUnregister, 4000), HAS(cuMemHostGetDevicePointer, 3020),
    HAS(cuIpcGetMemHandle, 4010), HAS(cuIpcOpenMemHandle, 4010), HAS(cuIpcCloseMemHandle, 4010),
    HAS(cuMemGetAllocationGranularity, 10020), HAS(cuMemAddressReserve, 10020), HAS(cuMemAddressFree, 10020), HAS(cuMemCreate, 10020),
    HAS(cuMemRelease, 10020), HAS(cuMemMap, 10020), HAS(cuMemUnmap, 10020), HAS(cuMemSetAccess, 10020),
    HAS(cuStreamCreate, 2000), HAS(cuStreamCreateWithPriority, 5050), HAS(cuStreamDestroy, 4000), HAS(cuStreamSynchronize, 2000),
    HAS(cuStreamQuery, 2000), HAS(cuStreamWaitEvent, 3020), HAS(cuLaunchHostFunc, 10000),
    HAS(cuEventCreate, 2000), HAS(cuEventDestroy, 4000), HAS(cuEventRecord, 2000), HAS(cuEventSynchronize, 2000),
    HAS(cuEventQuery, 2000), HAS(cuEventElapsedTime, 2000),
    HAS(cuCheckpointProcessGetState, 12080), HAS(cuCheckpointProcessGetRestoreThreadId, 12080), HAS(cuCheckpointProcessLock, 12080),
    HAS(cuCheckpointProcessCheckpoint, 12080), HAS(cuCheckpointProcessRestore, 12080), HAS(cuCheckpointProcessUnlock, 12080),
};

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult *symbolStatus) {
    (void)flags;
    int served = open_host() ? (int)setting("cuda_version", 13000) : 13000;
    bool named = false;
    *pfn = NULL;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        if (!strcmp(symbols[i].name, symbol) && symbols[i].since <= served) {
            named = true;
            if (symbols[i].since <= cudaVersion) *pfn = symbols[i].at;
        }
    if (symbolStatus)
        *symbolStatus = *pfn    ? CU_GET_PROC_ADDRESS_SUCCESS
                        : named ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *pfn || symbolStatus ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
