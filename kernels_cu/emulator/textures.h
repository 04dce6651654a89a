// Texture objects: arrays that are read by coordinates, with filtering, address modes and conversion to floats. Each texel that
// a fetch touches counts as a load from HBM.
#pragma once
#include "emu_hide_names.h"

#include <cmath>

#include "floats.h"
#include "primitives.h"

namespace emulator {

// What flashlab/emulator/textures.py passes in place of a handle.
struct alignas(8) Texture {
  const char* base;
  long long pitch, slice;  // bytes from row to row, and from plane to plane
  int width, height, depth;
  unsigned char channels, channel_bytes, kind;  // kind: i, u or f
  unsigned char linear, normalized, as_floats;  // as_floats: integers become 0 .. 1, or -1 .. 1
  unsigned char address;                        // w(rap), c(lamp), m(irror), b(order)
};

template <class T, class = void> struct Component { using type = T; };
template <class T> struct Component<T, std::enable_if_t<std::is_class_v<T>>> { using type = decltype(T::x); };

struct Texel { float f[4] = {}; int i[4] = {}; };

// The place of a coordinate among n, or -1 if it has none.
inline int texture_place(int i, int n, const Texture& t) {
  if (i >= 0 && i < n) return i;
  if (t.address == 'b') return -1;
  if (t.address == 'c' || !t.normalized) return i < 0 ? 0 : n - 1;
  const int period = t.address == 'm' ? 2 * n : n, at = (i % period + period) % period;
  return at < n ? at : 2 * n - 1 - at;
}

__forceinline__ Texel texel(const Texture& t, int x, int y, int z) {
  Texel result;
  x = texture_place(x, t.width, t), y = texture_place(y, t.height, t), z = texture_place(z, t.depth, t);
  if (x < 0 || y < 0 || z < 0) return result;
  unsigned char bytes[16];
  const unsigned size = t.channels * t.channel_bytes;
  emu_load_global(bytes, t.base + z * t.slice + y * t.pitch + static_cast<long long>(x) * size, size);
  for (int c = 0; c < t.channels; ++c) {
    const unsigned char* at = bytes + c * t.channel_bytes;
    unsigned word = 0;
    for (int i = 0; i < t.channel_bytes; ++i) word |= static_cast<unsigned>(at[i]) << 8 * i;
    const int bits = 8 * t.channel_bytes;
    if (t.kind == 'f') {
      result.f[c] = bits == 16 ? float_of_f16(static_cast<unsigned short>(word)) : float_of_bits(word);
      continue;
    }
    result.i[c] = t.kind == 'i' ? static_cast<int>(word << (32 - bits)) >> (32 - bits) : static_cast<int>(word);
    const float most = static_cast<float>((1ull << (bits - (t.kind == 'i'))) - 1);
    result.f[c] = t.as_floats ? std::fmax(result.i[c] / most, -1.f) : static_cast<float>(result.i[c]);
  }
  return result;
}

template <class T>
__forceinline__ T of_texel(const Texel& texel) {
  using C = typename Component<T>::type;
  T result;
  C parts[sizeof(T) / sizeof(C)];
  for (unsigned c = 0; c < sizeof(T) / sizeof(C); ++c)
    if constexpr (std::is_floating_point_v<C>) parts[c] = c < 4 ? texel.f[c] : C{};
    else parts[c] = c < 4 ? static_cast<C>(texel.i[c]) : C{};
  __builtin_memcpy(static_cast<void*>(&result), parts, sizeof result);
  return result;
}

// Coordinates in texels; with filtering, the weights have 8 bits behind the point (CUDA's guide, Texture Fetching).
template <class T>
__forceinline__ T fetched(const Texture& t, float x, float y, float z, int dimensions) {
  const float at[3] = {t.normalized ? x * t.width : x, t.normalized ? y * t.height : y, t.normalized ? z * t.depth : z};
  int first[3] = {};
  float weight[3] = {};
  for (int d = 0; d < dimensions; ++d) {
    const float from = t.linear ? at[d] - 0.5f : at[d];
    first[d] = static_cast<int>(std::floor(from));
    weight[d] = t.linear ? std::nearbyint((from - std::floor(from)) * 256) / 256 : 0.f;
  }
  if (!t.linear) return of_texel<T>(texel(t, first[0], first[1], first[2]));
  Texel sum;
  for (int corner = 0; corner < 1 << dimensions; ++corner) {
    float part = 1;
    int place[3];
    for (int d = 0; d < 3; ++d) {
      const int up = corner >> d & 1;
      place[d] = first[d] + up;
      if (d < dimensions) part *= up ? weight[d] : 1 - weight[d];
    }
    const Texel one = texel(t, place[0], place[1], place[2]);
    for (int c = 0; c < 4; ++c) sum.f[c] += part * one.f[c];
  }
  return of_texel<T>(sum);
}

// One layer of an array of images or rows. The next one lies `stride` bytes further. A layer past an end is the one at that end.
inline Texture layer_of(Texture t, int layer, int layers, long long stride) {
  t.base += (layer < 0 ? 0 : layer < layers ? layer : layers - 1) * stride;
  return t;
}

}  // namespace emulator

using cudaTextureObject_t = emulator::Texture;
using CUtexObject = cudaTextureObject_t;

// Outside of the array a fetch by an index gives 0.
template <class T>
__forceinline__ T tex1Dfetch(const cudaTextureObject_t& t, int i) {
  return i < 0 || i >= t.width ? emulator::of_texel<T>({}) : emulator::of_texel<T>(emulator::texel(t, i, 0, 0));
}
template <class T> __forceinline__ T tex1D(const cudaTextureObject_t& t, float x) { return emulator::fetched<T>(t, x, 0, 0, 1); }
template <class T> __forceinline__ T tex2D(const cudaTextureObject_t& t, float x, float y) { return emulator::fetched<T>(t, x, y, 0, 2); }
template <class T> __forceinline__ T tex3D(const cudaTextureObject_t& t, float x, float y, float z) { return emulator::fetched<T>(t, x, y, z, 3); }
template <class T>
__forceinline__ T tex1DLayered(const cudaTextureObject_t& t, float x, int layer) { return tex1D<T>(emulator::layer_of(t, layer, t.height, t.pitch), x); }
template <class T>
__forceinline__ T tex2DLayered(const cudaTextureObject_t& t, float x, float y, int layer) { return tex2D<T>(emulator::layer_of(t, layer, t.depth, t.slice), x, y); }
template <class T> __forceinline__ T tex1DLod(const cudaTextureObject_t& t, float x, float) { return tex1D<T>(t, x); }
template <class T> __forceinline__ T tex2DLod(const cudaTextureObject_t& t, float x, float y, float) { return tex2D<T>(t, x, y); }
template <class T> __forceinline__ T tex3DLod(const cudaTextureObject_t& t, float x, float y, float z, float) { return tex3D<T>(t, x, y, z); }

#include "emu_show_names.h"
