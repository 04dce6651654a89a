// assert in a kernel is a finding (cuda.h), not the end of the process.
#include "cuda.h"
