// CUDA's runtime for host code: the names that programs use. They lead to host_memory.cpp, host_launch.cpp and host_order.cpp. Each
// call is inlined, so that its line is the program's.
#pragma once
#include "emu_hide_names.h"

#include <cstddef>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda.h"
#include "host_calls.h"

#define EMU_HOST __attribute__((always_inline)) inline
#define EMU_CUDA EMU_HOST cudaError_t

// Launches. The reader of sources makes `k<<<grid, block>>>(x)` of these.
namespace emulator {

struct Configuration {
  dim3 grid, block;
  std::size_t sram = 0;
  cudaStream_t stream = nullptr;
  Configuration(dim3 grid, dim3 block, std::size_t sram = 0, cudaStream_t stream = nullptr) : grid(grid), block(block), sram(sram), stream(stream) {}
};

// A kernel by its address. It lies before the arguments.
template <class... Parameters, std::size_t... I>
void enter(std::index_sequence<I...>) {
  Argument<void (*)(Parameters...)>(0).value()(Argument<std::remove_const_t<Parameters>>(I + 1).value()...);
}
template <class... Parameters>
void enter_kernel(void**) { enter<Parameters...>(std::index_sequence_for<Parameters...>{}); }

template <class... Parameters>
struct Launcher {
  const char* name;
  void (*kernel)(Parameters...);
  Configuration as;
  EMU_HOST void operator()(Parameters... given) const {
    void (*function)(Parameters...) = kernel;
    void* arguments[] = {&function, const_cast<void*>(static_cast<const volatile void*>(&given))...};
    const EmuHostLaunch launch{name, reinterpret_cast<const void*>(kernel), enter_kernel<Parameters...>, arguments, as.grid, as.block, as.sram, as.stream, 0};
    emu_host_launch(&launch);
  }
};
template <class... Parameters>
EMU_HOST Launcher<Parameters...> launcher(const char* name, void (*kernel)(Parameters...), Configuration as) { return {name, kernel, as}; }

// A template whose arguments the call tells: the call, as the source has it.
template <class Call, class... Given, std::size_t... I>
void make_call(std::index_sequence<I...>) {
  (*Argument<const Call*>(0).value())(Argument<Given>(I + 1).value()...);
}
template <class Call, class... Given>
void enter_call(void**) { make_call<Call, Given...>(std::index_sequence_for<Given...>{}); }

template <class Call>
struct CallLauncher {
  const char* name;
  Call call;
  Configuration as;
  template <class... Given>
  EMU_HOST void operator()(Given... given) const {
    const Call* at = &call;
    void* arguments[] = {&at, const_cast<void*>(static_cast<const volatile void*>(&given))...};
    const EmuHostLaunch launch{name, nullptr, enter_call<Call, Given...>, arguments, as.grid, as.block, as.sram, as.stream, 0};
    emu_host_launch(&launch);
  }
};
template <class Call>
EMU_HOST CallLauncher<Call> launcher(const char* name, Call call, Configuration as) { return {name, call, as}; }

// A kernel whose address the program takes.
template <class... Parameters>
EMU_HOST auto known(void (*kernel)(Parameters...)) {
  emu_host_known(reinterpret_cast<const void*>(kernel), enter_kernel<Parameters...>, sizeof...(Parameters));
  return kernel;
}

EMU_CUDA unchecked(cudaError_t error) { return static_cast<cudaError_t>(emu_host_unchecked(error)); }
EMU_HOST void named(const char* name) { emu_host_name(name); }
EMU_HOST cudaError_t status(int error) { return static_cast<cudaError_t>(error); }

// A host function that --call calls: its arguments as they lie.
template <class Result, class... Parameters, std::size_t... I>
void call_on_host(Result (*function)(Parameters...), void** given, std::index_sequence<I...>) {
  function(*static_cast<std::remove_const_t<std::remove_reference_t<Parameters>>*>(given[I])...);
}
template <class Result, class... Parameters>
void call_on_host(Result (*function)(Parameters...), void** given) {
  call_on_host(function, given, std::index_sequence_for<Parameters...>{});
}
template <class Result, class... Parameters>
int describe_host(Result (*)(Parameters...), char* letters, unsigned* sizes, int most) {
  return describe(static_cast<void (*)(Parameters...)>(nullptr), letters, sizes, most);
}

}  // namespace emulator

// Errors
EMU_CUDA cudaGetLastError() { return emulator::status(emu_host_last(1)); }
EMU_CUDA cudaPeekAtLastError() { return emulator::status(emu_host_last(0)); }
EMU_HOST const char* cudaGetErrorString(cudaError_t error) { return emu_host_error(error, 1); }
EMU_HOST const char* cudaGetErrorName(cudaError_t error) { return emu_host_error(error, 0); }

// Memory
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaMemAttachGlobal = 1, cudaMemAttachHost = 2, cudaMemAttachSingle = 4, cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2 };
enum cudaMemoryAdvise { cudaMemAdviseSetReadMostly = 1, cudaMemAdviseUnsetReadMostly, cudaMemAdviseSetPreferredLocation,
                        cudaMemAdviseUnsetPreferredLocation, cudaMemAdviseSetAccessedBy, cudaMemAdviseUnsetAccessedBy };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes { cudaMemoryType type; int device; void *devicePointer, *hostPointer; };

template <class T> EMU_CUDA cudaMalloc(T** at, std::size_t bytes) { return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), bytes, 0)); }
template <class T> EMU_CUDA cudaMallocAsync(T** at, std::size_t bytes, cudaStream_t) { return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), bytes, 0)); }
template <class T> EMU_CUDA cudaMallocManaged(T** at, std::size_t bytes, unsigned = cudaMemAttachGlobal) { return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), bytes, 1)); }
template <class T> EMU_CUDA cudaMallocHost(T** at, std::size_t bytes, unsigned = 0) { return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), bytes, 2)); }
template <class T> EMU_CUDA cudaHostAlloc(T** at, std::size_t bytes, unsigned) { return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), bytes, 2)); }
template <class T> EMU_CUDA cudaMallocPitch(T** at, std::size_t* pitch, std::size_t width, std::size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return emulator::status(emu_host_allocate(reinterpret_cast<void**>(at), *pitch * height, 0));
}
EMU_CUDA cudaFree(void* at) { return emulator::status(emu_host_free(at, 0, "cudaFree")); }
EMU_CUDA cudaFreeAsync(void* at, cudaStream_t) { return emulator::status(emu_host_free(at, 0, "cudaFreeAsync")); }
EMU_CUDA cudaFreeHost(void* at) { return emulator::status(emu_host_free(at, 1, "cudaFreeHost")); }
EMU_CUDA cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
template <class T> EMU_CUDA cudaHostGetDevicePointer(T** device, void* host, unsigned) { return *device = static_cast<T*>(host), cudaSuccess; }
EMU_CUDA cudaHostRegister(void*, std::size_t, unsigned = 0) { return cudaSuccess; }  // it stays the host's: no kernel may read it
EMU_CUDA cudaHostUnregister(void*) { return cudaSuccess; }
EMU_CUDA cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) { return emulator::status(emu_host_copy(to, bytes, from, bytes, bytes, 1, kind, nullptr, 0)); }
EMU_CUDA cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
  return emulator::status(emu_host_copy(to, bytes, from, bytes, bytes, 1, kind, stream, 1));
}
EMU_CUDA cudaMemcpyPeer(void* to, int, const void* from, int, std::size_t bytes) { return emulator::status(emu_host_copy(to, bytes, from, bytes, bytes, 1, cudaMemcpyDeviceToDevice, nullptr, 0)); }
EMU_CUDA cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream = nullptr) {
  return emulator::status(emu_host_copy(to, bytes, from, bytes, bytes, 1, cudaMemcpyDeviceToDevice, stream, 1));
}
EMU_CUDA cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return emulator::status(emu_host_copy(to, to_pitch, from, from_pitch, width, height, kind, nullptr, 0));
}
EMU_CUDA cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
  return emulator::status(emu_host_copy(to, to_pitch, from, from_pitch, width, height, kind, stream, 1));
}
EMU_CUDA cudaMemset(void* at, int value, std::size_t bytes) { return emulator::status(emu_host_fill(at, bytes, value, bytes, 1, nullptr)); }
EMU_CUDA cudaMemsetAsync(void* at, int value, std::size_t bytes, cudaStream_t stream = nullptr) { return emulator::status(emu_host_fill(at, bytes, value, bytes, 1, stream)); }
EMU_CUDA cudaMemset2D(void* at, std::size_t pitch, int value, std::size_t width, std::size_t height) { return emulator::status(emu_host_fill(at, pitch, value, width, height, nullptr)); }
EMU_CUDA cudaMemGetInfo(std::size_t* free, std::size_t* total) { return emu_host_memory(free, total), cudaSuccess; }
template <class T> EMU_CUDA cudaMemPrefetchAsync(const T*, std::size_t, int, cudaStream_t = nullptr) { return cudaSuccess; }
template <class T> EMU_CUDA cudaMemAdvise(const T*, std::size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
EMU_CUDA cudaPointerGetAttributes(cudaPointerAttributes* about, const void* at) {
  const int kind = emu_host_kind(at);
  *about = {kind == 0 ? cudaMemoryTypeUnregistered : kind == 1 ? cudaMemoryTypeDevice : kind == 2 ? cudaMemoryTypeManaged : cudaMemoryTypeHost, 0,
            kind ? const_cast<void*>(at) : nullptr, kind == 1 ? nullptr : const_cast<void*>(at)};
  return cudaSuccess;
}

// Variables of the device.
template <class T>
EMU_CUDA cudaMemcpyToSymbol(T& symbol, const void* from, std::size_t bytes, std::size_t offset = 0, cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
  if (const int error = emu_host_symbol(sizeof(T), offset, bytes)) return emulator::status(error);
  return emulator::status(emu_host_copy(const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol)) + offset, bytes, from, bytes, bytes, 1, kind, nullptr, 0));
}
template <class T>
EMU_CUDA cudaMemcpyToSymbolAsync(T& symbol, const void* from, std::size_t bytes, std::size_t offset = 0, cudaMemcpyKind kind = cudaMemcpyHostToDevice, cudaStream_t stream = nullptr) {
  if (const int error = emu_host_symbol(sizeof(T), offset, bytes)) return emulator::status(error);
  return emulator::status(emu_host_copy(const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol)) + offset, bytes, from, bytes, bytes, 1, kind, stream, 1));
}
template <class T>
EMU_CUDA cudaMemcpyFromSymbol(void* to, const T& symbol, std::size_t bytes, std::size_t offset = 0, cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
  if (const int error = emu_host_symbol(sizeof(T), offset, bytes)) return emulator::status(error);
  return emulator::status(emu_host_copy(to, bytes, const_cast<const char*>(reinterpret_cast<const volatile char*>(&symbol)) + offset, bytes, bytes, 1, kind, nullptr, 0));
}
template <class P, class T> EMU_CUDA cudaGetSymbolAddress(P** at, const T& symbol) {
  return *at = reinterpret_cast<P*>(const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol))), cudaSuccess;
}
template <class T> EMU_CUDA cudaGetSymbolAddress(void** at, const T& symbol) {
  return *at = const_cast<char*>(reinterpret_cast<const volatile char*>(&symbol)), cudaSuccess;
}
template <class T> EMU_CUDA cudaGetSymbolSize(std::size_t* bytes, const T&) { return *bytes = sizeof(T), cudaSuccess; }

// Streams and events
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaEventInterprocess = 4 };
using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);
using cudaHostFn_t = void (*)(void*);
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))
#define CUDART_CB
EMU_CUDA cudaStreamCreate(cudaStream_t* made) { return emulator::status(emu_host_stream(made, 0)); }
EMU_CUDA cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) { return emulator::status(emu_host_stream(made, flags & cudaStreamNonBlocking)); }
EMU_CUDA cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int) { return emulator::status(emu_host_stream(made, flags & cudaStreamNonBlocking)); }
EMU_CUDA cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EMU_CUDA cudaStreamSynchronize(cudaStream_t stream) { return emulator::status(emu_host_wait(stream, 0)); }
EMU_CUDA cudaStreamQuery(cudaStream_t stream) { return emulator::status(emu_host_wait(stream, 0)); }
EMU_CUDA cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) { return emulator::status(emu_host_wait_event(stream, event)); }
EMU_CUDA cudaStreamAttachMemAsync(cudaStream_t, void*, std::size_t = 0, unsigned = cudaMemAttachSingle) { return cudaSuccess; }
EMU_CUDA cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) { return call(stream, cudaSuccess, data), cudaSuccess; }
EMU_CUDA cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { return call(data), cudaSuccess; }
EMU_CUDA cudaEventCreate(cudaEvent_t* made, unsigned = 0) { return emulator::status(emu_host_event(made)); }
EMU_CUDA cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) { return emulator::status(emu_host_event(made)); }
EMU_CUDA cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EMU_CUDA cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) { return emulator::status(emu_host_record(event, stream)); }
EMU_CUDA cudaEventSynchronize(cudaEvent_t event) { return emulator::status(emu_host_sync_event(event)); }
EMU_CUDA cudaEventQuery(cudaEvent_t event) { return emulator::status(emu_host_sync_event(event)); }
EMU_CUDA cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) { return emulator::status(emu_host_elapsed(milliseconds, first, last)); }
EMU_CUDA cudaDeviceSynchronize() { return emulator::status(emu_host_wait(nullptr, 1)); }
EMU_CUDA cudaThreadSynchronize() { return emulator::status(emu_host_wait(nullptr, 1)); }

// The device
struct cudaUUID_t { char bytes[16]; };
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  std::size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
  std::size_t totalConstMem;
  int major, minor;
  std::size_t textureAlignment, texturePitchAlignment;
  int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode, maxTexture1D, maxTexture2D[2], maxTexture3D[3];
  std::size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize,
      persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
  std::size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported, singleToDoublePrecisionPerfRatio, pageableMemoryAccess,
      concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch, cooperativeMultiDeviceLaunch;
  std::size_t sharedMemPerBlockOptin;
  int maxBlocksPerMultiProcessor;
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxBlockDimX, cudaDevAttrMaxBlockDimY, cudaDevAttrMaxBlockDimZ, cudaDevAttrMaxGridDimX, cudaDevAttrMaxGridDimY,
  cudaDevAttrMaxGridDimZ, cudaDevAttrMaxSharedMemoryPerBlock, cudaDevAttrTotalConstantMemory, cudaDevAttrWarpSize, cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate, cudaDevAttrMultiProcessorCount = 16, cudaDevAttrIntegrated = 18, cudaDevAttrComputeMode = 20, cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrMemoryClockRate = 36, cudaDevAttrGlobalMemoryBusWidth, cudaDevAttrL2CacheSize, cudaDevAttrMaxThreadsPerMultiProcessor, cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrMaxRegistersPerMultiprocessor,
  cudaDevAttrManagedMemory, cudaDevAttrPageableMemoryAccess = 88, cudaDevAttrConcurrentManagedAccess, cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaSharedMemConfig { cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte };
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize, cudaLimitDevRuntimeSyncDepth, cudaLimitDevRuntimePendingLaunchCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum cudaComputeMode { cudaComputeModeDefault, cudaComputeModeExclusive, cudaComputeModeProhibited, cudaComputeModeExclusiveProcess };
enum { cudaDeviceScheduleAuto = 0, cudaDeviceScheduleSpin = 1, cudaDeviceScheduleYield = 2, cudaDeviceScheduleBlockingSync = 4, cudaDeviceMapHost = 8 };
enum cudaDeviceP2PAttr { cudaDevP2PAttrPerformanceRank = 1, cudaDevP2PAttrAccessSupported };
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes, preferredShmemCarveout;
};

EMU_CUDA cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
EMU_CUDA cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EMU_CUDA cudaSetDevice(int device) { return device == 0 ? cudaSuccess : emulator::status(emu_host_invalid_device()); }
EMU_CUDA cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EMU_CUDA cudaChooseDevice(int* device, const cudaDeviceProp*) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* about, int device) {
  if (device != 0) return emulator::status(emu_host_invalid_device());
  const EmuProgram& gpu = *emu_host_device();
  *about = {};
  std::snprintf(about->name, sizeof about->name, "%s (flashlab's emulator)", gpu.device);
  about->totalGlobalMem = gpu.memory, about->sharedMemPerBlock = 49152, about->regsPerBlock = 65536, about->warpSize = 32, about->memPitch = 2147483647;
  about->maxThreadsPerBlock = about->maxThreadsDim[0] = about->maxThreadsDim[1] = 1024, about->maxThreadsDim[2] = 64;
  about->maxGridSize[0] = 2147483647, about->maxGridSize[1] = about->maxGridSize[2] = 65535, about->clockRate = 1000000, about->totalConstMem = 65536;
  about->major = gpu.major, about->minor = gpu.minor, about->textureAlignment = 512, about->texturePitchAlignment = 32, about->deviceOverlap = 1;
  about->multiProcessorCount = gpu.sms, about->canMapHostMemory = about->concurrentKernels = about->unifiedAddressing = 1, about->asyncEngineCount = 2;
  about->memoryClockRate = 1000000, about->memoryBusWidth = 5120, about->l2CacheSize = static_cast<int>(gpu.l2);
  about->maxThreadsPerMultiProcessor = gpu.threads_per_sm, about->sharedMemPerMultiprocessor = gpu.sram_per_sm, about->regsPerMultiprocessor = 65536;
  about->managedMemory = about->concurrentManagedAccess = about->cooperativeLaunch = about->globalL1CacheSupported = about->localL1CacheSupported = 1;
  about->sharedMemPerBlockOptin = gpu.sram_per_block, about->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return *value = 1024, cudaSuccess;
    case cudaDevAttrMaxBlockDimZ: return *value = 64, cudaSuccess;
    case cudaDevAttrMaxGridDimX: return *value = 2147483647, cudaSuccess;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return *value = 65535, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: return *value = 49152, cudaSuccess;
    case cudaDevAttrTotalConstantMemory: return *value = 65536, cudaSuccess;
    case cudaDevAttrWarpSize: return *value = 32, cudaSuccess;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return *value = 65536, cudaSuccess;
    case cudaDevAttrClockRate: case cudaDevAttrMemoryClockRate: return *value = 1000000, cudaSuccess;
    case cudaDevAttrMultiProcessorCount: return *value = p.multiProcessorCount, cudaSuccess;
    case cudaDevAttrGlobalMemoryBusWidth: return *value = p.memoryBusWidth, cudaSuccess;
    case cudaDevAttrL2CacheSize: return *value = p.l2CacheSize, cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return *value = p.maxThreadsPerMultiProcessor, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = p.major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = p.minor, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return *value = static_cast<int>(p.sharedMemPerMultiprocessor), cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = static_cast<int>(p.sharedMemPerBlockOptin), cudaSuccess;
    case cudaDevAttrIntegrated: case cudaDevAttrComputeMode: case cudaDevAttrPageableMemoryAccess: return *value = 0, cudaSuccess;
    default: return *value = 1, cudaSuccess;
  }
}
EMU_CUDA cudaDeviceReset() { return emu_host_reset(), cudaSuccess; }
EMU_CUDA cudaThreadExit() { return emu_host_reset(), cudaSuccess; }
EMU_CUDA cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
EMU_CUDA cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
EMU_CUDA cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* value) { return *value = cudaSharedMemBankSizeFourByte, cudaSuccess; }
EMU_CUDA cudaDeviceSetLimit(cudaLimit, std::size_t) { return cudaSuccess; }
EMU_CUDA cudaDeviceGetLimit(std::size_t* value, cudaLimit) { return *value = 8u << 20, cudaSuccess; }
EMU_CUDA cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EMU_CUDA cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EMU_CUDA cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EMU_CUDA cudaDeviceEnablePeerAccess(int, unsigned) { return emulator::status(emu_host_invalid_device()); }
EMU_CUDA cudaDeviceDisablePeerAccess(int) { return emulator::status(emu_host_invalid_device()); }
EMU_CUDA cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
EMU_CUDA cudaDeviceGetPCIBusId(char* text, int length, int) { return std::snprintf(text, static_cast<std::size_t>(length), "0000:00:00.0"), cudaSuccess; }
EMU_CUDA cudaProfilerStart() { return cudaSuccess; }
EMU_CUDA cudaProfilerStop() { return cudaSuccess; }

// Kernels
template <class F> EMU_CUDA emu_func_set_attribute(const char* name, F function, cudaFuncAttribute attribute, int value) {
  const void* at;
  if constexpr (std::is_pointer_v<F>) at = reinterpret_cast<const void*>(function);
  else at = nullptr;
  return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? emulator::status(emu_host_allow(name, at, value)) : cudaSuccess;
}
#define cudaFuncSetAttribute(...) emu_func_set_attribute(#__VA_ARGS__, __VA_ARGS__)
template <class F> EMU_CUDA cudaFuncSetCacheConfig(F, cudaFuncCache) { return cudaSuccess; }
template <class F> EMU_CUDA cudaFuncSetSharedMemConfig(F, cudaSharedMemConfig) { return cudaSuccess; }
template <class F> EMU_CUDA cudaFuncGetAttributes(cudaFuncAttributes* about, F) {
  *about = {};
  about->maxThreadsPerBlock = 1024, about->numRegs = 32, about->maxDynamicSharedSizeBytes = 49152;
  about->ptxVersion = about->binaryVersion = 10 * emu_host_device()->major + emu_host_device()->minor;
  return cudaSuccess;
}
template <class F>
EMU_CUDA emu_launch_kernel(const char* name, F kernel, dim3 grid, dim3 block, void** arguments, std::size_t sram = 0, cudaStream_t stream = nullptr) {
  if constexpr (std::is_function_v<std::remove_pointer_t<F>>) emulator::known(kernel);
  return emulator::status(emu_host_launch_at(name, reinterpret_cast<const void*>(kernel), grid, block, arguments, sram, stream, 0));
}
template <class F>
EMU_CUDA emu_launch_cooperative_kernel(const char* name, F kernel, dim3 grid, dim3 block, void** arguments, std::size_t sram = 0, cudaStream_t stream = nullptr) {
  if constexpr (std::is_function_v<std::remove_pointer_t<F>>) emulator::known(kernel);
  return emulator::status(emu_host_launch_at(name, reinterpret_cast<const void*>(kernel), grid, block, arguments, sram, stream, 1));
}
#define cudaLaunchKernel(...) emu_launch_kernel(#__VA_ARGS__, __VA_ARGS__)
#define cudaLaunchCooperativeKernel(...) emu_launch_cooperative_kernel(#__VA_ARGS__, __VA_ARGS__)
// As many blocks as threads and shared memory allow: registers aren't known here.
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int threads, std::size_t sram) {
  const EmuProgram& gpu = *emu_host_device();
  if (threads <= 0 || threads > 1024) return *blocks = 0, emulator::status(emu_host_invalid("a block has 1 to 1,024 threads"));
  const int rounded = (threads + 31) / 32 * 32;
  int n = gpu.threads_per_sm / rounded < 32 ? gpu.threads_per_sm / rounded : 32;
  const auto by_sram = sram ? gpu.sram_per_sm / (sram + 1024) : 32;
  return *blocks = by_sram < static_cast<std::size_t>(n) ? static_cast<int>(by_sram) : n, cudaSuccess;
}
template <class F>
EMU_CUDA cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, F kernel, int threads, std::size_t sram, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, sram);
}
template <class F>
EMU_CUDA cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, F, std::size_t = 0, int limit = 0) {
  *block = limit > 0 && limit < 1024 ? limit : 1024;
  *grid = emu_host_device()->sms * (emu_host_device()->threads_per_sm / *block);
  return cudaSuccess;
}

#include "emu_show_names.h"
