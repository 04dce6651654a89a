// Arithmetic that doesn't round to the nearest. The processor does it.
#include <cfenv>
#include <cmath>

namespace {

// `volatile` keeps the compiler from computing ahead of, or behind, the change of rounding.
template <class T>
T rounded(char operation, unsigned mode, T a, T b, T c) {
  static const int MODES[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  volatile T x = a, y = b, z = c, result = 0;
  std::fesetround(MODES[mode & 3]);
  switch (operation) {
    case '+': result = x + y; break;
    case '-': result = x - y; break;
    case '*': result = x * y; break;
    case '/': result = x / y; break;
    case 'r': result = std::sqrt(x); break;
    default: result = std::fma(x, y, z);
  }
  std::fesetround(FE_TONEAREST);
  return result;
}

}  // namespace

extern "C" {
float emu_ptx_rounded32(char operation, unsigned mode, float a, float b, float c) { return rounded(operation, mode, a, b, c); }
double emu_ptx_rounded64(char operation, unsigned mode, double a, double b, double c) { return rounded(operation, mode, a, b, c); }
}
