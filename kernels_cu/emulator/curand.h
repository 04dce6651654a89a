// The host side of cuRAND has nothing that a kernel needs.
#pragma once
