// Complex numbers as kernels know them: c10::complex, thrust::complex, CuPy's and PyCUDA's complex. Each moves in one piece.
#pragma once
#include "emu_hide_names.h"

#include <cmath>
#include <complex>

#include "cuda.h"

namespace emulator {

template <class T>
struct alignas(2 * sizeof(T)) Complex {
  using value_type = T;
  T real_ = T(0), imag_ = T(0);

  constexpr Complex() = default;
  constexpr Complex(const T& re, const T& im = T(0)) : real_(re), imag_(im) {}
  template <class U> constexpr Complex(const Complex<U>& z) : real_(static_cast<T>(z.real_)), imag_(static_cast<T>(z.imag_)) {}
  Complex(const std::complex<T>& z) : real_(z.real()), imag_(z.imag()) {}
  operator std::complex<T>() const { return {real_, imag_}; }
  constexpr T real() const { return real_; }
  constexpr T imag() const { return imag_; }
  void real(T x) { real_ = x; }
  void imag(T x) { imag_ = x; }

  Complex& operator+=(const Complex& b) { return real_ += b.real_, imag_ += b.imag_, *this; }
  Complex& operator-=(const Complex& b) { return real_ -= b.real_, imag_ -= b.imag_, *this; }
  Complex& operator*=(const Complex& b) { return *this = {real_ * b.real_ - imag_ * b.imag_, real_ * b.imag_ + imag_ * b.real_}; }
  Complex& operator/=(const Complex& b) { return *this = std::complex<T>(*this) / std::complex<T>(b); }
  friend Complex operator+(Complex a, const Complex& b) { return a += b; }
  friend Complex operator-(Complex a, const Complex& b) { return a -= b; }
  friend Complex operator*(Complex a, const Complex& b) { return a *= b; }
  friend Complex operator/(Complex a, const Complex& b) { return a /= b; }
  friend Complex operator+(const Complex& a) { return a; }
  friend Complex operator-(const Complex& a) { return {-a.real_, -a.imag_}; }
  friend bool operator==(const Complex& a, const Complex& b) { return a.real_ == b.real_ && a.imag_ == b.imag_; }
  friend bool operator!=(const Complex& a, const Complex& b) { return !(a == b); }
};

#define EMU_COMPLEX(NAME, TYPE) \
  template <class T> TYPE NAME(const Complex<T>& z) { return std::NAME(std::complex<T>(z)); }
EMU_COMPLEX(abs, T)
EMU_COMPLEX(arg, T)
EMU_COMPLEX(norm, T)
EMU_COMPLEX(real, T)
EMU_COMPLEX(imag, T)
EMU_COMPLEX(conj, Complex<T>)
EMU_COMPLEX(exp, Complex<T>)
EMU_COMPLEX(log, Complex<T>)
EMU_COMPLEX(sqrt, Complex<T>)
EMU_COMPLEX(sin, Complex<T>)
EMU_COMPLEX(cos, Complex<T>)
EMU_COMPLEX(tan, Complex<T>)
EMU_COMPLEX(tanh, Complex<T>)
#undef EMU_COMPLEX
template <class T> Complex<T> polar(const T& size, const T& angle = T(0)) { return std::polar(size, angle); }
template <class T> Complex<T> pow(const Complex<T>& z, const T& n) { return std::pow(std::complex<T>(z), n); }

}  // namespace emulator

// The names of another namespace for them.
#define EMU_COMPLEX_NAMES                                                   \
  template <class T> using complex = ::emulator::Complex<T>;                \
  using ::emulator::abs, ::emulator::arg, ::emulator::norm, ::emulator::real, ::emulator::imag, ::emulator::conj, ::emulator::exp; \
  using ::emulator::log, ::emulator::sqrt, ::emulator::sin, ::emulator::cos, ::emulator::tan, ::emulator::tanh, ::emulator::polar; \
  using ::emulator::pow;

#include "emu_show_names.h"
