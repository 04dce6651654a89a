// The keywords of CUDA C++, its built-in variables, and the doors to kernels.
#pragma once

// Keywords. SRAM is thread-local: a block runs on one thread of the operating system, and that thread runs one block at a
// time.
#define __host__
#define __device__
#define __constant__
#define __managed__
#define __global__ __attribute__((flatten, noinline))  // in the debug information, inlined calls keep the kernel's line
#define __cluster_dims__(...)
#define __block_size__(...)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#if defined(__clang__)
#define __shared__ thread_local
#else
#define __shared__ __constinit thread_local  // g++ would guard arrays of classes against a second initialisation
#endif

// Built-in variables.
#define threadIdx emu_thread_index()
#define blockIdx emu_block_index()
#define blockDim ::dim3(emu_block_dim())
#define gridDim ::dim3(emu_grid_dim())

// A door to a kernel. It stands at the end of the kernel's source. It first copies the arguments to the lane's own stack, for
// to read them is no access by the kernel.
#define EMU_DOOR(I, ...)                                                                                          \
  extern "C" void emu_entry_##I(void**) { ::emulator::call(__VA_ARGS__); }                                        \
  extern "C" int emu_parameters_##I(char* letters, unsigned* sizes, int most) {                                   \
    return ::emulator::describe(__VA_ARGS__, letters, sizes, most);                                                 \
  }

// A door to a function of the host.
#define EMU_CALL(NAME)                                                                                            \
  extern "C" void emu_call(void** given) { ::emulator::call_on_host(NAME, given); }                               \
  extern "C" int emu_parameters_0(char* letters, unsigned* sizes, int most) {                                     \
    return ::emulator::describe_host(NAME, letters, sizes, most);                                                 \
  }

// What EMU_FIELDS is told beside a kernel's door: which of its structs' members have this name.
#define EMU_FIELD(NAME)                                                                                           \
  namespace emulator {                                                                                            \
  template <class T, class = void> struct EmuField_##NAME {                                                       \
    static void say(Say, int, const char*, unsigned long, const T*) {}                                     \
  };                                                                                                              \
  template <class T> struct EmuField_##NAME<T, std::void_t<decltype(&std::declval<const T&>().NAME)>> {           \
    static void say(Say say, int parameter, const char* before, unsigned long from, const T* object) {     \
      char name[256];                                                                                             \
      std::snprintf(name, sizeof name, "%s" #NAME, before);                                                       \
      say_field<T, decltype(object->NAME)>(say, parameter, name, from, object, (const char*)&object->NAME);       \
    }                                                                                                             \
  };                                                                                                              \
  }
#define EMU_SAY(NAME) EmuField_##NAME<T>::say(say, parameter, before, from, object);
#define EMU_FIELDS(SAYS)                                                                                          \
  template <class T> void emulator::say_fields(Say say, int parameter, const char* before, unsigned long from) { \
    alignas(T) static char room[sizeof(T)];                                                                       \
    const T* object = reinterpret_cast<const T*>(room);                                                           \
    (void)object, (void)say, (void)parameter, (void)from;                                                         \
    SAYS                                                                                                          \
  }
#define EMU_FIELDS_OF(I, ...) \
  extern "C" void emu_fields_##I(::emulator::Say say) { ::emulator::say_all_fields(__VA_ARGS__, say); }

// A door to a variable in a GPU's memory: its name, where it lies, its size, and its type as a parameter's.
#define EMU_SYMBOL(I, NAME)                                                                                       \
  extern "C" const char* emu_symbol_##I(const volatile void** at, unsigned long* bytes, char* letters, unsigned* size) { \
    *at = &NAME, *bytes = sizeof(NAME);                                                                           \
    ::emulator::describe_one<std::remove_all_extents_t<decltype(NAME)>*>(letters, size);                            \
    return #NAME;                                                                                                 \
  }
