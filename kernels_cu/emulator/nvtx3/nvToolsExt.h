// The same in its newer place.
#pragma once

#include "../nvToolsExt.h"
